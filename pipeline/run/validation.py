"""Validation: MLM and CLM loss on the same rows under the same masks, whatever the phase, step or number of ranks."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from data_prep.rows import Rows
from pipeline.data import Objective, Vocabulary, in_background, label, pack, result_unless
from pipeline.engine import Engine
from pipeline.model import PackedBatch
from pipeline.ranks import Agreement, failures, raise_together
from pipeline.recipe import Recipe


class Validation:
    def __init__(self, rows: Rows, vocabulary: Vocabulary, recipe: Recipe, agreement: Agreement) -> None:
        assert recipe.validation is not None
        self.rows, self.vocabulary, self.agreement = rows, vocabulary, agreement
        count = min(recipe.validation.rows, len(rows))
        # Spread over the whole set: rows stand in the order of the corpus.
        self.row_ids = np.linspace(0, len(rows) - 1, count).round().astype(int).tolist()
        self.per_batch = recipe.batch.rows_per_device
        mlm = Objective("mlm", recipe.validation.mask_rate, "validation", recipe.seed)
        self.objectives = {"mlm_loss": mlm, "clm_loss": Objective("clm")}

    def __call__(
        self, engine: Engine, go_on: Callable[[], bool], stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Returns the mean loss per label in nats under both objectives, and the number of rows; a collective call.

        Batches are dealt to the ranks in turn, and each row counts once. Every rank makes the same number of forward
        passes; a rank without a batch left repeats the first one and does not count it. Every rank asks `go_on` before
        each pass, and `stopping` while it waits for rows. Returns None where any rank has to stop.
        """
        world, rank = self.agreement.ranks.world_size, self.agreement.ranks.rank
        batches = [self.row_ids[i : i + self.per_batch] for i in range(0, len(self.row_ids), self.per_batch)]
        rounds = -(-len(batches) // world)
        result: dict[str, float] = {"rows": len(self.row_ids)}
        for name, objective in self.objectives.items():
            total, labels = 0.0, 0
            for turn in range(rounds):
                mine = turn * world + rank
                counts = mine < len(batches)
                ids = batches[mine if counts else 0]
                problem: Exception | None = None
                batch: PackedBatch | None = None
                try:
                    batch = result_unless(stopping, in_background(partial(self._batch, ids, objective)))
                except Exception as error:  # all must leave together
                    problem = error
                stop = int(batch is None or not go_on())
                stops, failed, lasting = self.agreement.sum([stop, *failures(problem)])
                raise_together(problem, failed, lasting, "validation rows")
                if stops or batch is None:
                    return None
                loss = engine.evaluate(batch, objective.causal)
                if counts:
                    total += loss
                    labels += len(batch.labels)
            total, count = self.agreement.sum_real([total, labels])
            result[name] = total / max(1.0, count)
        return result

    def _batch(self, ids: Sequence[int], objective: Objective) -> PackedBatch:
        return pack([label(self.rows[i], objective, self.vocabulary, i) for i in ids], ids)
