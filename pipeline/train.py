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
    from pipeline.run import stop_requests as preemption

    preemption.block()  # before the imports below, which take seconds

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from command_line import STOPPED_EARLY, Failure, Parser, UsageError, run
from pipeline.run import stop_requests as preemption
from pipeline.run.assemble import Parts, assemble, described, enter_phase
from pipeline.data.node_cache import JobCache
from pipeline.engine.checkpoint import State, retain, save
from pipeline.data.loader import Step
from pipeline.ranks.agreement import Agreement, Ranks, device_of, failures, from_environment, raise_together
from pipeline.engine.deepspeed_engine import accumulation, start_processes
from pipeline.export import export
from pipeline.run.faults import Spikes, Watchdog, explain
from pipeline.model.flops import device_peak, step_flops
from pipeline.run.metrics import PhaseLog
from pipeline.data.objectives import Objective
from pipeline.recipe.schema import Recipe
from pipeline.recipe.file import load
from pipeline.run.folder import RunFolder
from pipeline.recipe.schedule import learning_rate


def main(argv: list[str]) -> int:
    arguments, recipe = parse_arguments(argv)
    ranks = from_environment(os.environ)
    accumulation(recipe, ranks)  # an indivisible batch is known before anything starts
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
    """All phases, or the one of that name. Returns the exit code."""
    device = device_of(ranks)
    start_processes(ranks, device)
    agreement = Agreement(ranks)
    stops, cache = preemption.StopRequests(os.environ), JobCache(recipe, os.environ)
    try:
        parts = assemble(recipe, folder, agreement, device, cache)
        for index, phase in enumerate(recipe.phases):
            if only not in (None, phase.name):
                continue
            if folder.done(phase.name):
                say(agreement, f"phase {phase.name} is done already")
                continue
            begin = time.monotonic()
            if not train_phase(recipe, index, parts, agreement, stops):
                if agreement.ranks.leads:
                    folder.mark_stopped(phase.name)
                say(agreement, f"stopped early in phase {phase.name}, checkpoint saved; run the same command to go on")
                agreement.barrier()  # the rank that leaves first makes the launcher end the others
                return STOPPED_EARLY
            export = folder.phase(phase.name) / "export"
            say(agreement, f"phase {phase.name} done in {time.monotonic() - begin:.0f} s; model in {export}")
        return 0
    finally:
        cache.release()


def train_phase(recipe: Recipe, index: int, parts: Parts, agreement: Agreement, stops: preemption.StopRequests) -> bool:
    """Train phase `index` to its budget, from wherever it stands. False: stopped early, checkpoint saved."""
    phase, folder, engine = recipe.phases[index], parts.folder, parts.engine
    state = agreement.together(lambda: enter_phase(recipe, index, parts))
    objective = Objective(phase.objective, phase.mask_rate or 0.0, phase.name, recipe.seed, recipe.model.dropout)
    ranks, faults, spikes = agreement.ranks, recipe.faults, Spikes()
    board = folder.path / "tensorboard" / phase.name if recipe.logging.tensorboard else None
    peak = device_peak(engine.device)
    saved_at, saved = time.monotonic(), state.step
    if state.step:
        say(
            agreement, f"phase {phase.name} goes on at step {state.step:,}, {state.tokens:,} of {phase.tokens:,} tokens"
        )

    def save_checkpoint(keep: bool = False) -> None:
        nonlocal saved_at, saved
        watchdog.alive()
        begin = time.monotonic()
        history = [*state.history, described(recipe, index, state, log.validation)]
        save(folder.checkpoints(phase.name), engine, replace(state, history=history), parts.tokenizer, agreement, keep)
        saved_at, saved = time.monotonic(), state.step
        stops.leave_time_for(save=saved_at - begin)
        if ranks.leads:
            retain(folder.checkpoints(phase.name), recipe.checkpoints.keep)
        watchdog.alive()

    def validate() -> bool:
        """False where a stop was asked for in the middle; it is done again when the run goes on."""
        begin = time.monotonic()
        losses = parts.validation(engine, go_on, asked_to_stop) if parts.validation else {}
        if losses:
            where = {"phase": phase.name, "step": state.step, "tokens": state.tokens, "validation": True}
            log.validate({**where, **losses, "seconds": time.monotonic() - begin})
        return losses is not None

    def go_on() -> bool:
        watchdog.alive()
        return not (stops.pending() or (ranks.leads and folder.stop_requested()))

    def asked_to_stop() -> bool:  # of a rank that waits for its rows, as the leading one may for this one
        return stops.pending() or folder.stop_requested()

    def stop() -> bool:
        if state.step > saved:
            save_checkpoint()
        return False

    with (
        Watchdog(faults.hang_medians, faults.hang_seconds, ranks.rank) as watchdog,
        PhaseLog(folder.phase(phase.name), board, state, phase.tokens, recipe.logging.every_steps, ranks.leads) as log,
        closing(parts.loaders[index].steps(state.position, objective, asked_to_stop)) as steps,
    ):
        # At a phase's start; and again where a stop came between a step and the validation that was due after it.
        missed = leads_say(agreement, state.step not in log.validated_at)
        last = state.tokens >= phase.tokens
        if missed and validation_due(recipe, state, last):
            if not validate():
                return stop()
            if last:
                save_checkpoint()  # the one that the stop left does not know this validation
        begin = time.monotonic()
        while not last:
            clock_due = ranks.leads and checkpoint_overdue(recipe, saved_at)
            step, (tokens, labels, stopping, save_due) = agree_on_step(steps, agreement, [not go_on(), clock_due])
            if stopping or step is None:
                return stop()
            if save_due and state.step > saved:
                save_checkpoint()
            rate = learning_rate(phase.learning_rate, state.tokens + tokens, phase.tokens)
            loss, grad_norm = engine.train_step(step.batches, objective.causal, labels, rate)
            flops = float(step_flops(engine.encoder.config, step.batches, objective.causal))
            loss, flops = agreement.sum_real([loss, flops])
            loss /= max(1, labels)
            finite = math.isfinite(grad_norm)
            if not (finite and math.isfinite(loss)):
                bad = f"phase {phase.name}, step {state.step + 1}: loss {loss:.4g}, gradient norm {grad_norm:.4g}; rows {step.row_ids}"
                if faults.on_nonfinite == "stop" or finite or state.skipped >= faults.max_skipped:
                    remedy = "lower the peak of learning_rate, leave rows out by faults.skip_rows, or see faults.on_nonfinite"
                    raise Failure(
                        f"{bad}; the weights did not move; the last checkpoint, of step {saved}, is intact; {remedy}"
                    )
                say(agreement, f"skipped: {bad}")
            before, state = state.tokens, state.after(tokens, recipe.batch.rows, applied=finite)
            last = state.tokens >= phase.tokens
            seconds, begin = time.monotonic() - begin, time.monotonic()
            watchdog.step(seconds)
            stops.leave_time_for(step=seconds)
            log.step(tokens)
            log.rows(state.step, step.position, step.row_ids)
            if spikes(loss):
                log.spike({"phase": phase.name, "step": state.step, "loss": loss, "rows": step.row_ids})
            if log.due(state.step, last) or not finite:
                log.train(
                    {
                        "phase": phase.name,
                        "step": state.step,
                        "tokens": state.tokens,
                        "loss": loss if math.isfinite(loss) else None,
                        "learning_rate": rate,
                        "grad_norm": grad_norm if finite else None,
                        "labels": labels,
                        "tokens_per_second": tokens / seconds,
                        "model_flops_utilization": flops / seconds / (peak * ranks.world_size) if peak else None,
                        "seconds": seconds,
                    }
                )
            exported = crossed(recipe.checkpoints.export_at_tokens, before, state.tokens)
            if exported or crossed(recipe.checkpoints.keep_at_tokens, before, state.tokens):
                save_checkpoint(keep=True)
            if exported:
                export_checkpoint(parts, phase.name, f"export-step-{state.step:08d}", agreement)
            if validation_due(recipe, state, last) and not validate():
                return stop()
            every = recipe.checkpoints.every_steps
            if last or (every and state.step % every == 0 and state.step > saved):
                save_checkpoint()
            begin = time.monotonic()
    finish_phase(parts, phase.name, state, agreement)
    return True


def agree_on_step(steps: Iterator[Step], agreement: Agreement, questions: list[bool]) -> tuple[Step | None, list[int]]:
    """The next step; its tokens and labels over all ranks, and of each question on how many ranks the answer is yes.

    The first question is whether to stop: yes on a rank whose steps have ended. There the step is None.
    """
    problem: Exception | None = None
    step: Step | None = None
    stopping, *others = questions
    try:
        step = next(steps, None)
        stopping = stopping or step is None
    except Exception as error:  # the others must hear of it, or they would wait for this rank in vain
        problem = error
    counts = [step.tokens, step.labels] if step else [0, 0]
    *agreed, failed, lasting = agreement.sum([*counts, *map(int, [stopping, *others]), *failures(problem)])
    raise_together(problem, failed, lasting, "rows")
    if not agreed[0] and not agreed[2]:
        raise UsageError("faults.skip_rows leaves a step without any row; skip fewer rows, or use a larger batch")
    return step, agreed


def export_checkpoint(parts: Parts, phase: str, name: str, agreement: Agreement) -> None:
    """The phase's newest checkpoint as a Hugging Face folder RUN/PHASE/name; a collective call."""

    def work() -> None:
        if agreement.ranks.leads:
            checkpoint = parts.folder.latest(phase)
            assert checkpoint is not None
            export(checkpoint, parts.folder.phase(phase) / name)

    agreement.together(work)


def finish_phase(parts: Parts, phase: str, state: State, agreement: Agreement) -> None:
    """Export, then DONE: its final checkpoint is complete, and of the others only those kept for good are needed."""
    export_checkpoint(parts, phase, "export", agreement)
    if agreement.ranks.leads:
        parts.folder.mark_done(phase, {"step": state.step, "tokens": state.tokens})
        retain(parts.folder.checkpoints(phase), 1)
    agreement.barrier()


def validation_due(recipe: Recipe, state: State, last: bool) -> bool:
    return recipe.validation is not None and (last or state.step % recipe.validation.every_steps == 0)


def crossed(points: list[int], before: int, now: int) -> bool:
    return any(before < point <= now for point in points)


def checkpoint_overdue(recipe: Recipe, saved_at: float) -> bool:
    minutes = recipe.checkpoints.every_minutes
    return minutes is not None and time.monotonic() - saved_at >= 60 * minutes


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
