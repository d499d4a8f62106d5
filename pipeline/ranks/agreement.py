"""Ranks: who this process is, how all agree, and how an error on one rank ends all of them.

Numbers that the whole run decides by (labels, tokens, stop requests) travel as CPU tensors over gloo, never waiting for
the device; gradients travel over whatever backend DeepSpeed uses.
"""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from command_line import Failure, Passing, UsageError, describe

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
PORTS = range(10_000, 30_000)  # for rendezvous: below Linux' ephemeral ports, above the system's


def from_environment(environment: Mapping[str, str]) -> Ranks:
    """This process's ranks from the launcher's or SLURM's variables; one process alone where there are none."""
    # A batch script and `salloc` see SLURM_PROCID=0 too, but only what srun started has a step.
    batch_shell = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    for names in (LAUNCHER, SLURM):
        if names[0] in environment and names[1] in environment and not (names is SLURM and batch_shell):
            break
    else:
        return Ranks()
    try:
        rank, world, local = (int(environment[name]) for name in names[:3])
        local_world = _tasks_here(environment) if names is SLURM else None
        local_world = local_world or int(environment.get(names[3], world))
    except (KeyError, ValueError):
        raise UsageError(f"the environment sets {names[0]} but not {', '.join(names[1:3])} as whole numbers") from None
    if not 0 <= rank < world or not 0 <= local < local_world:
        raise UsageError(f"{names[0]}={rank}, {names[1]}={world}, {names[2]}={local} do not fit together")
    return Ranks(rank, world, local, local_world)


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """Tasks of the step on this node, from lists such as `4(x2),1`; SLURM_NTASKS_PER_NODE stands only where it was asked for."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def meeting_place(
    environment: Mapping[str, str], address: Callable[[str], str | None] | None = None
) -> tuple[str, int]:
    """Host and port where the ranks of a SLURM step meet: the step's first node, and a port made from the job's id.

    In Python rather than in the batch script, so that ranks started by any srun line find each other, and so that it is
    tested without a cluster. `address` gives a node's address, or None where its name does for the resolver.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = environment.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdigit():
        raise UsageError("several ranks need MASTER_ADDR and MASTER_PORT in the environment")
    first = first_node(nodes)
    step = environment.get("SLURM_STEP_ID", "0")  # two steps of one job may run side by side
    restart = environment.get("SLURM_RESTART_COUNT", "0")  # a former start's processes may still be ending
    spread = int(job) * 7 + sum(int(n) * scale for n, scale in ((step, 1), (restart, 5003)) if n.isdigit())
    return (address or _address)(first) or first, PORTS[spread % len(PORTS)]


def first_node(nodes: str) -> str:
    """The first of SLURM's list of nodes: `gpu[07-09,12],login1` -> `gpu07`."""
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    if first is None:
        raise UsageError(f"SLURM's list of nodes {nodes!r} is not understood; set MASTER_ADDR and MASTER_PORT")
    return first[1] + (first[2] or "") + (first[3] or "")


def _address(node: str) -> str | None:
    """NodeAddr of a node whose name does not resolve, or None."""
    try:
        socket.getaddrinfo(node, None)
        return None
    except OSError:
        pass
    try:
        shown = subprocess.run(["scontrol", "-o", "show", "node", node], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
    return found[1] if found else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def device_of(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "SLURM_STEP_ID" in os.environ:
        return torch.device("cuda", 0)  # --gpus-per-task shows each task its own GPU alone
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

    def barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)


def failures(problem: Exception | None) -> list[int]:
    """What a rank tells the others of its problem, to be summed: whether it has one, and one that will not pass."""
    return [int(problem is not None), int(problem is not None and not isinstance(problem, Passing))]


def raise_together(problem: Exception | None, failed: int, lasting: int, what: str) -> None:
    """All ranks leave where any has failed to read `what`; the others with a failure of the same kind as its own."""
    if problem is not None:
        raise problem
    if failed:
        raise (Failure if lasting else Passing)(f"another rank failed to read its {what}; its own message says why")


def rendezvous(ranks: Ranks) -> None:
    """What torch.distributed reads from the environment, where no launcher has set it: one process alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    facts = (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size)
    os.environ.update({name: str(fact) for name, fact in zip(names, facts, strict=True)})
    if ranks.world_size == 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    elif "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        host, port = meeting_place(os.environ)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))
