import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from data_prep.errors import Failure
from data_prep.rows import Rows
from pipeline.data import Loader, RowStream
from pipeline.distributed import Ranks
from pipeline.objectives import Objective, Vocabulary


def test_each_row_once_an_epoch_in_an_order_of_its_own() -> None:
    shards = np.array([300, 300, 300, 103])
    stream = RowStream(shards, 42)
    epochs = [[stream[g] for g in range(e * 1003, (e + 1) * 1003)] for e in range(3)]
    assert all(sorted(epoch) == list(range(1003)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] == [RowStream(shards, 42)[g] for g in range(1003)]
    other = RowStream(shards, 43)
    assert [other[g] for g in range(1003)] not in epochs  # nor is it a later epoch of the same order


def test_lookahead_touches_few_shards() -> None:
    shards = np.full(400, 4096)
    stream = RowStream(shards, 42)
    for begin in (0, 600_000, 1_500_000):
        near = {stream[g] // 4096 for g in range(begin, begin + 5000)}
        assert len(near) < 60  # a whole shuffle would touch all 400


@pytest.fixture(scope="module")
def opened(rows: Path) -> Rows:
    return Rows(rows / "train")


def loader(rows: Rows, rank: int, world: int, per_device: int) -> Loader:
    vocabulary = Vocabulary.from_manifest(rows.manifest.tokenizer)
    return Loader(rows, 42, vocabulary, Ranks(rank, world), rows_per_step=8, rows_per_device=per_device)


@pytest.mark.parametrize("kind", ["clm", "mlm"])
def test_a_step_is_the_same_however_it_is_cut(opened: Rows, kind: str) -> None:
    objective = Objective(kind, 0.15 if kind == "mlm" else 0.0, "phase", 17)
    end = len(opened) - 3  # across an epoch's end
    for position in (0, 8, end):
        whole = loader(opened, 0, 1, 8).step(position, objective)
        for world, per_device in ((1, 1), (1, 2), (2, 4), (2, 1), (4, 2)):
            parts = [loader(opened, rank, world, per_device).step(position, objective) for rank in range(world)]
            batches = [batch for part in parts for batch in part.batches]
            assert all(part.row_ids == whole.row_ids for part in parts)
            assert [i for batch in batches for i in batch.row_ids] == whole.row_ids
            for name in ("input_ids", "labels", "position_ids"):
                joined = torch.cat([getattr(batch, name) for batch in batches])
                assert torch.equal(joined, getattr(whole.batches[0], name))
            assert sum(part.tokens for part in parts) == whole.tokens
            assert sum(part.labels for part in parts) == whole.labels
        lengths = [len(opened[i].tokens) for i in whole.row_ids]
        assert whole.tokens == sum(lengths)


def test_the_loader_state_is_one_integer(opened: Rows) -> None:
    objective = Objective("mlm", 0.15, "phase", 17)
    steps = loader(opened, 0, 1, 4).steps(16, objective)
    seen = [next(steps) for _ in range(3)]
    steps.close()
    assert [step.position for step in seen] == [16, 24, 32]
    again = loader(opened, 0, 1, 4).step(24, objective)
    assert again.row_ids == seen[1].row_ids
    assert torch.equal(again.batches[1].labels, seen[1].batches[1].labels)


def test_a_damaged_row_ends_the_stream_with_its_place(opened: Rows, rows: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(rows / "train", tmp_path / "rows")
    shard = next((tmp_path / "rows").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:5000])
    broken = loader(Rows(tmp_path / "rows"), 0, 1, 4).steps(0, Objective("clm"))
    with pytest.raises(Failure, match="shard 0"):
        list(itertools.islice(broken, 50))
