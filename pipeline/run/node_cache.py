"""A node's cache of rows from URLs: the job's own folder with mode 0700, removed when the job's last process ends.

A lock tells whether a job is alive: every process of the job holds a shared lock on `.alive`. A process that gets the
exclusive lock knows that the job is dead, however it died, and removes the folder. It is the last process of the job
itself, or belongs to a later job of the same user on this node. The folder of a live job or of another user is never
touched. No shared memory is used.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from command_line import Failure, UsageError
from data_prep.rows import Rows, is_url
from pipeline.data import AHEAD_ROWS, MixedRows
from pipeline.recipe import OwnData, Recipe, locations

ALIVE = ".alive"


class JobCache:
    """The cache folder of this process's job; call `open` when it is needed and `release` at the end."""

    def __init__(self, recipe: Recipe, environment: Mapping[str, str]) -> None:
        self._recipe = recipe
        # Nodes may share the file system of TMPDIR, hence the node's id. Without SLURM, MASTER_PORT identifies the job.
        job = environment.get("SLURM_JOB_ID") or environment.get("MASTER_PORT") or str(os.getpid())
        self._name = f"{job}-n{environment.get('SLURM_NODEID', '0')}"
        self._lock: IO[str] | None = None
        self.folder: Path | None = None

    def open(self) -> Path | None:
        """Create, lock and return the folder; None where all rows are local. A recipe's `data.cache` is used as it is."""
        if not uses_urls(self._recipe):
            return None
        if self._recipe.data.cache is not None:
            return Path(self._recipe.data.cache)
        root = _own_folder(Path(tempfile.gettempdir()) / f"clm-detour-rows-{os.getuid()}")
        for other in root.iterdir():
            if other.name != self._name:
                _remove_if_dead(other)
        self.folder = root / self._name
        while True:
            self.folder.mkdir(exist_ok=True, mode=0o700)
            try:
                self._lock = open(self.folder / ALIVE, "w")  # noqa: SIM115, held until release
                self._hold()
                if os.fstat(self._lock.fileno()).st_ino == os.stat(self.folder / ALIVE).st_ino:
                    return self.folder
            except FileNotFoundError:
                pass  # the last process of an earlier start removed it between two of these lines

    def _hold(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        except OSError as error:
            print(
                f"{self.folder}: no locks on this file system ({error.strerror}): remove the folder after the job, "
                "or set TMPDIR to a disk of the node",
                flush=True,
            )

    def release(self) -> None:
        """Release the folder; the last process of the job removes it, because it holds text that must not stay."""
        if self._lock is not None and self.folder is not None:
            self._lock.close()
            self._lock = None
            _remove_if_dead(self.folder)


def _own_folder(path: Path) -> Path:
    """Create `path` with mode 0700 and return it; Failure where it belongs to another user."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = path.lstat()
    if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
        raise Failure(f"{path} belongs to another user; set TMPDIR, or data.cache, to a folder of your own")
    path.chmod(0o700)
    return path


def _remove_if_dead(folder: Path) -> None:
    try:
        with open(folder / ALIVE) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # it belongs to a live job, or is not a cache


def uses_urls(recipe: Recipe) -> bool:
    own = [phase.data.rows for phase in recipe.phases if isinstance(phase.data, OwnData)]
    places = [place for given in (recipe.data.rows, *own) for place in locations(given)]
    return any(is_url(place) for place in (*places, recipe.data.validation or ""))


def look_ahead(recipe: Recipe, streams: Sequence[MixedRows], validation: Rows | None, ranks: int) -> int:
    """Returns how many rows ahead a rank may prefetch shards: as many as `data.cache_limit` has room for.

    UsageError where the limit cannot even hold the shards of two steps (the current one and the next), those of the
    validation rows, and one more for a download in progress: shards would then be fetched over and over.
    """
    limit = recipe.data.cache_limit
    if limit is None:
        return AHEAD_ROWS
    remote = [rows for stream in streams for rows in stream.sources if is_url(rows.location)]
    spare = limit
    if validation is not None and is_url(validation.location):
        remote.append(validation)
        count = min(recipe.validation.rows if recipe.validation else 0, len(validation))
        spread = np.linspace(0, len(validation) - 1, count).round()  # as in pipeline/run/validation.py
        spare -= _bytes_of(validation, spread)
    largest = max((int(rows.shard_bytes.max()) for rows in remote), default=0)
    spare -= largest
    ahead = AHEAD_ROWS
    while True:
        window = max(2 * recipe.batch.rows, ahead * ranks)
        need = max(_window_bytes(stream, window) for stream in streams)
        if need <= spare:
            return ahead
        if window == 2 * recipe.batch.rows:
            raise UsageError(
                f"data.cache_limit {limit / 1e6:,.2f} MB is too small: the shards of two steps and of the validation need "
                f"{(limit - spare + need) / 1e6:,.2f} MB, the largest has {largest / 1e6:,.2f} MB; allow more, or build rows "
                "with a smaller --shard-size"
            )
        ahead //= 2


def _window_bytes(stream: MixedRows, window: int) -> int:
    """Returns the bytes of the remote shards that the first `window` positions touch; other windows touch about as many."""
    ids = np.unique(np.fromiter((stream.row_id(g) for g in range(min(window, len(stream)))), np.int64))
    total, start = 0, 0
    for rows in stream.sources:
        mine = ids[(ids >= start) & (ids < start + len(rows))] - start
        start += len(rows)
        total += _bytes_of(rows, mine) if is_url(rows.location) else 0
    return total


def _bytes_of(rows: Rows, ids: NDArray[Any]) -> int:
    """Returns the bytes of the shards that hold these rows."""
    touched = np.unique(np.searchsorted(np.cumsum(rows.shard_rows), ids, side="right"))
    return int(rows.shard_bytes[touched].sum())
