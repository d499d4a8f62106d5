"""Back end `flash`: flash-attn of whatever generation is installed and trains on this GPU.

It is deterministic where torch.use_deterministic_algorithms asks for it, by the kernel's own flag.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.model.attention.backend import Backend


@cache
def kernel() -> tuple[int, Callable[..., Any]]:
    """Returns generation and function of the newest flash-attn installed that trains on this GPU.

    Generation 3 is for Hopper only; 4 has a variable-length backward only on datacenter Blackwell; 2 runs on all.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    modules = {4: "flash_attn.cute", 3: "flash_attn_interface", 2: "flash_attn"}
    fits = {4: capability[0] in (10, 11), 3: capability[0] == 9, 2: True}
    problem: ImportError | None = None
    for generation, module in modules.items():
        if fits[generation]:
            try:
                return generation, importlib.import_module(module).flash_attn_varlen_func
            except (ImportError, AttributeError) as error:
                problem = ImportError(f"{module}: {error}")
    raise problem or ImportError("flash_attn")


def _attend(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    generation, function = kernel()
    # -1 on each side means no window; generation 4 wants None instead.
    none = None if generation == 4 else -1
    window = (none, none) if half_window is None else (half_window, 0 if causal else half_window)
    out = function(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        causal=causal,
        window_size=window,
        **({"deterministic": True} if torch.are_deterministic_algorithms_enabled() else {}),
    )
    result: Tensor = out[0] if isinstance(out, tuple) else out  # generation 4 and early 3 add the log-sum-exp
    return result


BACKEND = Backend(
    _attend,
    gpu="flash-attn (pip install 'clm-detour[flash]')",
    load=kernel,
    version=lambda: f"flash-attn {kernel()[0]}",
)
