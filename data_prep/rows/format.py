"""The packed row and the manifest beside the rows.

A folder (or URL) of rows:

    index.json  shard.00000.mds ...    MDS shards, two columns a row
    manifest.json                      what the rows are, see `Manifest`
    tokenizer/                         the tokenizer's own files: rows are self-contained

A row holds whole documents or pieces of documents, one after the other, never padded:

    tokens   uint16 or uint32 [length]   ids, special tokens included; length <= manifest.row_length
    lengths  uint32 [documents]          length of each piece; they sum to len(tokens)

`lengths` is the single source of document boundaries. Nothing is ever guessed from a separator token.
"""

import hashlib
import json
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from command_line import Failure

FORMAT_VERSION = 1
INDEX = "index.json"
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
HASH = "xxh64"  # of every shard, in index.json; checked after each download and whenever a local shard is opened


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerInfo(_Strict):
    name: str  # as the command line gives it, the last path component only
    digest: str  # `tokenizer_digest` of tokenizer.json
    vocabulary: int  # ids are below this
    special: dict[str, int]  # such as {"[CLS]": 0, "[SEP]": 1}: every special token; never masked, never random
    roles: dict[str, int]  # of "cls", "sep", "mask", "pad" and, where there is one, "unk"
    add_prefix_space: bool | None = (
        None  # treat a document's first word as if a space stood before it; None: no such setting
    )


class Counts(_Strict):
    documents: int  # that reached the rows
    pieces: int  # entries of `lengths`: one for each document, and one more for each cut
    tokens: int
    rows: int
    dropped: dict[str, int]  # reason -> documents
    dropped_tokens: int = 0  # of duplicates; all other drops happen before a record has tokens


class Source(_Strict):
    digest: str  # sha256 of the file's bytes; no name: it may be a patient's
    bytes: int
    documents: int


class Manifest(_Strict):
    """What a folder of rows holds. Counts and digests only: no text, no ids, no file names."""

    format_version: int = FORMAT_VERSION
    software: str
    tokenizer: TokenizerInfo
    row_length: int
    packing: str
    split: str | None  # "train", "validation", or None when the build made no split
    counts: Counts
    sources: list[Source]
    seed: int
    rows_digest: str  # `rows_digest` of index.json
    repaired: list[
        str
    ] = []  # what `repair` dropped: rows, pieces and tokens are then what is left, documents and sources what was built

    @property
    def fill(self) -> float:
        """Share of the row length that holds tokens, 0 to 1."""
        return self.counts.tokens / max(1, self.counts.rows * self.row_length)


@dataclass(frozen=True)
class Row:
    tokens: NDArray[np.unsignedinteger]  # [length]
    lengths: NDArray[np.uint32]  # [pieces], each > 0, sum == length

    def check(self, row_length: int, vocabulary: int) -> str | None:
        """What is wrong with the row, or None."""
        if self.tokens.ndim != 1 or self.lengths.ndim != 1 or not len(self.tokens):
            return "it is empty or not one-dimensional"
        if len(self.tokens) > row_length:
            return f"it holds {len(self.tokens)} tokens, more than the row length {row_length}"
        if (self.lengths == 0).any() or int(self.lengths.sum(dtype=np.int64)) != len(self.tokens):
            return "its document lengths do not sum to its tokens"
        if int(self.tokens.max()) >= vocabulary:
            return f"it holds an id beyond the vocabulary of {vocabulary}"
        return None


def token_dtype(vocabulary: int) -> str:
    """uint16 where every id below `vocabulary` fits, else uint32."""
    return "uint16" if vocabulary <= 1 << 16 else "uint32"


def columns(vocabulary: int) -> dict[str, str]:
    """The MDS columns of a row, for `streaming.MDSWriter`."""
    return {"tokens": f"ndarray:{token_dtype(vocabulary)}", "lengths": "ndarray:uint32"}


def tokenizer_digest(folder: str | Path) -> str:
    """sha256 of the meaning of tokenizer.json: the same, whichever library version wrote the file."""
    return content_digest(tokenizer_content(folder))


def tokenizer_content(folder: str | Path) -> dict[str, Any]:
    """tokenizer.json as an object. Raises Failure."""
    path = Path(folder) / "tokenizer.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Failure(f"{folder} has no tokenizer.json: a fast tokenizer is needed") from None
    except ValueError:
        raise Failure(f"{path} is not JSON") from None
    if not isinstance(content, dict):
        raise Failure(f"{path} is not a JSON object")
    return content


def content_digest(content: dict[str, Any]) -> str:
    """`tokenizer_digest` of the content of a tokenizer.json.

    Padding and truncation are left out: they are settings of a call, not of the tokenizer. Older versions of tokenizers write
    a merge as "a b", newer ones as ["a", "b"]; both give the same digest.
    """
    content = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
    model = content.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        content["model"] = model | {"merges": [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def rows_digest(index: dict[str, Any]) -> str:
    """sha256 over the shards' sizes, sample counts and hashes, in order: which rows, in which order."""
    shards = [[s["samples"], s["raw_data"]["bytes"], s["raw_data"]["hashes"]] for s in index["shards"]]
    return hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()


def software() -> str:
    """Name and version of this software. Rows must not depend on whether it is installed or run from a checkout."""
    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        return f"clm-detour {version('clm-detour')}"
    except PackageNotFoundError:
        return f"clm-detour {tomllib.loads(project.read_text('utf-8'))['project']['version']}"


def is_url(location: str | Path) -> bool:
    return "://" in str(location)
