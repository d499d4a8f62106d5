"""Back end `torch_varlen`: PyTorch's own variable-length kernel, which needs no other package.

The kernel is deterministic by itself where torch.use_deterministic_algorithms asks for it.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from pipeline.model.attention.backend import Backend


@cache
def kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        raise ImportError("this torch's varlen_attn has no windows yet")
    function: Callable[..., Any] = varlen_attn
    return function


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    left = -1 if half_window is None else half_window
    right = 0 if causal else left  # varlen_attn has no causal flag: causal is a window that ends at the query
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    result: Tensor = kernel()(q, k, v, *lengths, window_size=(left, right))
    return result


BACKEND = Backend(_attend, gpu="torch >= 2.13", load=kernel)
