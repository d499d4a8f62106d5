"""Packs documents and writes the folder of rows: shards, tokenizer, index and manifest."""

from collections import Counter

from data_prep.building.packing import BestFit, OnePerRow, Tokens
from data_prep.rows import (
    INDEX,
    MANIFEST,
    TOKENIZER,
    AtomicFiles,
    Counts,
    Manifest,
    ShardWriter,
    Source,
    index_bytes,
    rows_digest,
    software,
)
from data_prep.tokenizer import DocumentTokenizer

SHARD_BYTES = 64 << 20


class RowsWriter:
    """One folder of rows in the making. It takes documents, packs them, counts, and writes shards; the manifest comes last."""

    def __init__(
        self,
        store: AtomicFiles,
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
        """Write the rows that still wait, the tokenizer, the index, and last the manifest. `sources` are (sha256, bytes)."""
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
