"""The packed row, the manifest beside the rows, and the reader: all that training knows of data preparation.

A folder (or URL) of rows:

    index.json  shard.00000.mds ...    MDS shards, two columns a row
    manifest.json                      what the rows are, see `Manifest`
    tokenizer/                         the tokenizer's own files: rows are self-contained

A row holds whole documents or pieces of documents, one after the other, never padded:

    tokens   uint16 or uint32 [length]   ids, special tokens included; length <= manifest.row_length
    lengths  uint32 [documents]          length of each piece; they sum to len(tokens)

`lengths` is the single source of document boundaries; nothing is ever guessed from a separator token.
"""

import hashlib
import json
import os
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.cache import VERIFY, Ahead, Remote, Shard, ShardFiles, writing
from data_prep.errors import Failure

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"

AHEAD_THREADS = 4  # downloads in the background, of each process
TOUCH_EVERY = 5.0  # seconds: how finely "least recently used" is told
EVICTIONS = 10  # of a shard between its download and its reading, before the cache counts as too small


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TokenizerInfo(_Strict):
    name: str  # as given on the command line, the last path component only
    digest: str  # `tokenizer_digest` of tokenizer.json
    vocabulary: int  # ids are below this
    special: dict[str, int]  # such as {"[CLS]": 0, "[SEP]": 1}: every special token; never masked, never random
    roles: dict[str, int]  # of "cls", "sep", "mask", "pad" and, where there is one, "unk"
    add_prefix_space: bool | None = None  # whether a document's first word is as after a space; None: no such setting


class Counts(_Strict):
    documents: int  # that reached the rows
    pieces: int  # entries of `lengths`: documents, plus one for every split
    tokens: int
    rows: int
    dropped: dict[str, int]  # reason -> documents
    dropped_tokens: int = 0  # of duplicates; whatever else is dropped is dropped before it has tokens


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
    repaired: list[str] = []  # what `repair` dropped: `counts` tell what is left, `sources` and documents what was

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
    """sha256 of what tokenizer.json means: the same whatever library version wrote the file."""
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
    """`tokenizer_digest` of a tokenizer.json that was read.

    Padding and truncation are settings of a call, not of the tokenizer; merges are written "a b" by older versions of
    tokenizers and ["a", "b"] by newer ones.
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
    """Name and version of this software, installed or run from a checkout: rows must not depend on which."""
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    try:
        return f"clm-detour {version('clm-detour')}"
    except PackageNotFoundError:
        return f"clm-detour {tomllib.loads(project.read_text('utf-8'))['project']['version']}"


def is_url(location: str | Path) -> bool:
    return "://" in str(location)


class Rows:
    """Rows of one folder or URL, read by index. Any number of threads and processes may share a cache.

    mosaicml-streaming's downloaders and its shard reader are used; its `StreamingDataset`, with its shared memory, its
    iteration and its resumable state, is not. Reading has no state but the files in the cache.
    """

    def __init__(
        self,
        location: str | Path,
        cache: str | Path | None = None,
        cache_limit: int | None = None,
        opened_before: bool = False,
    ) -> None:
        """`cache`: where shards of a URL are kept, at most `cache_limit` bytes of them for all sources of a node.

        `opened_before`: the run has read these rows at an earlier start. Silence is then an outage, to be waited out.
        """
        from streaming.base.format import reader_from_json  # costs seconds; commands that only print must not pay it

        self.location = str(location)
        if is_url(location):
            if cache is None:
                raise Failure(f"{location} is a URL: it needs a local cache folder")
            self._files = self._remote_files(Path(cache), cache_limit, opened_before)
        else:
            folder = Path(location)
            if not (folder / "index.json").is_file():
                if (folder / "train" / "index.json").is_file():
                    raise Failure(f"no rows at {location} itself: name {location}/train, or {location}/validation")
                reason = "there is no such folder" if not folder.is_dir() else "it has no index.json"
                raise Failure(f"no rows at {location}: {reason}; `python -m data_prep build` makes them")
            self._files = ShardFiles(None, folder)
        self.folder = self._files.folder
        self.manifest = self._read_manifest()
        index = self._read_index()
        self._shards = [Shard.from_index(entry) for entry in index["shards"]]
        self._readers = [reader_from_json(str(self.folder), "", entry) for entry in index["shards"]]
        self.shard_rows = np.array([entry["samples"] for entry in index["shards"]], np.int64)
        self._ends = np.cumsum(self.shard_rows)
        self._ready = [False] * len(self._shards)
        self._touched = [0.0] * len(self._shards)
        self._ahead = Ahead(AHEAD_THREADS)
        if rows_digest(index) != self.manifest.rows_digest or len(self) != self.manifest.counts.rows:
            raise Failure(
                f"{location}: index.json is not the one its manifest describes; `python -m data_prep verify` tells more"
            )
        if self._files.remote is not None:
            self._files.remote.opened = True

    def _remote_files(self, cache: Path, limit: int | None, opened_before: bool) -> ShardFiles:
        """The manifest is read anew each time: rows that were built again are other rows, in another folder."""
        remote = Remote(self.location, opened_before)
        place = hashlib.sha256(self.location.encode()).hexdigest()[:16]
        aside = cache / f".{place}.{os.getpid()}.{threading.get_ident()}.tmp"
        with writing(cache):
            cache.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                remote.download(MANIFEST, aside)
                content = aside.read_bytes()
            except FileNotFoundError:
                raise Failure(f"{self.location} has no {MANIFEST}: it is not a finished build") from None
            finally:
                aside.unlink(missing_ok=True)
            folder = cache / f"{place}-{hashlib.sha256(content).hexdigest()[:8]}"
            folder.mkdir(exist_ok=True, mode=0o700)
            if not (folder / MANIFEST).exists():
                own = folder / f".{MANIFEST}.{os.getpid()}.{threading.get_ident()}.tmp"
                own.write_bytes(content)
                os.replace(own, folder / MANIFEST)
        return ShardFiles(remote, folder, limit)

    def _fetch(self, name: str) -> Path:
        try:
            return self._files.file(name)
        except FileNotFoundError:
            raise Failure(f"{self.location} has no {name}: it is not a finished build") from None

    def _read_manifest(self) -> Manifest:
        path = self._fetch(MANIFEST)
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise Failure(f"{self.location} has no {MANIFEST}: it is not a finished build") from None
        except ValidationError as error:
            where = ".".join(str(part) for part in error.errors()[0]["loc"]) or "its JSON"
            raise Failure(f"{self.location}/{MANIFEST} cannot be used: {where} is wrong for this version") from None

    def _read_index(self) -> dict[str, Any]:
        path = self._fetch("index.json")
        try:
            index: dict[str, Any] = json.loads(path.read_bytes())
            expected = columns(self.manifest.tokenizer.vocabulary)
            for shard in index["shards"]:
                for part in (shard["raw_data"], shard["zip_data"] or shard["raw_data"]):
                    if part["basename"] != os.path.basename(part["basename"]) or part["basename"] in ("", ".", ".."):
                        raise Failure(f"{self.location}/index.json names a shard outside its folder")
                if dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) != expected:
                    raise Failure(f"{self.location}/index.json: its columns are not those of packed rows ({expected})")
            return index
        except (ValueError, KeyError, TypeError):
            raise Failure(f"{self.location}/index.json is damaged; `python -m data_prep verify` tells more") from None

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> Row:
        """Row `index`, 0 <= index < len(self); downloads its shard first where that is needed."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        within = index - int(self._ends[shard] - self.shard_rows[shard])
        try:
            sample = self._read(shard, within)
            row = Row(sample["tokens"], sample["lengths"])
        except Exception as error:
            # Whatever streaming or numpy says of a damaged shard may quote it; our own lines name the shard.
            if isinstance(error, Failure):
                raise type(error)(f"{self.location}: row {index} of shard {shard} cannot be read: {error}") from None
            raise Failure(
                f"{self.location}: row {index} of shard {shard} cannot be read ({type(error).__name__}); {VERIFY}"
            ) from None
        problem = row.check(self.manifest.row_length, self.manifest.tokenizer.vocabulary)
        if problem:
            raise Failure(f"{self.location}: row {index} of shard {shard} is damaged: {problem}")
        return row

    def _read(self, shard: int, within: int) -> Any:
        for attempt in range(EVICTIONS):
            if not self._ready[shard]:
                self._files.ensure(self._shards[shard])
                self._ready[shard] = True
            if time.monotonic() - self._touched[shard] > TOUCH_EVERY:
                self._files.touch(self._shards[shard])
                self._touched[shard] = time.monotonic()
            try:
                return self._readers[shard][within]
            except FileNotFoundError:  # it made room for another one, of this process or another
                self._ready[shard] = False
                self._ahead.forget(shard)
                if attempt == EVICTIONS - 1 or self._files.limit is None:
                    raise
        raise AssertionError

    def prefetch(self, indices: Iterable[int]) -> None:
        """Rows that will be read soon: their shards are fetched in the background. Nothing to do in a local folder."""
        if not is_url(self.location):
            return
        for shard in dict.fromkeys(np.searchsorted(self._ends, list(indices), side="right").tolist()):
            if not self._ready[shard]:
                self._ahead(shard, partial(self._files.ensure, self._shards[shard]))

    @property
    def shard_bytes(self) -> NDArray[np.int64]:
        """Of each shard, as it lies in the cache."""
        return np.array([shard.bytes for shard in self._shards], np.int64)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def tokenizer_folder(self) -> Path:
        """The tokenizer's files beside the rows, downloaded where the rows are at a URL."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            self._fetch(f"{TOKENIZER}/{name}")
        return self.folder / TOKENIZER
