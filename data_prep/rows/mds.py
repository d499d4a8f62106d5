"""Write and read MDS shards of packed rows without mosaicml-streaming.

The import of streaming takes 6 s and 0.85 GB (it imports torch), too much for a worker. The layout (version 2, "joint"):

    uint32 samples | uint32 offsets[samples + 1] | JSON configuration | samples
    sample: uint32 bytes of `lengths`, uint32 bytes of `tokens`, then both columns, in the order of their names
    column: one byte (dimensions << 2 | log2 of the bytes of the next number), the dimension, the values

The tests compare our shards byte for byte with those of streaming.MDSWriter, and read them with streaming's own reader.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from data_prep.rows.format import HASH, Row, columns

OFFSET_BYTES = 4  # that a sample adds to the list of offsets
ZSTD_LEVEL = 3


class ShardWriter:
    """Writes rows into shards of at most `size_limit` bytes and hands each to `put`. A larger row gets a shard of its own."""

    def __init__(
        self, put: Callable[[str, bytes], None], vocabulary: int, size_limit: int, compression: str | None = None
    ) -> None:
        self._put = put
        encodings = columns(vocabulary)
        names = sorted(encodings)
        self._settings: dict[str, Any] = {
            "version": 2,
            "format": "mds",
            "compression": compression,
            "hashes": [HASH],
            "size_limit": size_limit,
            "column_names": names,
            "column_encodings": [encodings[name] for name in names],
            "column_sizes": [None] * len(names),
        }
        self._header = json.dumps(self._settings, sort_keys=True).encode()
        self.shards: list[dict[str, Any]] = []
        self._empty()

    def _empty(self) -> None:
        self._samples: list[bytes] = []
        self._bytes = 4 + 4 + len(self._header)

    def write(self, row: Row) -> None:
        parts = [_column(row.lengths), _column(row.tokens)]
        sample = np.array([len(part) for part in parts], np.uint32).tobytes() + b"".join(parts)
        size = len(sample) + OFFSET_BYTES
        if self._samples and self._bytes + size > self._settings["size_limit"]:
            self._flush()
        self._samples.append(sample)
        self._bytes += size

    def _flush(self) -> None:
        count = len(self._samples)
        offsets = np.cumsum([0, *map(len, self._samples)]) + 4 + 4 * (count + 1) + len(self._header)
        head = np.uint32(count).tobytes() + offsets.astype(np.uint32).tobytes() + self._header
        data = b"".join([head, *self._samples])
        self._empty()
        name = f"shard.{len(self.shards):05}.mds"
        entry: dict[str, Any] = {"samples": count, "raw_data": _described(name, data), "zip_data": None}
        if self._settings["compression"]:
            import zstandard

            name += ".zstd"
            # `compress` writes the content size, which streaming needs.
            data = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data)
            entry["zip_data"] = _described(name, data)
        self.shards.append(entry | self._settings)
        self._put(name, data)

    def finish(self) -> dict[str, Any]:
        """Write the rows that are left. Returns the content of index.json."""
        if self._samples:
            self._flush()
        return {"version": 2, "shards": self.shards}


def index_bytes(index: dict[str, Any]) -> bytes:
    return json.dumps(index, sort_keys=True).encode()


def digest(data: bytes) -> str:
    return str(xxhash.xxh64(data).hexdigest())


def _described(name: str, data: bytes) -> dict[str, Any]:
    return {"basename": name, "bytes": len(data), "hashes": {HASH: digest(data)}}


def _column(values: NDArray[np.unsignedinteger]) -> bytes:
    count = len(values)
    size = 0 if count < 1 << 8 else 1 if count < 1 << 16 else 2
    return bytes([1 << 2 | size]) + count.to_bytes(1 << size, "little") + values.tobytes()


class ShardData:
    """A whole shard in memory. Raises ValueError if its bytes cannot be a shard of packed rows."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        if len(data) < 8:
            raise ValueError("it has no header")
        self.samples = int.from_bytes(data[:4], "little")
        if len(data) < 4 + 4 * (self.samples + 1):
            raise ValueError("it ends within its list of offsets")
        self._offsets = np.frombuffer(data, np.uint32, self.samples + 1, 4).astype(np.int64)
        begin = 4 + 4 * (self.samples + 1)
        if self._offsets[0] < begin or (np.diff(self._offsets) < 0).any():
            raise ValueError("its offsets are wrong")
        if self._offsets[-1] != len(data):
            raise ValueError(f"it has {len(data)} bytes where its own offsets say {self._offsets[-1]}")
        try:
            settings = json.loads(bytes(self._data[begin : int(self._offsets[0])]))
            self.columns = dict(zip(settings["column_names"], settings["column_encodings"], strict=True))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError("its own description is damaged") from None
        self.settings: dict[str, Any] = settings
        self._types = {name: encoding.removeprefix("ndarray:") for name, encoding in self.columns.items()}

    def __getitem__(self, index: int) -> Row:
        sample = self._data[int(self._offsets[index]) : int(self._offsets[index + 1])]
        head = 4 * len(self._types)
        sizes = np.frombuffer(sample[:head], np.uint32).tolist()
        if head + sum(sizes) != len(sample):
            raise ValueError("its columns do not fill it")
        found = {}
        for (name, dtype), size in zip(self._types.items(), sizes, strict=True):
            found[name] = _values(sample[head : head + size], dtype)
            head += size
        return Row(found["tokens"], found["lengths"])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(self.samples))


def _values(column: memoryview, dtype: str) -> NDArray[Any]:
    kind = column[0]
    if kind >> 2 != 1:
        raise ValueError("a column is not one-dimensional")
    width = 1 << (kind & 3)
    values = np.frombuffer(column[1 + width :], dtype)
    if len(values) != int.from_bytes(column[1 : 1 + width], "little"):
        raise ValueError("a column is not as long as it says")
    return values
