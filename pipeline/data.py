"""The row stream: an order of rows that is ours and pure, and the loader that turns a step of it into packed batches.

Stream position g lies in epoch g // N and is row order(data_seed, epoch)[g mod N]. Step k of a phase that begins at
position p takes positions p + k * rows to p + (k + 1) * rows, across epoch ends, and the ranks take slices of
the step. The loader's whole state is one integer, the position. Resume, twins and masks follow from it.
"""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_prep.rows import Rows
from pipeline.batch import PackedBatch
from pipeline.distributed import Ranks
from pipeline.objectives import Objective, Vocabulary, label, pack

SHUFFLE_BLOCK = 1 << 16  # rows: shuffled across that many neighbours, so that look-ahead touches few shards


class RowStream:
    """Position to row index; each row comes once an epoch, in an order new to each epoch."""

    def __init__(self, shard_rows: NDArray[np.int64], data_seed: int) -> None:
        self.size = int(shard_rows.sum())
        self._shard_rows = shard_rows
        self._seed = data_seed
        self._order = lru_cache(maxsize=2)(self._make_order)  # a step may straddle two epochs

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        from streaming.base.shuffle import get_shuffle

        # Its seed is seed + epoch, which would make epoch 1 of seed 42 epoch 0 of seed 43: spread the seeds.
        spread = int(np.random.SeedSequence(self._seed).generate_state(1, np.uint32)[0])
        block = max(SHUFFLE_BLOCK, 2 * int(self._shard_rows.max()))
        return np.asarray(get_shuffle("py1e", self._shard_rows, 1, spread, epoch, block))

    def __getitem__(self, position: int) -> int:
        epoch, within = divmod(position, self.size)
        return int(self._order(epoch)[within])


@dataclass(frozen=True)
class Step:
    """What one rank trains in one step, and what all ranks agree on before it."""

    batches: list[PackedBatch]  # micro-batches of this rank
    tokens: int  # of this rank
    labels: int  # of this rank
    position: int  # of the step's first row in the stream
    row_ids: list[int]  # of the whole step, all ranks, in stream order


class Loader:
    """Steps of one rank from a stream position on, the next one prepared while the present one trains."""

    def __init__(
        self, rows: Rows, data_seed: int, vocabulary: Vocabulary, ranks: Ranks, rows_per_step: int, rows_per_device: int
    ) -> None:
        self.rows, self.vocabulary, self.ranks = rows, vocabulary, ranks
        self.stream = RowStream(rows.shard_rows, data_seed)
        self.rows_per_step, self.rows_per_device = rows_per_step, rows_per_device

    def step(self, position: int, objective: Objective) -> Step:
        """The step that begins at `position`: a pure function."""
        row_ids = [self.stream[g] for g in range(position, position + self.rows_per_step)]
        share = self.rows_per_step // self.ranks.world_size
        begin = self.ranks.rank * share
        batches = []
        for micro in range(begin, begin + share, self.rows_per_device):
            ids = row_ids[micro : micro + self.rows_per_device]
            labelled = [
                label(self.rows[i], objective, self.vocabulary, position + micro + n) for n, i in enumerate(ids)
            ]
            batches.append(pack(labelled, ids))
        return Step(batches, sum(b.tokens for b in batches), sum(len(b.labels) for b in batches), position, row_ids)

    def steps(self, position: int, objective: Objective) -> Generator[Step]:
        """Steps without end, from `position` on."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            coming = pool.submit(self.step, position, objective)
            while True:
                step = coming.result()
                position += self.rows_per_step
                coming = pool.submit(self.step, position, objective)
                yield step
