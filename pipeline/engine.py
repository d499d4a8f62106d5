"""The only file that touches DeepSpeed: accumulation, scaling, clipping, the step, and state by parameter name.

The loss of a step is sum(loss over labels) / count(labels), both over the whole accumulation window on all ranks, the
count known before the first backward. DeepSpeed divides by the accumulation steps and averages over the ranks, so each
micro-batch's sum is multiplied by both and divided by the count: the gradient is that of one big batch on one
device, however the labels are spread.
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from data_prep.errors import Failure, UsageError
from pipeline import optimizer as optimizers
from pipeline.batch import PackedBatch
from pipeline.distributed import Ranks, rendezvous
from pipeline.encoder import Encoder
from pipeline.loss import LossModel
from pipeline.recipe import Recipe, deepspeed_file

STATES = ("exp_avg", "exp_avg_sq")
PREFIX = "encoder."  # LossModel's, not part of a parameter's name

# What a DeepSpeed file may not set: the recipe owns it.
OWNED = {
    "train_batch_size": "batch.rows",
    "train_micro_batch_size_per_gpu": "batch.rows_per_device",
    "gradient_accumulation_steps": "batch",
    "optimizer": "optimizer",
    "scheduler": "phases[].learning_rate",
    "gradient_clipping": "optimizer.clip",
    "bf16": "precision",
    "fp16": "precision",
    "torch_autocast": "precision",
}


def start_processes(ranks: Ranks, device: torch.device) -> None:
    """Join the process group: NCCL between GPUs, gloo between CPUs."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it warns that it found no GPU
    import deepspeed

    rendezvous(ranks)
    # DeepSpeed calls collectives by names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its C++ kernel for CPU inference would be compiled at every first start and hold 69 MB of shared memory a rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deepspeed.init_distributed(
        "nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def accumulation(recipe: Recipe, ranks: Ranks) -> int:
    """Micro-batches of a step on each rank; UsageError where the global batch does not divide."""
    rows, per_device = recipe.batch.rows, recipe.batch.rows_per_device
    if rows % (per_device * ranks.world_size):
        raise UsageError(
            f"batch: rows {rows} cannot be divided over {ranks.world_size} ranks x rows_per_device {per_device}; "
            "change one of them so that it can"
        )
    return rows // (per_device * ranks.world_size)


def read_deepspeed_file(recipe: Recipe) -> dict[str, Any]:
    path = deepspeed_file(recipe)
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except OSError:
        raise UsageError(f"engine.deepspeed: {recipe.engine.deepspeed} cannot be read") from None
    except ValueError:
        raise UsageError(f"engine.deepspeed: {recipe.engine.deepspeed} is not JSON") from None
    for key in config:
        if key in OWNED:
            raise UsageError(
                f"engine.deepspeed: {recipe.engine.deepspeed} sets {key}, which the recipe owns: {OWNED[key]}"
            )
    stage = config.get("zero_optimization", {}).get("stage")
    if stage != 1:
        raise UsageError(f"engine.deepspeed: zero_optimization.stage must be 1 in this version (given: {stage})")
    return config


def resolve_precision(recipe: Recipe, device: torch.device) -> str:
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" else "float32"


class Engine:
    """A DeepSpeed engine around the encoder and its loss, with our loss scale and our state."""

    def __init__(self, encoder: Encoder, recipe: Recipe, ranks: Ranks, device: torch.device) -> None:
        import deepspeed

        self.accumulation = accumulation(recipe, ranks)
        self.ranks, self.device = ranks, device
        config = read_deepspeed_file(recipe)
        half = resolve_precision(recipe, device) == "bf16"
        config |= {
            "train_batch_size": recipe.batch.rows,
            "train_micro_batch_size_per_gpu": recipe.batch.rows_per_device,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": recipe.optimizer.clip or 0.0,
            "bf16": {"enabled": half},
        }
        model = LossModel(encoder)
        named = [(name.removeprefix(PREFIX), parameter) for name, parameter in model.named_parameters()]
        built = optimizers.build(named, recipe.optimizer, device)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(model=model, optimizer=built, config=config)
        self.parameters: dict[str, torch.nn.Parameter] = dict(named)
        self._create_state()

    @property
    def encoder(self) -> Encoder:
        encoder: Encoder = self._engine.module.encoder
        return encoder

    # --- a step ---

    def train_step(self, batches: Sequence[PackedBatch], causal: bool, labels: int, rate: float) -> tuple[float, float]:
        """One optimizer step over this rank's micro-batches of the window.

        `labels` is the count over all ranks, `rate` the learning rate. Returns the sum of this rank's losses, undivided,
        and the global gradient norm before clipping; where that is not finite no weight has moved.
        """
        assert len(batches) == self.accumulation
        self._engine.train()
        scale = self.ranks.world_size * self.accumulation / max(1, labels)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch in batches:
            loss = self._engine(batch.to(self.device), causal)
            total += loss.detach()
            self._engine.backward(loss * scale)
            self._engine.step()
        return float(total), float(self._engine.get_global_grad_norm())

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch, causal: bool) -> float:
        """Sum of the losses at the batch's labels; all ranks call it the same number of times."""
        self._engine.eval()
        return float(self._engine(batch.to(self.device), causal))

    # --- state by parameter name, the same for every number of ranks ---

    def _partitions(self) -> list[Tensor]:
        """This rank's float32 master of each parameter group, flat."""
        found = getattr(self._optimizer, "single_partition_of_fp32_groups", None)
        partitions: list[Tensor] = found if found is not None else self._optimizer.fp32_groups_flat_partition
        return partitions

    def _create_state(self) -> None:
        """Zero moments and step, linked to the parameters: DeepSpeed would create them at the first step, and link only
        the first group's."""
        from deepspeed.utils import lazy_init_hp_params_optimizer_state

        inner = self._optimizer.optimizer
        groups = (
            self._optimizer.bit16_groups if hasattr(self._optimizer, "bit16_groups") else self._optimizer.bf16_groups
        )
        for group, partition in zip(groups, self._partitions(), strict=True):
            state = inner.state[partition]
            for key in STATES:
                state[key] = torch.zeros_like(partition)
            state["step"] = torch.zeros(
                (), dtype=torch.float32, device=self.device if self.device.type == "cuda" else None
            )
            lazy_init_hp_params_optimizer_state(group, partition, inner.state)

    @property
    def adam_step(self) -> int:
        return int(self._optimizer.optimizer.state[self._partitions()[0]]["step"])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole float32 weights by name, on the CPU, one at a time; a collective call."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self.parameters.items():
            yield name, safe_get_full_fp32_param(parameter).cpu()

    def moments(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Whole float32 `exp_avg` or `exp_avg_sq` by name; a collective call."""
        from deepspeed.utils import safe_get_full_optimizer_state

        for name, parameter in self.parameters.items():
            yield name, safe_get_full_optimizer_state(parameter, key).cpu()

    @torch.no_grad()
    def load(
        self, weights: Callable[[str], Tensor], moments: Callable[[str, str], Tensor] | None, adam_step: int
    ) -> None:
        """Set weights, moments and Adam's step count; `moments` None: as if the optimizer were new."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for name, parameter in self.parameters.items():
            value = weights(name)
            if value.shape != parameter.shape:
                raise Failure(
                    f"the checkpoint's {name} has shape {list(value.shape)}, the model's {list(parameter.shape)}"
                )
            value = value.to(self.device)
            parameter.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            for key in STATES:
                state = torch.zeros_like(value) if moments is None else moments(key, name).to(self.device)
                safe_set_full_optimizer_state(parameter, state, key)
        for partition in self._partitions():
            self._optimizer.optimizer.state[partition]["step"].fill_(0 if moments is None else adam_step)
