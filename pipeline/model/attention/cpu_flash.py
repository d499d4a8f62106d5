"""Back end `sdpa` on a CPU: our own autograd function over PyTorch's flash kernels for the CPU.

Forward and backward write into buffers that are allocated once; plain autograd over slices would fill a zero tensor of
the whole batch for each slice. A global layer makes one kernel call per document. A local layer makes one call for the
whole batch: each block of queries attends to the keys around it, so that the cost is O(T x window) whatever the
documents' lengths. On another device, this back end is the dense reference.
"""

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.attention.backend import Backend
from pipeline.model.attention.dense_reference import reference

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    if q.device.type != "cpu":
        return reference(q, k, v, cu_seqlens, max_seqlen, causal, half_window)
    if half_window is None:
        result: Tensor = _Global.apply(q, k, v, cu_seqlens, causal)
    else:
        result = _Local.apply(q, k, v, cu_seqlens, causal, half_window)
    return result


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]  # [length, N, H] -> [1, N, length, H], a view


class _Global(torch.autograd.Function):
    """Attention to the whole document, or to all tokens before: one kernel call per document."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        bounds = cu_seqlens.tolist()
        sums = []  # log-sum-exp of each document, which the backward kernel needs
        for begin, end in itertools.pairwise(bounds):
            part, lse = _forward(*(_heads_first(x[begin:end]) for x in (q, k, v)), 0.0, causal)
            out[begin:end] = part[0].transpose(0, 1)
            sums.append(lse)
        ctx.save_for_backward(q, k, v, out, *sums)
        ctx.bounds, ctx.causal = bounds, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *sums = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for begin, end, lse in zip(ctx.bounds[:-1], ctx.bounds[1:], sums, strict=True):
            views = [_heads_first(x[begin:end]) for x in (grad, q, k, v, out)]
            for whole, part in zip(grads, _backward(*views, lse, 0.0, ctx.causal), strict=True):
                whole[begin:end] = part[0].transpose(0, 1)
        return (*grads, None, None)


class _Local(torch.autograd.Function):
    """Blocks of B queries against windows of 2B keys that start w before the block, over the whole packed batch.

    With B = 2w (bidirectional) the window holds exactly the block's own keys and w on each side; with B = w (causal),
    the block's own and w on the left. Windows i and i+2 touch without overlapping: the gradients of the even windows
    tile the keys, those of the odd windows tile them again one block later, and their sum is the whole gradient.
    Keys of other documents get -inf: their weight is exactly 0, so that documents stay isolated bit by bit.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool, w: int) -> Tensor:
        total = len(q)
        block = w if causal else 2 * w
        blocks = math.ceil(total / block)
        mask = _window_mask(cu_seqlens, total, block, blocks, causal, w).to(q.dtype)
        q_pad = F.pad(q, (0, 0, 0, 0, 0, blocks * block - total))
        k_pad, v_pad = (F.pad(x, (0, 0, 0, 0, w, (blocks + 1) * block - w - total)) for x in (k, v))
        views = (_queries(q_pad, block), _windows(k_pad, block), _windows(v_pad, block))
        out, lse = _forward(*views, 0.0, False, attn_mask=mask)
        ctx.save_for_backward(q_pad, k_pad, v_pad, out, lse, mask)
        ctx.total, ctx.block, ctx.w = total, block, w
        return out.transpose(1, 2).reshape(-1, *q.shape[1:])[:total]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q_pad, k_pad, v_pad, out, lse, mask = ctx.saved_tensors
        total, block, w = ctx.total, ctx.block, ctx.w
        grad = _queries(F.pad(grad, (0, 0, 0, 0, 0, len(q_pad) - total)), block)
        views = (_queries(q_pad, block), _windows(k_pad, block), _windows(v_pad, block))
        dq, dk, dv = _backward(grad, *views, out, lse, 0.0, False, attn_mask=mask)
        dq = dq.transpose(1, 2).reshape(q_pad.shape)[:total]
        dk, dv = (_merge(x, block)[w : w + total] for x in (dk, dv))
        return dq, dk, dv, None, None, None


def _queries(x: Tensor, block: int) -> Tensor:
    return x.unflatten(0, (-1, block)).transpose(1, 2)  # [blocks, N, B, H]


def _windows(x: Tensor, block: int) -> Tensor:
    return x.unfold(0, 2 * block, block).transpose(2, 3)  # [blocks, N, 2B, H], overlapping views


def _merge(x: Tensor, block: int) -> Tensor:
    """Sum overlapping windows [blocks, N, 2B, H] back to [(blocks+1) * B, N, H]."""
    x = x.transpose(1, 2)
    even, odd = x[0::2].reshape(-1, *x.shape[2:]), x[1::2].reshape(-1, *x.shape[2:])
    merged = x.new_zeros((len(x) + 1) * block, *x.shape[2:])
    merged[: len(even)] = even
    merged[block : block + len(odd)] += odd
    return merged


def _window_mask(cu_seqlens: Tensor, total: int, block: int, blocks: int, causal: bool, w: int) -> Tensor:
    """Returns [blocks, 1, B, 2B] float32: 0 where the query sees the key, else -inf. Padding sees padding."""
    lengths = cu_seqlens.diff().long()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    of_query = F.pad(document, (0, blocks * block - total), value=-1).unflatten(0, (blocks, block))
    of_key = F.pad(document, (w, (blocks + 1) * block - w - total), value=-1).unfold(0, 2 * block, block)
    distance = (torch.arange(block) + w)[:, None] - torch.arange(2 * block)[None, :]
    near = (distance >= 0) & (distance <= w) if causal else distance.abs() <= w
    seen = (of_query[:, :, None] == of_key[:, None, :]) & near
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)[:, None]


BACKEND = Backend(_attend)
