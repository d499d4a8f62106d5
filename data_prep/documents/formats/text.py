"""Text"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file


def _of_text(text: io.TextIOWrapper, reading: Reading) -> Iterator[tuple[int, Any]]:
    separator = reading.separator
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
    except UnicodeError:  # an encoding that has no place for bad bytes, such as UTF-16
        return "\ud800"
