"""Run folders as values: what a recipe planned and what its metrics files say so far.

    RUN/recipe.yaml            name, phases, seeds            -> Run, Phase
    RUN/PHASE/metrics.jsonl    one line a logged step         -> Phase.training, Phase.validation
    RUN/PHASE/DONE             the phase's budget is trained  -> Phase.finished

We read the recipe loosely, and only the keys that a report shows: an old run folder must stay readable after the strict
recipe of `pipeline` has gained a key. We read metrics strictly, because a line left out in silence would make a curve
wrong. Only the last line may be incomplete: a run may be killed, or may be writing, while we read.

Privacy: error messages name the file and the line number and never quote the line.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from command_line import Failure


@dataclass(frozen=True)
class TrainingPoint:
    """One logged training step. `step` and `tokens` count from the start of the phase; nan stands for a logged null."""

    step: int
    tokens: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    utilization: float


@dataclass(frozen=True)
class ValidationPoint:
    """Both losses, in nats a label, on the fixed validation rows. Step 0 comes before the phase's first step."""

    step: int
    tokens: int
    mlm_loss: float
    clm_loss: float
    rows: int | None


@dataclass(frozen=True)
class Phase:
    name: str
    objective: str
    mask_rate: float | None
    budget: int  # tokens
    offset: int = 0  # tokens of the run before this phase, where its curve begins
    finished: bool = False
    training: list[TrainingPoint] = field(default_factory=list)
    validation: list[ValidationPoint] = field(default_factory=list)
    cut_off: bool = False  # the last metrics line was incomplete and is left out
    superseded: int = 0  # lines of steps that the run trained again after it went back to a checkpoint

    @property
    def started(self) -> bool:
        return bool(self.training or self.validation)

    @property
    def trained(self) -> int:
        """Tokens trained. A finished phase has its whole budget, even if its last step was not logged."""
        logged = max([0, *(point.tokens for point in self.training), *(point.tokens for point in self.validation)])
        return max(logged, self.budget) if self.finished else logged


@dataclass(frozen=True)
class Milestone:
    """The validation losses at the start of a run or after a phase. `tokens` counts from the start of the run."""

    label: str
    tokens: int
    losses: ValidationPoint


@dataclass(frozen=True)
class Run:
    name: str
    phases: list[Phase]
    recipe: dict[str, Any]  # as read from the file; use `setting`

    def setting(self, *keys: str) -> Any:
        """Return a value of the recipe, such as `setting("batch", "rows")`, or None if the recipe lacks it."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    @property
    def finished(self) -> bool:
        return all(phase.finished for phase in self.phases)

    def milestones(self) -> list[Milestone]:
        """Return the validation losses at the start and after each phase, in order."""
        found = []
        first = self.phases[0].validation[:1]
        if first and first[0].step == 0:
            found.append(Milestone("start", 0, first[0]))
        for phase, following in zip(self.phases, [*self.phases[1:], None], strict=True):
            last = phase.validation[-1] if phase.validation and phase.validation[-1].step > 0 else None
            # The state before the next phase's first step is the state after this phase's last step.
            begins = following.validation[:1] if following else []
            if following and begins and begins[0].step == 0 and (last is None or last.tokens < phase.trained):
                found.append(Milestone(f"after {phase.name}", following.offset, begins[0]))
            elif last is not None:
                label = f"after {phase.name}" if phase.finished else f"in {phase.name} so far"
                found.append(Milestone(label, phase.offset + last.tokens, last))
        return found


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in the order given and make their names differ. Folder names stay hidden: they may name a user."""
    runs = [_read_run(folder) for folder in folders]
    if not any(phase.started for run in runs for phase in run.phases):
        raise Failure(f"no metrics in {', '.join(map(str, folders))}: no phase has logged a step yet; train first")
    return [
        Run(name, run.phases, run.recipe) for name, run in zip(_distinct([r.name for r in runs]), runs, strict=True)
    ]


def _distinct(names: Sequence[str]) -> list[str]:
    """Number the names that occur more than once. A numbered name is never another run's name."""
    distinct: list[str] = []
    for name in names:
        number, candidate = 0, name
        while candidate in distinct or (names.count(candidate) > 1 if number == 0 else candidate in names):
            number += 1
            candidate = f"{name} ({number})"
        distinct.append(candidate)
    return distinct


def _read_run(folder: Path) -> Run:
    file = folder / "recipe.yaml"
    if not file.is_file():
        raise Failure(f"{folder} is not a run folder: it has no recipe.yaml; give the --run-dir of a training")
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        # str, because PyYAML reads `name: 2024` as a number.
        name, planned = str(recipe["name"]), [_planned(phase) for phase in recipe["phases"]]
    except (yaml.YAMLError, LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        raise Failure(
            f"{file} is not the recipe of a run: it needs a name, and phases with name, objective and tokens; "
            "name a run folder that our training wrote"
        ) from None
    if not planned:
        raise Failure(f"{file} has no phases; name a run folder that our training wrote")

    phases: list[Phase] = []
    offset = 0
    for plan in planned:
        phases.append(_with_metrics(folder / plan.name, plan, offset))
        offset += phases[-1].trained
    return Run(name, phases, recipe)


def _planned(phase: dict[str, Any]) -> Phase:
    name = str(phase["name"])
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        raise ValueError("a phase's name is a folder inside the run folder")
    mask_rate = phase.get("mask_rate")
    return Phase(
        name=name,
        objective=str(phase["objective"]),
        mask_rate=None if mask_rate is None else float(mask_rate),
        budget=int(float(phase["tokens"])),  # `1e9` is text to PyYAML
    )


def _with_metrics(folder: Path, plan: Phase, offset: int) -> Phase:
    training: list[TrainingPoint] = []
    validation: list[ValidationPoint] = []
    superseded = 0
    lines, cut_off = _lines(folder / "metrics.jsonl")
    for number, line in enumerate(lines, start=1):
        try:
            point = _point(line)
        except (KeyError, TypeError) as error:
            # The argument of these errors is the name of one of our fields, never a value.
            raise Failure(
                f"{folder / 'metrics.jsonl'}, line {number}: the field {error.args[0]} is missing or not a number"
            ) from None
        # A killed run goes on from its last checkpoint and logs the steps since then a second time. The second time
        # led to the weights, so it counts.
        same, other = (validation, training) if isinstance(point, ValidationPoint) else (training, validation)
        while same and same[-1].step >= point.step:
            same.pop()
            superseded += 1
        while other and other[-1].step > point.step:
            other.pop()
            superseded += 1
        same.append(point)  # type: ignore[arg-type]
    return Phase(
        name=plan.name,
        objective=plan.objective,
        mask_rate=plan.mask_rate,
        budget=plan.budget,
        offset=offset,
        finished=(folder / "DONE").exists(),
        training=training,
        validation=validation,
        cut_off=cut_off,
        superseded=superseded,
    )


def _lines(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the JSON objects of the file, and whether an incomplete last line was left out.

    A phase that has not begun has no file and gives no objects.
    """
    if not file.is_file():
        return [], False
    texts = file.read_bytes().split(b"\n")
    if texts[-1] == b"":
        texts.pop()
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except ValueError:  # bad JSON and bad UTF-8 alike
            if number == len(texts):
                return lines, True
            raise Failure(
                f"{file}, line {number}: not JSON; only the last line of a metrics file may be incomplete"
            ) from None
        if not isinstance(line, dict):
            raise Failure(f"{file}, line {number}: not a JSON object")
        lines.append(line)
    return lines, False


def _point(line: dict[str, Any]) -> TrainingPoint | ValidationPoint:
    if line.get("validation"):
        return ValidationPoint(
            step=_count(line, "step"),
            tokens=_count(line, "tokens"),
            mlm_loss=_number(line, "mlm_loss"),
            clm_loss=_number(line, "clm_loss"),
            rows=_count(line, "rows") if "rows" in line else None,
        )
    return TrainingPoint(
        step=_count(line, "step"),
        tokens=_count(line, "tokens"),
        loss=_number(line, "loss"),
        learning_rate=_number(line, "learning_rate"),
        grad_norm=_number(line, "grad_norm"),
        tokens_per_second=_number(line, "tokens_per_second"),
        utilization=_number(line, "model_flops_utilization"),
    )


def _count(line: dict[str, Any], key: str) -> int:
    value = line[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(key)
    return value


def _number(line: dict[str, Any], key: str) -> float:
    """Read a number. null (an unknown GPU has no utilization) and infinities become nan, which no curve draws."""
    value = line[key]
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(key)
    return float(value) if math.isfinite(value) else math.nan
