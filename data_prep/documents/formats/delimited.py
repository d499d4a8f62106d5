"""CSV"""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file


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
