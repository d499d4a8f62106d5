"""Decides what a SLURM job does next; launch/phase.sh asks before and after the ranks run.

    python -m pipeline.slurm begin RUN PHASE      prints go | done | stopped; exit 1 after too many futile attempts
    python -m pipeline.slurm end RUN PHASE CODE   prints done | again | stopped | failed; CODE is srun's

srun's exit code alone does not suffice: it is the highest among the tasks, and a task that is killed while its
neighbours leave changes it. DONE, RUN/STOP and this start's records (`RunFolder.mark_stopped`, `mark_failed`) decide:
the job goes on after a stop, and after a failure that may pass (`command_line.Passing`). No torch is imported.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from command_line import Failure, UsageError

STOP_CLEARED = "CLM_DETOUR_STOP_CLEARED"  # set where submitting or starting this job removed an old RUN/STOP
LIMIT = 5  # attempts in a row without a new token; CLM_DETOUR_ATTEMPTS changes it
BY_USR2 = 128 + signal.SIGUSR2  # srun's exit code where SIGUSR2 killed a rank before Python could block it


def begin(folder: Path, phase: str, environment: Mapping[str, str]) -> str:
    """Count this attempt. Returns "go", or "done" or "stopped" where there is nothing to do; Failure past the limit."""
    if (folder / phase / "DONE").exists():
        return "done"
    # launch/submit, or an earlier start of this job, has removed any old STOP: this one came while the job waited.
    cleared = any(environment.get(name) for name in (STOP_CLEARED, "CLM_DETOUR_CHAIN"))
    if cleared or environment.get("SLURM_RESTART_COUNT", "0") != "0":
        if (folder / "STOP").exists():
            return "stopped"
    else:  # submitted by hand after a stop, to go on
        (folder / "STOP").unlink(missing_ok=True)
    file = _file(folder, phase)
    before, tokens = _read(file), trained(folder, phase)
    # A job that requeues itself keeps its chain's name; a job submitted by hand starts a new count.
    chain = environment.get("CLM_DETOUR_CHAIN") or environment.get("SLURM_JOB_ID", "")
    in_vain = before.get("in_vain", 0) + 1 if (before.get("chain"), before.get("tokens")) == (chain, tokens) else 0
    limit = int(environment.get("CLM_DETOUR_ATTEMPTS") or LIMIT)
    if in_vain >= limit:
        raise Failure(
            f"phase {phase}: {limit} attempts in a row trained no new token; see the job's log, mend what ends it so early "
            "(the time limit? --signal?), and submit again"
        )
    now = {"chain": chain, "tokens": tokens, "in_vain": in_vain, "time": time.time()}
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(now) + "\n")
    aside.replace(file)
    return "go"


def end(folder: Path, phase: str, code: int, environment: Mapping[str, str]) -> str:
    if (folder / phase / "DONE").exists():
        return "done"
    this = (environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_RESTART_COUNT") or "0")

    def ours(record: dict[str, Any]) -> bool:
        return (record.get("job"), record.get("restart")) == this

    error = _read(folder / "logs" / "error.json")
    passing = ours(error) and error.get("passing") is True
    if not (passing or ours(_read(folder / phase / "STOPPED")) or code == BY_USR2):
        return "failed"
    return "stopped" if (folder / "STOP").exists() else "again"


def trained(folder: Path, phase: str) -> int:
    """Returns the tokens that the phase has trained in its newest checkpoint; 0 where there is none."""
    checkpoints = folder / phase / "checkpoints"
    try:
        newest = checkpoints / (checkpoints / "latest").read_text().strip()
        return int(json.loads((newest / "state.json").read_text())["tokens"])
    except (OSError, ValueError, KeyError):
        return 0


def _file(folder: Path, phase: str) -> Path:
    return folder / "logs" / f"attempts-{phase}.json"


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return {}


def main(argv: list[str]) -> int:
    if len(argv) == 3 and argv[0] == "begin":
        print(begin(Path(argv[1]), argv[2], os.environ))
    elif len(argv) == 4 and argv[0] == "end" and argv[3].isdigit():
        print(end(Path(argv[1]), argv[2], int(argv[3]), os.environ))
    else:
        raise UsageError("python -m pipeline.slurm begin RUN PHASE | end RUN PHASE CODE")
    return 0
