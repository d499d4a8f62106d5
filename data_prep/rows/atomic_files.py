"""Files and folders that are complete or absent, even if a process is killed; in a folder or at a URL.

A local file is written under a temporary name, flushed to the disk and renamed. A local folder is filled and renamed. An object
store has no rename, but an object appears only when all of it has arrived. Where several files belong together, one of them
makes the rest valid and is put last.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from command_line import Failure, UsageError
from data_prep.rows.format import is_url

PARTIAL = ".tmp"
LIBRARIES = {"gs": "gcsfs", "gcs": "gcsfs", "oci": "ocifs", "azure": "adlfs", "az": "adlfs", "abfs": "adlfs"}


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path in it. Raises UsageError if no installed library knows the scheme."""
    import fsspec

    scheme, _, rest = url.partition("://")
    if scheme == "azure":  # streaming says azure where fsspec says az
        url = f"az://{rest}"
    elif scheme == "oci":
        url = f"oci://{rest}"
    if scheme == "s3":
        from data_prep.rows.s3 import connected

        return connected(), rest.rstrip("/")
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError):
        library = LIBRARIES.get(scheme)
        remedy = f"`pip install {library}` adds it" if library else "s3, gs, oci, azure, hf and https are known"
        raise UsageError(f"{scheme}:// cannot be used here: {remedy}") from None
    return fs, path.rstrip("/")


@contextmanager
def said_of(what: str) -> Iterator[None]:
    """Turn an OSError into a Failure about `what`, which must come from the command line."""
    try:
        yield
    except OSError as error:
        raise Failure(f"{what}: {error.strerror or type(error).__name__}") from None


def _make_private(folder: str) -> None:
    """Make `folder` and all missing ones above it, for their owner only (os.makedirs gives its mode to the last one only)."""
    if not os.path.isdir(folder):
        _make_private(os.path.dirname(folder))
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)


class AtomicFiles:
    """The files at one place, by names such as "train/shard.00000.mds". Can be pickled, for workers get it as an argument."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/") if is_url(location) else os.path.abspath(location)
        self._fs: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"location": self.location, "_fs": None}

    @property
    def remote(self) -> bool:
        return is_url(self.location)

    def _at(self, name: str) -> str:
        if self._fs is None:
            self._fs, self._root = filesystem(self.location)
        return f"{self._root}/{name}" if name else self._root

    def put(self, name: str, data: bytes) -> None:
        if self.remote:
            path = self._at(name)
            with said_of(self.location):
                self._fs.pipe_file(path, data)
            return
        path = os.path.join(self.location, name)
        _make_private(os.path.dirname(path))
        aside = f"{path}.{os.getpid()}{PARTIAL}"
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def get(self, name: str) -> bytes:
        """The content of a file. Raises FileNotFoundError if there is no such file."""
        if self.remote:
            path = self._at(name)
            return bytes(self._fs.cat_file(path))
        return Path(self.location, name).read_bytes()

    def sizes(self, partial: bool = False) -> dict[str, int]:
        """Name and bytes of every file, at all depths. `partial`: also files that a killed process left half written."""
        if self.remote:
            root = self._at("")
            with said_of(self.location):
                try:
                    found = self._fs.find(root, detail=True)
                except FileNotFoundError:
                    return {}
            return {name.removeprefix(root).lstrip("/"): int(entry["size"]) for name, entry in found.items()}
        sizes = {}
        for parent, _, files in os.walk(self.location):
            for file in files:
                path = os.path.join(parent, file)
                if partial or not file.endswith(PARTIAL):
                    sizes[os.path.relpath(path, self.location)] = os.path.getsize(path)
        return sizes

    def remove(self, names: list[str]) -> None:
        if self.remote:
            paths = [self._at(name) for name in names]
            if paths:
                with said_of(self.location):
                    self._fs.rm(paths)
            return
        for name in names:
            Path(self.location, name).unlink(missing_ok=True)

    def remove_all(self) -> None:
        if self.remote:
            self.remove(list(self.sizes()))
        else:
            shutil.rmtree(self.location, ignore_errors=True)


def empty_place(out: str) -> Path:
    """The absolute path of a local `out`. Raises Failure unless it is an empty folder or does not exist."""
    final = Path(os.path.abspath(out))
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise Failure(f"--out {out!r} exists and is not a folder")
    if final.is_dir() and any(final.iterdir()):
        raise Failure(f"--out {out!r} is not empty: nothing is overwritten; remove it or name another folder")
    return final


def put_in_place(folder: Path, final: Path, out: str) -> None:
    """Rename `folder` to `final`; messages name it as `out`, as the command line does."""
    try:
        folder.rename(final)  # an empty folder may be there; it is replaced
    except OSError as error:
        raise Failure(f"--out {out!r} could not be put in place: {error.strerror}") from None


@contextmanager
def aside(out: str) -> Iterator[Path]:
    """A new folder beside `out`, mode 0700. It becomes `out` if the block ends well, and is removed if it does not.

    Raises Failure if `out` holds anything already.
    """
    if is_url(out):
        raise UsageError(f"--out {out!r} is a URL: name a local folder")
    final = empty_place(out)
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))  # mode 0700
    try:
        yield folder
        put_in_place(folder, final, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
