"""From records to documents, or to the reason why a record gives none. Runs in the workers.

A record is a line of JSONL, a row of CSV, Parquet or Arrow, or a whole text. A line of white space is no record, but it counts
as a line, so that a record's number is the line number in an editor.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from command_line import Failure
from data_prep.documents.fields import Fields, Reason, checked

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Chunk:
    """Consecutive records of one file, as the reader hands them to a worker."""

    source: int  # number of the file
    begin: int  # byte of the file at which record 1 stands
    first: int  # number of the first record, from 1
    lines: bytes = b""  # JSONL
    records: list[Any] | None = None  # everything else: a text, or a dictionary by field

    def numbered(self) -> Iterator[tuple[int, Any]]:
        if self.records is not None:
            yield from enumerate(self.records, self.first)
        else:
            for number, line in enumerate(self.lines.split(b"\n"), self.first):
                if line and not line.isspace():
                    yield number, line


@dataclass(frozen=True)
class Document:
    text: str
    group: str | None
    source: int


class BrokenRecord(Failure):
    """A record that ends the build. `slicing.in_words` makes the message, for it knows the file's label."""

    def __init__(self, source: int, begin: int, number: int, reason: Reason) -> None:
        super().__init__(source, begin, number, reason)
        self.source, self.begin, self.number, self.reason = source, begin, number, reason


def documents(chunk: Chunk, fields: Fields, on_error: str) -> Iterator[Document | Reason]:
    """A document or a reason for every record. A broken record raises unless `on_error` is "skip"; an empty one is not broken."""
    for number, record in chunk.numbered():
        found = _document(record, chunk, number, fields)
        if on_error == "fail" and isinstance(found, Reason) and found is not Reason.EMPTY:
            raise BrokenRecord(chunk.source, chunk.begin, number, found)
        yield found


def _document(record: Any, chunk: Chunk, number: int, fields: Fields) -> Document | Reason:
    if isinstance(record, Reason):
        return record
    if isinstance(record, bytes):
        record = _parsed(record.removeprefix(BYTE_ORDER_MARK) if number == 1 and not chunk.begin else record)
    group: str | Reason | None
    if isinstance(record, str):  # a text file has no fields
        text, group = checked(record), Reason.NO_GROUP if fields.group else None
    elif isinstance(record, dict):
        text = fields.document(record)
        group = fields.group_of(record)
    else:
        return record if isinstance(record, Reason) else Reason.NOT_AN_OBJECT
    if isinstance(text, Reason):
        return text
    return group if isinstance(group, Reason) else Document(text, group, chunk.source)


def _parsed(line: bytes) -> Any:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Reason.UNDECODABLE
    except (ValueError, RecursionError):
        return Reason.BAD_JSON
    return record if isinstance(record, dict) else Reason.NOT_AN_OBJECT


def explain(reason: Reason, fields: Fields) -> str:
    """What is wrong with a record, and the remedy, without a word of its content."""
    skip = "or drop such records with --on-error skip"
    name = "field" if fields.template is None else "one of the fields"
    return {
        Reason.EMPTY: "it has no text",
        Reason.UNDECODABLE: f"it is not valid UTF-8 (or not of the given --encoding); convert the file, {skip}",
        Reason.BAD_JSON: f"it is not valid JSON; mend it, {skip}",
        Reason.NOT_AN_OBJECT: 'it is JSON but not an object such as {"text": "..."}; JSONL holds one object a line',
        Reason.NO_FIELD: f"it has no {name} {fields.shown()}; name the field that holds the text with --text-field, {skip}",
        Reason.NOT_TEXT: f"its {name} {fields.shown()} is not a string; name the field that holds the text with --text-field, {skip}",
        Reason.NO_GROUP: f"it has no usable field {fields.group!r}, which --group-field names; {skip}",
        Reason.DUPLICATE: "its text came before",
    }[reason]
