"""The row stream: the order of rows, a pure function of seed and position, over one source or a mix of several.

With N rows, stream position g lies in epoch g // N and holds row order(data_seed, epoch)[g mod N]. Each row comes once
per epoch. Only the position is stored: resume, twins, mixing and masks follow from it.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_prep.rows import Row, Rows

SHUFFLE_BLOCK = 1 << 16  # rows that are shuffled with each other; a block this small lets look-ahead touch few shards
CYCLE = 1000  # positions of a mix in which each source has exactly its share, rounded to a thousandth


class RowStream:
    """Maps a position to a row index in one source; each row comes once per epoch, in a new order each epoch."""

    def __init__(self, shard_rows: NDArray[np.int64], data_seed: int) -> None:
        self.size = int(shard_rows.sum())
        self._shard_rows = shard_rows
        self._seed = data_seed
        self._order = lru_cache(maxsize=2)(self._make_order)  # a step may straddle two epochs

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        from streaming.base.shuffle import get_shuffle

        # get_shuffle adds the epoch to the seed, so epoch 1 of seed 42 would be epoch 0 of seed 43: spread the seeds.
        spread = int(np.random.SeedSequence(self._seed).generate_state(1, np.uint32)[0])
        block = max(SHUFFLE_BLOCK, 2 * int(self._shard_rows.max()))
        return np.asarray(get_shuffle("py1e", self._shard_rows, 1, spread, epoch, block))

    def __getitem__(self, position: int) -> int:
        epoch, within = divmod(position, self.size)
        return int(self._order(epoch)[within])


class Mix:
    """Maps a position to (source, position in that source): pure, and exact in every cycle of 1,000 positions."""

    def __init__(self, proportions: Sequence[float], data_seed: int) -> None:
        shares = np.array(proportions, float) / sum(proportions) * CYCLE
        self.counts = np.floor(shares).astype(int)
        for source in np.argsort(self.counts - shares, kind="stable")[
            : CYCLE - self.counts.sum()
        ]:  # largest remainders
            self.counts[source] += 1
        self._seed = data_seed
        self._cycle = lru_cache(maxsize=4)(self._make_cycle)

    def _make_cycle(self, cycle: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns for each position of a cycle its source, and how many of that source come before it in the cycle."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, cycle]))).shuffle(sources)
        before = np.zeros(CYCLE, np.int64)
        for source in range(len(self.counts)):
            mine = sources == source
            before[mine] = np.arange(mine.sum())
        return sources, before

    def __getitem__(self, position: int) -> tuple[int, int]:
        cycle, within = divmod(position, CYCLE)
        sources, before = self._cycle(cycle)
        source = int(sources[within])
        return source, int(cycle * self.counts[source] + before[within])


class MixedRows:
    """One or more sources of rows as one stream; row ids count through the sources in the order of the recipe."""

    def __init__(self, sources: Sequence[Rows], proportions: Sequence[float], data_seed: int) -> None:
        self.sources = list(sources)
        self._starts = np.cumsum([0, *(len(rows) for rows in sources)])
        # Sources of equal size must not share an order: their seeds differ, and the first one's is the recipe's.
        self._streams = [RowStream(rows.shard_rows, data_seed + i) for i, rows in enumerate(sources)]
        self._mix = Mix(proportions, data_seed) if len(sources) > 1 else None
        digests = [rows.manifest.rows_digest for rows in sources]
        counts = [] if self._mix is None else self._mix.counts.tolist()
        mixed = hashlib.sha256(json.dumps([digests, counts]).encode()).hexdigest()
        self.digest: str = digests[0] if self._mix is None else mixed  # which rows, in which mix

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row_id(self, position: int) -> int:
        source, place = (0, position) if self._mix is None else self._mix[position]
        return int(self._starts[source]) + self._streams[source][place]

    def prefetch(self, row_ids: Iterable[int]) -> None:
        """Start fetching the shards of rows that will be read soon."""
        ids = np.fromiter(row_ids, np.int64)
        for source, rows in enumerate(self.sources):
            start, end = self._starts[source : source + 2]
            rows.prefetch(ids[(ids >= start) & (ids < end)] - start)

    def __getitem__(self, row_id: int) -> Row:
        source = int(np.searchsorted(self._starts, row_id, side="right")) - 1
        return self.sources[source][row_id - int(self._starts[source])]
