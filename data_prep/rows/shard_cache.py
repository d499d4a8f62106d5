"""The shards of a URL in a local folder that all processes of a node share.

A process locks a shard, fetches it under a temporary name, checks its size and hash against the index, and renames it. So a
shard is there whole or not at all, and crosses the network once a node. If the cache has a limit, the least recently used
shards make room for new ones.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from command_line import Failure
from data_prep.rows.downloads import Remote, writing
from data_prep.rows.format import HASH

ABANDONED = 3600.0  # seconds after which a reservation must be that of a process that was killed
VERIFY = "`python -m data_prep verify` tells more"


@dataclass(frozen=True)
class Shard:
    """One shard as index.json describes it."""

    name: str  # of the raw file
    bytes: int
    hash: str | None
    zip_name: str | None = None  # of the compressed file, the one at the URL; None: shards are not compressed
    zip_bytes: int = 0
    zip_hash: str | None = None
    compression: str | None = None

    @classmethod
    def from_index(cls, entry: dict[str, Any]) -> "Shard":
        raw, packed = entry["raw_data"], entry["zip_data"]
        plain = cls(raw["basename"], int(raw["bytes"]), raw["hashes"].get(HASH))
        if not packed:
            return plain
        return replace(
            plain,
            zip_name=packed["basename"],
            zip_bytes=int(packed["bytes"]),
            zip_hash=packed["hashes"].get(HASH),
            compression=entry["compression"],
        )


class ShardFiles:
    """The shards of one source in `folder`, fetched from `remote`. If `remote` is None, they are in the local folder already.

    Reading has no state but the files: any number of threads and processes may use one folder.
    """

    def __init__(self, remote: Remote | None, folder: Path, limit: int | None = None) -> None:
        self.remote, self.folder, self.limit = remote, folder, limit
        self._room = folder.parent / ".room"

    def file(self, name: str) -> Path:
        """The path of a small file beside the shards. Raises FileNotFoundError if there is none."""
        path, begin = self.folder / name, time.monotonic()
        if self.remote is not None and not path.exists():
            with writing(self.folder):
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with self._lock(name):
                    if not path.exists():
                        aside = self._aside(name)
                        self.remote.download(name, aside, begin)
                        os.replace(aside, path)
        return path

    def ensure(self, shard: Shard) -> Path:
        """The path of the shard's raw file, fetched and checked if it is not there. A Failure names a damaged shard."""
        path, begin = self.folder / shard.name, time.monotonic()
        if _size(path) == shard.bytes:
            if self.remote is None:  # a fetched shard was checked when it came
                self._check(path, shard.name, shard.bytes, shard.hash)
            return path
        if self.remote is None:
            if shard.zip_name is None or not (self.folder / shard.zip_name).exists():
                self._check(path, shard.name, shard.bytes, None)
            data = self._checked_bytes(self.folder / str(shard.zip_name), str(shard.zip_name), shard)
            return self._unpack(shard, data)
        with writing(self.folder), self._lock(shard.name):
            if _size(path) == shard.bytes:
                return path  # another process was faster
            for left in self.folder.glob(f".{shard.name}.*.tmp"):
                left.unlink(missing_ok=True)  # left by a process that was killed
            path.unlink(missing_ok=True)
            with self._reserved(shard):
                return self._fetch(shard, begin)

    def _fetch(self, shard: Shard, begin: float) -> Path:
        assert self.remote is not None
        name, size, digest = shard.name, shard.bytes, shard.hash
        if shard.zip_name is not None:
            name, size, digest = shard.zip_name, shard.zip_bytes, shard.zip_hash
        aside = self._aside(name)
        try:
            for attempt in (1, 2):  # a second time, for the transfer may have damaged it
                try:
                    self.remote.download(name, aside, begin)
                    self._check(aside, name, size, digest)
                    break
                except FileNotFoundError:
                    raise Failure(f"{self.remote.url}: shard {name} is missing there; {VERIFY}") from None
                except Failure:
                    if attempt == 2 or not aside.exists():
                        raise
            if shard.zip_name is not None:
                return self._unpack(shard, aside.read_bytes())
            os.replace(aside, self.folder / shard.name)
        finally:
            aside.unlink(missing_ok=True)
        return self.folder / shard.name

    def _unpack(self, shard: Shard, data: bytes) -> Path:
        from streaming.base.compression import decompress

        aside = self._aside(shard.name)
        try:
            aside.write_bytes(decompress(shard.compression, data))
            self._check(aside, shard.name, shard.bytes, None)
            os.replace(aside, self.folder / shard.name)
        finally:
            aside.unlink(missing_ok=True)
        return self.folder / shard.name

    def _checked_bytes(self, path: Path, name: str, shard: Shard) -> bytes:
        self._check(path, name, shard.zip_bytes, shard.zip_hash)
        return path.read_bytes()

    def _check(self, path: Path, name: str, size: int, digest: str | None) -> None:
        found = _size(path)
        place = self.remote.url if self.remote else str(self.folder)
        if found is None:
            raise Failure(f"{place}: shard {name} is missing; {VERIFY}")
        if found != size:
            how = "is truncated" if found < size else "is too long"
            raise Failure(f"{place}: shard {name} {how}: {found:,} of {size:,} bytes; {VERIFY}")
        if digest is not None and _digest(path) != digest:
            raise Failure(f"{place}: shard {name} is damaged: its hash is not the index's; {VERIFY}")

    def touch(self, shard: Shard) -> None:
        """Note that the shard was used just now."""
        if self.limit is not None:
            with suppress(OSError):
                os.utime(self.folder / shard.name)

    # --- room ---

    @contextmanager
    def _reserved(self, shard: Shard) -> Iterator[None]:
        """Make room for the shard and reserve it while the shard is fetched, so that the node's cache keeps its limit."""
        if self.limit is None:
            yield
            return
        need = shard.bytes + shard.zip_bytes
        note = self.folder / f".{shard.name}.room"
        with _locked(self._room):
            self._evict(self.limit - need)
            with open(note, "wb") as file:
                file.truncate(need)  # sparse: its size counts, its blocks do not
        try:
            yield
        finally:
            note.unlink(missing_ok=True)

    def _evict(self, allowed: int) -> None:
        """Remove the least recently used shards until the folders of all sources hold at most `allowed` bytes."""
        held, total = [], 0
        for path in self.folder.parent.glob("*/*"):
            reservation = path.name.endswith(".room")
            if not reservation and (path.name.startswith(".") or ".mds" not in path.name):
                continue
            with suppress(OSError):
                facts = path.stat()
                total += facts.st_size
                if not reservation or time.time() - facts.st_mtime > ABANDONED:
                    held.append((facts.st_mtime, facts.st_size, path))
        for _, size, path in sorted(held):
            if total <= allowed:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _aside(self, name: str) -> Path:
        path = self.folder / name
        return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")

    def _lock(self, name: str) -> Any:
        return _locked(self.folder / ".locks" / name.replace("/", "."))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _digest(path: Path) -> str:
    import xxhash

    digest = xxhash.xxh64()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among all threads and processes of this node. Without locks in the file system, a shard may come twice."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "w") as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Ahead:
    """Does work in the background, once for each key. An error there is ignored: it comes again where the result is needed."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._seen: set[int] = set()
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def __call__(self, key: int, work: Callable[[], object]) -> None:
        if key in self._seen:
            return
        self._seen.add(key)
        self._work.put(work)
        if self._threads:
            self._threads -= 1
            # A daemon: a download that waits through an outage must not keep the process alive.
            threading.Thread(target=self._carry_out, name="look-ahead", daemon=True).start()

    def _carry_out(self) -> None:
        while True:
            with suppress(Exception):
                self._work.get()()

    def forget(self, key: int) -> None:
        self._seen.discard(key)
