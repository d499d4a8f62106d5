"""From records to documents, or to the reason why a record holds none. Runs in the workers.

A record is a line of JSONL, a row of CSV, Parquet or Arrow, or a whole text. Lines of white space are no records, but
count as lines, so that a record's number is the line an editor shows.
"""

import hashlib
import json
import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from data_prep.errors import Failure, UsageError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Reason(StrEnum):
    """Why a record gave no document; the key in the manifest's `dropped`."""

    EMPTY = "empty"
    UNDECODABLE = "undecodable"
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    NO_FIELD = "no_field"
    NOT_TEXT = "not_text"
    NO_GROUP = "no_group"
    DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Fields:
    """Which fields make a document: one of them, or a template such as "{title} {body}"; names may be nested (a.b)."""

    text: str = "text"
    template: str | None = None
    group: str | None = None

    def check(self) -> None:
        if self.template is None:
            return
        try:
            parts = list(string.Formatter().parse(self.template))
        except ValueError:
            raise UsageError(f"--template {self.template!r} has a brace that is not closed") from None
        if any(spec or conversion for _, _, spec, conversion in parts):
            raise UsageError(f"--template {self.template!r}: only plain names such as {{title}} may stand in braces")
        if not self._names():
            raise UsageError(f"--template {self.template!r} names no field; write such as '{{title}} {{body}}'")
        if "" in self._names():
            raise UsageError(f"--template {self.template!r} has empty braces: name a field in them")

    def _names(self) -> list[str]:
        if self.template is None:
            return [self.text]
        return [name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None]

    def columns(self) -> list[str]:
        """Every name that is read."""
        return list(dict.fromkeys([*self._names(), *([self.group] if self.group else [])]))

    def shown(self) -> str:
        return ", ".join(repr(name) for name in self._names())

    def document(self, record: dict[str, Any]) -> str | Reason:
        """The text of a record."""
        if self.template is None:
            text = self._value(record, self.text)
        else:
            parts = []
            for literal, name, _, _ in string.Formatter().parse(self.template):
                parts.append(literal)
                if name is not None:
                    value = self._value(record, name, numbers=True)
                    if isinstance(value, Reason) and value is not Reason.EMPTY:
                        return value
                    parts.append("" if value is Reason.EMPTY else value)
            text = "".join(parts)
            if not any(part.strip() for part in parts[1::2]):
                return Reason.EMPTY
        return text if isinstance(text, Reason) else checked(text)

    @staticmethod
    def _value(record: dict[str, Any], name: str, numbers: bool = False) -> str | Reason:
        value = lookup(record, name)
        if value is Reason.NO_FIELD:
            return Reason.NO_FIELD
        if value is None:
            return Reason.EMPTY
        if isinstance(value, bytes):
            try:
                return value.decode("utf-8")
            except UnicodeDecodeError:
                return Reason.UNDECODABLE
        if isinstance(value, str):
            return value
        return str(value) if numbers and type(value) in (int, float) else Reason.NOT_TEXT

    def group_of(self, record: dict[str, Any]) -> str | Reason | None:
        """The value that keeps records on one side of the split; None where no field is named."""
        if self.group is None:
            return None
        value = self._value(record, self.group, numbers=True)
        return Reason.NO_GROUP if isinstance(value, Reason) or not value.strip() else value


def lookup(record: dict[str, Any], name: str) -> Any:
    """The value of `name`, or of the path a.b where no field has the whole name; Reason.NO_FIELD where there is none."""
    if name in record:
        return record[name]
    head, dot, rest = name.partition(".")
    inner = record.get(head) if dot else None
    return lookup(inner, rest) if isinstance(inner, dict) else Reason.NO_FIELD


def checked(text: str) -> str | Reason:
    """The text, unless it is blank or no valid Unicode (half of a surrogate pair, or bytes that could not be decoded)."""
    if not text.strip():
        return Reason.EMPTY
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return Reason.UNDECODABLE
    return text


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
    """A record that ends the build; the reader, who knows the file's label, puts it into words."""

    def __init__(self, source: int, begin: int, number: int, reason: Reason) -> None:
        super().__init__(source, begin, number, reason)
        self.source, self.begin, self.number, self.reason = source, begin, number, reason


def documents(chunk: Chunk, fields: Fields, on_error: str) -> Iterator[Document | Reason]:
    """A document or a reason for every record; a broken record (empty ones are not) raises unless `on_error` is "skip"."""
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
    """What is wrong with a record and what to do, without a word of its content."""
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


def normalised(text: str) -> bytes:
    """The text as far as two copies of one document agree: composed Unicode, white space collapsed."""
    return " ".join(unicodedata.normalize("NFC", text).split()).encode("utf-8")


def split_of(text: str, validation: float | None, group: str | None = None) -> str:
    """The side of the split a document is on, by its normalised text alone, or by its group where it has one.

    So duplicates are on one side, growing the corpus or raising the share moves no document out of validation, and the
    seed of the packing plays no part.
    """
    if not validation:
        return "train"
    digest = hashlib.blake2b(normalised(group or text), digest_size=8, person=b"clm-detour-split").digest()
    return "validation" if int.from_bytes(digest, "big") < validation * 2.0**64 else "train"


def content_hash(text: str) -> bytes:
    """16 bytes that two documents share when their normalised texts do."""
    return hashlib.blake2b(normalised(text), digest_size=16, person=b"clm-detour-same_").digest()
