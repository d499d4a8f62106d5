"""`inspect`: what a folder of rows holds, as manifest and histograms, and as text only when the user asks for it."""

import tempfile
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data_prep.rows import Manifest, Rows, is_url
from data_prep.tokenizer import DocumentTokenizer
from data_prep.verify import folders_of_rows

READ_AT_MOST = 20_000  # rows that a histogram reads; of more rows, an even sample
SHARDS_OF_A_URL = 4  # that a histogram downloads
SOURCES_SHOWN = 5
BAR = 40  # characters of the longest bar


def inspect(location: str, shown: int) -> None:
    """Print manifest and histograms of the rows at `location`, a folder or URL, and the text of `shown` rows."""
    for number, folder in enumerate(folders_of_rows(location)):
        if number:
            print()
        if is_url(folder):
            with tempfile.TemporaryDirectory() as cache:  # mode 0700
                _inspect(Rows(folder, cache), shown)
        else:
            _inspect(Rows(folder), shown)


def _inspect(rows: Rows, shown: int) -> None:
    print("\n".join([*_manifest_lines(rows.manifest), *_largest_sources(rows.manifest)]))
    usable = np.arange(len(rows))
    if is_url(rows.location):  # a download for each shard, so only some of them
        shards = np.unique(np.linspace(0, len(rows.shard_rows) - 1, SHARDS_OF_A_URL).astype(int))
        usable = usable[np.isin(np.repeat(np.arange(len(rows.shard_rows)), rows.shard_rows), shards)]
    count = len(usable)
    indices = usable[np.unique(np.linspace(0, count - 1, min(count, READ_AT_MOST)).astype(int))].tolist()
    lengths = [rows[index].lengths for index in indices]
    of = f" ({len(indices):,} of {len(rows):,} rows)" if len(indices) < len(rows) else ""
    print(f"\nfill of a row, % of {rows.manifest.row_length:,} tokens{of}")
    fills = np.array([length.sum() for length in lengths]) / rows.manifest.row_length
    print("\n".join(_fill_histogram(fills)))
    print(f"\ntokens of a piece{of}")
    print("\n".join(_length_histogram(np.concatenate(lengths))))
    if shown:
        _show_text(rows, shown)


def _largest_sources(manifest: Manifest) -> list[str]:
    """The files that gave most documents, by number and digest, for their names are not recorded."""
    largest = sorted(enumerate(manifest.sources, 1), key=lambda item: -item[1].documents)[:SOURCES_SHOWN]
    if len(manifest.sources) < 2:
        return []
    return [
        f"  source {number:,}: {source.documents:,} documents, {source.bytes:,} bytes, sha256 {source.digest[:16]}"
        for number, source in largest
    ]


def _manifest_lines(manifest: Manifest) -> list[str]:
    counts, tokenizer = manifest.counts, manifest.tokenizer
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in counts.dropped.items())
    special = ", ".join(f"{token} {number}" for token, number in tokenizer.special.items())
    return [
        f"split        {manifest.split or 'none'}",
        f"documents    {counts.documents:,} in {counts.pieces:,} pieces; dropped: {dropped or 'none'}",
        f"tokens       {counts.tokens:,}",
        f"rows         {counts.rows:,} of {manifest.row_length:,}, fill {manifest.fill:.2%}",
        f"packing      {manifest.packing}; seed {manifest.seed}",
        f"tokenizer    {tokenizer.name}, {tokenizer.vocabulary:,} entries, digest {tokenizer.digest[:16]}",
        f"special      {special}",
        f"sources      {len(manifest.sources):,} files, {sum(source.bytes for source in manifest.sources):,} bytes",
        f"made by      {manifest.software}, format {manifest.format_version}",
        *(f"repaired     {note}" for note in manifest.repaired),
    ]


def _fill_histogram(fills: NDArray[np.floating]) -> list[str]:
    edges = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0]
    counts = [int(((fills >= low) & (fills < high)).sum()) for low, high in pairwise(edges)]
    names = [f"{low * 100:g} to {high * 100:g}" for low, high in pairwise(edges)]
    return _bars([*names, "100"], [*counts, int((fills >= 1).sum())])


def _length_histogram(lengths: NDArray[np.integer]) -> list[str]:
    top = int(lengths.max()).bit_length()
    powers = np.array([int(length).bit_length() for length in lengths])
    names = [f"{1 << power >> 1:,} to {(1 << power) - 1:,}" for power in range(1, top + 1)]
    return _bars(names, [int((powers == power).sum()) for power in range(1, top + 1)])


def _bars(names: list[str], counts: list[int]) -> list[str]:
    width = max(map(len, names))
    longest = max(*counts, 1)
    return [
        f"  {name:>{width}}  {count:>9,}  {'#' * -(-count * BAR // longest)}".rstrip()
        for name, count in zip(names, counts, strict=True)
    ]


def _show_text(rows: Rows, shown: int) -> None:
    tokenizer = DocumentTokenizer(rows.tokenizer_folder(), rows.manifest.tokenizer.name)
    for index in range(min(shown, len(rows))):
        row = rows[index]
        print(f"\nrow {index}: {len(row.lengths)} pieces, {len(row.tokens):,} tokens")
        for number, piece in enumerate(np.split(row.tokens, np.cumsum(row.lengths)[:-1])):
            print(f"--- piece {number}, {len(piece):,} tokens\n{tokenizer.decode(piece)}")
