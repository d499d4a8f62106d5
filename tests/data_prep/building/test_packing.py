"""Packing as a pure function: nothing lost, nothing too long, full, the same each time."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from data_prep.building import BestFit
from data_prep.building.packing import best_subset, split
from data_prep.rows import Row


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents of these lengths in which no token comes twice."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, end, dtype=np.uint32) for start, end in pairwise(ends)]


def pack(lengths: list[int], row_length: int, seed: int = 1, **options: float) -> tuple[BestFit, list[Row]]:
    packer = BestFit(row_length, seed, **options)  # type: ignore[arg-type]
    rows = [row for document in numbered(lengths) for row in packer.add(document)]
    return packer, rows + list(packer.finish())


def lengths_like(kind: str, count: int, seed: int = 0) -> list[int]:
    """Document lengths of several shapes of corpora."""
    source = np.random.default_rng(seed)
    return {
        "short": source.lognormal(3, 0.7, count).astype(int) + 1,
        "mixed": source.lognormal(5, 1.2, count).astype(int) + 1,
        "articles": source.lognormal(6.3, 0.4, count).astype(int) + 1,  # most longer than half a row of 1,024
        "equal": np.full(count, 100),
        "single": np.ones(count, int),
    }[kind].tolist()


@pytest.mark.parametrize("kind", ["short", "mixed", "articles", "equal", "single"])
@pytest.mark.parametrize("buffer", [50, 3000, 1 << 22])
def test_every_token_comes_out_once_in_the_order_of_its_piece(kind: str, buffer: int) -> None:
    lengths = lengths_like(kind, 400)
    packer, rows = pack(lengths, 256, buffer_tokens=buffer)
    tokens = np.concatenate([row.tokens for row in rows])
    assert np.array_equal(np.sort(tokens), np.arange(sum(lengths)))
    assert all(row.check(256, sum(lengths)) is None for row in rows)
    assert packer.rows == len(rows)
    assert packer.pieces == sum(len(row.lengths) for row in rows)
    ends = set(np.cumsum(lengths).tolist())
    for row in rows:
        for piece in np.split(row.tokens, np.cumsum(row.lengths)[:-1]):
            assert np.array_equal(piece, np.arange(piece[0], piece[0] + len(piece)))  # of one document, in order
            assert not any(end in ends for end in range(int(piece[0]) + 1, int(piece[-1]) + 1))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 80])
def test_long_documents_are_cut_at_row_length(length: int) -> None:
    found = split(np.arange(length, dtype=np.uint16), 8)
    assert [len(piece) for piece in found] == [8] * (length // 8) + [length % 8] * (length % 8 > 0)
    assert np.concatenate(found).tolist() == list(range(length))


@pytest.mark.parametrize(
    ("kind", "row_length"), [("short", 1024), ("mixed", 1024), ("articles", 1024), ("mixed", 8192)]
)
def test_rows_are_at_least_99_percent_full(kind: str, row_length: int) -> None:
    lengths = lengths_like(kind, 30_000 if kind != "articles" else 8_000)
    _, rows = pack(lengths, row_length)
    assert sum(lengths) / (len(rows) * row_length) >= 0.99


def test_documents_that_fit_stay_whole_where_nothing_is_won_by_a_cut() -> None:
    lengths = lengths_like("short", 20_000)
    packer, _ = pack(lengths, 1024)
    assert packer.pieces == len(lengths)


@pytest.mark.parametrize("kind", ["mixed", "articles"])
def test_fill_0_cuts_only_what_is_longer_than_a_row(kind: str) -> None:
    lengths = lengths_like(kind, 8000)
    whole, _ = pack(lengths, 1024, fill=0)
    assert whole.pieces == sum(-(-length // 1024) for length in lengths)
    if kind == "articles":
        assert pack(lengths, 1024)[0].pieces > whole.pieces


def test_a_small_corpus_keeps_its_documents_whole() -> None:
    packer, rows = pack([60] * 30, 100)
    assert packer.pieces == 30
    assert len(rows) == 30


def test_rows_depend_on_seed_and_order_only() -> None:
    lengths = lengths_like("mixed", 500)

    def told(seed: int) -> list[tuple[int, ...]]:
        random.seed(random.random())  # the global state plays no part
        np.random.seed(seed + 5)
        return [tuple(row.tokens.tolist()) for row in pack(lengths, 512, seed)[1]]

    assert told(1) == told(1)
    assert told(1) != told(2)
    assert Counter(map(len, told(1))) == Counter(map(len, told(2)))  # the seed only shuffles within rows


def test_documents_of_a_row_are_not_sorted_by_length() -> None:
    _, rows = pack(lengths_like("short", 20_000), 1024)
    first_longest = sum(int(row.lengths[0]) == int(row.lengths.max()) for row in rows)
    assert first_longest / len(rows) < 0.2  # about 1 in 36 pieces a row


def test_the_buffer_is_bounded() -> None:
    packer = BestFit(64, 1, buffer_tokens=1000, buffer_pieces=40)
    for document in numbered(lengths_like("short", 3000)):
        list(packer.add(document))
        assert packer._tokens <= 1000
        assert len(packer._order) <= 40


def test_best_subset_is_the_best() -> None:
    source = random.Random(3)
    for _ in range(300):
        lengths = [source.randint(1, 30) for _ in range(source.randint(1, 9))]
        space = source.randint(1, 60)
        chosen = best_subset(lengths, space)
        assert chosen == sorted(set(chosen))
        sums = {0}
        for length in lengths:
            sums |= {s + length for s in sums if s + length <= space}
        assert sum(lengths[index] for index in chosen) == max(sums)
