"""JSON Lines"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file


def _lines(opened: OpenFile, member: Member, unit_bytes: int) -> Iterator[tuple[Chunk, int]]:
    stream, position, number = opened.stream, member.begin, 1
    if member.begin:  # the line that crosses the cut belongs to the slice before
        opened.handle.seek(member.begin - 1)
        position = member.begin - 1 + len(stream.readline())
    start = position
    while member.end is None or position < member.end:
        block = stream.read(unit_bytes if member.end is None else min(unit_bytes, member.end - position))
        if not block:
            return
        if not block.endswith(b"\n"):
            block += stream.readline()
        position += len(block)
        yield Chunk(member.source, start, number, lines=block), len(block)
        number += block.count(b"\n")
