"""From the bytes of a source file to documents, or to the reason why a record holds none.

JSONL: a record a line, an object with the text in one field; lines of white space are no records, but count as lines, so
that a record's number is the line an editor shows. Text: the whole file is one document, record 1.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO

from data_prep.errors import Failure
from data_prep.sources import SourceFile

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Reason(StrEnum):
    """Why a record gave no document; the key in the manifest's `dropped`."""

    EMPTY = "empty"
    UNDECODABLE = "undecodable"
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_FIELD = "no_field"
    NOT_TEXT = "not_text"


@dataclass(frozen=True)
class Record:
    number: int  # from 1; the line in JSONL
    content: str | Reason


def explain(reason: Reason, text_field: str) -> str:
    """What is wrong with a record and what to do, without a word of its content."""
    return {
        Reason.EMPTY: "it has no text",
        Reason.UNDECODABLE: "it is not valid UTF-8; convert the file, or drop such records with --on-error skip",
        Reason.BAD_JSON: "it is not valid JSON; mend it, or drop such records with --on-error skip",
        Reason.NOT_AN_OBJECT: 'it is JSON but not an object such as {"text": "..."}; JSONL holds one object a line',
        Reason.NO_FIELD: f"it has no field {text_field!r}; name the field that holds the text with --text-field",
        Reason.NOT_TEXT: f"its field {text_field!r} is not a string; name the field that holds the text with --text-field",
    }[reason]


def read_records(file: SourceFile, stream: BinaryIO, text_field: str) -> Iterator[Record]:
    """The records of one file in order; `stream` gives its decompressed bytes."""
    if file.format == "text":
        yield Record(1, _decode(stream.read().removeprefix(BYTE_ORDER_MARK)))
        return
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield Record(number, _text_of(line, text_field))


def texts(file: SourceFile, stream: BinaryIO, text_field: str, on_error: str) -> Iterator[Record]:
    """`read_records`, but a broken record (empty ones are not) raises Failure unless `on_error` is "skip"."""
    for record in read_records(file, stream, text_field):
        if on_error == "fail" and isinstance(record.content, Reason) and record.content is not Reason.EMPTY:
            raise Failure(f"{file.label}, record {record.number}: {explain(record.content, text_field)}")
        yield record


def _text_of(line: bytes, text_field: str) -> str | Reason:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return Reason.UNDECODABLE
    except (ValueError, RecursionError):
        return Reason.BAD_JSON
    if not isinstance(record, dict):
        return Reason.NOT_AN_OBJECT
    if text_field not in record:
        return Reason.NO_FIELD
    text = record[text_field]
    if text is None:
        return Reason.EMPTY
    if not isinstance(text, str):
        return Reason.NOT_TEXT
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, written as an escape
        return Reason.UNDECODABLE
    return text if text.strip() else Reason.EMPTY


def _decode(data: bytes) -> str | Reason:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return Reason.UNDECODABLE
    return text if text.strip() else Reason.EMPTY
