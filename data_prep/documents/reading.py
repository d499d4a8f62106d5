"""How the files of a build are read, and which share of a file is."""

import csv
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from data_prep.documents.records import BrokenRecord, Chunk, Document, Fields, Reason, documents, explain
from command_line import Failure, UsageError
from data_prep.documents.source_file import Advance, OpenFile, SourceFile, open_file


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
