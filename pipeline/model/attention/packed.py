"""Attention over packed documents: one function, any number of back ends, the causal mask and the window as arguments.

The keys that a query at position i of its document sees, with half window w:

                 half_window None        half_window w
    causal=False every j                 i-w <= j <= i+w
    causal=True  j <= i                  i-w <= j <= i

No query ever sees another document. Shapes: T packed tokens, N heads, H head dimension, S documents.

To add a back end, write a file beside this one that ends with its `BACKEND`, and add a line to BACKENDS.
"""

from functools import cache

import torch
from torch import Tensor

from command_line import Failure
from pipeline.model.attention import cpu_flash, flash, torch_varlen

# On a GPU, `auto` takes the first GPU kernel here that is installed.
BACKENDS = {
    "flash": flash.BACKEND,
    "torch_varlen": torch_varlen.BACKEND,
    "sdpa": cpu_flash.BACKEND,
}
OR_SLOW = "; or accept the slow path with model.attention=sdpa"
IN_BF16 = "model.attention: {name} computes in bf16; with precision float32 use model.attention=sdpa"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    causal: bool,
    half_window: int | None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention with scale 1/sqrt(H), document by document; returns [T, N, H].

    q, k, v: [T, N, H], one dtype. cu_seqlens: [S+1] int32 on the same device, from 0 to T, strictly increasing.
    max_seqlen: the longest document, a host int. ValueError where they disagree.
    """
    _check(q, k, v, cu_seqlens, max_seqlen, half_window)
    if half_window is not None and half_window >= max_seqlen - 1:
        half_window = None  # the window holds every document whole
    if backend == "auto":
        backend = choose(q.device)
    if BACKENDS[backend].gpu and q.dtype == torch.float32:
        raise Failure(IN_BF16.format(name=backend))
    return BACKENDS[backend].attend(q, k, v, cu_seqlens, max_seqlen, causal, half_window)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, half_window: int | None) -> None:
    if q.ndim != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(f"q, k, v must be [T, N, H] alike, not {list(q.shape)}, {list(k.shape)}, {list(v.shape)}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype != torch.int32 or cu_seqlens.device != q.device:
        raise ValueError("cu_seqlens must be int32 [S+1] on the device of q")
    if not isinstance(max_seqlen, int) or max_seqlen < 1:
        raise ValueError("max_seqlen must be a host int above 0")
    if half_window is not None and half_window < 1:
        raise ValueError("half_window must be above 0, or None for global attention")
    if cu_seqlens.device.type == "cpu":
        check_boundaries(cu_seqlens, len(q), max_seqlen)


def check_boundaries(cu_seqlens: Tensor, total: int, max_seqlen: int) -> None:
    """Raise a ValueError unless cu_seqlens rises strictly from 0 to `total`, and no document is longer than max_seqlen.

    On a GPU the check is an assertion on the device, for which the host does not wait. It costs a few small kernels, so
    the encoder makes it once per batch and `attend` does not.
    """
    lengths = cu_seqlens.diff()
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & (lengths.min() > 0) & (lengths.max() <= max_seqlen)
    message = "cu_seqlens must rise strictly from 0 to T, no document longer than max_seqlen"
    if cu_seqlens.device.type != "cpu":
        torch._assert_async(right, message)
    elif not right:
        raise ValueError(message)


@cache
def choose(device: torch.device) -> str:
    """Returns the fastest installed back end; on a GPU, never falls back to sdpa silently."""
    if device.type != "cuda":
        return "sdpa"
    _check_generation()
    kernels = {name: backend.gpu for name, backend in BACKENDS.items() if backend.gpu}
    for name in kernels:
        if _installed(name):
            return name
    raise Failure(f"no variable-length attention kernel for this GPU: install {' or '.join(kernels.values())}{OR_SLOW}")


def _check_generation() -> None:
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    if major < 8:
        raise Failure(
            f"this GPU (compute capability {major}.{minor}) has no variable-length attention kernel: they need an A100 or "
            f"newer{OR_SLOW}"
        )


def available(name: str, device: torch.device, head_dim: int = 64, precision: str = "bf16") -> None:
    """Raise Failure, naming the remedy, where back end `name` cannot run on `device` with these heads in this precision."""
    if name == "auto":
        name = choose(device)
    needed = BACKENDS[name].gpu
    if needed is None:
        return
    if device.type != "cuda":
        raise Failure(f"model.attention: {name} needs a CUDA GPU; use auto or sdpa here")
    _check_generation()
    if not _installed(name):
        raise Failure(f"model.attention: {name} needs {needed}")
    if precision == "float32":
        raise Failure(IN_BF16.format(name=name))
    if head_dim % 8 or head_dim > 256:
        raise Failure(
            f"model.attention: {name} takes heads of a multiple of 8 up to 256, not of {head_dim} (hidden_size / "
            f"num_attention_heads){OR_SLOW}"
        )


def describe(name: str, device: torch.device) -> str:
    """Returns what `name` means on `device`, for the log, such as 'flash (flash-attn 3)'."""
    chosen = choose(device) if name == "auto" else name
    version = BACKENDS[chosen].version
    return f"{chosen} ({version()})" if version else chosen


def _installed(name: str) -> bool:
    try:
        BACKENDS[name].load()
    except ImportError:
        return False
    return True
