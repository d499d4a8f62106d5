"""Plain text: a file is one document, or several with a separator between them."""

import io
from collections.abc import Iterator

from data_prep.documents.formats.format import Chunks, Format, batched, decoded
from data_prep.documents.reading import Member, Reading
from data_prep.documents.source_file import OpenFile


def _chunks(opened: OpenFile, member: Member, reading: Reading) -> Chunks:
    return batched(_records(decoded(opened, reading), reading.separator), member, reading.unit_bytes)


def _records(text: io.TextIOWrapper, separator: str | None) -> Iterator[tuple[int, str]]:
    if separator is None:
        yield 1, _read(text, -1).removeprefix("\ufeff")
        return
    number, held = 1, _read(text, 1 << 20).removeprefix("\ufeff")
    while more := _read(text, 1 << 20):
        *done, held = (held + more).split(separator)
        for document in done:
            yield number, document
            number += 1
    yield from enumerate(held.split(separator), number)


def _read(text: io.TextIOWrapper, size: int) -> str:
    try:
        return text.read(size)
    except UnicodeError:  # in some encodings, such as UTF-16, a bad byte cannot become a surrogate
        return "\ud800"


TEXT = Format((".txt",), _chunks)
