"""Documents into rows of at most `row_length` tokens. Pure: no files, no clock, no global random state.

Best fit over a bounded buffer. Documents longer than a row are first cut into pieces at row length. Pieces wait in a buffer;
when it holds more than `buffer_rows` rows of tokens, one row is taken out of it: the longest piece, then again and again the
longest one that still fits. So short documents wait to fill gaps that only they can fill. Of pieces of one length the
oldest goes first. The pieces of a row are then shuffled, as otherwise every row would run from long to short.

    row length 10, buffer holds  7 6 3 3 2        rows:  7 3 | 6 3 | 2 ...      (each then shuffled)

The rows depend on the order of the documents, the row length and the seed, and on nothing else.
"""

import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_prep.rows import Row

Tokens = NDArray[np.unsignedinteger]
BUFFER_ROWS = 1024  # of 8,192 tokens of 2 bytes: 17 MB


def split(document: Tokens, row_length: int) -> list[Tokens]:
    """The pieces of a document [n]: all of `row_length` tokens but the last, none empty; joined they are the document."""
    return [document[start : start + row_length] for start in range(0, len(document), row_length)]


class BestFit:
    """Takes documents, gives rows. Every token that goes in comes out once, in the order of its document's pieces' tokens."""

    def __init__(self, row_length: int, seed: int, buffer_rows: int = BUFFER_ROWS) -> None:
        self.row_length = row_length
        self.seed = seed
        self.limit = buffer_rows * row_length  # tokens that may wait
        self.pieces = 0  # given so far
        self.rows = 0  # taken so far
        self._tokens = 0  # waiting
        self._waiting: dict[int, Tokens] = {}  # by the number of the piece
        self._order: list[tuple[int, int]] = []  # (length, number) of each waiting piece, sorted

    @property
    def policy(self) -> str:
        """What the manifest says of the packing."""
        return f"best fit, buffer of {self.limit // self.row_length} rows, seeded shuffle within a row"

    def add(self, document: Tokens) -> Iterator[Row]:
        """Give one document [n], n > 0; yields the rows that are full because of it."""
        for piece in split(document, self.row_length):
            insort(self._order, (len(piece), self.pieces))
            self._waiting[self.pieces] = piece
            self.pieces += 1
            self._tokens += len(piece)
        while self._tokens > self.limit:
            yield self._take()

    def finish(self) -> Iterator[Row]:
        """The rows that are left once all documents are given."""
        while self._order:
            yield self._take()

    def _take(self) -> Row:
        space = self.row_length
        chosen = []
        while self._order and self._order[0][0] <= space:
            longest = self._order[bisect_right(self._order, (space, self.pieces)) - 1][0]
            length, number = self._order.pop(bisect_left(self._order, (longest, -1)))  # the oldest of that length
            chosen.append(self._waiting.pop(number))
            space -= length
        self._tokens -= self.row_length - space
        random.Random(f"{self.seed} {self.rows}").shuffle(chosen)
        self.rows += 1
        return Row(np.concatenate(chosen), np.array([len(piece) for piece in chosen], np.uint32))
