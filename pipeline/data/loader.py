"""The row stream: an order of rows that is ours and pure, and the loader that turns a step of it into packed batches.

Stream position g lies in epoch g // N and is row order(data_seed, epoch)[g mod N]. Step k of a phase that begins at
position p takes positions p + k * rows to p + (k + 1) * rows, across epoch ends, and the ranks take slices of
the step. The loader's whole state is one integer, the position. Resume, twins, mixing and masks follow from it.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.rows.format import Row, Rows, is_url
from pipeline.model.batch import PackedBatch
from pipeline.ranks.agreement import Ranks
from pipeline.data.objectives import LabelledRow, Objective, Vocabulary, label, pack

T = TypeVar("T")
SHUFFLE_BLOCK = 1 << 16  # rows: shuffled across that many neighbours, so that look-ahead touches few shards
AHEAD_ROWS = 4096  # of a rank whose shards are fetched before their turn, where the rows are at a URL
POLL = 0.5  # seconds between two questions whether to stop, while rows are waited for
CYCLE = 1000  # positions of a mix in which each source has exactly its share, rounded to a thousandth


class RowStream:
    """Position to row index in one source; each row comes once an epoch, in an order new to each epoch."""

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


class Mix:
    """Position to (source, position in that source): pure, and exact in every cycle of 1,000 positions."""

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
        """Of each position in a cycle: its source, and how many of that source came before it in the cycle."""
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
        # Sources of equal size must not share an order: their seeds differ, the first one's is the recipe's own.
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
        """Rows that will be read soon."""
        ids = np.fromiter(row_ids, np.int64)
        for source, rows in enumerate(self.sources):
            start, end = self._starts[source : source + 2]
            rows.prefetch(ids[(ids >= start) & (ids < end)] - start)

    def __getitem__(self, row_id: int) -> Row:
        source = int(np.searchsorted(self._starts, row_id, side="right")) - 1
        return self.sources[source][row_id - int(self._starts[source])]


@dataclass(frozen=True)
class Step:
    """What one rank trains in one step, and what all ranks agree on before it."""

    batches: list[PackedBatch]  # micro-batches of this rank
    tokens: int  # of this rank
    labels: int  # of this rank
    position: int  # of the step's first row in the stream
    row_ids: list[int]  # of the whole step, all ranks, in stream order, without those that are skipped


class Loader:
    """Steps of one rank from a stream position on, the next one prepared while the present one trains."""

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
        """The step that begins at `position`: a pure function. A skipped row leaves a hole and shifts nothing."""
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
        """What a rank computes on where all rows of a micro-batch are skipped: one token, no label."""
        none, keys = np.zeros(0, np.int64), np.zeros(1, np.int64) if objective.dropout else None
        return LabelledRow(np.array([self.vocabulary.mask]), np.array([1], np.uint32), none, none, keys)

    def steps(
        self, position: int, objective: Objective, stopping: Callable[[], bool] = lambda: False
    ) -> Generator[Step]:
        """Steps from `position` on. It ends where `stopping` says so while a step is waited for: through an outage, say."""
        coming = in_background(partial(self.step, position, objective))
        steps_ahead = max(1, self.ahead_rows * self.ranks.world_size // self.rows_per_step)
        asked = position + self.rows_per_step  # up to here the shards are asked for
        try:
            while True:
                step = result_unless(stopping, coming)
                if step is None:
                    return
                position += self.rows_per_step
                coming = in_background(partial(self.step, position, objective))
                for _ in range(2):  # gaining one step at each step, until it is far enough ahead
                    if asked < position + steps_ahead * self.rows_per_step:
                        self._prefetch(asked)
                        asked += self.rows_per_step
                yield step
        finally:
            wait([coming], 10 * POLL)

    def _prefetch(self, position: int) -> None:
        """The shards of this rank's rows of the step at `position`."""
        if self._remote:
            share = self.rows_per_step // self.ranks.world_size
            begin = position + self.ranks.rank * share
            self.rows.prefetch(self.rows.row_id(g) for g in range(begin, begin + share))


def in_background(work: Callable[[], T]) -> Future[T]:
    """`work` in a thread: a daemon, as a read that waits out an outage must not keep the process from ending."""
    future: Future[T] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=carry_out, name="loader", daemon=True).start()
    return future


def result_unless(stopping: Callable[[], bool], future: Future[T]) -> T | None:
    """What the future comes to; None where `stopping` says so before, which is asked while there is nothing yet."""
    while not wait([future], POLL).done:
        if stopping():
            return None
    return future.result()
