"""Parquet"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file

ROWS_AT_ONCE = 64  # of a Parquet or Arrow table; long documents make large ones


def _parquet(file: SourceFile, opened: OpenFile) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(opened.handle, buffer_size=1 << 20, pre_buffer=False)
    except pyarrow.ArrowException:
        raise Failure(f"{file.label} is damaged or not a Parquet file") from None


def _of_parquet(
    file: SourceFile, opened: OpenFile, member: Member, reading: Reading, advance: Advance
) -> Iterator[tuple[int, Any]]:
    table = _parquet(file, opened)
    groups = range(member.begin, table.metadata.num_row_groups if member.end is None else member.end)
    number = 1 + sum(table.metadata.row_group(group).num_rows for group in range(member.begin))
    tops = {name.partition(".")[0] for name in reading.fields.columns()} | set(reading.fields.columns())
    present = [name for name in table.schema_arrow.names if name in tops]
    rows = max(1, table.metadata.num_rows)
    for batch in _arrow_errors(
        file, table.iter_batches(ROWS_AT_ONCE, row_groups=list(groups), columns=present, use_threads=False)
    ):
        advance(file.bytes * batch.num_rows // rows)
        for record in _rows_of(batch, present):
            yield number, record
            number += 1


def _of_arrow(file: SourceFile, opened: OpenFile, reading: Reading, advance: Advance) -> Iterator[tuple[int, Any]]:
    import pyarrow

    number = 1
    try:
        table = pyarrow.ipc.open_stream(opened.stream)
    except pyarrow.ArrowException:
        raise Failure(f"{file.label} is damaged or not an Arrow file") from None
    tops = {name.partition(".")[0] for name in reading.fields.columns()} | set(reading.fields.columns())
    for whole in _arrow_errors(file, table):
        for start in range(0, whole.num_rows, ROWS_AT_ONCE):
            for record in _rows_of(whole.slice(start, ROWS_AT_ONCE), [n for n in whole.schema.names if n in tops]):
                yield number, record
                number += 1


def _arrow_errors(file: SourceFile, batches: Any) -> Iterator[Any]:
    import pyarrow

    try:
        yield from batches
    except (pyarrow.ArrowException, OSError):
        raise Failure(f"{file.label} is damaged: its {file.format} data are cut or broken; copy it again") from None


def _rows_of(batch: Any, names: list[str]) -> Iterator[Any]:
    """The rows as dictionaries; strings as bytes, so that a bad one is dropped alone and not its whole batch."""
    import pyarrow

    columns = {}
    for name in names:
        column = batch.column(name)
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pyarrow.types.is_string(column.type):
            column = column.cast(pyarrow.binary())
        elif pyarrow.types.is_large_string(column.type):
            column = column.cast(pyarrow.large_binary())
        columns[name] = column
    for index in range(batch.num_rows):
        try:
            yield {name: column[index].as_py() for name, column in columns.items()}
        except UnicodeDecodeError:  # within a nested field
            yield Reason.UNDECODABLE
