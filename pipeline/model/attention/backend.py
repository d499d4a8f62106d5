"""What a back end declares: its function, what it needs, and its name in the log."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Backend:
    """One implementation of `attend`, with the arguments q, k, v, cu_seqlens, max_seqlen, causal, half_window."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor, int, bool, int | None], Tensor]
    gpu: str | None = None  # for a CUDA kernel, which computes in bf16: what to install; None: runs everywhere
    load: Callable[[], object] = lambda: None  # raises ImportError where it is not installed
    version: Callable[[], str] | None = None  # for the log, such as "flash-attn 3"
