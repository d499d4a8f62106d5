"""F"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file


def _batched(records: Iterator[tuple[int, Any]], member: Member, unit_bytes: int) -> Iterator[tuple[Chunk, int]]:
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
