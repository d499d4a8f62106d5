"""What the reader needs to know of an input format, and what the formats share.

A format turns an open file, or a share of it, into chunks of about a unit of text. A format whose records are not lines of bytes
gives them one by one, and `batched` makes the chunks.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from data_prep.documents.reading import Member, Reading
from data_prep.documents.records import Chunk
from data_prep.documents.source_file import OpenFile, SourceFile

Chunks = Iterator[tuple[Chunk, int]]  # each with its size in bytes or characters


@dataclass(frozen=True)
class Format:
    """An input format."""

    endings: tuple[str, ...]  # of file names, in lower case, such as ".csv"; none: no name tells the format
    chunks: Callable[[OpenFile, Member, Reading], Chunks]  # of the file, or of the share that `Member` names
    compressible: bool = True  # the name may also end in .gz or .zst
    digested_apart: bool = False  # the reader skips bytes of the file, so its sha256 takes a pass of its own
    cuts: Callable[[SourceFile, int], list[int]] | None = (
        None  # where the shares of a file end, each of about `int` bytes
    )


def batched(records: Iterator[tuple[int, Any]], member: Member, unit_bytes: int) -> Chunks:
    """Chunks of (number, record), each closed by the record that fills the unit."""
    batch: list[Any] = []
    first = held = 0
    for number, record in records:
        if not batch:
            first = number
        batch.append(record)
        held += _size(record)
        if held >= unit_bytes:
            yield Chunk(member.source, 0, first, records=batch), held
            batch, held = [], 0
    if batch:
        yield Chunk(member.source, 0, first, records=batch), held


def _size(record: Any) -> int:
    if isinstance(record, dict):
        return sum(_size(value) for value in record.values()) + 1
    return len(record) + 1 if isinstance(record, str | bytes) else 8


def decoded(opened: OpenFile, reading: Reading) -> io.TextIOWrapper:
    """The file as text. Bytes that are not of the encoding become surrogates, which `fields.checked` finds in each record."""
    return io.TextIOWrapper(opened.stream, reading.encoding, errors="surrogateescape", newline="")
