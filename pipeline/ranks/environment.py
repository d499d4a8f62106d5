"""Reads from the launcher's variables which rank this process is, and which device it uses."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from command_line import Failure, UsageError


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0


# The same four facts, as the deepspeed launcher (and torchrun) and as srun name them.
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")


def from_environment(environment: Mapping[str, str]) -> Ranks:
    """Returns this process's ranks by the launcher's or SLURM's variables; a single process where there are none."""
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
    """Returns the step's tasks on this node, from lists such as `4(x2),1`; SLURM_NTASKS_PER_NODE is set only on request."""
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    counts = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) for _ in range(int(times or 1))]
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else None


def device_of(ranks: Ranks) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if torch.cuda.device_count() == 1 and "SLURM_STEP_ID" in os.environ:
        return torch.device("cuda", 0)  # --gpus-per-task shows each task only its own GPU
    if ranks.local_rank >= torch.cuda.device_count():
        raise Failure(f"local rank {ranks.local_rank} has no GPU of its own: {torch.cuda.device_count()} here")
    return torch.device("cuda", ranks.local_rank)
