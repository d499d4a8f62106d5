"""The packed batch: documents one after the other in one flat dimension, and the boundaries between them.

    document          0 0 0 1 2 2 2 2
    position_ids      0 1 2 0 0 1 2 3        cu_seqlens  0 3 4 8        max_seqlen  4

There is no [rows, length] rectangle anywhere after the loader, hence no padding and no attention mask.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """T tokens of S documents, L of them labelled. All tensors on one device."""

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in each document
    cu_seqlens: Tensor  # [S+1] int32, from 0 to T, strictly increasing
    max_seqlen: int  # on the host: kernels need it before launch
    label_positions: Tensor  # [L] int64, indices into T
    labels: Tensor  # [L] int64, label i belongs to position label_positions[i]
    row_ids: tuple[int, ...] = ()  # of the rows that it was made from
    dropout_keys: Tensor | None = None  # [T] int64, see `dropout.token_keys`; None: no dropout

    @classmethod
    def from_arrays(
        cls,
        input_ids: NDArray[np.integer],
        lengths: NDArray[np.integer],
        label_positions: NDArray[np.integer],
        labels: NDArray[np.integer],
        row_ids: Sequence[int] = (),
        dropout_keys: NDArray[np.int64] | None = None,
    ) -> "PackedBatch":
        """Build a batch from flat ids [T] and document lengths [S]; ValueError where they disagree."""
        lengths = np.asarray(lengths, np.int64)
        total = len(input_ids)
        if not len(lengths) or (lengths <= 0).any() or lengths.sum() != total:
            raise ValueError(f"document lengths must be above 0 and sum to the {total} tokens")
        if total >= 1 << 31:
            raise ValueError(f"{total} tokens do not fit int32 cu_seqlens; use fewer rows per device")
        ends = np.cumsum(lengths)
        positions = np.arange(total) - np.repeat(ends - lengths, lengths)
        return cls(
            input_ids=torch.from_numpy(np.asarray(input_ids).astype(np.int64)),
            position_ids=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            max_seqlen=int(lengths.max()),
            label_positions=torch.from_numpy(np.asarray(label_positions).astype(np.int64)),
            labels=torch.from_numpy(np.asarray(labels).astype(np.int64)),
            row_ids=tuple(row_ids),
            dropout_keys=None if dropout_keys is None else torch.from_numpy(dropout_keys),
        )

    @classmethod
    def from_documents(cls, documents: Sequence[Sequence[int]]) -> "PackedBatch":
        """Build a batch without labels from one int sequence per document, special tokens included."""
        none = np.zeros(0, np.int64)
        if not documents:
            raise ValueError("a batch needs at least one document")
        ids = [np.asarray(document, np.int64) for document in documents]
        return cls.from_arrays(np.concatenate(ids), np.array([len(d) for d in ids]), none, none)

    def to(self, device: torch.device | str) -> "PackedBatch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "PackedBatch":
        """Returns the batch in page-locked memory, from which a copy to a GPU does not block the host."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "PackedBatch":
        changed: dict[str, Any] = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)

    def filled(self, total: int) -> "PackedBatch":
        """Returns the batch with padding documents appended up to `total` tokens: unlabelled, isolated.

        This gives torch.compile static shapes. Results at the first T positions do not change. It waits for no device.
        """
        missing = total - self.tokens
        if missing <= 0:
            return self
        device = self.input_ids.device
        longest = max(self.max_seqlen, min(missing, 1024))  # else very many short ones might follow short documents
        starts = torch.arange(self.tokens, total, longest, dtype=torch.int32, device=device)
        ends = torch.cat([starts[1:], starts.new_full((1,), total)])
        positions = torch.arange(missing, device=device) % longest
        nothing = torch.zeros(missing, dtype=torch.int64, device=device)
        keys = self.dropout_keys
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, nothing]),
            dropout_keys=None if keys is None else torch.cat([keys, nothing]),
            position_ids=torch.cat([self.position_ids, positions]),
            cu_seqlens=torch.cat([self.cu_seqlens, ends]),
            max_seqlen=longest,
        )

    @property
    def tokens(self) -> int:
        return len(self.input_ids)
