"""CSV and TSV: the first line names the columns, and a quoted value may hold line ends."""

import csv
import io
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from command_line import Failure
from data_prep.documents.formats.format import Chunks, Format, batched, decoded
from data_prep.documents.reading import Member, Reading
from data_prep.documents.source_file import OpenFile, SourceFile


def _chunks(delimiter: str, opened: OpenFile, member: Member, reading: Reading) -> Chunks:
    """`delimiter` is that of the format; --delimiter goes before it."""
    records = _records(opened.file, decoded(opened, reading), reading, reading.delimiter or delimiter)
    return batched(records, member, reading.unit_bytes)


def _records(
    file: SourceFile, text: io.TextIOWrapper, reading: Reading, delimiter: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))
    wanted = reading.fields.columns()
    reader = csv.reader(text, delimiter=delimiter)
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


CSV = Format((".csv",), partial(_chunks, ","))
TSV = Format((".tsv",), partial(_chunks, "\t"))
