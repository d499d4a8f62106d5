"""The packed batch: boundaries, positions and lengths agree, or it is refused."""

import numpy as np
import pytest
import torch

from pipeline.model import PackedBatch

NONE = np.zeros(0, np.int64)


def test_the_drawing_in_the_docstring() -> None:
    batch = PackedBatch.from_documents([[7, 8, 9], [7], [1, 2, 3, 4]])
    assert batch.input_ids.tolist() == [7, 8, 9, 7, 1, 2, 3, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 2, 3]
    assert batch.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert batch.max_seqlen == 4
    assert type(batch.max_seqlen) is int
    assert (batch.input_ids.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int32)
    assert (batch.tokens, len(batch.labels)) == (8, 0)


@pytest.mark.parametrize("lengths", [[], [0, 4], [4, 0], [3], [5], [-1, 5]])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="lengths"):
        PackedBatch.from_arrays(np.arange(4), np.array(lengths, dtype=np.int64), NONE, NONE)


def test_no_documents_and_empty_documents_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PackedBatch.from_documents([])
    with pytest.raises(ValueError, match="lengths"):
        PackedBatch.from_documents([[1], []])


def test_unsigned_rows_do_not_wrap() -> None:
    batch = PackedBatch.from_arrays(np.array([65_535, 3], np.uint16), np.array([1, 1], np.uint32), NONE, NONE)
    assert batch.input_ids.tolist() == [65_535, 3]
    assert batch.cu_seqlens.tolist() == [0, 1, 2]


def test_to_keeps_all() -> None:
    batch = PackedBatch.from_arrays(np.arange(4), np.array([1, 3]), np.array([2]), np.array([9]), row_ids=[5])
    moved = batch.to("cpu")
    assert moved.row_ids == (5,)
    assert moved.max_seqlen == 3
    assert torch.equal(moved.labels, batch.labels)
