"""Where a run stands, from what it has written: phase, step, tokens, loss, tokens/s, time left, last error.

    python -m pipeline.status RUN

It reads files only, takes no lock and imports no torch: it can be run at any time, by anyone who may read the folder.
"""

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from command_line import Failure, Parser, run

RECENT = 20  # logged steps over which the speed is averaged
TAIL = 1 << 18  # bytes read from the end of metrics.jsonl
# Error lines in a job's log, for an end that the trainer could not record: ours, srun's and slurmstepd's.
START_LINE = re.compile(r"^phase \S+: job \d+, start \d+,.*$", re.MULTILINE)  # launch/phase.sh prints it
ERROR_LINE = re.compile(r"^(?:\d+: )?((?:error|slurmstepd: error|srun: error): .*)$", re.MULTILINE)


@dataclass(frozen=True)
class PhaseStatus:
    name: str
    objective: str
    budget: int  # tokens
    state: str  # "done", "running or stopped", "not started"
    step: int = 0
    tokens: int = 0
    loss: float | None = None
    validation: dict[str, float] | None = None  # mlm_loss and clm_loss
    tokens_per_second: float | None = None
    written: float | None = None  # time of the last logged line

    @property
    def seconds_left(self) -> float | None:
        """Seconds left at the recent speed, without validation and checkpoints; None where done or unknown."""
        if self.state == "done" or not self.tokens_per_second:
            return None
        return max(0, self.budget - self.tokens) / self.tokens_per_second


def phases(folder: Path) -> list[PhaseStatus]:
    """Returns the status of each phase of the recipe, in order; Failure where `folder` holds no run that has started."""
    file = folder / "recipe.yaml"
    try:
        recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
        return [_phase(folder, p["name"], p["objective"], int(p["tokens"])) for p in recipe["phases"]]
    except FileNotFoundError:
        if (folder / "logs").is_dir():
            raise Failure(f"{folder}: the run has not started yet{_because(folder)}") from None
        raise Failure(f"{folder} holds no run (no recipe.yaml)") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, OSError):
        raise Failure(f"{file} cannot be read") from None


def _phase(folder: Path, name: str, objective: str, budget: int) -> PhaseStatus:
    records = _tail(folder / name / "metrics.jsonl")
    trained = [r for r in records if not r.get("validation")]
    validated = [r for r in records if r.get("validation")]
    done = (folder / name / "DONE").exists()
    state = "done" if done else "running or stopped" if (folder / name).is_dir() else "not started"
    last: dict[str, Any] = trained[-1] if trained else {}
    recent = trained[-RECENT:]
    speed = sum(r["tokens_per_second"] for r in recent) / len(recent) if recent else None
    losses = {k: validated[-1][k] for k in ("mlm_loss", "clm_loss")} if validated else None
    metrics = folder / name / "metrics.jsonl"
    return PhaseStatus(
        name=name,
        objective=objective,
        budget=budget,
        state=state,
        step=last.get("step", 0),
        tokens=last.get("tokens", 0),
        loss=last.get("loss"),
        validation=losses,
        tokens_per_second=speed,
        written=metrics.stat().st_mtime if metrics.exists() else None,
    )


def _tail(path: Path) -> list[dict[str, Any]]:
    """Returns the last records of a metrics file, without a line that is still being written."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                records.append(record)
        except ValueError:
            continue
    return records


def last_error(folder: Path) -> str | None:
    """Returns the error line of the last start that failed; None where the run has written something since."""
    moved = [f.stat().st_mtime for f in (*folder.glob("*/metrics.jsonl"), *folder.glob("*/DONE"))]
    moved += [f.stat().st_mtime for f in folder.glob("*/STOPPED")]
    since = max(moved, default=0.0)
    try:
        record = json.loads((folder / "logs" / "error.json").read_text())
        if record["time"] >= since - 1:
            return f"error: {record['message']}"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    logs = sorted((folder / "logs").glob("*.out"), key=lambda f: f.stat().st_mtime)
    if not logs or logs[-1].stat().st_mtime < since - 1:
        return None
    with open(logs[-1], "rb") as file:
        file.seek(max(0, logs[-1].stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    # One log holds all starts of a job. srun alone calls a task that stopped early on request an error.
    found = [line for line in ERROR_LINE.findall(START_LINE.split(text)[-1]) if not line.endswith("exit code 75")]
    ours = [line for line in found if line.startswith("error: ") and "the lines above say why" not in line]
    return (ours or found or [None])[-1]


def _because(folder: Path) -> str:
    error = last_error(folder)
    return f"; {error}" if error else ""


def duration(seconds: float) -> str:
    """Returns text such as 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def described(phase: PhaseStatus, now: float) -> str:
    parts = [f"{phase.name} ({phase.objective}): {phase.state}"]
    if phase.tokens:
        parts += [
            f"step {phase.step:,}",
            f"{phase.tokens:,} of {phase.budget:,} tokens ({phase.tokens / phase.budget:.1%})",
        ]
    if phase.loss is not None:
        parts.append(f"loss {phase.loss:.4f}")
    if phase.validation:
        parts.append(f"validation MLM {phase.validation['mlm_loss']:.4f} CLM {phase.validation['clm_loss']:.4f}")
    if phase.state != "done" and phase.tokens_per_second:
        parts.append(f"{phase.tokens_per_second:,.0f} tokens/s")
        if phase.seconds_left is not None:
            parts.append(f"{duration(phase.seconds_left)} of training left")
        if phase.written is not None:
            parts.append(f"last line {duration(max(0.0, now - phase.written))} ago")
    return "  ".join(parts)


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m pipeline.status", description="Where a run stands.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    folder = parser.parse_args(argv).run
    if not folder.is_dir():
        raise Failure(f"{folder}: no such folder")
    for phase in phases(folder):
        print(described(phase, time.time()))
    if (folder / "STOP").exists():
        print("STOP: the run stops at its next step, or has stopped; the same command, or launch/submit, goes on")
    error = last_error(folder)
    if error:
        print(f"last error: {error.removeprefix('error: ')}")
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
