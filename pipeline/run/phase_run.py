"""A phase while it trains: where it stands, when it was last saved, and how each part of a step changes both."""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from types import TracebackType

from command_line import Failure, UsageError
from pipeline.data import Objective, Step
from pipeline.engine import State, retain, save
from pipeline.model import PackedBatch, device_peak, step_flops
from pipeline.ranks import Agreement, failures, raise_together
from pipeline.recipe import Recipe
from pipeline.run.faults import Spikes, Watchdog
from pipeline.run.lineage import phase_facts
from pipeline.run.metrics import PhaseLog
from pipeline.run.parts import Parts
from pipeline.run.stop_requests import StopRequests


@dataclass(frozen=True)
class AgreedStep:
    """The next step of this rank, and what all ranks agreed on before it."""

    batches: list[PackedBatch]  # micro-batches of this rank
    position: int  # of the step's first row in the stream
    row_ids: list[int]  # of the whole step
    tokens: int  # over all ranks
    labels: int  # over all ranks
    save_first: bool  # the newest checkpoint is older than checkpoints.every_minutes


class PhaseRun:
    """Phase `index` of a recipe from `state` on; a context manager. Every rank calls all methods in the same order."""

    def __init__(
        self, recipe: Recipe, index: int, parts: Parts, agreement: Agreement, stops: StopRequests, state: State
    ) -> None:
        self.recipe, self.index, self.phase = recipe, index, recipe.phases[index]
        self.parts, self.agreement, self.stops, self.state = parts, agreement, stops, state
        self.saved, self.saved_at = state.step, time.monotonic()  # step of the newest checkpoint, and its time
        self.objective = Objective(
            self.phase.objective, self.phase.mask_rate or 0.0, self.phase.name, recipe.seed, recipe.model.dropout
        )
        self._begin = self.saved_at  # start of the current step
        self._spikes = Spikes()
        self._peak = device_peak(parts.engine.device)

    def __enter__(self) -> "PhaseRun":
        recipe, name, leads = self.recipe, self.phase.name, self.agreement.ranks.leads
        board = self.parts.folder.path / "tensorboard" / name if recipe.logging.tensorboard else None
        every, folder = recipe.logging.every_steps, self.parts.folder.phase(name)
        steps = self.parts.loaders[self.index].steps(self.state.position, self.objective, self.asked_to_stop)
        faults = recipe.faults
        with ExitStack() as opened:
            self.watchdog = opened.enter_context(
                Watchdog(faults.hang_medians, faults.hang_seconds, self.agreement.ranks.rank)
            )
            self.log = opened.enter_context(PhaseLog(folder, board, self.state, self.phase.tokens, every, leads))
            self.steps: Iterator[Step] = opened.enter_context(closing(steps))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    @property
    def finished(self) -> bool:
        """Whether the token budget is trained."""
        return self.state.tokens >= self.phase.tokens

    # --- requests to stop ---

    def go_on(self) -> bool:
        self.watchdog.alive()
        return not (self.stops.pending() or (self.agreement.ranks.leads and self.parts.folder.stop_requested()))

    def asked_to_stop(self) -> bool:
        """Whether this rank itself sees a request to stop. It asks while it waits for rows: rank 0 may be waiting for it."""
        return self.stops.pending() or self.parts.folder.stop_requested()

    def stop(self) -> bool:
        """Save what is not saved yet. Returns False, as `train_phase` does for a phase that stopped early."""
        if self.state.step > self.saved:
            self.save()
        return False

    # --- a step ---

    def next_step(self) -> AgreedStep | None:
        """Returns the step that all ranks take next; None where any of them has to stop."""
        self._begin = time.monotonic()
        minutes = self.recipe.checkpoints.every_minutes
        overdue = minutes is not None and time.monotonic() - self.saved_at >= 60 * minutes
        clock_due = self.agreement.ranks.leads and overdue
        step, (tokens, labels, stopping, save_due) = agree_on_step(
            self.steps, self.agreement, [not self.go_on(), clock_due]
        )
        if stopping or step is None:
            return None
        save_first = save_due > 0 and self.state.step > self.saved
        return AgreedStep(step.batches, step.position, step.row_ids, tokens, labels, save_first)

    def account(self, step: AgreedStep, rate: float, loss: float, grad_norm: float) -> None:
        """Account for a trained step: check its numbers, advance the state, write the log.

        `loss` is the sum over this rank's labels. Failure where a number is not finite, unless such steps are skipped.
        """
        flops = float(step_flops(self.parts.engine.encoder.config, step.batches, self.objective.causal))
        loss, flops = self.agreement.sum_real([loss, flops])
        loss /= max(1, step.labels)
        finite = math.isfinite(grad_norm)
        if not (finite and math.isfinite(loss)):
            self._not_finite(step, loss, grad_norm)
        self.state = self.state.after(step.tokens, self.recipe.batch.rows, applied=finite)
        seconds = time.monotonic() - self._begin
        self.watchdog.step(seconds)
        self.stops.leave_time_for(step=seconds)
        self.log.step(step.tokens)
        self.log.rows(self.state.step, step.position, step.row_ids)
        where = {"phase": self.phase.name, "step": self.state.step}
        if self._spikes(loss):
            self.log.spike({**where, "loss": loss, "rows": step.row_ids})
        if self.log.due(self.state.step, self.finished) or not finite:
            per_second = flops / seconds
            self.log.train(
                {
                    **where,
                    "tokens": self.state.tokens,
                    "loss": loss if math.isfinite(loss) else None,
                    "learning_rate": rate,
                    "grad_norm": grad_norm if finite else None,
                    "labels": step.labels,
                    "tokens_per_second": step.tokens / seconds,
                    "model_flops_utilization": per_second / (self._peak * self.agreement.ranks.world_size)
                    if self._peak
                    else None,
                    "seconds": seconds,
                }
            )

    def _not_finite(self, step: AgreedStep, loss: float, grad_norm: float) -> None:
        faults = self.recipe.faults
        bad = (
            f"phase {self.phase.name}, step {self.state.step + 1}: loss {loss:.4g}, gradient norm {grad_norm:.4g}; "
            f"rows {step.row_ids}"
        )
        if faults.on_nonfinite == "stop" or math.isfinite(grad_norm) or self.state.skipped >= faults.max_skipped:
            remedy = "lower the peak of learning_rate, leave rows out by faults.skip_rows, or see faults.on_nonfinite"
            raise Failure(
                f"{bad}; the weights did not move; the last checkpoint, of step {self.saved}, is intact; {remedy}"
            )
        self.agreement.say(f"skipped: {bad}")

    # --- validation ---

    @property
    def validation_due(self) -> bool:
        settings = self.recipe.validation
        return settings is not None and (self.finished or self.state.step % settings.every_steps == 0)

    def validation_missed(self) -> bool:
        """Whether a due validation is missing: at a phase's start, or where a stop came before a step's validation."""
        missed = self.agreement.leader_says(self.state.step not in self.log.validated_at)
        return missed and self.validation_due

    def validate(self) -> bool:
        """Validate and log the losses. Returns False where a stop interrupted it; the resumed run then validates again."""
        begin = time.monotonic()
        validation = self.parts.validation
        losses = validation(self.parts.engine, self.go_on, self.asked_to_stop) if validation else {}
        if losses:
            where = {
                "phase": self.phase.name,
                "step": self.state.step,
                "tokens": self.state.tokens,
                "validation": True,
            }
            self.log.validate({**where, **losses, "seconds": time.monotonic() - begin})
        return losses is not None

    # --- checkpoints ---

    @property
    def checkpoint_due(self) -> bool:
        every, step = self.recipe.checkpoints.every_steps, self.state.step
        return self.finished or bool(every and step % every == 0 and step > self.saved)

    def save(self, keep: bool = False) -> None:
        """Write a checkpoint of the current state; with `keep` it is never removed."""
        self.watchdog.alive()
        begin = time.monotonic()
        recipe, folder, state = self.recipe, self.parts.folder.checkpoints(self.phase.name), self.state
        history = [*state.history, phase_facts(recipe, self.index, state, self.log.validation)]
        whole = replace(state, history=history)
        save(folder, self.parts.engine, whole, self.parts.tokenizer, self.agreement, keep)
        self.saved, self.saved_at = state.step, time.monotonic()
        self.stops.leave_time_for(save=self.saved_at - begin)
        if self.agreement.ranks.leads:
            retain(folder, recipe.checkpoints.keep)
        self.watchdog.alive()


def agree_on_step(steps: Iterator[Step], agreement: Agreement, questions: list[bool]) -> tuple[Step | None, list[int]]:
    """Returns this rank's next step, and counts over all ranks: tokens, labels, and for each question the yes answers.

    The first question is whether to stop. A rank whose steps have ended answers yes, and its step is None.
    """
    problem: Exception | None = None
    step: Step | None = None
    stopping, *others = questions
    try:
        step = next(steps, None)
        stopping = stopping or step is None
    except Exception as error:  # the others must learn of it, or they would wait for this rank forever
        problem = error
    counts = [step.tokens, step.labels] if step else [0, 0]
    *agreed, failed, lasting = agreement.sum([*counts, *map(int, [stopping, *others]), *failures(problem)])
    raise_together(problem, failed, lasting, "rows")
    if not agreed[0] and not agreed[2]:
        raise UsageError("faults.skip_rows leaves a step without any row; skip fewer rows, or use a larger batch")
    return step, agreed
