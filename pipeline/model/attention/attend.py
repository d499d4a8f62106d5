"""Attention over packed documents: one function, three back ends, the causal mask and the window as arguments.

Which keys a query at position i of its own document sees (half window w):

                 half_window None        half_window w
    causal=False every j                 i-w <= j <= i+w
    causal=True  j <= i                  i-w <= j <= i

No query ever sees another document. Shapes: T packed tokens, N heads, H head dimension, S documents.

The CPU path calls PyTorch's own flash kernels into buffers that are allocated once, forward and backward. Plain autograd
over slices would fill a zero tensor of the whole batch for each slice. A global layer is one call a document. A local
layer is one call for the whole batch: queries in blocks, each against the keys around it, so that the cost is
O(T x window) whatever the documents' lengths.
"""

import importlib
import inspect
import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from command_line import Failure

BACKENDS = ("flash", "torch_varlen", "sdpa")
FLASH, TORCH = "flash-attn (pip install 'clm-detour[flash]')", "torch >= 2.13"
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
    if backend != "sdpa" and q.dtype == torch.float32:
        raise Failure(IN_BF16.format(name=backend))
    return _BACKENDS[backend](q, k, v, cu_seqlens, max_seqlen, causal, half_window)


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
    """ValueError unless cu_seqlens rises strictly from 0 to `total`, no document longer than max_seqlen.

    On a GPU the device itself stops, without the host waiting for it: a few small kernels, which the encoder pays once a
    batch and `attend` does not.
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
    """The fastest back end that is installed; on a GPU never sdpa in silence."""
    if device.type != "cuda":
        return "sdpa"
    _check_generation()
    for name in ("flash", "torch_varlen"):
        if _installed(name):
            return name
    raise Failure(f"no variable-length attention kernel for this GPU: install {FLASH} or {TORCH}{OR_SLOW}")


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
    if name == "sdpa":
        return
    if device.type != "cuda":
        raise Failure(f"model.attention: {name} needs a CUDA GPU; use auto or sdpa here")
    _check_generation()
    if not _installed(name):
        raise Failure(f"model.attention: {name} needs {FLASH if name == 'flash' else TORCH}")
    if precision == "float32":
        raise Failure(IN_BF16.format(name=name))
    if head_dim % 8 or head_dim > 256:
        raise Failure(
            f"model.attention: {name} takes heads of a multiple of 8 up to 256, not of {head_dim} (hidden_size / "
            f"num_attention_heads){OR_SLOW}"
        )


def describe(name: str, device: torch.device) -> str:
    """What `name` means on `device`, for the log: such as 'flash (flash-attn 3)'."""
    chosen = choose(device) if name == "auto" else name
    return f"{chosen} (flash-attn {_flash_kernel()[0]})" if chosen == "flash" else chosen


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    """One scaled_dot_product_attention a document under an explicit mask: plain, slow, any device; the tests' yardstick."""
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


# --- sdpa: our own autograd function over PyTorch's CPU flash kernels -------------------------------------------------

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _sdpa(
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
    """Every token of the document, or all before it: one kernel call a document."""

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

    With B = 2w (bidirectional) or B = w (causal) the window of 2B holds exactly the block's own keys and w on each side
    (on the left). Windows i and i+2 touch without overlapping: the gradients of the even ones tile the
    keys, those of the odd ones tile them again one block further on, and their sum is the whole gradient.
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
    """[blocks, 1, B, 2B] float32: 0 where the query sees the key, else -inf. Padding sees padding, so no row is empty."""
    lengths = cu_seqlens.diff().long()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    of_query = F.pad(document, (0, blocks * block - total), value=-1).unflatten(0, (blocks, block))
    of_key = F.pad(document, (w, (blocks + 1) * block - w - total), value=-1).unfold(0, 2 * block, block)
    distance = (torch.arange(block) + w)[:, None] - torch.arange(2 * block)[None, :]
    near = (distance >= 0) & (distance <= w) if causal else distance.abs() <= w
    seen = (of_query[:, :, None] == of_key[:, None, :]) & near
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)[:, None]


# --- GPU kernels ------------------------------------------------------------------------------------------------------
# Deterministic where torch.use_deterministic_algorithms asks for it: flash-attn by its own flag, torch's kernel by itself.


@cache
def _flash_kernel() -> tuple[int, Callable[..., Any]]:
    """Generation and function of the newest flash-attn installed that trains on this GPU.

    3 is for Hopper alone; 4 has no variable-length backward on Hopper, only on datacenter Blackwell; 2 runs on all.
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


@cache
def _torch_kernel() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        raise ImportError("this torch's varlen_attn has no windows yet")
    kernel: Callable[..., Any] = varlen_attn
    return kernel


def _installed(name: str) -> bool:
    try:
        _flash_kernel() if name == "flash" else _torch_kernel()
    except ImportError:
        return False
    return True


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    generation, kernel = _flash_kernel()
    # No window is -1 to each side, in generation 4 None.
    none = None if generation == 4 else -1
    window = (none, none) if half_window is None else (half_window, 0 if causal else half_window)
    out = kernel(
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


def _torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool, half_window: int | None
) -> Tensor:
    left = -1 if half_window is None else half_window
    right = 0 if causal else left  # varlen_attn has no causal flag: causal is a window that ends at the query
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    result: Tensor = _torch_kernel()(q, k, v, *lengths, window_size=(left, right))
    return result


_BACKENDS: dict[str, Callable[..., Tensor]] = {"sdpa": _sdpa, "flash": _flash, "torch_varlen": _torch_varlen}
