"""Requests to stop: a signal, the file RUN/STOP, the end of the job's time, a launcher that is gone. Polled, never handled.

The signals are blocked from the start (`command_line.block_stop_signals`), and `sigpending` says at each step whether one
has come. A signal to the pid of the `deepspeed` launcher kills only the launcher: its ranks see that it is gone, and stop.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from command_line import STOP_SIGNALS

END_TIME = ("CLM_DETOUR_END_TIME", "SLURM_JOB_END_TIME")  # seconds since 1970; the first that is set counts

SCRIPTS = 90.0  # seconds that launch/phase.sh may need after the ranks, to clean up on each node and to requeue the job


class StopRequests:
    """All reasons for this process to stop early; `pending` says whether there is one now."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._launchers = _launchers()
        ends = [environment[name] for name in END_TIME if environment.get(name, "").isdigit()]
        self._end = float(ends[0]) if ends else None
        self._save = self._step = 0.0  # seconds of the slowest save and step so far

    def leave_time_for(self, *, save: float = 0.0, step: float = 0.0) -> None:
        """Note the seconds of a save or a step. One step, three saves and SCRIPTS must fit before the job's end."""
        self._save, self._step = max(self._save, save), max(self._step, step)

    def pending(self) -> bool:
        signalled = bool(signal.sigpending() & STOP_SIGNALS)
        late = self._end is not None and time.time() >= self._end - (self._step + 3 * self._save + SCRIPTS)
        return signalled or late or any(_started(pid) != started for pid, started in self._launchers)


def _launchers() -> list[tuple[int, str | None]]:
    """Returns the processes of the `deepspeed` launcher above this one, with their start times (pids are reused)."""
    found = []
    pid = os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        if not any(word == "deepspeed.launcher.launch" or os.path.basename(word) == "deepspeed" for word in words[:4]):
            break
        found.append((pid, _started(pid)))
        pid = parent
    return found


def _started(pid: int) -> str | None:
    """Returns when the process started, in clock ticks since boot, or None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
