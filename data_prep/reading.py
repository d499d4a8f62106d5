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

from data_prep.documents import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from data_prep.errors import Failure, UsageError
from data_prep.streams import Advance, OpenFile, SourceFile, open_file

UNITS_PER_SLICE = 32
ROWS_AT_ONCE = 64  # of a Parquet or Arrow table; long documents make large ones


@dataclass(frozen=True)
class Reading:
    """How the files of a build are read."""

    fields: Fields = field(default_factory=Fields)
    encoding: str = "utf-8"  # of text and CSV files; JSONL is UTF-8 by definition
    delimiter: str | None = None  # of CSV; None: by the file's ending
    separator: str | None = None  # between the documents of a text file; None: a file is one document
    unit_bytes: int = 1 << 20

    def check(self) -> None:
        self.fields.check()
        try:
            "".encode(self.encoding)
        except LookupError:
            raise UsageError(f"--encoding {self.encoding!r} is not known; such as utf-8 or latin-1") from None
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise UsageError(f"--delimiter {self.delimiter!r} is not a single character such as ';'")
        if self.separator == "":
            raise UsageError("--separator is empty")


@dataclass(frozen=True)
class Member:
    """A file, or a share of it: bytes of JSONL or row groups of Parquet from `begin` to before `end` (None: all)."""

    source: int
    begin: int = 0
    end: int | None = None

    @property
    def whole(self) -> bool:
        return self.end is None


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


def _cuts(file: SourceFile, size: int) -> list[int]:
    """Where the slices of a file end."""
    if file.bytes <= size or file.compression:
        return []
    if file.format == "jsonl":
        return [*range(size, file.bytes, size), file.bytes]
    if file.format != "parquet":
        return []
    ends, held = [], 0
    with open_file(file) as opened:
        metadata = _parquet(file, opened).metadata
        for group in range(metadata.num_row_groups):
            held += metadata.row_group(group).total_byte_size
            if held >= size or group + 1 == metadata.num_row_groups:
                ends.append(group + 1)
                held = 0
    return ends


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


def chunks(
    file: SourceFile, member: Member, reading: Reading, advance: Advance, digests: dict[int, str]
) -> Iterator[tuple[Chunk, int]]:
    """The chunks of a file or a share of it, each of about a unit at most, with their sizes in bytes or characters."""
    with open_file(file, advance) as opened:
        if file.format == "jsonl":
            yield from _lines(opened, member, reading.unit_bytes)
        else:
            yield from _batched(_records(file, opened, member, reading, advance), member, reading.unit_bytes)
        if member.whole and file.format not in ("parquet", "arrow"):
            digests[member.source] = opened.digest()


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


def _records(
    file: SourceFile, opened: OpenFile, member: Member, reading: Reading, advance: Advance
) -> Iterator[tuple[int, Any]]:
    """(number, record) of everything that is not JSONL."""
    if file.format == "parquet":
        return _of_parquet(file, opened, member, reading, advance)
    if file.format == "arrow":
        return _of_arrow(file, opened, reading, advance)
    # Bytes that are not of the encoding become surrogates, which `documents.checked` finds record by record.
    text = io.TextIOWrapper(opened.stream, reading.encoding, errors="surrogateescape", newline="")
    return _of_csv(file, text, reading) if file.format in ("csv", "tsv") else _of_text(text, reading)


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


def _of_csv(file: SourceFile, text: io.TextIOWrapper, reading: Reading) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))
    wanted = reading.fields.columns()
    reader = csv.reader(text, delimiter=reading.delimiter or ("\t" if file.format == "tsv" else ","))
    try:
        names = [name.removeprefix("\ufeff") for name in next(reader, [])]
        places = {name: names.index(name) for name in wanted if name in names}
        if names and not places:
            raise Failure(
                f"{file.label}: its first line names no column {reading.fields.shown()}; "
                "name the one that holds the text with --text-field, and see --delimiter"
            )
        for number, row in enumerate((row for row in reader if row), 1):
            yield number, {name: row[place] for name, place in places.items() if place < len(row)}
    except (csv.Error, UnicodeError):
        raise Failure(f"{file.label} cannot be read as {file.format.upper()}; see --delimiter and --encoding") from None


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
