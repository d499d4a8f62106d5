"""Documents to packed rows, read top to bottom.

    files -> records -> batches -> ids -> train or validation -> packer -> shards, then the manifest

Reading and packing go on in this thread while the tokenizers library works on the batch before with every core. The
order of documents is that of the files and never depends on timing, so a build gives the same bytes each time.
"""

import hashlib
import time
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from tqdm import tqdm

from data_prep.documents import Reason, texts
from data_prep.errors import Failure, UsageError
from data_prep.packing import FILL, BestFit, Tokens
from data_prep.rows import Manifest
from data_prep.sources import SourceFile, find_files, open_file
from data_prep.tokenizer import DocumentTokenizer, load_tokenizer
from data_prep.writing import SHARD_BYTES, RowsWriter, aside

BATCH_CHARACTERS = 2_000_000  # what is tokenised at once; the encodings of a batch take about 100 bytes a token
BATCH_DOCUMENTS = 10_000
SHORTEST_ROW = 8


@dataclass(frozen=True)
class BuildOptions:
    inputs: list[str]
    tokenizer: str  # folder or hub name
    out: str
    row_length: int  # tokens
    text_field: str = "text"
    validation: float | None = None  # share of documents
    on_error: str = "fail"  # or "skip"
    seed: int = 17
    fill: float = FILL  # below it documents are cut
    shard_bytes: int = SHARD_BYTES

    def check(self) -> None:
        if self.row_length < SHORTEST_ROW:
            raise UsageError(f"--row-length {self.row_length} is too short: at least {SHORTEST_ROW} tokens")
        if self.validation is not None and not 0 < self.validation < 1:
            raise UsageError(
                f"--validation {self.validation:g} is no share between 0 and 1; 0.01 keeps 1 % of the documents back"
            )
        if not 0 <= self.fill < 1:
            raise UsageError(f"--fill {self.fill:g} is no share from 0 to below 1, such as 0.995")
        if not 1 << 10 <= self.shard_bytes < 1 << 32:
            raise UsageError("--shard-size must lie between 1 kb and 4 gb")


@dataclass(frozen=True)
class Document:
    text: str
    source: int  # number of its file
    split: str  # "train" or "validation"


@dataclass
class Tally:
    """What was read and dropped so far."""

    sources: list[tuple[str, int]] = field(default_factory=list)  # (sha256, bytes) of each file read to its end
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> records


@dataclass(frozen=True)
class BuildReport:
    manifests: list[Manifest]
    dropped: dict[str, int]
    left_out: int  # files of unknown kind in folders
    edges: int  # special tokens of a document
    seconds: float


def build(options: BuildOptions) -> BuildReport:
    """Build the rows that `options` asks for. Raises Failure (nothing is left behind then) and UsageError."""
    options.check()
    found = find_files(options.inputs)
    tokenizer = load_tokenizer(options.tokenizer)
    tally = Tally()
    with aside(options.out) as folder:
        splits = ("train", "validation") if options.validation else ("train",)
        writers = {
            split: RowsWriter(
                folder / split if options.validation else folder,
                tokenizer,
                BestFit(options.row_length, options.seed, options.fill),
                split if options.validation else None,
                options.shard_bytes,
            )
            for split in splits
        }
        start = time.perf_counter()
        total = sum(file.bytes for file in found.files)
        with tqdm(total=total, unit="B", unit_scale=True, desc="build", disable=None) as bar:
            documents = read(found.files, options, tally, bar.update)
            for batch, arrays in ahead(batches(documents), tokenizer):
                for document, ids in zip(batch, arrays, strict=True):
                    if len(ids):
                        writers[document.split].add(ids, document.source)
                    else:
                        tally.dropped[Reason.EMPTY] += 1
                tokens = sum(writer.tokens for writer in writers.values())
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
        _refuse_empty(writers, tally, options)
        # A dropped record has no text, so no side of the split: all of them are counted in the first manifest.
        dropped = dict(sorted(tally.dropped.items()))
        manifests = [
            writer.finish(tally.sources, dropped if split == splits[0] else {}) for split, writer in writers.items()
        ]
        seconds = time.perf_counter() - start
    return BuildReport(manifests, dropped, found.left_out, tokenizer.edges, seconds)


def read(
    files: list[SourceFile], options: BuildOptions, tally: Tally, advance: Callable[[int], object]
) -> Iterator[Document]:
    """The documents of all files in order; drops and sources go to `tally`."""
    for source, file in enumerate(files):
        with open_file(file, advance) as opened:
            for record in texts(file, opened.stream, options.text_field, options.on_error):
                if isinstance(record.content, Reason):
                    tally.dropped[record.content] += 1
                else:
                    yield Document(record.content, source, split_of(record.content, options.validation))
            tally.sources.append((opened.digest(), file.bytes))


def normalised(text: str) -> bytes:
    """The text as far as two copies of one document agree: composed Unicode, white space collapsed."""
    return " ".join(unicodedata.normalize("NFC", text).split()).encode("utf-8")


def split_of(text: str, validation: float | None) -> str:
    """The side of the split a document is on, by its normalised text alone.

    So duplicates are on one side, growing the corpus or raising the share moves no document out of validation, and the
    seed of the packing plays no part.
    """
    if not validation:
        return "train"
    digest = hashlib.blake2b(normalised(text), digest_size=8, person=b"clm-detour-split").digest()
    return "validation" if int.from_bytes(digest, "big") < validation * 2.0**64 else "train"


def batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Batches bounded in documents and characters (a single longer document makes a batch of its own)."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def ahead(
    batched: Iterable[list[Document]], tokenizer: DocumentTokenizer
) -> Iterator[tuple[list[Document], list[Tokens]]]:
    """Each batch with its ids, in order; the next one is already being tokenised while the caller works on this one."""
    running: deque[tuple[list[Document], Future[list[Tokens]]]] = deque()
    with ThreadPoolExecutor(1) as pool:
        for batch in batched:
            running.append((batch, pool.submit(tokenizer.encode, [document.text for document in batch])))
            if len(running) > 1:
                done, future = running.popleft()
                yield done, future.result()
        while running:
            done, future = running.popleft()
            yield done, future.result()


def _refuse_empty(writers: dict[str, RowsWriter], tally: Tally, options: BuildOptions) -> None:
    counts = {split: writer.documents.total() for split, writer in writers.items()}
    if not sum(counts.values()):
        dropped = (
            ", ".join(f"{count} {reason}" for reason, count in sorted(tally.dropped.items())) or "no records at all"
        )
        raise Failure(f"the corpus is empty: no document is left of {' '.join(map(repr, options.inputs))} ({dropped})")
    for split, count in counts.items():
        if not count:
            raise Failure(
                f"no document of {sum(counts.values())} falls into {split} with --validation {options.validation:g};"
                " change the share, or leave it out"
            )
