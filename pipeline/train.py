"""Train a recipe: its phases one after the other, or one of them.

    deepspeed pipeline/train.py RECIPE [--phase NAME] [--run-dir DIR] [key=value ...]
    python pipeline/train.py RECIPE ...                                                    (one process)

A run that was stopped goes on with the same command. Exit codes: 0 done; 1 failed; 2 wrong usage or recipe; 75 stopped
early on request, checkpoint saved.
"""

import os
import sys

if __name__ == "__main__":
    # Run as a script, Python puts this folder first on the path, where our module names would shadow others'.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from pipeline import preemption

    preemption.block()  # before the imports below, which take seconds

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from data_prep.errors import STOPPED_EARLY, Failure, Parser, UsageError, run
from pipeline import preemption
from pipeline.assembly import Parts, assemble, described, enter_phase, remove_cache
from pipeline.checkpoint import State, retain, save
from pipeline.data import Step
from pipeline.distributed import Agreement, device_of, from_environment
from pipeline.engine import accumulation, start_processes
from pipeline.export import export
from pipeline.flops import device_peak, step_flops
from pipeline.metrics import PhaseLog
from pipeline.objectives import Objective
from pipeline.recipe import Recipe, load
from pipeline.run import RunFolder
from pipeline.schedule import learning_rate


def main(argv: list[str]) -> int:
    arguments, recipe = parse_arguments(argv)
    ranks = from_environment(os.environ)
    accumulation(recipe, ranks)  # an indivisible batch is known before anything starts
    device = device_of(ranks)
    start_processes(ranks, device)
    agreement = Agreement(ranks)
    folder = RunFolder(arguments.run_dir or Path("runs") / recipe.name)
    try:
        parts = assemble(recipe, folder, agreement, device)
        for index, phase in enumerate(recipe.phases):
            if arguments.phase not in (None, phase.name):
                continue
            if folder.done(phase.name):
                say(agreement, f"phase {phase.name} is done already")
                continue
            begin = time.monotonic()
            if not train_phase(recipe, index, parts, agreement):
                say(agreement, f"stopped early in phase {phase.name}, checkpoint saved; run the same command to go on")
                return STOPPED_EARLY
            say(
                agreement,
                f"phase {phase.name} done in {time.monotonic() - begin:.0f} s; model in {folder.phase(phase.name) / 'export'}",
            )
        return 0
    finally:
        remove_cache(recipe, agreement)
        folder.release()


def train_phase(recipe: Recipe, index: int, parts: Parts, agreement: Agreement) -> bool:
    """Train phase `index` to its budget, from wherever it stands. False: stopped early, checkpoint saved."""
    phase, folder, engine = recipe.phases[index], parts.folder, parts.engine
    state = agreement.together(lambda: enter_phase(recipe, index, parts))
    objective = Objective(phase.objective, phase.mask_rate or 0.0, phase.name, recipe.seed)
    leads = agreement.ranks.leads
    board = folder.path / "tensorboard" / phase.name if recipe.logging.tensorboard else None
    saved_at, saved = time.monotonic(), state.step

    def save_checkpoint() -> None:
        nonlocal saved_at, saved
        history = [*state.history, described(recipe, index, state, log.validation)]
        save(folder.checkpoints(phase.name), engine, replace(state, history=history), parts.tokenizer, agreement)
        saved_at, saved = time.monotonic(), state.step
        if leads:
            retain(folder.checkpoints(phase.name), recipe.checkpoints.keep)

    def validate() -> None:
        if parts.validation is not None:
            begin = time.monotonic()
            losses = parts.validation(engine)
            where = {"phase": phase.name, "step": state.step, "tokens": state.tokens, "validation": True}
            log.validate({**where, **losses, "seconds": time.monotonic() - begin})

    with PhaseLog(folder.phase(phase.name), board, state, phase.tokens, recipe.logging.every_steps, leads) as log:
        # At a phase's start; and again where a stop came between a step and the validation that was due after it.
        last = state.tokens >= phase.tokens
        if leads_say(agreement, state.step not in log.validated_at) and validation_due(recipe, state, last):
            validate()
        begin = time.monotonic()
        steps = parts.loader.steps(state.position, objective)
        while state.tokens < phase.tokens:
            step, tokens, labels, stop = agree_on_step(steps, agreement, folder)
            if stop:
                if state.step > saved or not state.step:
                    save_checkpoint()
                return False
            rate = learning_rate(phase.learning_rate, state.tokens + tokens, phase.tokens)
            loss, grad_norm = engine.train_step(step.batches, objective.causal, labels, rate)
            total, flops = agreement.sum_real([loss, step_flops(engine.encoder.config, step.batches, objective.causal)])
            loss = total / max(1, labels)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise Failure(
                    f"phase {phase.name}, step {state.step + 1}: loss {loss:.4g}, gradient norm {grad_norm:.4g}; rows {step.row_ids}; "
                    f"the last checkpoint, of step {saved}, is intact"
                )
            state = state.after(tokens, len(step.row_ids))
            last = state.tokens >= phase.tokens
            seconds, begin = time.monotonic() - begin, time.monotonic()
            log.step(tokens)
            log.rows(state.step, step.position, step.row_ids)
            if log.due(state.step, last):
                peak = device_peak(engine.device)
                log.train(
                    {
                        "phase": phase.name,
                        "step": state.step,
                        "tokens": state.tokens,
                        "loss": loss,
                        "learning_rate": rate,
                        "grad_norm": grad_norm,
                        "labels": labels,
                        "tokens_per_second": tokens / seconds,
                        "model_flops_utilization": flops / seconds / (peak * agreement.ranks.world_size)
                        if peak
                        else None,
                        "seconds": seconds,
                    }
                )
            if validation_due(recipe, state, last):
                validate()
                begin = time.monotonic()
            if not last and checkpoint_due(recipe, state, saved_at, agreement):
                save_checkpoint()
                begin = time.monotonic()
        steps.close()
        if state.step > saved:
            save_checkpoint()
    finish_phase(recipe, index, parts, state, agreement)
    return True


def agree_on_step(steps: Iterator[Step], agreement: Agreement, folder: RunFolder) -> tuple[Step, int, int, bool]:
    """The next step, its tokens and labels over all ranks, and whether anyone asks to stop before it."""
    problem: Exception | None = None
    step: Step | None = None
    try:
        step = next(steps)
    except Exception as error:  # the others must hear of it, or they would wait for this rank in vain
        problem = error
    stop = preemption.pending() or (agreement.ranks.leads and folder.stop_requested())
    counts = [step.tokens, step.labels] if step else [0, 0]
    tokens, labels, stops, problems = agreement.sum([*counts, int(stop), int(problem is not None)])
    if problem is not None:
        raise problem
    if problems or step is None:
        raise Failure("another rank failed to read its rows; its message is above")
    return step, tokens, labels, stops > 0


def finish_phase(recipe: Recipe, index: int, parts: Parts, state: State, agreement: Agreement) -> None:
    """Export, then DONE: its final checkpoint is complete, and of the others none is needed."""
    phase, folder = recipe.phases[index], parts.folder

    def finish() -> None:
        if agreement.ranks.leads:
            checkpoint = folder.latest(phase.name)
            assert checkpoint is not None
            export(checkpoint, folder.phase(phase.name) / "export")
            folder.mark_done(
                phase.name, {"checkpoint": checkpoint.folder.name, "step": state.step, "tokens": state.tokens}
            )
            retain(folder.checkpoints(phase.name), 1)

    agreement.together(finish)


def validation_due(recipe: Recipe, state: State, last: bool) -> bool:
    return recipe.validation is not None and (last or state.step % recipe.validation.every_steps == 0)


def checkpoint_due(recipe: Recipe, state: State, saved_at: float, agreement: Agreement) -> bool:
    settings = recipe.checkpoints
    if settings.every_steps and state.step % settings.every_steps == 0:
        return True
    if settings.every_minutes is None:
        return False
    return leads_say(agreement, time.monotonic() - saved_at >= 60 * settings.every_minutes)


def leads_say(agreement: Agreement, yes: bool) -> bool:
    """Rank 0's answer, on every rank: clocks and files may differ."""
    return agreement.sum([int(yes and agreement.ranks.leads)])[0] > 0


def say(agreement: Agreement, line: str) -> None:
    if agreement.ranks.leads:
        print(line, flush=True)


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
