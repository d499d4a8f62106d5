"""Which fields of a record make a document, one or a template of several; and why a record may give none."""

import string
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from command_line import UsageError


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
    """The fields that make a document: one, or a template such as "{title} {body}". Names may be nested (a.b)."""

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
            raise UsageError(f"--template {self.template!r} names no field; write one such as '{{title}} {{body}}'")
        if "" in self._names():
            raise UsageError(f"--template {self.template!r} has empty braces: name a field in them")

    def _names(self) -> list[str]:
        if self.template is None:
            return [self.text]
        return [name for _, name, _, _ in string.Formatter().parse(self.template) if name is not None]

    def columns(self) -> list[str]:
        """The names of all fields that are read."""
        return list(dict.fromkeys([*self._names(), *([self.group] if self.group else [])]))

    def shown(self) -> str:
        """The names of the text's fields, for messages."""
        return ", ".join(repr(name) for name in self._names())

    def document(self, record: dict[str, Any]) -> str | Reason:
        """The text of a record, or the reason why it has none."""
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
        """The value that keeps records on one side of the split. None if the build names no such field."""
        if self.group is None:
            return None
        value = self._value(record, self.group, numbers=True)
        return Reason.NO_GROUP if isinstance(value, Reason) or not value.strip() else value


def lookup(record: dict[str, Any], name: str) -> Any:
    """The value of the field `name`, else of the path a.b. Reason.NO_FIELD if the record has neither."""
    if name in record:
        return record[name]
    head, dot, rest = name.partition(".")
    inner = record.get(head) if dot else None
    return lookup(inner, rest) if isinstance(inner, dict) else Reason.NO_FIELD


def checked(text: str) -> str | Reason:
    """The text, or the reason: it is blank, or no valid Unicode (half a surrogate pair, bytes that could not be decoded)."""
    if not text.strip():
        return Reason.EMPTY
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            return Reason.UNDECODABLE
    return text
