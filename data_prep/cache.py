"""Shards at a URL, fetched into a local folder that all processes of a node share.

A file is fetched under a name of its own while its lock is held, checked against the index (size and hash), and renamed:
it is there whole or not at all, and each shard crosses the network once a node. With a limit, the shards that were not
used for longest make room. An outage is waited out; what no waiting mends (credentials, bucket, object) is said at once.

mosaicml-streaming's downloaders do the transfer: s3:// (any endpoint through S3_ENDPOINT_URL), gs://, oci://, azure://, ...
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

from data_prep.errors import Failure, Passing

FIRST_PATIENCE = 20.0  # seconds of trying before anything was fetched: a wrong address must be said soon
PATIENCE = 300.0  # later, through an outage of the store; below the trainer's faults.hang_seconds
SILENCE = 20.0  # seconds without a byte after which one attempt at s3:// is given up, so that patience can end in time
ODD_ANSWERS = 20.0  # seconds in which a refusal from a store that was open to us is taken for part of an outage
LONGEST_WAIT = 10.0  # seconds between two attempts
ABANDONED = 3600.0  # seconds after which a reservation is one of a process that was killed
HASH = "xxh64"  # of every shard, in index.json; checked after each download, and where local rows are read
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # said of files only, never of connections


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


class Remote:
    """Downloads from one URL, with patience. Failure names the URL, which stems from the recipe, and the remedy."""

    def __init__(self, url: str, opened: bool = False) -> None:
        self.url = url.rstrip("/")
        self.opened = (
            opened  # manifest and index were read, now or at an earlier start: address and credentials are right
        )
        self._reached = opened
        self._idle: list[Any] = []  # downloaders with their clients, which take long to make; each serves one at a time

    def download(self, name: str, to: Path, begin: float | None = None) -> None:
        """`name` below the URL to the file `to`, whole. FileNotFoundError where the store has no such object.

        `begin` (time.monotonic) is when the file was first wanted: who queued for it has been patient already.
        """
        begin, wait = time.monotonic() if begin is None else begin, 0.5
        while True:
            try:
                with writing(to.parent):
                    to.unlink(missing_ok=True)
                    downloader = self._downloader()
                    downloader.download(f"{self.url}/{name}", str(to), timeout=60)
                if not to.exists():
                    raise _NothingArrived
                self._idle.append(downloader)  # not after a failure: its connections may be dead
                self._reached = True
                return
            except Failure:
                raise
            except Exception as error:
                waited = time.monotonic() - begin
                kind = refusal(error)
                if kind and (not self.opened or waited > ODD_ANSWERS):
                    self._refuse(kind, name)
                if waited > (PATIENCE if self._reached else FIRST_PATIENCE):
                    # An address that never answered is more likely wrong than out of order.
                    raise (Passing if self._reached else Failure)(
                        f"{self.url} could not be reached for {waited:.0f} s ({type(error).__name__}): "
                        "check the address (S3_ENDPOINT_URL) and the network, then run the same command to go on"
                    ) from None
            time.sleep(wait * random.uniform(0.5, 1))  # many ranks must not come back at once
            wait = min(2 * wait, LONGEST_WAIT)

    def _downloader(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            from streaming.base.storage.download import CloudDownloader

        from data_prep.s3 import client

        try:
            downloader = CloudDownloader.get(self.url)
        except ValueError:
            raise _Unsupported from None
        if self.url.startswith("s3://"):
            # Its own would try for three minutes at an address that a firewall swallows; ours tries once, and we again.
            downloader._s3_client = client(attempts=1, silence=SILENCE)
        return downloader

    def _refuse(self, kind: str, name: str) -> None:
        if kind == "missing":
            if self.url.startswith("s3://") and not _bucket_exists(self.url):
                raise Failure(f"{self.url}: there is no such bucket; check data.rows and S3_ENDPOINT_URL")
            raise FileNotFoundError(name)
        remedies = {
            "credentials": "the object store refuses these credentials; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or what stands for them with this store, and the right to read there",
            "library": "the library for this kind of URL is not installed; `pip install 'mosaicml-streaming[all]'` brings it",
            "scheme": "this kind of URL is not supported; s3://, gs://, oci://, azure:// and hf:// are",
        }
        raise Failure(f"{self.url}: {remedies[kind]}")


class _Unsupported(Exception):
    pass


class _NothingArrived(Exception):
    """The downloader reported success and wrote nothing: streaming's for gs:// swallows errors."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What the file system says against the cache `folder` as a Failure. Other errors pass, those of connections too."""
    try:
        yield
    except OSError as error:
        place = error.filename
        if error.errno not in FULL and not (isinstance(place, str) and Path(place).is_relative_to(folder)):
            raise
        raise Failure(
            f"the cache folder {folder} cannot be written: {os.strerror(error.errno or errno.EIO)}; make room there, "
            "lower data.cache_limit, or choose another data.cache (default: in TMPDIR)"
        ) from None


def refusal(error: BaseException) -> str | None:
    """What no waiting mends: "missing", "credentials", "library" or "scheme"; None for an outage. For every cloud's library."""
    answer = getattr(error, "response", None)
    code = str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""
    status = code or str(
        getattr(error, "status", "") or getattr(error, "status_code", "") or getattr(error, "code", "")
    )
    name = type(error).__name__
    if (
        isinstance(error, FileNotFoundError)
        or status in ("404", "NoSuchKey", "NoSuchBucket")
        or name == "ResourceNotFoundError"
    ):
        return "missing"
    refused = (
        "401",
        "403",
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    )
    without = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError")
    if status in refused or name in without:
        return "credentials"
    if isinstance(error, ImportError):
        return "library"
    return "scheme" if isinstance(error, _Unsupported) else None


def _bucket_exists(url: str) -> bool:
    """False only where the store says so."""
    from data_prep.s3 import client

    try:
        client(attempts=1, silence=SILENCE).head_bucket(Bucket=url.removeprefix("s3://").partition("/")[0])
    except Exception as error:
        return refusal(error) != "missing"
    return True


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
