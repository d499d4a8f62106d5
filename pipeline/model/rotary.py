"""Rotary position embeddings (arXiv 2104.09864) at the positions of a packed batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotation:
    """RoPE's cos and sin at the batch's positions, float32 [T, 1, H/2], computed once per batch for each theta."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position_ids: Tensor, head_dim: int, theta: float) -> "Rotation":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
        angle = position_ids.float()[:, None, None] * theta**-exponent
        return cls(angle.cos(), angle.sin())


def turn(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Returns qkv [T, 3D] as [T, 3, N, H] q and k rotated, v unchanged; computed in float32, returned in qkv's dtype.

    Overwrites qkv, except under torch.compile.
    """
    if not torch.compiler.is_compiling():
        turned: Tensor = _Turn.apply(qkv, cos, sin, heads)
        return turned.view(len(qkv), 3, heads, -1)
    both, v = qkv.view(len(qkv), 3, heads, -1).split((2, 1), dim=1)
    first, second = both.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(v.dtype), v], 1)


class _Turn(torch.autograd.Function):
    """Rotates in place, since nothing else needs the input: less memory and half the passes of the plain formula."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.mark_dirty(qkv)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turn(qkv, qkv, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad = grad.contiguous()
        return _turn(grad, torch.empty_like(grad), cos, -sin, ctx.heads), None, None, None  # the inverse rotation


def _turn(qkv: Tensor, into: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Write qkv [T, 3D], with q and k rotated and v unchanged, to `into`, which may be qkv itself."""
    source, target = (x.view(len(x), 3, heads, 2, -1) for x in (qkv, into))
    first, second = source[:, :2].unbind(-2)
    cos, sin = cos[:, None], sin[:, None]
    x = (first * cos).addcmul_(second, sin, value=-1)
    y = (second * cos).addcmul_(first, sin)
    target[:, :2, :, 0], target[:, :2, :, 1] = x, y
    if into is not qkv:
        target[:, 2] = source[:, 2]
    return into
