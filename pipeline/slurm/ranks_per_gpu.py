"""How many ranks a SLURM job runs: one per GPU, or without GPUs one per task. launch/ asks; no torch is imported.

    python -m pipeline.slurm submit OPTION...   options of sbatch: prints `ranks N`, and `option X` for each that is missing
    python -m pipeline.slurm srun               in a batch script: prints the options that srun needs, one per line

SLURM does not tie tasks to GPUs: `--gpus-per-node=4` alone starts one task per node, and three GPUs idle unnoticed.
Where a job sets no number of tasks, we derive it from the GPUs; where it sets both and they disagree, that is an error.
"""

import os
import re
from collections.abc import Mapping, Sequence

from command_line import Failure, Parser, UsageError


def planned(options: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the ranks of a job with these sbatch options (the last of each counts), and the options it still needs."""
    parser = Parser(prog="sbatch", add_help=False, allow_abbrev=False)
    parser.add_argument("-N", "--nodes", default="1")
    parser.add_argument("-n", "--ntasks", type=int)
    parser.add_argument("-G", "--gpus", type=_gpus, default=0)
    for name in ("--gpus-per-node", "--gpus-per-task"):
        parser.add_argument(name, type=_gpus, default=0)
    parser.add_argument("--gres", type=_gpus_of_gres, default=0)
    for name in ("--ntasks-per-node", "--ntasks-per-gpu"):
        parser.add_argument(name, type=int)
    asked = parser.parse_known_args(list(options))[0]
    _, is_range, largest = asked.nodes.rpartition("-")
    if not largest.isdigit():
        raise UsageError(f"--nodes={asked.nodes} is not a number of nodes, nor a range such as 1-2")
    nodes, on_node = int(largest), asked.gpus_per_node or asked.gres
    gpus = asked.gpus or nodes * on_node
    tasks = asked.ntasks or (nodes * asked.ntasks_per_node if asked.ntasks_per_node else None)
    if asked.gpus_per_task or asked.ntasks_per_gpu:  # SLURM itself ties tasks to GPUs
        tied = gpus * asked.ntasks_per_gpu if asked.ntasks_per_gpu else gpus // asked.gpus_per_task
        return tasks or tied or nodes, []
    if tasks is None and asked.gpus:
        return gpus, [f"--ntasks={gpus}"]
    if tasks is None and on_node:
        return gpus, [f"--ntasks-per-node={on_node}"]
    if tasks is not None and gpus and tasks != gpus and not is_range:
        raise UsageError(f"{tasks} tasks for {gpus} GPUs: {_remedy(max(1, gpus // nodes))}")
    return tasks or nodes, []


def srun_options(environment: Mapping[str, str]) -> list[str]:
    """Returns the srun options that give each GPU of this job one task; Failure where the job's own numbers forbid that."""
    if environment.get("SLURM_GPUS_PER_TASK") or environment.get("SLURM_NTASKS_PER_GPU"):
        return []  # SLURM itself ties tasks to GPUs
    held = environment.get("SLURM_JOB_GPUS", "")
    gpus = _gpus(environment.get("SLURM_GPUS_ON_NODE") or environment.get("SLURM_GPUS_PER_NODE") or "0")
    gpus = gpus or len([gpu for gpu in held.split(",") if gpu])
    if not gpus:
        return []
    nodes = int(environment.get("SLURM_JOB_NUM_NODES") or 1)
    total = _gpus(environment.get("SLURM_GPUS") or "0")
    if total and total != nodes * gpus:
        raise Failure(f"{total} GPUs lie unevenly on {nodes} nodes: {_remedy(max(1, total // nodes))}")
    if environment.get("SLURM_NTASKS") or environment.get("SLURM_NTASKS_PER_NODE"):
        given = environment.get("SLURM_TASKS_PER_NODE") or environment.get("SLURM_NTASKS_PER_NODE") or ""
        if given and {int(n) for n in re.findall(r"(\d+)(?:\(x\d+\))?", given)} != {gpus}:
            raise Failure(f"{gpus} GPUs but {given} tasks on a node: {_remedy(gpus)}")
        return []
    cpus, each = int(environment.get("SLURM_CPUS_ON_NODE") or 0), int(environment.get("SLURM_CPUS_PER_TASK") or 1)
    if cpus and gpus * each > cpus:
        raise Failure(f"{gpus} GPUs but {cpus} CPUs on a node, for tasks of {each}: {_remedy(gpus)}")
    return [f"--ntasks={nodes * gpus}", f"--ntasks-per-node={gpus}"]


def _remedy(gpus: int) -> str:
    return f"submit with --gpus-per-node={gpus} --ntasks-per-node={gpus}, one task a GPU"


def _gpus(text: str) -> int:
    """Returns the number of GPUs: `4`, `h100:4` and `h100:2,a100:2` are four."""
    return sum(int(part.rpartition(":")[2]) for part in text.split(","))


def _gpus_of_gres(text: str) -> int:
    """Returns the number of GPUs: `gpu:h100:4,nvme:1` has four, `gpu` and `gpu:h100` one."""
    counts = [part.split(":")[-1] for part in text.split(",") if part.split(":")[0] == "gpu"]
    return sum(int(count) if count.isdigit() else 1 for count in counts)


def main(argv: list[str]) -> int:
    if argv[:1] == ["submit"]:
        ranks, missing = planned(argv[1:])
        print("\n".join([f"ranks {ranks}", *(f"option {option}" for option in missing)]))
    elif argv == ["srun"]:
        for option in srun_options(os.environ):
            print(option)
    else:
        raise UsageError("python -m pipeline.slurm submit OPTION... | srun")
    return 0
