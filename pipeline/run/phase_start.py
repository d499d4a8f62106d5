"""Where a phase starts from: its own latest checkpoint, the end of the phase before it, or another run's checkpoint.

It is always read from disk, so that staged, continuous and resumed runs agree by construction.
"""

from dataclasses import replace

from command_line import Failure
from pipeline.engine import Checkpoint, Engine, State
from pipeline.recipe import Recipe, frozen_groups
from pipeline.run.parts import Parts


def enter_phase(recipe: Recipe, index: int, parts: Parts) -> State:
    """Load the engine with the state in which phase `index` stands, and return that state."""
    phase, folder = recipe.phases[index], parts.folder
    digest = parts.loaders[index].rows.digest
    parts.engine.freeze(frozen_groups(phase.frozen_layers))
    own = folder.latest(phase.name)
    if own is not None:
        if own.state.rows_digest != digest:
            raise Failure(
                f"the rows of phase {phase.name} are not those it began with (their digests differ): "
                "give it those again, or begin anew with another --run-dir"
            )
        _load(parts.engine, own, keep=True)
        return replace(own.state, history=own.state.history[:-1])
    fresh = State(phase.name, rows_digest=digest, facts=parts.facts)
    before = recipe.phases[index - 1].name if index else None
    last = parts.start if before is None else folder.latest(before) if folder.done(before) else None
    if last is None:
        if before is None:
            return fresh
        raise Failure(f"phase {phase.name} starts from phase {before}, which is not done; run --phase {before} first")
    keep = phase.optimizer_state == "keep"
    _load(parts.engine, last, keep)
    positions = dict(last.state.positions)
    if phase.data == "restart":
        positions.pop(digest, None)
    elif phase.data == "continue" and last.state.positions and digest not in positions and index:
        raise Failure("data.rows are not the rows that this run began with (their digests differ)")
    adam_step = last.state.adam_step if keep else 0
    return replace(fresh, positions=positions, adam_step=adam_step, history=last.state.history)


def _load(engine: Engine, checkpoint: Checkpoint, keep: bool) -> None:
    if set(checkpoint.names()) != set(engine.parameters):
        raise Failure(f"checkpoint {checkpoint.folder} is of another model: its weights have other names")
    engine.load(checkpoint.tensor, checkpoint.state.adam_step if keep else None)
