"""Pack documents into rows of at most `row_length` tokens. Pure: no files, no clock, no global random state.

Best fit over a bounded buffer. A document longer than a row is first cut into pieces of the row length. Pieces wait in a
buffer. When it is full, one row leaves it: the longest piece, and beside it the pieces whose lengths together come closest to
the space that is left (a subset sum over up to 96 pieces of all sizes). The simpler rule, the longest piece that fits, again
and again, leaves 6 % of a 512-token row empty if documents have 100 to 300 tokens: nothing closes 240 + 240. The pieces of a
row are then shuffled, for otherwise every row would begin with its longest piece.

    row length 10, waiting  7 5 4 4 3 3 2        rows:  7 3 | 5 3 2 | 4 4      (each then shuffled)

Whole documents cannot always fill rows: articles of 5,000 tokens leave 15 % of rows of 8,192 empty. If the fill of all rows
so far would fall below `fill`, the longest waiting piece is cut to close the row, and its rest goes on waiting (of such
articles, one in five is cut for a fill of 99.5 %). A corpus that fits the buffer and 1,000 rows keeps whole all documents
that fit a row, since there is little to win; so does every corpus with `fill` 0.

The rows depend on the order of the documents and the arguments, and on nothing else.
"""

import random
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from data_prep.rows import Row

Tokens = NDArray[np.unsignedinteger]
BUFFER_TOKENS = 1 << 22  # 8 MB of uint16; 512 rows of 8,192
BUFFER_PIECES = 1 << 14  # so that the sorted list stays quick to change when pieces are very short
CANDIDATES = 96  # pieces of a subset sum, which takes 30 microseconds at row length 8,192
FILL = 0.995  # share of all rows' space below which documents are cut
SMALL = 1000  # rows of a corpus too small for cuts


def split(document: Tokens, row_length: int) -> list[Tokens]:
    """The pieces of a document [n], none of them empty. All but the last have `row_length` tokens; joined, they are the document."""
    return [document[start : start + row_length] for start in range(0, len(document), row_length)]


def best_subset(lengths: Sequence[int], space: int) -> list[int]:
    """Rising indices of those `lengths` (each > 0) whose sum is the largest that is <= `space`. Early ones are preferred.

    Bit s of `reach` says that some subset has the sum s, so that one shift adds a length to every sum at once.
    """
    mask = (1 << (space + 1)) - 1
    steps = [1]
    for length in lengths:
        steps.append(steps[-1] | (steps[-1] << length) & mask)
        if steps[-1] >> space:
            break
    total = steps[-1].bit_length() - 1
    chosen = []
    for index in range(len(steps) - 2, -1, -1):
        if not steps[index] >> total & 1:  # not reached without this length
            chosen.append(index)
            total -= lengths[index]
    return chosen[::-1]


class OnePerRow:
    """No packing, for comparisons: each document is a row, or each piece of it if it is longer than a row."""

    policy = "none: one document a row"

    def __init__(self, row_length: int, seed: int) -> None:
        self.row_length = row_length
        self.seed = seed
        self.pieces = 0
        self.rows = 0

    def add(self, document: Tokens) -> Iterator[Row]:
        for piece in split(document, self.row_length):
            self.pieces += 1
            self.rows += 1
            yield Row(piece, np.array([len(piece)], np.uint32))

    def finish(self) -> Iterator[Row]:
        return iter(())


class BestFit:
    """Takes documents and gives rows. Every token that goes in comes out once, beside its neighbours of the same piece."""

    def __init__(
        self,
        row_length: int,
        seed: int,
        fill: float = FILL,
        buffer_tokens: int = BUFFER_TOKENS,
        buffer_pieces: int = BUFFER_PIECES,
    ) -> None:
        self.row_length = row_length
        self.seed = seed
        self.fill = fill  # 0 to 1
        self.buffer_tokens = buffer_tokens
        self.buffer_pieces = buffer_pieces
        self.pieces = 0  # made so far
        self.rows = 0  # taken so far
        self._given = 0  # tokens
        self._empty = 0  # space in the rows taken, tokens
        self._tokens = 0  # waiting
        self._waiting: dict[int, Tokens] = {}  # by the number of the piece
        self._order: list[tuple[int, int]] = []  # (length, number) of each waiting piece, sorted

    @property
    def policy(self) -> str:
        """What the manifest says about the packing."""
        return (
            f"best fit by subset sums, buffer of {self.buffer_tokens} tokens and {self.buffer_pieces} pieces, "
            f"cuts below a fill of {self.fill:g}, seeded shuffle within a row"
        )

    def add(self, document: Tokens) -> Iterator[Row]:
        """Take one document [n], n > 0. Yields the rows that leave the buffer to make room (exhaust the iterator)."""
        self._given += len(document)
        for piece in split(document, self.row_length):
            self._wait(piece)
        while self._tokens > self.buffer_tokens or len(self._order) > self.buffer_pieces:
            yield self._take()

    def finish(self) -> Iterator[Row]:
        """The rows that are left when all documents are in."""
        while self._order:
            yield self._take()

    def _wait(self, piece: Tokens) -> None:
        insort(self._order, (len(piece), self.pieces))
        self._waiting[self.pieces] = piece
        self.pieces += 1
        self._tokens += len(piece)

    def _pop(self, place: int) -> Tokens:
        length, number = self._order.pop(place)
        self._tokens -= length
        return self._waiting.pop(number)

    def _take(self) -> Row:
        chosen = [self._pop(-1)]
        space = self.row_length - len(chosen[0])
        while fitting := bisect_right(self._order, (space, self.pieces)):
            # Candidates of all sizes, the longest that fits first, so that no short piece is spent where a long one serves.
            count = min(CANDIDATES, fitting)
            places = [fitting - 1 - step * fitting // count for step in range(count)]
            # `places` fall while indices rise, so no pop moves a place that is still to come.
            for index in best_subset([self._order[place][0] for place in places], space):
                chosen.append(self._pop(places[index]))
                space -= len(chosen[-1])
        self.rows += 1
        too_empty = self._empty + space > (1 - self.fill) * self.rows * self.row_length
        large = self._given >= min(SMALL * self.row_length, self.buffer_tokens)
        if space and too_empty and large and self.fill and self._order:
            longest = self._pop(-1)
            chosen.append(longest[:space])
            self._wait(longest[space:])
            space = 0
        self._empty += space
        random.Random(f"{self.seed} {self.rows}").shuffle(chosen)
        return Row(np.concatenate(chosen), np.array([len(piece) for piece in chosen], np.uint32))
