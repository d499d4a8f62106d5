"""Where the ranks meet: an address and a port that each of them works out by itself."""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping

from command_line import UsageError
from pipeline.ranks.environment import Ranks

PORTS = range(10_000, 30_000)  # for rendezvous: below Linux' ephemeral ports, above the system's


def rendezvous(ranks: Ranks) -> None:
    """Set the variables that torch.distributed reads; with several ranks, a launcher's address and port stay."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    facts = (ranks.rank, ranks.world_size, ranks.local_rank, ranks.local_world_size)
    os.environ.update({name: str(fact) for name, fact in zip(names, facts, strict=True)})
    if ranks.world_size == 1:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free_port())
    elif "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        host, port = meeting_place(os.environ)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))


def meeting_place(
    environment: Mapping[str, str], address: Callable[[str], str | None] | None = None
) -> tuple[str, int]:
    """Returns host and port where the ranks of a SLURM step meet: the step's first node, and a port made from the job's id.

    Python does this and not the batch script, so that ranks started by any srun line find each other, and tests need no
    cluster. `address` returns a node's address, or None where the resolver knows its name.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    job = environment.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdigit():
        raise UsageError("several ranks need MASTER_ADDR and MASTER_PORT in the environment")
    first = first_node(nodes)
    step = environment.get("SLURM_STEP_ID", "0")  # two steps of one job may run side by side
    restart = environment.get("SLURM_RESTART_COUNT", "0")  # an earlier start's processes may still be ending
    spread = int(job) * 7 + sum(int(n) * scale for n, scale in ((step, 1), (restart, 5003)) if n.isdigit())
    return (address or _address)(first) or first, PORTS[spread % len(PORTS)]


def first_node(nodes: str) -> str:
    """Returns the first node of SLURM's list: `gpu[07-09,12],login1` -> `gpu07`."""
    first = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    if first is None:
        raise UsageError(f"SLURM's list of nodes {nodes!r} is not understood; set MASTER_ADDR and MASTER_PORT")
    return first[1] + (first[2] or "") + (first[3] or "")


def _address(node: str) -> str | None:
    """Returns SLURM's NodeAddr of a node whose name does not resolve, or None."""
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
