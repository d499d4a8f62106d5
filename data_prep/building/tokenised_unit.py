"""A unit of work: chunks of records become a file of tokenised documents, complete or absent.

    a line of JSON      counts: documents, tokens, records dropped by reason
    uint32 [documents]  tokens of each
    uint32 [documents]  number of its source file
    uint8  [documents]  1: the document belongs to the validation split
    uint16 or uint32 [tokens]   ids

If the build drops duplicates, a second file is written beside it, and before it: 16 bytes a document, the hash of its text.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.documents import Chunk, Document, Fields, Reason, content_hash, documents, split_of
from data_prep.rows import AtomicFiles, token_dtype
from data_prep.tokenizer import tokenizer_of

BATCH_CHARACTERS = 1 << 19  # that are tokenised at once: encodings take about 100 bytes a token
HASHES = ".hashes"  # ending of the second file


@dataclass(frozen=True)
class Unit:
    """The tokenised documents of a unit, in the order of the corpus."""

    lengths: NDArray[np.uint32]
    sources: NDArray[np.uint32]
    validation: NDArray[np.uint8]
    tokens: NDArray[np.unsignedinteger]
    dropped: dict[str, int]

    def to_bytes(self) -> bytes:
        head = {"documents": len(self.lengths), "tokens": len(self.tokens), "dropped": self.dropped}
        arrays = (self.lengths, self.sources, self.validation, self.tokens)
        return b"".join([json.dumps(head, sort_keys=True).encode(), b"\n", *(array.tobytes() for array in arrays)])

    @classmethod
    def from_bytes(cls, data: bytes, vocabulary: int) -> "Unit":
        end = data.index(b"\n")
        head: dict[str, Any] = json.loads(data[:end])
        count, at = head["documents"], end + 1

        def take(dtype: Any, length: int) -> NDArray[Any]:
            nonlocal at
            array = np.frombuffer(data, dtype, length, at)
            at += array.nbytes
            return array

        lengths, sources = take(np.uint32, count), take(np.uint32, count)
        validation = take(np.uint8, count)
        return cls(lengths, sources, validation, take(token_dtype(vocabulary), head["tokens"]), head["dropped"])

    def documents(self) -> Iterator[NDArray[np.unsignedinteger]]:
        return iter(np.split(self.tokens, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else [])


@dataclass(frozen=True)
class Settings:
    """What all units of a build have in common. It is small, for it travels with each unit."""

    store: AtomicFiles
    tokenizer: tuple[str, str, bool | None]  # arguments of `tokenizer_of`
    fields: Fields
    validation: float | None
    deduplicate: bool
    on_error: str


@dataclass(frozen=True)
class Done:
    """What a worker reports of a finished unit."""

    slice: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class TokeniseUnit:
    """A task: tokenise the documents of `chunks` and store them as `name`."""

    settings: Settings
    slice: int
    name: str
    chunks: list[Chunk]

    def __call__(self) -> Done:
        settings = self.settings
        tokenizer = tokenizer_of(*settings.tokenizer)
        dropped: Counter[str] = Counter()
        facts: list[tuple[int, int]] = []  # (source, validation)
        hashes: list[bytes] = []
        arrays: list[NDArray[np.unsignedinteger]] = []
        for batch in _batches(self.chunks, settings, dropped):
            for document, ids in zip(batch, tokenizer.encode([d.text for d in batch]), strict=True):
                if not len(ids):
                    dropped[Reason.EMPTY] += 1
                    continue
                arrays.append(ids)
                held = split_of(document.text, settings.validation, document.group) == "validation"
                facts.append((document.source, int(held)))
                if settings.deduplicate:
                    hashes.append(content_hash(document.text))
        unit = Unit(
            lengths=np.array([len(ids) for ids in arrays], np.uint32),
            sources=np.array([fact[0] for fact in facts], np.uint32),
            validation=np.array([fact[1] for fact in facts], np.uint8),
            tokens=np.concatenate(arrays) if arrays else np.zeros(0, tokenizer.dtype),
            dropped=dict(sorted(dropped.items())),
        )
        if settings.deduplicate:
            settings.store.put(self.name + HASHES, b"".join(hashes))
        settings.store.put(self.name, unit.to_bytes())
        return Done(self.slice, len(arrays), len(unit.tokens))


def _batches(chunks: list[Chunk], settings: Settings, dropped: Counter[str]) -> Iterator[list[Document]]:
    """Documents in batches of about BATCH_CHARACTERS. Counts the dropped records."""
    batch: list[Document] = []
    held = 0
    for chunk in chunks:
        for found in documents(chunk, settings.fields, settings.on_error):
            if isinstance(found, Reason):
                dropped[found] += 1
                continue
            batch.append(found)
            held += len(found.text)
            if held >= BATCH_CHARACTERS:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch
