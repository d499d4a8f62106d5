"""Where ZeRO keeps each parameter's float32 master and moments: fragments of flat partitions, one view for every stage.

Stage 0 leaves parameters whole. Stages 1 and 2 flatten each parameter group and give each rank a slice, which may cut a
parameter in two. Stage 3 gives each rank a slice of every parameter. Once the fragments are known, whole tensors
are gathered and set by name, in the same way for every stage and number of ranks, without DeepSpeed's own checkpoints.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.engine.optimizer import Piece, StableAdamW
from pipeline.ranks import Ranks

STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """`size` numbers of a parameter, from `offset` in the flattened parameter, at `start` in the flat partition."""

    flat: Tensor
    start: int
    offset: int
    size: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns this fragment of the master or of a moment, which have the same layout."""
        return flat.view(-1)[self.start : self.start + self.size]


class Partitions:
    """This rank's partitions of an initialised DeepSpeed optimizer."""

    def __init__(
        self, optimizer: Any, stage: int, parameters: dict[str, torch.nn.Parameter], ranks: Ranks, device: torch.device
    ) -> None:
        self.stage, self.ranks, self.device = stage, ranks, device
        self.parameters = parameters
        self.inner: torch.optim.Optimizer = optimizer.optimizer if stage else optimizer
        by_id: dict[int, Fragment | None] = {}  # None: this rank holds no part of the parameter
        groups: Any
        if stage == 0:
            self.flats: list[Tensor] = list(parameters.values())
            groups = [[p] for p in self.flats]
            by_id = {id(p): Fragment(p, 0, 0, p.numel()) for p in self.flats}
        elif stage == 3:
            self.flats, groups = optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups
            for group, flat in zip(groups, self.flats, strict=True):
                start = 0
                for p in group:
                    share = p.ds_tensor.ds_numel  # the last rank's share is padded
                    offset = min(ranks.rank * share, p.ds_numel)
                    by_id[id(p)] = Fragment(flat, start, offset, min(share, p.ds_numel - offset))
                    start += share
        else:
            bf16 = hasattr(
                optimizer, "fp32_groups_flat_partition"
            )  # BF16_Optimizer, which DeepSpeed picks for bf16 at stage 1
            self.flats = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
            groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
            for group, flat in zip(groups, self.flats, strict=True):
                for p in group:
                    place = p._hp_mapping
                    if place is None:
                        by_id[id(p)] = None
                        continue
                    master, whole = place.hp_fragment_address, place.lp_fragment_address
                    by_id[id(p)] = Fragment(flat, master.start, whole.start, master.numel)
        self.fragments = {name: by_id[id(p)] for name, p in parameters.items()}
        if isinstance(self.inner, StableAdamW) and stage:
            members = [[(by_id[id(p)], getattr(p, "ds_numel", p.numel())) for p in group] for group in groups]
            self.inner.pieces = lambda flat: self._pieces(
                next(m for f, m in zip(self.flats, members, strict=True) if f is flat)
            )
            self.inner.reduce = self._sum_over_ranks
        for flat in self.flats:
            # DeepSpeed and torch create the state at the first step; ours is there before it.
            step_on = flat.device if self.inner.defaults.get("fused") else None
            self.inner.state[flat] = {key: torch.zeros_like(flat) for key in STATES}
            self.inner.state[flat]["step"] = torch.zeros((), dtype=torch.float32, device=step_on)

    @staticmethod
    def _pieces(members: list[tuple[Fragment | None, int]]) -> tuple[list[Piece], int]:
        held = [(f.start, f.size, i, whole) for i, (f, whole) in enumerate(members) if f is not None]
        return held, len(members)

    def _sum_over_ranks(self, sums: Tensor) -> None:
        if self.ranks.world_size > 1:
            on_device = sums.to(self.device)  # offloaded partitions are on the CPU, where NCCL cannot sum
            dist.all_reduce(on_device)
            sums.copy_(on_device)

    def shape(self, name: str) -> torch.Size:
        parameter = self.parameters[name]
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def _flat(self, fragment: Fragment, key: str | None) -> Tensor:
        return fragment.flat if key is None else self.inner.state[fragment.flat][key]

    @torch.no_grad()
    def gather(self, name: str, key: str | None = None) -> Tensor:
        """Returns the whole float32 master (or moment `key`) on the CPU; a collective call."""
        whole = torch.zeros(self.shape(name).numel(), dtype=torch.float32, device=self.device)
        fragment = self.fragments[name]
        if fragment is not None:
            whole[fragment.offset : fragment.offset + fragment.size] = fragment.of(self._flat(fragment, key))
        if self.stage and self.ranks.world_size > 1:
            dist.all_reduce(whole)  # exact, because the pieces are disjoint
        return whole.view(self.shape(name)).cpu()

    @torch.no_grad()
    def scatter(self, name: str, value: Tensor, key: str | None = None) -> None:
        """Set this rank's part of the master (or moment `key`) from the whole."""
        fragment = self.fragments[name]
        if fragment is not None:
            part = value.reshape(-1)[fragment.offset : fragment.offset + fragment.size]
            fragment.of(self._flat(fragment, key)).copy_(part)

    @torch.no_grad()
    def set_live(self, name: str, value: Tensor) -> None:
        """Set the weight that the forward reads; a collective call at stage 3."""
        parameter = self.parameters[name]
        if self.stage == 3:
            from deepspeed import zero

            with zero.GatheredParameters([parameter], modifier_rank=0):
                if self.ranks.leads:
                    parameter.copy_(value)
        else:
            parameter.copy_(value)

    @property
    def adam_step(self) -> int:
        return int(self.inner.state[self.flats[0]]["step"])

    @adam_step.setter
    def adam_step(self, step: int) -> None:
        for flat in self.flats:
            self.inner.state[flat]["step"].fill_(step)
