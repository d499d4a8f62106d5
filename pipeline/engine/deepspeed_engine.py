"""The only file that touches DeepSpeed: accumulation, scaling, clipping, the step, and state by parameter name.

The loss of a step is sum(loss over labels) / count(labels), both over all micro-batches on all ranks; the count is
known before the first backward. DeepSpeed divides by the gradient accumulation steps and averages over the ranks. Each
micro-batch's sum is therefore multiplied by both and divided by the count: the gradient is that of one big batch on one
device, however the labels are spread.
"""

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from command_line import Failure, Passing, UsageError
from pipeline.engine import optimizer as optimizers
from pipeline.engine.deepspeed_file import accumulation, read_deepspeed_file, resolve_precision
from pipeline.engine.zero_partitions import STATES, Partitions
from pipeline.model import Encoder, LossModel, PackedBatch
from pipeline.ranks import Ranks, rendezvous
from pipeline.recipe import Recipe

PREFIX = "encoder."  # LossModel's, not part of a parameter's name


def start_processes(ranks: Ranks, device: torch.device) -> None:
    """Join the process group: NCCL between GPUs, gloo between CPUs."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    import deepspeed

    rendezvous(ranks)
    # DeepSpeed calls collectives by names that torch has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed would compile its kernel for CPU inference at every first start and take 69 MB of shared memory a rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    facts = {"rank": ranks.rank, "world_size": ranks.world_size}
    try:
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, **facts)
    except torch.distributed.DistNetworkError:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise Passing(  # a restarted job meets at another port
            f"the ranks cannot meet at {place}: the port is taken, or the address cannot be reached; "
            "choose another (`deepspeed --master_port N`, or MASTER_ADDR and MASTER_PORT)"
        ) from None


class Engine:
    """A DeepSpeed engine around the encoder and its loss, with our loss scale and our state."""

    def __init__(self, encoder: Encoder, recipe: Recipe, ranks: Ranks, device: torch.device) -> None:
        import deepspeed

        self.accumulation = accumulation(recipe, ranks)
        self.ranks, self.device, self.clip = ranks, device, recipe.optimizer.clip
        config = read_deepspeed_file(recipe)
        zero = config["zero_optimization"]
        self.stage: int = zero["stage"]
        if self.stage == 3 and recipe.engine.compile:
            raise UsageError("engine.compile needs ZeRO stage 0, 1 or 2: stage 3 gathers weights while it runs")
        if recipe.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
            torch.use_deterministic_algorithms(True)
        precision = resolve_precision(recipe, device)
        if precision == "bf16" and not self.stage:
            raise UsageError(
                "precision bf16 needs ZeRO stage 1, 2 or 3, which keep the float32 masters; or use bf16_autocast"
            )
        self._autocast = precision == "bf16_autocast"
        config |= {
            "train_batch_size": recipe.batch.rows,
            "train_micro_batch_size_per_gpu": recipe.batch.rows_per_device,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": (self.clip or 0.0) if self.stage else 0.0,  # at stage 0 we clip ourselves
            "bf16": {"enabled": precision == "bf16"},
            "zero_allow_untested_optimizer": True,  # StableAdamW is ours
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW on offloaded partitions: nothing to compile
        }
        model = LossModel(encoder, recipe.optimizer.z_loss)
        self.parameters = {name.removeprefix(PREFIX): parameter for name, parameter in model.named_parameters()}
        offload = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        fused = device.type == "cuda" and not offload
        built = optimizers.build(self.parameters.items(), recipe.optimizer, fused)
        self._engine, self._optimizer, _, _ = deepspeed.initialize(model=model, optimizer=built, config=config)
        if self.stage == 3:
            # LossModel uses them in its own forward, not in the forward of the module that owns them.
            for weight in {encoder.output_weight, encoder.output_bias} - {None}:
                deepspeed.zero.register_external_parameter(model, weight)
        self._state = Partitions(self._optimizer, self.stage, self.parameters, ranks, device)
        self._frozen: set[str] = set()
        self._frozen_groups: set[str] = set()
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: torch.zeros_like(grad) if name in self._frozen else None)

    @property
    def encoder(self) -> Encoder:
        encoder: Encoder = self._engine.module.encoder
        return encoder

    def freeze(self, groups: Collection[str]) -> None:
        """Freeze the weights of these groups (see `optimizer.group_of`); their gradients become 0, in the norm too."""
        self._frozen = {name for name in self.parameters if optimizers.group_of(name) in groups}
        self._frozen_groups = set(groups)

    # --- a step ---

    def train_step(self, batches: Sequence[PackedBatch], causal: bool, labels: int, rate: float) -> tuple[float, float]:
        """Take one optimizer step over this rank's micro-batches.

        `labels` is the count over all ranks, `rate` the learning rate. Returns the sum of this rank's losses, undivided,
        and the global gradient norm before clipping; where the norm is not finite, no weight has moved.
        """
        assert len(batches) == self.accumulation
        self._engine.train()
        scale = self.ranks.world_size * self.accumulation / max(1, labels)
        for group in self._optimizer.param_groups:
            group["lr"] = 0.0 if group["name"] in self._frozen_groups else rate
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        norm: float | None = None
        for number, batch in enumerate(batches, 1):
            with self._precision():
                loss = self._engine(batch.to(self.device), causal)
            total += loss.detach()
            self._engine.backward(loss * scale)
            if not self.stage and number == self.accumulation:
                norm = self._clip_whole_gradients()
            self._engine.step()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return float(total), norm

    def _precision(self) -> torch.autocast | nullcontext[None]:
        return torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext()

    @torch.no_grad()
    def _clip_whole_gradients(self) -> float:
        """At stage 0, where DeepSpeed reports no norm: clip and return the norm; if it is not finite, prevent the step."""
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]).square().sum().sqrt()
        if not torch.isfinite(norm):
            for parameter in self.parameters.values():
                parameter.grad = None  # the optimizer skips it
        elif self.clip is not None:
            for grad in grads:
                grad.mul_((self.clip / (norm + 1e-6)).clamp(max=1.0))
        return float(norm)

    @torch.no_grad()
    def evaluate(self, batch: PackedBatch, causal: bool) -> float:
        """Returns the sum of the losses at the batch's labels; all ranks call it the same number of times."""
        self._engine.eval()
        with self._precision():
            return float(self._engine(batch.to(self.device), causal))

    # --- state by parameter name, the same for every stage and number of ranks ---

    @property
    def adam_step(self) -> int:
        """Optimizer steps since the moments were 0."""
        return self._state.adam_step

    def tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, whole float32 tensor on the CPU) of kind `weights`, `exp_avg` or `exp_avg_sq`; a collective call."""
        for name in self.parameters:
            yield name, self._state.gather(name, None if kind == "weights" else kind)

    def load(self, tensor: Callable[[str, str], Tensor], adam_step: int | None) -> None:
        """Set weights, moments and Adam's step count from `tensor(kind, name)`; adam_step None resets the optimizer."""
        for name in self.parameters:
            value, shape = tensor("weights", name), self._state.shape(name)
            if value.shape != shape:
                raise Failure(f"the checkpoint's {name} has shape {list(value.shape)}, the model's {list(shape)}")
            self._state.set_live(name, value)
            self._state.scatter(name, value)
            for kind in STATES:
                self._state.scatter(name, torch.zeros_like(value) if adam_step is None else tensor(kind, name), kind)
        self._state.adam_step = adam_step or 0
