"""Floating-point operations of a step, exact from document lengths, windows, mask and labels; and the device's peak."""

import time
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import ModernBertConfig

from pipeline.encoder import is_global

# Dense bf16 FLOP/s from the makers' data sheets; the first name that the device's name contains counts.
GPU_PEAK = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10": 125e12,
    "V100": 125e12,
}


def attended_pairs(lengths: NDArray[np.integer], causal: bool, half_window: int | None) -> int:
    """Query-key pairs that one head of one layer sees in documents of these lengths."""
    n = np.asarray(lengths, np.int64)
    w = n if half_window is None else np.minimum(n, half_window)
    # One side of a document: sum over i < n of min(i, w).
    near = np.minimum(n, w + 1)
    side = near * (near - 1) // 2 + (n - near) * w
    return int((n + side * (1 if causal else 2)).sum())


def step_flops(config: ModernBertConfig, lengths: NDArray[np.integer], labels: int, causal: bool) -> int:
    """Of forward and backward (twice the forward); a multiply-add is 2. Recomputation is not counted."""
    size, inner = config.hidden_size, config.intermediate_size
    tokens = int(np.asarray(lengths, np.int64).sum())
    linear = 2 * tokens * config.num_hidden_layers * (4 * size * size + 3 * size * inner)
    pairs = 0
    for layer in range(config.num_hidden_layers):
        window = None if is_global(config, layer) else config.local_attention // 2
        pairs += attended_pairs(lengths, causal, window)
    head = 2 * labels * (size * size + size * config.vocab_size)
    return 3 * (linear + 4 * size * pairs + head)


@cache
def device_peak(device: torch.device) -> float | None:
    """FLOP/s of a rank: a GPU's from the table (None: not in it); a CPU's as measured by a matrix product."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((peak for key, peak in GPU_PEAK.items() if key in name), None)
    size = 1024
    a, b = torch.ones(size, size), torch.ones(size, size)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best
