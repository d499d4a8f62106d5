import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from command_line import Failure
from data_prep.rows import Rows
from pipeline.data import Loader, MixedRows, Objective, RowStream, Vocabulary
from pipeline.data.row_order import Mix
from pipeline.ranks import Ranks


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


def loader(rows: Rows, rank: int, world: int, per_device: int, skip: list[int] = []) -> Loader:  # noqa: B006
    vocabulary = Vocabulary.from_manifest(rows.manifest.tokenizer)
    return Loader(MixedRows([rows], [1], 42), vocabulary, Ranks(rank, world), 8, per_device, skip)


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


def test_a_skipped_row_leaves_a_hole_and_shifts_nothing(opened: Rows) -> None:
    objective = Objective("mlm", 0.15, "phase", 17)
    whole = loader(opened, 0, 1, 1).step(8, objective)
    skip = whole.row_ids[2:4]
    holed = loader(opened, 0, 1, 1, skip).step(8, objective)
    assert holed.row_ids == [i for i in whole.row_ids if i not in skip]
    for place, (before, after) in enumerate(zip(whole.batches, holed.batches, strict=True)):
        if place in (2, 3):
            assert (after.tokens, len(after.labels), after.row_ids) == (1, 0, ())
        else:
            assert torch.equal(before.input_ids, after.input_ids)
            assert torch.equal(before.labels, after.labels)
    assert holed.tokens == whole.tokens - sum(len(opened[i].tokens) for i in skip)
    two = [loader(opened, rank, 2, 2, skip).step(8, objective) for rank in (0, 1)]
    assert sum(part.tokens for part in two) == holed.tokens
    following = loader(opened, 0, 1, 8, skip).step(16, objective)
    assert torch.equal(following.batches[0].labels, loader(opened, 0, 1, 8).step(16, objective).batches[0].labels)


def test_a_mix_keeps_its_shares_and_each_source_its_own_order() -> None:
    mix = Mix([0.7, 0.2, 0.1], 42)
    drawn = [mix[g] for g in range(5000)]
    for source, share in enumerate((0.7, 0.2, 0.1)):
        places = [place for s, place in drawn if s == source]
        assert places == list(range(len(places)))  # every row of a source in its turn, none left out, none twice
        assert len(places) == 5000 * share
        assert abs(sum(s == source for s, _ in drawn[:200]) - 200 * share) < 40  # mixed, not one after the other
    assert [mix[g] for g in (0, 1234, 4999)] == [drawn[0], drawn[1234], drawn[4999]]
    thirds = Mix([1, 1, 1], 42)
    assert sorted(thirds.counts.tolist()) == [333, 333, 334]


def test_mixed_rows_count_their_ids_through_the_sources(opened: Rows, rows: Path) -> None:
    other = Rows(rows / "validation")
    mixed = MixedRows([opened, other], [3, 1], 42)
    ids = [mixed.row_id(g) for g in range(1000)]
    of_other = [i - len(opened) for i in ids if i >= len(opened)][: len(other)]
    assert sorted(of_other) == list(range(len(other)))
    assert (mixed[len(opened) + 5].tokens == other[5].tokens).all()
    assert (mixed[7].tokens == opened[7].tokens).all()
    alone, again = MixedRows([opened], [1], 42), MixedRows([opened, other], [1, 3], 42)
    assert len({mixed.digest, alone.digest, again.digest}) == 3
    assert alone.digest == opened.manifest.rows_digest


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
