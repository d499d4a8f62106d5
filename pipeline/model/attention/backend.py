"""What a back end says of itself: the function, what it needs, and what a log calls it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Backend:
    """One implementation of `attend`; the arguments are its own: q, k, v, cu_seqlens, max_seqlen, causal, half_window."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, bool, int | None], Tensor]
    gpu: str | None = (
        None  # a kernel for CUDA GPUs that computes in bf16: what to install for it; None: runs everywhere
    )
    load: Callable[[], object] = lambda: None  # ImportError where it is not installed
    version: Callable[[], str] | None = None  # for the log, such as "flash-attn 3"
