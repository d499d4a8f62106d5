"""Tables by column: Parquet files, and the Arrow files in which `datasets` keeps a data set.

A large Parquet file is cut into shares by row groups.
"""

from collections.abc import Iterator
from typing import Any

from command_line import Failure
from data_prep.documents.fields import Fields, Reason
from data_prep.documents.formats.format import Chunks, Format, batched
from data_prep.documents.reading import Member, Reading
from data_prep.documents.source_file import OpenFile, SourceFile, open_file

ROWS_AT_ONCE = 64  # of a table, few because documents may be long


def _parquet_chunks(opened: OpenFile, member: Member, reading: Reading) -> Chunks:
    return batched(_parquet_records(opened, member, reading.fields), member, reading.unit_bytes)


def _parquet_records(opened: OpenFile, member: Member, fields: Fields) -> Iterator[tuple[int, Any]]:
    table = _parquet(opened)
    groups = range(member.begin, table.metadata.num_row_groups if member.end is None else member.end)
    number = 1 + sum(table.metadata.row_group(group).num_rows for group in range(member.begin))
    present = _columns_to_read(table.schema_arrow.names, fields)
    rows = max(1, table.metadata.num_rows)
    batches = table.iter_batches(ROWS_AT_ONCE, row_groups=list(groups), columns=present, use_threads=False)
    for batch in _without_arrow_errors(opened.file, batches):
        opened.advance(opened.file.bytes * batch.num_rows // rows)
        for record in _rows_of(batch, present):
            yield number, record
            number += 1


def _parquet(opened: OpenFile) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(opened.handle, buffer_size=1 << 20, pre_buffer=False)
    except pyarrow.ArrowException:
        raise Failure(f"{opened.file.label} is damaged or not a Parquet file") from None


def _parquet_cuts(file: SourceFile, size: int) -> list[int]:
    ends, held = [], 0
    with open_file(file) as opened:
        metadata = _parquet(opened).metadata
        for group in range(metadata.num_row_groups):
            held += metadata.row_group(group).total_byte_size
            if held >= size or group + 1 == metadata.num_row_groups:
                ends.append(group + 1)
                held = 0
    return ends


def _arrow_chunks(opened: OpenFile, member: Member, reading: Reading) -> Chunks:
    return batched(_arrow_records(opened, reading.fields), member, reading.unit_bytes)


def _arrow_records(opened: OpenFile, fields: Fields) -> Iterator[tuple[int, Any]]:
    import pyarrow

    number = 1
    try:
        table = pyarrow.ipc.open_stream(opened.stream)
    except pyarrow.ArrowException:
        raise Failure(f"{opened.file.label} is damaged or not an Arrow file") from None
    for batch in _without_arrow_errors(opened.file, table):
        present = _columns_to_read(batch.schema.names, fields)
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            for record in _rows_of(batch.slice(start, ROWS_AT_ONCE), present):
                yield number, record
                number += 1


def _columns_to_read(names: list[str], fields: Fields) -> list[str]:
    """The columns that hold the fields: each by its whole name, or by what stands before the first dot of a path."""
    wanted = fields.columns()
    tops = {name.partition(".")[0] for name in wanted} | set(wanted)
    return [name for name in names if name in tops]


def _without_arrow_errors(file: SourceFile, batches: Any) -> Iterator[Any]:
    """The batches. An error of pyarrow becomes a Failure, for its message may quote the file."""
    import pyarrow

    try:
        yield from batches
    except (pyarrow.ArrowException, OSError):
        raise Failure(f"{file.label} is damaged: its {file.format} data are cut or broken; copy it again") from None


def _rows_of(batch: Any, names: list[str]) -> Iterator[Any]:
    """The rows as dictionaries. Strings come as bytes, so that a bad one drops its own record and not the whole batch."""
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


PARQUET = Format((".parquet",), _parquet_chunks, compressible=False, digested_apart=True, cuts=_parquet_cuts)
ARROW = Format((), _arrow_chunks, compressible=False, digested_apart=True)  # found by the folder's state.json
