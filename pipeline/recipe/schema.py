"""The recipe: one YAML file is one run. Strict: an unknown key, an impossible value or an option without effect is an error.

The rest of the pipeline sees only `Recipe`, which `file.load` reads. Token counts are in tokens; learning rates are
those that the optimizer uses.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from data_prep.rows import is_url
from pipeline.data import OBJECTIVES
from pipeline.model import BACKENDS

ONE_SOURCE = "give either init (a folder or hub name) or config (fields of the model's config, for random weights)"


def _number(value: Any) -> Any:
    """Accept numbers however they are written: PyYAML reads `1e-6` as text, and `10_000` only sometimes as an integer."""
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


def _bytes(value: Any) -> Any:
    match = re.fullmatch(r"\s*([\d_.]+)\s*([kmgt]?)i?b\s*", value.lower()) if isinstance(value, str) else None
    return (
        _whole(value)
        if match is None
        else round(float(match[1].replace("_", "")) * 1000 ** " kmgt".index(match[2] or " "))
    )


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    known = list(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"must be {', '.join(known[:-1])} or {known[-1]}")
        return name

    return check


Bytes = Annotated[
    int, BeforeValidator(_bytes), Field(gt=0)
]  # a number, or text such as "200gb"; units are powers of 1,000
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
    config: dict[str, Any] | None = None  # fields of ModernBertConfig, or of model_type's, when init is null
    attention: Annotated[str, AfterValidator(_one_of(("auto", *BACKENDS)))] = "auto"
    vocab_multiple: Count | None = None  # pad the vocabulary to a multiple while training; the export undoes it
    dropout: bool = False  # train with the config's embedding_dropout and mlp_dropout; false refuses rates above 0

    @model_validator(mode="after")
    def _one_source(self) -> "Model":
        if self.init is not None and self.config is not None:
            raise ValueError(f"config has no effect beside init: {ONE_SOURCE}")
        if self.revision is not None and (self.init is None or Path(self.init).is_dir()):
            raise ValueError("revision has no effect without a hub name in init; remove it")
        return self


class Mixed(Strict):
    """One of several sources of rows; its share of the stream positions is `proportion` over the sum of all proportions."""

    rows: str  # folder or URL
    proportion: Annotated[float, BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]


def _by_shape(value: Any) -> str:
    """Returns the tag of the form that `value` has, so that an error speaks of that form alone; its key omits `TAGS`."""
    return "scalar" if isinstance(value, str | int | float | None) else "structure"


TAGS = ("scalar", "structure")
Sources = Annotated[
    Annotated[str, Tag("scalar")] | Annotated[list[Mixed], Field(min_length=1), Tag("structure")],
    Discriminator(_by_shape),
]


class OwnData(Strict):
    """A phase's own rows."""

    rows: Sources


class Data(Strict):
    rows: Sources  # folder or URL, or a mix of several
    validation: str | None = None  # folder or URL; null: no validation
    cache: str | None = (
        None  # local cache folder for rows at a URL; null: a folder of the job's own, removed at its end
    )
    cache_limit: Bytes | None = (
        None  # size limit of a node's cache, such as 200gb; the least recently used shards make room
    )

    @model_validator(mode="after")
    def _cache_has_effect(self) -> "Data":
        remote = any(is_url(place) for place in (*locations(self.rows), self.validation or ""))
        for key in ("cache", "cache_limit"):
            if getattr(self, key) is not None and not remote:
                raise ValueError(f"{key} has no effect: the rows are in a local folder; remove it")
        return self


class LearningRate(Strict):
    """`schedule.learning_rate` gives the formula of each shape."""

    peak: Real
    shape: Literal["constant", "linear", "cosine", "one_minus_sqrt"] = "constant"
    end: Real | None = None  # rate of the last step, for shapes that decay; default 0
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
    objective: Annotated[str, AfterValidator(_one_of(OBJECTIVES))]  # the causal mask and the labels follow from this
    tokens: Count
    learning_rate: LearningRate
    mask_rate: Share | None = None  # for mlm phases
    frozen_layers: list[str | int] = []  # numbers, ranges such as "0-7", "embeddings" (with the tied decoder)
    # Continue the run's row stream, restart it, or use own rows; a later phase on the same rows continues their stream.
    data: Annotated[
        Annotated[Literal["continue", "restart"], Tag("scalar")] | Annotated[OwnData, Tag("structure")],
        Discriminator(_by_shape),
    ] = "continue"
    optimizer_state: Literal["keep", "reset"] = "keep"

    @model_validator(mode="after")
    def _consistent(self) -> "Phase":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name) or self.name in ("logs", "tensorboard"):
            raise ValueError(
                "name must be letters, digits, _ and -, for it names a folder of the run; and not logs or tensorboard"
            )
        masks = OBJECTIVES[self.objective].masks
        if not masks and self.mask_rate is not None:
            raise ValueError(f"mask_rate has no effect with objective {self.objective}; remove it")
        if masks and self.mask_rate is None:
            raise ValueError(f"an {self.objective} phase needs a mask_rate, such as 0.15")
        frozen_groups(self.frozen_layers)
        if self.learning_rate.warmup_tokens >= self.tokens:
            raise ValueError(
                f"learning_rate.warmup_tokens {self.learning_rate.warmup_tokens} must be below tokens {self.tokens}"
            )
        return self


def frozen_groups(entries: list[str | int]) -> set[str]:
    """Returns the names of the parameter groups (`engine.optimizer.group_of`) that a recipe's frozen_layers means."""
    groups: set[str] = set()
    for entry in entries:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", str(entry))
        if match:
            first, last = int(match[1]), int(match[2] or match[1])
            if first > last:
                raise ValueError(f"frozen_layers: the range '{entry}' runs backwards")
            groups |= {str(layer) for layer in range(first, last + 1)}
        elif entry == "embeddings":
            groups.add("embeddings")
        else:
            raise ValueError(
                f"frozen_layers: '{entry}' is not a layer's number, a range such as '0-7', or 'embeddings'"
            )
    return groups


class Batch(Strict):
    rows: Count  # rows of a global batch, the same at every number of ranks
    rows_per_device: Count  # rows of a micro-batch; gradient accumulation follows from both

    @model_validator(mode="after")
    def _divides(self) -> "Batch":
        if self.rows % self.rows_per_device:
            raise ValueError(f"rows {self.rows} is not a multiple of rows_per_device {self.rows_per_device}")
        return self


class Optimizer(Strict):
    name: Literal["adamw", "stable_adamw"] = "adamw"
    betas: tuple[Share, Share] = (0.9, 0.98)
    eps: Real = 1e-6
    weight_decay: Real = 0.05  # decoupled, times the learning rate, as in torch.optim.AdamW; none on norms and biases
    clip: Real | None = 1.0  # limit of the global gradient norm; null: no clipping
    z_loss: Real = 0.0  # weight of log(sum of exp of the logits)^2 in the gradient, such as 1e-4; 0: none

    @model_validator(mode="after")
    def _positive(self) -> "Optimizer":
        if self.eps <= 0 or self.clip == 0:
            raise ValueError("eps and clip must be above 0 (clip: null clips nothing)")
        return self


class Engine(Strict):
    deepspeed: str = "ds_configs/zero1.json"
    compile: bool = False  # torch.compile each layer; on a GPU batches are padded to one size for it
    activation_checkpointing: bool = False
    deterministic: bool = False  # torch.use_deterministic_algorithms: slower attention backward on a GPU


class Checkpoints(Strict):
    every_steps: Count | None = 500
    every_minutes: Annotated[float, BeforeValidator(_number), Field(gt=0)] | None = 30
    keep: Count = 2  # newest checkpoints to keep while a phase trains; a finished phase keeps only its last
    keep_at_tokens: list[Count] = []  # tokens of a phase at which to save a checkpoint for good, to branch from
    export_at_tokens: list[Count] = []  # the same, and export each of these checkpoints


class Validation(Strict):
    """Measures MLM and CLM loss on the same rows under the same masks, whatever the phase."""

    every_steps: Count = 250
    rows: Count = 256
    mask_rate: Share = 0.15


class Logging(Strict):
    every_steps: Count = 10
    tensorboard: bool = True


class Faults(Strict):
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a step whose loss or gradient is not finite never moves a weight
    max_skipped: Count = 10  # steps that a phase may skip; one more stops the run
    skip_rows: list[
        Annotated[int, BeforeValidator(_whole), Field(ge=0)]
    ] = []  # row ids to leave out; no other row moves
    # A step that takes longer than both is a hang: every rank writes its stacks and the run ends.
    hang_medians: Count = 30  # times the median step
    hang_seconds: Count = 900


class Start(Strict):
    checkpoint: str  # a checkpoint, a phase or a run of any recipe: gives weights, optimizer state, stream positions


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
    faults: Faults = Faults()
    card: Card = Card()
    start: Start | None = None  # branch from another run's checkpoint
    seed: Seed = 17
    data_seed: Seed = 42

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError("name must be letters, digits, '.', '_' and '-', for it names the run folder and the card")
        names = [phase.name for phase in self.phases]
        if len(set(names)) < len(names):
            raise ValueError("phases: two phases have the same name")
        if self.start is None:
            if self.model.init is None and self.model.config is None:
                raise ValueError(f"model: {ONE_SOURCE}")
            if self.phases[0].data == "restart" or self.phases[0].optimizer_state == "reset":
                raise ValueError("phases.0: there is nothing to restart or reset; remove data and optimizer_state")
        elif self.model.init is not None or self.model.config is not None:
            raise ValueError("model: init and config have no effect with start.checkpoint; remove them")
        if self.validation is not None and self.data.validation is None:
            raise ValueError("validation has no effect: data.validation names no rows")
        return self


def locations(sources: Sources) -> list[str]:
    return [sources] if isinstance(sources, str) else [source.rows for source in sources]
