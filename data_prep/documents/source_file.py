"""The bytes of a source file, local or at a URL. They are decompressed, digested and counted while they pass."""

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from command_line import Failure
from data_prep.rows import filesystem, is_url

CHUNK = 1 << 20  # bytes read from disk at a time


@dataclass(frozen=True)
class SourceFile:
    location: str  # path or URL
    label: str  # how messages name it
    format: str  # a name in `formats.FORMATS`
    compression: str  # "", ".gz" or ".zst"
    bytes: int  # size as stored
    version: str  # changes when the file changes


Advance = Callable[[int], object]


def ignore(count: int) -> None:
    pass


class _Raw(io.RawIOBase):
    """The bytes of the file as they are stored."""

    def __init__(self, file: BinaryIO, advance: Advance) -> None:
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
    """Decompressed zstd, of any number of frames. Raises EOFError if the last one is cut; zstandard's own reader does not."""

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
            data = data or self.raw.read(CHUNK // 8) or b""  # 128 KB, for memory holds all that they decompress to
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
    """A source file that is open. `stream` gives its decompressed bytes, `digest()` the sha256 of all bytes as stored."""

    def __init__(self, file: SourceFile, handle: BinaryIO, advance: Advance) -> None:
        self.file = file
        self.advance = advance  # for a format that reads from `handle`
        self.handle = handle  # seekable; bytes read from it directly are neither counted nor digested
        self._raw = _Raw(handle, advance)
        plain: Any = self._raw
        if file.compression == ".gz":
            plain = gzip.GzipFile(fileobj=io.BufferedReader(self._raw, CHUNK), mode="rb")
        elif file.compression == ".zst":
            plain = _Zstd(self._raw)
        self.stream = io.BufferedReader(plain, CHUNK)

    def digest(self) -> str:
        while self._raw.read(CHUNK):  # the bytes behind the last record
            pass
        return self._raw.sha256.hexdigest()


@contextmanager
def open_file(file: SourceFile, advance: Advance = ignore) -> Iterator[OpenFile]:
    """Open `file`. Each read of `stream` calls `advance` with the number of stored bytes. Damage becomes a Failure."""
    import zstandard

    try:
        with _handle(file.location) as handle:
            yield OpenFile(file, handle, advance)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError):
        raise Failure(
            f"{file.label} is damaged: its {file.compression} data are cut or broken; copy it again"
        ) from None
    except OSError as error:
        raise Failure(f"{file.label} cannot be read: {error.strerror or type(error).__name__}") from None
    except Failure:
        raise
    except Exception as error:  # HTTP and cloud libraries raise exceptions of their own, which may quote the address
        if not is_url(file.location):
            raise
        raise Failure(f"{file.label} cannot be read ({type(error).__name__})") from None


def _handle(location: str) -> Any:
    if not is_url(location):
        return open(location, "rb")
    fs, path = filesystem(location)
    return fs.open(path, "rb")
