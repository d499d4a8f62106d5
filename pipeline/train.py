"""Train a recipe: its phases one after the other, or one of them.

    deepspeed pipeline/train.py RECIPE [--phase NAME] [--run-dir DIR] [key=value ...]
    python pipeline/train.py RECIPE ...                                                    (one process)

A run that was stopped goes on with the same command. Exit codes: 0 done; 1 failed; 2 wrong usage or recipe; 75 stopped
early on request, checkpoint saved.
"""

import os
import sys

if __name__ == "__main__":
    # Python puts a script's folder first on the path, where our module names would shadow those of others.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from command_line import block_stop_signals

    block_stop_signals()  # before the imports below, which take seconds

import argparse
import time
from pathlib import Path

from command_line import STOPPED_EARLY, Parser, UsageError, run
from pipeline.engine import accumulation, retain, start_processes
from pipeline.export import export
from pipeline.ranks import Agreement, Ranks, device_of, from_environment
from pipeline.recipe import Recipe, learning_rate, load
from pipeline.run import JobCache, Parts, PhaseRun, RunFolder, StopRequests, assemble, enter_phase, explain


def main(argv: list[str]) -> int:
    arguments, recipe = parse_arguments(argv)
    ranks = from_environment(os.environ)
    accumulation(recipe, ranks)  # reports an indivisible batch before anything starts
    folder = RunFolder(arguments.run_dir or Path("runs") / recipe.name)
    try:
        return train_phases(recipe, arguments.phase, folder, ranks)
    except Exception as error:
        explained = explain(error, recipe)
        folder.mark_failed(explained or error)
        if explained is None:
            raise
        raise explained from error
    finally:
        folder.release()


def train_phases(recipe: Recipe, only: str | None, folder: RunFolder, ranks: Ranks) -> int:
    """Train all phases, or only the phase named `only`. Returns the exit code."""
    device = device_of(ranks)
    start_processes(ranks, device)
    agreement = Agreement(ranks)
    stops, cache = StopRequests(os.environ), JobCache(recipe, os.environ)
    try:
        parts = assemble(recipe, folder, agreement, device, cache)
        for index, phase in enumerate(recipe.phases):
            if only not in (None, phase.name):
                continue
            if folder.done(phase.name):
                agreement.say(f"phase {phase.name} is done already")
                continue
            begin = time.monotonic()
            if not train_phase(recipe, index, parts, agreement, stops):
                if ranks.leads:
                    folder.mark_stopped(phase.name)
                agreement.say(f"stopped early in phase {phase.name}, checkpoint saved; run the same command to go on")
                agreement.barrier()  # the rank that leaves first makes the launcher end the others
                return STOPPED_EARLY
            model = folder.phase(phase.name) / "export"
            agreement.say(f"phase {phase.name} done in {time.monotonic() - begin:.0f} s; model in {model}")
        return 0
    finally:
        cache.release()


def train_phase(recipe: Recipe, index: int, parts: Parts, agreement: Agreement, stops: StopRequests) -> bool:
    """Train phase `index` from wherever it stands to its budget. Returns False where it stopped early, checkpoint saved."""
    phase, at = recipe.phases[index], recipe.checkpoints
    state = agreement.together(lambda: enter_phase(recipe, index, parts))
    if state.step:
        done = f"step {state.step:,}, {state.tokens:,} of {phase.tokens:,} tokens"
        agreement.say(f"phase {phase.name} goes on at {done}")
    with PhaseRun(recipe, index, parts, agreement, stops, state) as training:
        if training.validation_missed():
            if not training.validate():
                return training.stop()
            if training.finished:
                training.save()  # the checkpoint saved at the stop lacks this validation
        while not training.finished:
            step = training.next_step()
            if step is None:
                return training.stop()
            if step.save_first:
                training.save()
            before = training.state.tokens
            rate = learning_rate(phase.learning_rate, before + step.tokens, phase.tokens)
            loss, grad_norm = parts.engine.train_step(step.batches, training.objective.causal, step.labels, rate)
            training.account(step, rate, loss, grad_norm)
            exported = crossed(at.export_at_tokens, before, training.state.tokens)
            if exported or crossed(at.keep_at_tokens, before, training.state.tokens):
                training.save(keep=True)
            if exported:
                export_checkpoint(parts, phase.name, f"export-step-{training.state.step:08d}", agreement)
            if training.validation_due and not training.validate():
                return training.stop()
            if training.checkpoint_due:
                training.save()
    export_checkpoint(parts, phase.name, "export", agreement)
    if agreement.ranks.leads:
        parts.folder.mark_done(phase.name, {"step": training.state.step, "tokens": training.state.tokens})
        retain(parts.folder.checkpoints(phase.name), 1)  # besides the last one, only those kept for good are needed
    agreement.barrier()
    return True


def crossed(points: list[int], before: int, now: int) -> bool:
    return any(before < point <= now for point in points)


def export_checkpoint(parts: Parts, phase: str, name: str, agreement: Agreement) -> None:
    """Export the phase's newest checkpoint to the Hugging Face folder RUN/PHASE/name; a collective call."""

    def work() -> None:
        if agreement.ranks.leads:
            checkpoint = parts.folder.latest(phase)
            assert checkpoint is not None
            export(checkpoint, parts.folder.phase(phase) / name)

    agreement.together(work)


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Recipe]:
    parser = Parser(
        prog="pipeline/train.py",
        description="Train a recipe, or go on with a run that was stopped.",
        epilog="--traceback shows the frames of an error. To stop a run: touch RUN/STOP, or send SIGUSR2 or SIGTERM to its ranks.",
    )
    parser.add_argument("recipe", type=Path, help="YAML file; recipes/ holds examples")
    parser.add_argument("--phase", metavar="NAME", help="train this phase only; the one before it must be done")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME of the recipe")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of the recipe, such as seed=18")
    arguments = parser.parse_intermixed_args(argv)
    recipe = load(arguments.recipe, arguments.overrides)
    names = [phase.name for phase in recipe.phases]
    if arguments.phase is not None and arguments.phase not in names:
        raise UsageError(f"--phase {arguments.phase}: the recipe's phases are {', '.join(names)}")
    return arguments, recipe


if __name__ == "__main__":
    sys.exit(run(main))
