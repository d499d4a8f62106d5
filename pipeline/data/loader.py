"""The loader: one rank's steps of the row stream, as packed batches.

Step k of a phase that begins at stream position p takes positions p + k * rows to p + (k + 1) * rows, across epoch ends,
and the ranks take slices of the step. The loader's whole state is one integer, the position.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from data_prep.rows import is_url
from pipeline.data.background import POLL, in_background, result_unless
from pipeline.data.objectives import LabelledRow, Objective, Vocabulary, label, pack
from pipeline.data.row_order import MixedRows
from pipeline.model import PackedBatch
from pipeline.ranks import Ranks

AHEAD_ROWS = 4096  # rows ahead for which a rank prefetches shards, where the rows are at a URL


@dataclass(frozen=True)
class Step:
    """What one rank trains in one step, and what all ranks agree on before it."""

    batches: list[PackedBatch]  # micro-batches of this rank
    tokens: int  # of this rank
    labels: int  # of this rank
    position: int  # of the step's first row in the stream
    row_ids: list[int]  # of the whole step, all ranks, in stream order, without skipped rows


class Loader:
    """Yields the steps of one rank from a stream position on, and prepares the next one while the current one trains."""

    def __init__(
        self,
        rows: MixedRows,
        vocabulary: Vocabulary,
        ranks: Ranks,
        rows_per_step: int,
        rows_per_device: int,
        skip_rows: Sequence[int] = (),
        ahead_rows: int = AHEAD_ROWS,
    ) -> None:
        self.rows, self.vocabulary, self.ranks = rows, vocabulary, ranks
        self.rows_per_step, self.rows_per_device = rows_per_step, rows_per_device
        self.skip = frozenset(skip_rows)
        self.ahead_rows = ahead_rows
        self._remote = any(is_url(source.location) for source in rows.sources)

    def step(self, position: int, objective: Objective) -> Step:
        """Returns the step that begins at `position`, a pure function. A skipped row leaves a gap and moves no other row."""
        row_ids = [self.rows.row_id(g) for g in range(position, position + self.rows_per_step)]
        share = self.rows_per_step // self.ranks.world_size
        begin = self.ranks.rank * share
        batches, tokens = [], 0
        for micro in range(begin, begin + share, self.rows_per_device):
            places = [n for n in range(micro, micro + self.rows_per_device) if row_ids[n] not in self.skip]
            rows = [label(self.rows[row_ids[n]], objective, self.vocabulary, position + n) for n in places]
            tokens += sum(len(row.input_ids) for row in rows)
            batch = pack(rows or [self._nothing(objective)], [row_ids[n] for n in places])
            batches.append(batch.pinned() if torch.cuda.is_available() else batch)
        kept = [i for i in row_ids if i not in self.skip]
        return Step(batches, tokens, sum(len(b.labels) for b in batches), position, kept)

    def _nothing(self, objective: Objective) -> LabelledRow:
        """Returns a stand-in for a micro-batch whose rows are all skipped: one token, no label."""
        none, keys = np.zeros(0, np.int64), np.zeros(1, np.int64) if objective.dropout else None
        return LabelledRow(np.array([self.vocabulary.mask]), np.array([1], np.uint32), none, none, keys)

    def steps(
        self, position: int, objective: Objective, stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Step]:
        """Yield the steps from `position` on; end where `stopping` says yes while waiting for a step, as in an outage."""
        coming = in_background(partial(self.step, position, objective))
        steps_ahead = max(1, self.ahead_rows * self.ranks.world_size // self.rows_per_step)
        asked = position + self.rows_per_step  # shards are requested up to here
        try:
            while True:
                step = result_unless(stopping, coming)
                if step is None:
                    return
                position += self.rows_per_step
                coming = in_background(partial(self.step, position, objective))
                for _ in range(2):  # two steps each time, until the look-ahead is complete
                    if asked < position + steps_ahead * self.rows_per_step:
                        self._prefetch(asked)
                        asked += self.rows_per_step
                yield step
        finally:
            wait([coming], 10 * POLL)

    def _prefetch(self, position: int) -> None:
        """Prefetch the shards of this rank's rows in the step at `position`."""
        if self._remote:
            share = self.rows_per_step // self.ranks.world_size
            begin = position + self.ranks.rank * share
            self.rows.prefetch(self.rows.row_id(g) for g in range(begin, begin + share))
