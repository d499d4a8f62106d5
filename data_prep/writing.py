"""Where output goes: folders written aside, and a folder of rows in the making."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.errors import Failure, UsageError
from data_prep.mds import INDEX, ShardWriter, index_bytes
from data_prep.packing import BestFit, OnePerRow, Tokens
from data_prep.rows import MANIFEST, TOKENIZER, Counts, Manifest, Source, is_url, rows_digest, software
from data_prep.store import Store
from data_prep.tokenizer import DocumentTokenizer

SHARD_BYTES = 64 << 20


def empty_place(out: str) -> Path:
    """The absolute path of a local `out` that does not exist or is an empty folder; else Failure."""
    final = Path(os.path.abspath(out))
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise Failure(f"--out {out!r} exists and is not a folder")
    if final.is_dir() and any(final.iterdir()):
        raise Failure(f"--out {out!r} is not empty: nothing is overwritten; remove it or name another folder")
    return final


def put_in_place(folder: Path, final: Path, out: str) -> None:
    try:
        folder.rename(final)  # over an empty folder too
    except OSError as error:
        raise Failure(f"--out {out!r} could not be put in place: {error.strerror}") from None


@contextmanager
def aside(out: str) -> Iterator[Path]:
    """A new folder beside `out`, mode 0700, that takes its place when the block ends well and is removed when it does not.

    Raises Failure where `out` holds anything already.
    """
    if is_url(out):
        raise UsageError(f"--out {out!r} is a URL: name a local folder")
    final = empty_place(out)
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))  # mode 0700
    try:
        yield folder
        put_in_place(folder, final, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RowsWriter:
    """One folder of rows in the making: takes documents, packs them, writes shards, counts; the manifest comes last."""

    def __init__(
        self,
        store: Store,
        tokenizer: DocumentTokenizer,
        packer: BestFit | OnePerRow,
        split: str | None,
        shard_bytes: int = SHARD_BYTES,
        compression: str | None = None,
    ) -> None:
        self.store = store
        self.tokenizer = tokenizer
        self.packer = packer
        self.split = split
        self.prefix = f"{split}/" if split else ""
        self.tokens = 0
        self.documents: Counter[int] = Counter()  # by the number of the source file
        self.written: set[str] = set()  # names of files
        self._shards = ShardWriter(self._put, tokenizer.info.vocabulary, shard_bytes, compression)

    def _put(self, name: str, data: bytes) -> None:
        self.store.put(self.prefix + name, data)
        self.written.add(self.prefix + name)

    def add(self, document: Tokens, source: int) -> None:
        self.documents[source] += 1
        self.tokens += len(document)
        for row in self.packer.add(document):
            self._shards.write(row)

    def finish(self, sources: list[tuple[str, int]], dropped: dict[str, int], dropped_tokens: int) -> Manifest:
        """Write what still waits, the tokenizer, the index, and last the manifest; `sources` are (sha256, bytes)."""
        for row in self.packer.finish():
            self._shards.write(row)
        index = self._shards.finish()
        for name, data in self.tokenizer.files().items():
            self._put(f"{TOKENIZER}/{name}", data)
        self._put(INDEX, index_bytes(index))
        manifest = Manifest(
            software=software(),
            tokenizer=self.tokenizer.info,
            row_length=self.packer.row_length,
            packing=self.packer.policy,
            split=self.split,
            counts=Counts(
                documents=self.documents.total(),
                pieces=self.packer.pieces,
                tokens=self.tokens,
                rows=self.packer.rows,
                dropped=dropped,
                dropped_tokens=dropped_tokens,
            ),
            sources=[
                Source(digest=digest, bytes=size, documents=self.documents[number])
                for number, (digest, size) in enumerate(sources)
            ],
            seed=self.packer.seed,
            rows_digest=rows_digest(index),
        )
        self._put(MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
        return manifest
