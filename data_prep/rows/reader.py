"""Read packed rows by index, from a folder or a URL.

We use mosaicml-streaming's downloaders and its shard reader. We do not use its `StreamingDataset`, which brings shared
memory, an iteration and a resumable state: our reader has no state but the files in the cache.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from command_line import Failure
from data_prep.rows.downloads import Remote, writing
from data_prep.rows.format import INDEX, MANIFEST, TOKENIZER, Manifest, Row, columns, is_url, rows_digest
from data_prep.rows.shard_cache import VERIFY, Ahead, Shard, ShardFiles

AHEAD_THREADS = 4  # downloads in the background, of each process
TOUCH_EVERY = 5.0  # seconds: how finely "least recently used" is told
EVICTIONS = (
    10  # times a shard may be removed between its download and its reading, before the cache counts as too small
)


class Rows:
    """Rows of one folder or URL, read by index. Any number of threads and processes may share a cache."""

    def __init__(
        self,
        location: str | Path,
        cache: str | Path | None = None,
        cache_limit: int | None = None,
        opened_before: bool = False,
    ) -> None:
        """`cache`: the folder that holds shards of a URL, at most `cache_limit` bytes for all sources of a node.

        `opened_before`: the run has read these rows at an earlier start. Silence then means an outage, and we wait.
        """
        from streaming.base.format import (
            reader_from_json,  # takes seconds; commands that only print must not wait for it
        )

        self.location = str(location)
        if is_url(location):
            if cache is None:
                raise Failure(f"{location} is a URL: it needs a local cache folder")
            self._files = self._remote_files(Path(cache), cache_limit, opened_before)
        else:
            folder = Path(location)
            if not (folder / INDEX).is_file():
                if (folder / "train" / INDEX).is_file():
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
        """The manifest is downloaded each time. Rows that were built again are other rows, so they get another folder."""
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
        path = self._fetch(INDEX)
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
        """Row `index`, 0 <= index < len(self). Downloads its shard first if it is not there."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._ends, index, side="right"))
        within = index - int(self._ends[shard] - self.shard_rows[shard])
        try:
            sample = self._read(shard, within)
            row = Row(sample["tokens"], sample["lengths"])
        except Exception as error:
            # Messages of streaming and numpy about a damaged shard may quote it. Ours only name the shard.
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
            except FileNotFoundError:  # this process or another removed it to make room
                self._ready[shard] = False
                self._ahead.forget(shard)
                if attempt == EVICTIONS - 1 or self._files.limit is None:
                    raise
        raise AssertionError

    def prefetch(self, indices: Iterable[int]) -> None:
        """Fetch the shards of these rows in the background, for they will be read soon. Does nothing in a local folder."""
        if not is_url(self.location):
            return
        for shard in dict.fromkeys(np.searchsorted(self._ends, list(indices), side="right").tolist()):
            if not self._ready[shard]:
                self._ahead(shard, partial(self._files.ensure, self._shards[shard]))

    @property
    def shard_bytes(self) -> NDArray[np.int64]:
        """[shards] Bytes of each shard as it lies in the cache, unpacked."""
        return np.array([shard.bytes for shard in self._shards], np.int64)

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer's files beside the rows. Downloads them if the rows are at a URL."""
        for name in ("tokenizer.json", "tokenizer_config.json"):
            self._fetch(f"{TOKENIZER}/{name}")
        return self.folder / TOKENIZER
