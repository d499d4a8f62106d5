"""Where a build's output goes: written aside, complete or absent, readable by its owner only."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data_prep.errors import Failure, UsageError
from data_prep.packing import BestFit, Tokens
from data_prep.rows import (
    HASH,
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Row,
    Source,
    columns,
    is_url,
    rows_digest,
)
from data_prep.tokenizer import DocumentTokenizer

SHARD_BYTES = 64 << 20


@contextmanager
def aside(out: str) -> Iterator[Path]:
    """A new folder beside `out`, mode 0700, that takes its place when the block ends well and is removed when it does not.

    Raises Failure where `out` holds anything already.
    """
    if is_url(out):
        raise UsageError(f"--out {out!r} is a URL: build to a local folder, then copy it")
    final = Path(os.path.abspath(out))
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise Failure(f"--out {out!r} exists and is not a folder")
    if final.is_dir() and any(final.iterdir()):
        raise Failure(f"--out {out!r} is not empty: nothing is overwritten; remove it or name another folder")
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))  # mode 0700
    try:
        yield folder
        try:
            folder.rename(final)  # over an empty folder too
        except OSError as error:
            raise Failure(f"--out {out!r} could not be put in place: {error.strerror}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def software() -> str:
    try:
        return f"clm-detour {version('clm-detour')}"
    except PackageNotFoundError:
        return "clm-detour, not installed"


class RowsWriter:
    """One folder of rows in the making: takes documents, packs them, writes shards, counts; the manifest comes last."""

    def __init__(
        self,
        folder: Path,
        tokenizer: DocumentTokenizer,
        packer: BestFit,
        split: str | None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        from streaming import MDSWriter

        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self.tokenizer = tokenizer
        self.packer = packer
        self.split = split
        self.tokens = 0
        self.documents: Counter[int] = Counter()  # by the number of the source file
        self._writer = MDSWriter(
            out=str(folder), columns=columns(tokenizer.info.vocabulary), hashes=[HASH], size_limit=shard_bytes
        )

    def add(self, document: Tokens, source: int) -> None:
        self.documents[source] += 1
        self.tokens += len(document)
        for row in self.packer.add(document):
            self._write(row)

    def _write(self, row: Row) -> None:
        self._writer.write({"tokens": row.tokens, "lengths": row.lengths})

    def finish(self, sources: list[tuple[str, int]], dropped: dict[str, int]) -> Manifest:
        """Write what still waits, the index, the tokenizer, and last the manifest; `sources` are (sha256, bytes)."""
        for row in self.packer.finish():
            self._write(row)
        self._writer.finish()
        self.tokenizer.save(self.folder / TOKENIZER)
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
            ),
            sources=[
                Source(digest=digest, bytes=size, documents=self.documents[number])
                for number, (digest, size) in enumerate(sources)
            ],
            seed=self.packer.seed,
            rows_digest=rows_digest(json.loads((self.folder / "index.json").read_bytes())),
        )
        (self.folder / MANIFEST).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")
        return manifest
