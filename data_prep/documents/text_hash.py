"""Hashes of a document's text: which side of the split it is on, and which documents are copies."""

import hashlib
import json
import string
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from command_line import Failure, UsageError


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
