"""Ranks: who this process is, how all agree, and how an error on one rank ends all of them.

Numbers that the whole run decides by (labels, tokens, stop requests) travel as CPU tensors over gloo, never waiting for
the device; gradients travel over whatever backend DeepSpeed uses.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from data_prep.errors import Failure, UsageError, describe

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0


# The same four facts as the deepspeed launcher (and torchrun) and as srun name them.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


def from_environment(environment: Mapping[str, str]) -> Ranks:
    """This process's ranks from the launcher's or SLURM's variables; one process alone where there are none."""
    for names in (LAUNCHER, SLURM):
        if names[0] in environment and names[1] in environment:
            break
    else:
        return Ranks()
    try:
        rank, world, local = (int(environment[name]) for name in names[:3])
        local_world = int(environment.get(names[3], world))
    except (KeyError, ValueError):
        raise UsageError(f"the environment sets {names[0]} but not {', '.join(names[1:3])} as whole numbers") from None
    if not 0 <= rank < world or not 0 <= local < local_world:
        raise UsageError(f"{names[0]}={rank}, {names[1]}={world}, {names[2]}={local} do not fit together")
    return Ranks(rank, world, local, local_world)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def device_of(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if ranks.local_rank >= torch.cuda.device_count():
        raise Failure(f"local rank {ranks.local_rank} has no GPU of its own: {torch.cuda.device_count()} here")
    return torch.device("cuda", ranks.local_rank)


class Agreement:
    """What all ranks say to each other outside the gradients; every call is made by all ranks in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        alone = ranks.world_size == 1
        self._group: dist.ProcessGroup | None = None
        if not alone:
            group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
            assert isinstance(group, dist.ProcessGroup)  # every rank is a member
            self._group = group

    def sum(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums over the ranks, exact."""
        if self._group is None:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        return [int(value) for value in total]

    def sum_real(self, values: Sequence[float]) -> list[float]:
        """The same in float64."""
        if self._group is None:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; if it fails on any, all fail with what the first of them says.

        For set-up work without collective calls: otherwise one rank would leave and the others wait for it.
        """
        problem: tuple[str, bool] | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            if self._group is None:
                raise
            problem = (describe(error), isinstance(error, UsageError))
        if self._group is not None:
            problems: list[tuple[str, bool] | None] = [None] * self.ranks.world_size
            dist.all_gather_object(problems, problem, group=self._group)
            first = next((p for p in problems if p is not None), None)
            if first is not None:
                raise (UsageError if first[1] else Failure)(first[0])
        return result  # type: ignore[return-value]

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def rendezvous(ranks: Ranks) -> None:
    """What torch.distributed reads from the environment, where no launcher has set it: one process alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    facts = (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size)
    os.environ.update({name: str(fact) for name, fact in zip(names, facts, strict=True)})
    if ranks.world_size == 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    elif "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UsageError("several ranks need MASTER_ADDR and MASTER_PORT in the environment")
