"""How the ranks agree, and how an error on one of them ends all of them.

Numbers on which the whole run decides (labels, tokens, stop requests) travel as CPU tensors over gloo and never wait
for the device; gradients travel over whatever backend DeepSpeed uses.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from command_line import Failure, Passing, describe
from pipeline.ranks.environment import Ranks

T = TypeVar("T")


class Agreement:
    """Everything that ranks exchange besides gradients; all ranks make every collective call in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        alone = ranks.world_size == 1
        self._group: dist.ProcessGroup | None = None
        if not alone:
            group = dist.new_group(backend="gloo", timeout=timedelta(minutes=30))
            assert isinstance(group, dist.ProcessGroup)  # every rank is a member
            self._group = group

    def sum(self, values: Sequence[int]) -> list[int]:
        """Returns the exact element-wise sums over the ranks."""
        if self._group is None:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.int64)
        dist.all_reduce(total, group=self._group)
        return [int(value) for value in total]

    def sum_real(self, values: Sequence[float]) -> list[float]:
        """Returns the element-wise sums over the ranks in float64."""
        if self._group is None:
            return list(values)
        total = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        return total.tolist()

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; if it fails on any, all ranks raise the failure of the first of them.

        It is for set-up work without collective calls. Without it, one rank would leave and the others wait for it.
        """
        problem: tuple[type[Failure], str] | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            if self._group is None:
                raise
            problem = (type(error) if isinstance(error, Failure) else Failure, describe(error))
        if self._group is not None:
            problems: list[tuple[type[Failure], str] | None] = [None] * self.ranks.world_size
            dist.all_gather_object(problems, problem, group=self._group)
            first = next((p for p in problems if p is not None), None)
            if first is not None:
                kind, message = first
                raise kind(message)
        return result  # type: ignore[return-value]

    def leader_says(self, yes: bool) -> bool:
        """Returns rank 0's answer on every rank, because clocks and files may differ."""
        return self.sum([int(yes and self.ranks.leads)])[0] > 0

    def say(self, line: str) -> None:
        """Print the line once, on rank 0; no collective call."""
        if self.ranks.leads:
            print(line, flush=True)

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def failures(problem: Exception | None) -> list[int]:
    """Returns two flags to sum over the ranks: this rank has a problem, and it has one that will not pass."""
    return [int(problem is not None), int(problem is not None and not isinstance(problem, Passing))]


def raise_together(problem: Exception | None, failed: int, lasting: int, what: str) -> None:
    """Raise on all ranks where any failed to read `what`; the other ranks raise a failure of the same kind.

    `failed` and `lasting` are the sums of `failures` over the ranks.
    """
    if problem is not None:
        raise problem
    if failed:
        raise (Failure if lasting else Passing)(f"another rank failed to read its {what}; its own message says why")
