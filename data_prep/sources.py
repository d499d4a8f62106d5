"""Which files a build reads, how messages may name them, and their decompressed bytes.

    python -m data_prep build notes.jsonl.zst scans/ 'letters/*.txt' ...
                              |               |       |
                              a file          a folder, all levels; a pattern

The name of a file *found* in a folder or by a pattern may be a patient's, so it is never shown: such a file is "file 3
of 12 in 'scans/'", counted in sorted order. Only what stands on the command line itself is repeated in messages.
"""

import glob
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.errors import Failure, UsageError

FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}
COMPRESSIONS = (".gz", ".zst")
KNOWN = ".jsonl, .ndjson or .txt, plain or with .gz or .zst"
CHUNK = 1 << 20  # bytes read from disk at a time


@dataclass(frozen=True)
class SourceFile:
    path: Path
    label: str  # how messages name it
    format: str  # "jsonl" or "text"
    compression: str  # "", ".gz" or ".zst"

    @property
    def bytes(self) -> int:
        """Size on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Found:
    files: list[SourceFile]
    left_out: int  # files in folders or matched by patterns whose kind is not known


def kind(name: str) -> tuple[str, str] | None:
    """(format, compression) by the name's endings, or None."""
    stem, compression = name.lower(), ""
    for ending in COMPRESSIONS:
        if stem.endswith(ending):
            stem, compression = stem.removesuffix(ending), ending
    format = FORMATS.get(os.path.splitext(stem)[1])
    return (format, compression) if format else None


def find_files(inputs: list[str]) -> Found:
    """The files of all inputs, in the order of the command line, those of one folder or pattern sorted by path.

    Raises Failure for an input that does not exist, has no usable file or is not readable, UsageError for a file named twice.
    """
    files: list[SourceFile] = []
    left_out = 0
    seen: dict[Path, str] = {}
    for given in inputs:
        found, others = _of_input(given)
        left_out += others
        for file in found:
            real = file.path.resolve()
            if real in seen:
                raise UsageError(
                    f"a file comes twice, by {seen[real]!r} and by {given!r}: its documents would count double"
                )
            seen[real] = given
        files += found
    return Found(files, left_out)


def _of_input(given: str) -> tuple[list[SourceFile], int]:
    if "://" in given:
        raise UsageError(f"{given!r} is a URL: inputs are local files, folders or patterns")
    if os.path.isfile(given):
        known = kind(given)
        if known is None:
            raise Failure(f"{given!r} is of no known kind: a name ends in {KNOWN}")
        return [SourceFile(Path(given), repr(given), *known)], 0
    if os.path.isdir(given):
        paths = _walk(given)
    else:
        paths = [path for path in glob.glob(given, recursive=True) if os.path.isfile(path)]
        if not paths:
            raise Failure(f"no such file or folder, and no file matches: {given!r}")
    kinds = [(path, kind(path)) for path in sorted(paths)]
    usable = [(path, known) for path, known in kinds if known]
    if not usable:
        raise Failure(f"no file to read in {given!r}: names must end in {KNOWN}")
    files = [
        SourceFile(Path(path), f"file {number} of {len(usable)} in {given!r}", *known)
        for number, (path, known) in enumerate(usable, 1)
    ]
    return files, len(kinds) - len(usable)


def _walk(folder: str) -> list[str]:
    """Every file below `folder`, hidden ones and hidden folders (checkpoints of editors, .git) left out."""

    def refuse(error: OSError) -> None:
        raise Failure(f"a folder in {folder!r} cannot be read: {error.strerror}")

    paths = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return paths


class _Raw(io.RawIOBase):
    """The bytes of the file as they lie on disk, digested and counted while they pass."""

    def __init__(self, file: BinaryIO, advance: Callable[[int], object]) -> None:
        self.file = file
        self.advance = advance
        self.sha256 = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(len(buffer))
        self.sha256.update(data)
        self.advance(len(data))
        buffer[: len(data)] = data
        return len(data)


class _Zstd(io.RawIOBase):
    """Decompressed zstd, any number of frames; EOFError where the last one is cut (zstandard's own reader ends silently)."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self.raw = raw
        self.frame: Any = None
        self.pending = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        import zstandard

        while not self.pending:
            data = self.frame.unused_data if self.frame is not None and self.frame.eof else b""
            data = data or self.raw.read(CHUNK) or b""
            if not data:
                if self.frame is not None and not self.frame.eof:
                    raise EOFError
                return 0
            if self.frame is None or self.frame.eof:
                self.frame = zstandard.ZstdDecompressor().decompressobj()
            self.pending = memoryview(self.frame.decompress(data))
        size = min(len(buffer), len(self.pending))
        buffer[:size] = self.pending[:size]
        self.pending = self.pending[size:]
        return size


class OpenFile:
    """A source file being read: `stream` has its decompressed bytes, `digest()` the sha256 of all bytes on disk."""

    def __init__(self, file: SourceFile, raw: _Raw) -> None:
        self._raw = raw
        plain: Any = raw
        if file.compression == ".gz":
            plain = gzip.GzipFile(fileobj=io.BufferedReader(raw, CHUNK), mode="rb")
        elif file.compression == ".zst":
            plain = _Zstd(raw)
        self.stream = io.BufferedReader(plain, CHUNK)

    def digest(self) -> str:
        while self._raw.read(CHUNK):  # what lies behind the last record
            pass
        return self._raw.sha256.hexdigest()


@contextmanager
def open_file(file: SourceFile, advance: Callable[[int], object] = lambda count: None) -> Iterator[OpenFile]:
    """Open `file`; `advance` is called with the number of bytes at each read from disk. Damage becomes a Failure."""
    import zstandard

    try:
        with open(file.path, "rb") as handle:
            yield OpenFile(file, _Raw(handle, advance))
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError):
        raise Failure(
            f"{file.label} is damaged: its {file.compression} data are cut or broken; copy it again"
        ) from None
    except OSError as error:
        raise Failure(f"{file.label} cannot be read: {error.strerror or type(error).__name__}") from None
