"""From source files to slices, which can be read independently of one another, and from a slice to its chunks.

    file, plain JSONL    slices of 32 units by bytes: a record belongs to the slice in which it begins
    file, Parquet        slices of row groups of about 32 units
    any other file       one slice; small files share one up to the size of a unit
    slice                units of about `unit_bytes` of text, in the order of the files

Slices are what --part shares out and --resume skips without reading; units are what one worker tokenises at a time. Reading is
a hundred times faster than tokenising, so one reader feeds all workers, also from a single compressed file.
"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file

UNITS_PER_SLICE = 32

def slices(files: list[SourceFile], unit_bytes: int) -> list[list[Member]]:
    """All files cut into slices, in order; depends on nothing but the files and `unit_bytes`."""
    size = UNITS_PER_SLICE * unit_bytes
    found: list[list[Member]] = []
    shared: list[Member] = []
    shared_bytes = 0
    for source, file in enumerate(files):
        ends = _cuts(file, size)
        if len(ends) < 2:
            shared.append(Member(source))
            shared_bytes += max(1, file.bytes)
            if shared_bytes < unit_bytes:
                continue
            found.append(shared)
        else:
            found += [shared] if shared else []
            found += [[Member(source, begin, end)] for begin, end in zip([0, *ends], ends, strict=False)]
        shared, shared_bytes = [], 0
    return found + ([shared] if shared else [])

def units(
    files: list[SourceFile], members: list[Member], reading: Reading, advance: Advance, digests: dict[int, str]
) -> Iterator[list[Chunk]]:
    """The units of a slice in order; `digests` gets the sha256 of each file that was read as a stream to its end."""
    unit: list[Chunk] = []
    held = 0
    for member in members:
        for chunk, size in chunks(files[member.source], member, reading, advance, digests):
            unit.append(chunk)
            held += size
            if held >= reading.unit_bytes:
                yield unit
                unit, held = [], 0
    if unit:
        yield unit

def corpus(files: list[SourceFile], reading: Reading, on_error: str, advance: Advance) -> Iterator[Document | Reason]:
    """Every document of all files in order, read in this process; a reason for each record without one."""
    for source, file in enumerate(files):
        for chunk, _ in chunks(file, Member(source), reading, advance, {}):
            try:
                yield from documents(chunk, reading.fields, on_error)
            except BrokenRecord as broken:
                raise in_words(broken, files, reading.fields) from None

def in_words(broken: BrokenRecord, files: list[SourceFile], fields: Fields) -> Failure:
    """The message about a broken record: its file and number, never its content."""
    file, number = files[broken.source], broken.number
    if broken.begin:  # a slice does not know how many lines stand before it
        with open_file(file) as opened:
            left = broken.begin
            while left and (block := opened.stream.read(min(left, 1 << 20))):
                number += block.count(b"\n")
                left -= len(block)
    return Failure(f"{file.label}, record {number}: {explain(broken.reason, fields)}")

