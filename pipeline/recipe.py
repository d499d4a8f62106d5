"""The recipe: one YAML file is one run. Strict: an unknown key, an impossible value or an option without effect is an error.

`load` reads, overrides and checks it; `Recipe` is what the rest of the pipeline sees; `numbers` is the part that decides
the results and may not change when a run goes on. Token counts are in tokens, learning rates as the optimizer sees them.
"""

import difflib
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from data_prep.errors import UsageError
from data_prep.rows import is_url

INSTALLED = Path(__file__).resolve().parent.parent


def _number(value: Any) -> Any:
    """Numbers are numbers however written: PyYAML reads `1e-6` as text, and `10_000` only sometimes as an integer."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    if isinstance(value, str):
        try:
            return float(value.replace("_", ""))
        except ValueError:
            raise ValueError("must be a number") from None
    return value


def _whole(value: Any) -> Any:
    value = _number(value)
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            raise ValueError("must be a whole number")
        return int(value)
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[int, BeforeValidator(_whole), Field(gt=0)]
Real = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, BeforeValidator(_number), Field(gt=0, lt=1)]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, lt=1 << 63)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ValueError("must be a mapping of keys")
        for key in data:
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key '{key}'; {hint}")
        return data


class Model(Strict):
    init: str | None = None  # folder or hub name; null: random weights from `config`
    revision: str | None = None
    config: dict[str, Any] | None = None  # ModernBertConfig fields, when init is null
    attention: Literal["auto", "flash", "torch_varlen", "sdpa"] = "auto"

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if (self.init is None) == (self.config is None):
            raise ValueError(
                "give either init (a folder or hub name) or config (ModernBertConfig fields for random weights)"
            )
        if self.revision is not None and (self.init is None or Path(self.init).is_dir()):
            raise ValueError("revision has no effect without a hub name in init; remove it")
        return self


class Data(Strict):
    rows: str  # folder or URL
    validation: str | None = None  # folder or URL; null: no validation
    cache: str | None = (
        None  # local cache folder for rows at a URL; null: a folder of the job's own, removed at its end
    )

    @model_validator(mode="after")
    def _cache_has_effect(self) -> "Data":
        if self.cache is not None and not is_url(self.rows) and not is_url(self.validation or ""):
            raise ValueError("cache has no effect: the rows are in a local folder; remove it")
        return self


class LearningRate(Strict):
    """`pipeline.schedule.learning_rate` gives the formula of each shape."""

    peak: Real
    shape: Literal["constant", "linear", "cosine", "one_minus_sqrt"] = "constant"
    end: Real | None = None  # the last step's, for shapes that decay; default 0
    warmup_tokens: Annotated[int, BeforeValidator(_whole), Field(ge=0)] = 0

    @model_validator(mode="after")
    def _end_has_effect(self) -> "LearningRate":
        if self.peak <= 0:
            raise ValueError("peak must be above 0")
        if self.shape == "constant" and self.end is not None:
            raise ValueError(
                "end has no effect with shape constant; remove it or choose linear, cosine or one_minus_sqrt"
            )
        if self.end is not None and self.end > self.peak:
            raise ValueError(f"end {self.end} is above peak {self.peak}")
        return self


class Phase(Strict):
    name: str
    objective: Literal["clm", "mlm"]  # the causal mask and the labels both follow from this
    tokens: Count
    learning_rate: LearningRate
    mask_rate: Share | None = None  # of an mlm phase
    data: Literal["continue", "restart"] = "continue"  # go on in the row stream, or from its start
    optimizer_state: Literal["keep", "reset"] = "keep"

    @model_validator(mode="after")
    def _consistent(self) -> "Phase":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name) or self.name in ("logs", "tensorboard"):
            raise ValueError(
                "name must be letters, digits, _ and -, for it names a folder of the run; and not logs or tensorboard"
            )
        if self.objective == "clm" and self.mask_rate is not None:
            raise ValueError("mask_rate has no effect with objective clm; remove it")
        if self.objective == "mlm" and self.mask_rate is None:
            raise ValueError("an mlm phase needs a mask_rate, such as 0.15")
        if self.learning_rate.warmup_tokens >= self.tokens:
            raise ValueError(
                f"learning_rate.warmup_tokens {self.learning_rate.warmup_tokens} must be below tokens {self.tokens}"
            )
        return self


class Batch(Strict):
    rows: Count  # of a global step, the same at every number of ranks
    rows_per_device: Count  # of a micro-batch; accumulation follows

    @model_validator(mode="after")
    def _divides(self) -> "Batch":
        if self.rows % self.rows_per_device:
            raise ValueError(f"rows {self.rows} is not a multiple of rows_per_device {self.rows_per_device}")
        return self


class Optimizer(Strict):
    name: Literal["adamw", "stable_adamw"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.98)
    eps: Real = 1e-6
    weight_decay: Real = 0.05  # decoupled, times the learning rate, as torch.optim.AdamW; none on norms and biases
    clip: Real | None = 1.0  # of the global gradient norm; null: none

    @model_validator(mode="after")
    def _positive(self) -> "Optimizer":
        if self.eps <= 0 or self.clip == 0:
            raise ValueError("eps and clip must be above 0 (clip: null clips nothing)")
        return self


class Engine(Strict):
    deepspeed: str = "ds_configs/zero1.json"
    activation_checkpointing: bool = False


class Checkpoints(Strict):
    every_steps: Count | None = 500
    every_minutes: Annotated[float, BeforeValidator(_number), Field(gt=0)] | None = 30
    keep: Count = 2  # newest ones of a phase that is not finished; of a finished phase only the last stays


class Validation(Strict):
    """Always the same rows under the same masks, MLM and CLM loss both, whatever the phase."""

    every_steps: Count = 250
    rows: Count = 256
    mask_rate: Share = 0.15


class Logging(Strict):
    every_steps: Count = 10
    tensorboard: bool = True


class Card(Strict):
    license: str | None = None
    language: str | list[str] | None = None


class Recipe(Strict):
    name: str
    model: Model
    precision: Literal["auto", "float32", "bf16", "bf16_autocast"] = "auto"  # auto: float32 on a CPU, bf16 on a GPU
    data: Data
    phases: list[Phase] = Field(min_length=1)
    batch: Batch
    optimizer: Optimizer = Optimizer()
    engine: Engine = Engine()
    checkpoints: Checkpoints = Checkpoints()
    validation: Validation | None = None
    logging: Logging = Logging()
    card: Card = Card()
    seed: Seed = 17
    data_seed: Seed = 42

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError("name must be letters, digits, '.', '_' and '-', for it names the run folder and the card")
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError("phases: two phases have the same name")
        if self.phases[0].data == "restart" or self.phases[0].optimizer_state == "reset":
            raise ValueError(
                "phases.0: the first phase has nothing to restart or reset; remove data and optimizer_state"
            )
        if self.validation is not None and self.data.validation is None:
            raise ValueError("validation has no effect: data.validation names no rows")
        return self


# What may change when a run goes on: it moves work around, not results.
FREE = {"data", "engine", "checkpoints", "logging", "card"}


def numbers(recipe: Recipe) -> dict[str, Any]:
    """The part of the recipe that decides the results, as plain values (rows are compared by digest, elsewhere)."""
    decisive = recipe.model_dump(mode="json", exclude=FREE)
    del decisive["model"]["attention"], decisive["batch"]["rows_per_device"]
    return decisive


def first_difference(old: Any, new: Any, path: str = "") -> str | None:
    """Dotted key at which two plain values first differ, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            found = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next((d for i, (a, b) in pairs if (d := first_difference(a, b, f"{path}.{i}"))), None)
    return None if old == new else path


def _override(tree: dict[str, Any], assignment: str) -> None:
    """Apply one `key.0.key=value` of the command line."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise UsageError(f"'{assignment}' is not key=value")
    node: Any = tree
    *parents, last = key.split(".")
    try:
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if isinstance(node, list):
            node[int(last)] = yaml.safe_load(text)
        elif isinstance(node, dict):
            node[last] = yaml.safe_load(text)
        else:
            raise TypeError
    except (ValueError, IndexError, TypeError, AttributeError):
        raise UsageError(f"'{key}' names no key of the recipe") from None
    except yaml.YAMLError:
        raise UsageError(f"the value of '{key}' is not YAML") from None


def resolve(location: str | None, folder: Path) -> str | None:
    """Relative paths resolve against the recipe's own folder; URLs stay as they are."""
    return location if location is None or is_url(location) else str((folder / Path(location).expanduser()).resolve())


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"] if not str(part).startswith(("function-", "constrained-")))
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = (
        f" (given: {given!r})" if isinstance(given, str | int | float | None) and problem["type"] != "missing" else ""
    )
    more = f"; and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{where + ': ' if where else ''}{message}{shown}{more}"


def parse(tree: Any, folder: Path, source: str) -> Recipe:
    """The recipe from plain values, paths resolved against `folder`; UsageError names the key and the remedy."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"{source}: {_first_problem(error)}") from None
    init = recipe.model.init
    if init is not None and (folder / Path(init).expanduser()).is_dir():
        init = resolve(init, folder)  # else a hub name
    ours = recipe.engine.deepspeed.startswith("ds_configs/")
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update={"init": init}),
            "data": recipe.data.model_copy(
                update={key: resolve(getattr(recipe.data, key), folder) for key in ("rows", "validation", "cache")}
            ),
            "engine": recipe.engine
            if ours
            else recipe.engine.model_copy(update={"deepspeed": resolve(recipe.engine.deepspeed, folder)}),
            "validation": recipe.validation or (Validation() if recipe.data.validation else None),
        }
    )


def load(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read `path`, apply the command line's key=value pairs, check everything that needs no other file."""
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"recipe {path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(f"recipe {path} is not YAML" + (f": line {mark.line + 1}" if mark else "")) from None
    if not isinstance(tree, dict):
        raise UsageError(f"recipe {path} must be a mapping of keys")
    for assignment in overrides or []:
        _override(tree, assignment)
    return parse(tree, path.resolve().parent, f"recipe {path}")


def deepspeed_file(recipe: Recipe) -> Path:
    """`ds_configs/...` is the installed project's, whatever the working folder."""
    name = recipe.engine.deepspeed
    return INSTALLED / name if name.startswith("ds_configs/") else Path(name)
