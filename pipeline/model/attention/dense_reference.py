"""The dense reference that every back end is tested against: plain, slow, on any device."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    """Attend as `attend` does, with one scaled_dot_product_attention per document under an explicit mask."""
    outputs = []
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        distance = torch.arange(end - begin, device=q.device)
        distance = distance[:, None] - distance[None, :]  # query position minus key position
        seen = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            seen &= distance >= 0
        if half_window is not None:
            seen &= distance.abs() <= half_window
        query, key, value = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1))
    return torch.cat(outputs)
