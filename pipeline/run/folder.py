"""The run folder: which recipe it belongs to, who may write to it, and which phases are done."""

import fcntl
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from command_line import Failure, Passing, UsageError, describe
from data_prep.rows import software
from pipeline.engine import LATEST, Checkpoint, latest, write_aside
from pipeline.ranks import Ranks
from pipeline.recipe import Recipe, first_difference, numbers, parse
from pipeline.slurm import STOP_CLEARED

STOP = "STOP"
DONE = "DONE"
STOPPED = "STOPPED"  # in a phase's folder: the last start stopped early, checkpoint saved
ERROR = "logs/error.json"  # of the last start that failed
BEFOREHAND = {STOP, "logs"}  # what may lie in a run folder before its first start: the job's logs, a request to stop
PATIENCE = 60  # seconds that a restarted SLURM job waits for the processes of its last start to end


def this_start() -> dict[str, str]:
    """Returns the SLURM job id and the restart count of this start."""
    return {"job": os.environ.get("SLURM_JOB_ID", ""), "restart": os.environ.get("SLURM_RESTART_COUNT") or "0"}


def process_start() -> float:
    """Returns when this process began, in seconds since 1970, before its imports, which take seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: Any = None

    def claim(self) -> None:
        """Lock the folder until this process ends; Failure where another run holds the lock."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115, held until the process ends
        deadline = time.monotonic() + (PATIENCE if int(os.environ.get("SLURM_RESTART_COUNT") or 0) else 0)
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(1)
                    continue
                raise Failure(
                    f"{self.path} is in use by another run: wait for it, or stop it with `touch {self.path}/{STOP}`"
                ) from None
            except OSError as error:
                print(
                    f"{self.path}: no locks on this file system ({error.strerror}): never start a second run there",
                    flush=True,
                )
                return

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def recipe(self) -> Recipe | None:
        """Returns the recipe of the run's first start, or None in a new folder."""
        file = self.path / "recipe.yaml"
        if not file.exists():
            return None
        try:
            tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, OSError, UnicodeDecodeError):
            raise Failure(f"{file} cannot be read") from None
        return parse(tree, self.path.resolve(), str(file))

    def accept(self, recipe: Recipe) -> None:
        """Record the recipe at the first start; later, raise a UsageError for one that would change the numbers."""
        if self.check(recipe) is None:
            write_aside(self.path / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))

    def check(self, recipe: Recipe) -> Recipe | None:
        """Check as `accept` does, without writing. Returns the recorded recipe, or None where `accept` records a new one."""
        known = self.recipe()
        if known is None:
            if not self.path.is_dir():
                return None
            unknown = [p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.name not in BEFOREHAND]
            if unknown:
                raise UsageError(f"{self.path} is not empty and holds no run; choose another --run-dir")
            return None
        wanted = numbers(recipe)
        for old, new, phase in zip(known.phases, recipe.phases, wanted["phases"], strict=False):
            longer = new.tokens > old.tokens and new.learning_rate.shape == "constant"
            if longer and not self.done(old.name):  # a longer budget changes no number so far
                phase["tokens"] = old.tokens
        key = first_difference(numbers(known), wanted)
        if key and not self.begun(known):
            return None  # it failed before it had saved anything: nothing ties the folder to that recipe
        if key:
            raise UsageError(
                f"{self.path} holds a run of another recipe: {key} differs, and it decides the numbers; "
                "change it back, or choose another --run-dir"
            )
        return known

    def record_start(self, recipe: Recipe, ranks: Ranks, device: torch.device, attention: str, rows: list[str]) -> None:
        """Append this start to environment.json: versions and kind of machine, but no host or user."""
        packages = ("torch", "deepspeed", "transformers", "mosaicml-streaming", "numpy", "tokenizers", "safetensors")
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
        start = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "software": software(),
            "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
            "ranks": ranks.world_size,
            "device": gpu or platform.machine(),
            "threads": torch.get_num_threads(),
            "attention": attention,
            "rows_digests": rows,
            "recipe": recipe.model_dump(mode="json"),
        }
        file = self.path / "environment.json"
        starts = json.loads(file.read_text()) if file.exists() else []
        write_aside(file, json.dumps([*starts, start], indent=1) + "\n")

    def stop_requested(self) -> bool:
        return (self.path / STOP).exists()

    def clear_stop(self) -> None:
        """Remove a request to stop that ended an earlier start; one made since this process began is for this run.

        A SLURM job has removed old requests before its ranks began, so any that it finds now is for this run.
        """
        file = self.path / STOP
        try:
            old = file.stat().st_mtime < process_start() and not os.environ.get(STOP_CLEARED)
        except FileNotFoundError:
            return
        if old:
            file.unlink(missing_ok=True)

    # --- phases ---

    def phase(self, name: str) -> Path:
        return self.path / name

    def checkpoints(self, name: str) -> Path:
        return self.path / name / "checkpoints"

    def done(self, name: str) -> bool:
        return (self.path / name / DONE).exists()

    def begun(self, recipe: Recipe) -> bool:
        """Whether any phase has a checkpoint, that is, whether an earlier start opened the rows and trained on them."""
        return any((self.checkpoints(phase.name) / LATEST).exists() for phase in recipe.phases)

    def latest(self, name: str) -> Checkpoint | None:
        return latest(self.checkpoints(name))

    def mark_stopped(self, name: str) -> None:
        """Record that this start stopped early, so that a job script need not guess it from srun's exit code."""
        self.phase(name).mkdir(parents=True, exist_ok=True)
        write_aside(self.phase(name) / STOPPED, json.dumps(this_start()) + "\n")

    def mark_failed(self, error: BaseException) -> None:
        """Record this rank's error line, for `pipeline.status`, and whether its cause may pass, for `pipeline.slurm end`.

        A record of another rank that says more stays: a rank that fails makes the others report a lost rank.
        """
        file = self.path / ERROR
        if not (self.path / "recipe.yaml").exists() and not file.parent.is_dir():
            return  # not a run's folder
        message, passing, now = describe(error), isinstance(error, Passing), time.time()
        try:
            known = json.loads(file.read_text())
            # Without SLURM all starts have the same id, so a record counts as ours for 120 s only.
            ours = this_start().items() <= known.items() and (known["job"] or now - known["time"] < 120)
            if ours and (message.startswith("another rank") or passing > known["passing"]):
                return
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            pass
        try:
            file.parent.mkdir(exist_ok=True)
            write_aside(file, json.dumps({"message": message, "passing": passing, "time": now, **this_start()}) + "\n")
        except OSError:
            pass  # stderr has the line in any case

    def mark_done(self, name: str, facts: dict[str, Any]) -> None:
        write_aside(self.path / name / DONE, json.dumps(facts) + "\n")


def last_checkpoint(path: Path) -> Checkpoint:
    """Returns the newest checkpoint in `path`, which is a checkpoint folder, a phase's folder or a run, as for `export`."""
    if (path / "state.json").is_file():
        return Checkpoint(path)
    if (path / "checkpoints").is_dir():
        found = latest(path / "checkpoints")
        if found is not None:
            return found
    recipe = RunFolder(path).recipe() if path.is_dir() else None
    for phase in reversed(recipe.phases if recipe else []):
        found = RunFolder(path).latest(phase.name)
        if found is not None:
            return found
    raise Failure(f"{os.fspath(path)} is neither a checkpoint nor a run that has one")
