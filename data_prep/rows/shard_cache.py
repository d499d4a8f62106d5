"""The shards of a URL in a local folder that all processes of a node share.

A file is fetched under a name of its own while its lock is held, checked against the index (size and hash), and renamed:
it is there whole or not at all, and each shard crosses the network once a node. With a limit, the shards that were not
used for longest make room.
"""

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from command_line import Failure, Passing
from data_prep.rows.downloads import Remote, writing

ABANDONED = 3600.0  # seconds after which a reservation is one of a process that was killed
HASH = "xxh64"  # of every shard, in index.json; checked after each download, and where local rows are read


@dataclass(frozen=True)
class Shard:
    """One shard as index.json describes it."""

    name: str  # of the raw file
    bytes: int
    hash: str | None
    zip_name: str | None = None  # what lies at the URL, where it is compressed
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
    """The shards of one source in `folder`, fetched from `remote`; or those of a local folder, where `remote` is None.

    Reading has no state but the files: any number of threads and processes may use one folder.
    """

    def __init__(self, remote: Remote | None, folder: Path, limit: int | None = None) -> None:
        self.remote, self.folder, self.limit = remote, folder, limit
        self._room = folder.parent / ".room"

    def file(self, name: str) -> Path:
        """A small file beside the shards. FileNotFoundError where there is none."""
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
        """The shard's raw file, fetched and checked where it is not there. Failure names it where it is damaged."""
        path, begin = self.folder / shard.name, time.monotonic()
        if _size(path) == shard.bytes:
            if self.remote is None:  # what was fetched was checked then
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
                left.unlink(missing_ok=True)  # of a process that was killed
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
            for attempt in (1, 2):  # the transfer itself may have damaged it
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
        """The shard was used just now."""
        if self.limit is not None:
            with suppress(OSError):
                os.utime(self.folder / shard.name)

    # --- room ---

    @contextmanager
    def _reserved(self, shard: Shard) -> Iterator[None]:
        """Keep the node's cache within its limit while the shard is fetched: the least recently used ones go."""
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
        """Remove shards, those not used for longest first, until at most `allowed` bytes are left in all sources' folders."""
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


VERIFY = "`python -m data_prep verify` tells more"


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
    """Hold a lock of all threads and processes of this node. A file system without locks costs a second download, no more."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with open(path, "w") as handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Ahead:
    """Carries out work in the background, each key once; what fails there fails again, and is said, where it is needed."""

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
            # A daemon, for a download that waits out an outage must not keep the process from ending.
            threading.Thread(target=self._carry_out, name="look-ahead", daemon=True).start()

    def _carry_out(self) -> None:
        while True:
            with suppress(Exception):
                self._work.get()()

    def forget(self, key: int) -> None:
        self._seen.discard(key)
