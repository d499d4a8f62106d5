"""How the files of a build are read, and which share of a file."""

from dataclasses import dataclass, field

from command_line import UsageError
from data_prep.documents.fields import Fields


@dataclass(frozen=True)
class Reading:
    """How the files of a build are read."""

    fields: Fields = field(default_factory=Fields)
    encoding: str = "utf-8"  # of text and CSV files; JSONL is UTF-8 by definition
    delimiter: str | None = None  # of CSV; None: that of the format
    separator: str | None = None  # between the documents of a text file; None: a file is one document
    unit_bytes: int = 1 << 20

    def check(self) -> None:
        self.fields.check()
        try:
            "".encode(self.encoding)
        except LookupError:
            raise UsageError(f"--encoding {self.encoding!r} is not known; try utf-8 or latin-1") from None
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise UsageError(f"--delimiter {self.delimiter!r} is not a single character such as ';'")
        if self.separator == "":
            raise UsageError("--separator is empty")


@dataclass(frozen=True)
class Member:
    """A file of a slice, or a share of it: bytes of JSONL or row groups of Parquet, from `begin` to before `end`."""

    source: int  # number of the file
    begin: int = 0
    end: int | None = None  # None: to the end of the file, which is then whole

    @property
    def whole(self) -> bool:
        return self.end is None
