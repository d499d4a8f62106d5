"""Hashes of a document's normalised text. They decide the side of the split, and tell which documents are copies."""

import hashlib
import unicodedata


def normalised(text: str) -> bytes:
    """The text in the form in which two copies of a document agree: composed Unicode, one space for each run of white space."""
    return " ".join(unicodedata.normalize("NFC", text).split()).encode("utf-8")


def split_of(text: str, validation: float | None, group: str | None = None) -> str:
    """ "train" or "validation", by the document's normalised text alone, or by its group if it has one.

    So all copies of a text, or all documents of a group, are on one side. A document in validation stays there when the corpus or
    the share grows. The seed of the packing plays no part.
    """
    if not validation:
        return "train"
    digest = hashlib.blake2b(normalised(group or text), digest_size=8, person=b"clm-detour-split").digest()
    return "validation" if int.from_bytes(digest, "big") < validation * 2.0**64 else "train"


def content_hash(text: str) -> bytes:
    """16 bytes, the same for two documents whose normalised texts are the same."""
    return hashlib.blake2b(normalised(text), digest_size=16, person=b"clm-detour-same_").digest()
