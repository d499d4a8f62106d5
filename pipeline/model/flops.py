"""FLOPs of a step, counted exactly from document lengths, windows, mask and labels; and the device's peak."""

import re
import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.model.batch import PackedBatch
from pipeline.model.families import Config, family_of

# Dense bf16 FLOP/s from the makers' data sheets; the first name here that the device's name contains counts.
GPU_PEAK = {
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "V100": 125e12,
}


def attended_pairs(lengths: NDArray[np.integer], causal: bool, half_window: int | None) -> int:
    """Returns the number of query-key pairs that one head of one layer sees in documents of these lengths."""
    n = np.asarray(lengths, np.int64)
    w = n if half_window is None else np.minimum(n, half_window)
    # One side of a document: sum over i < n of min(i, w).
    near = np.minimum(n, w + 1)
    side = near * (near - 1) // 2 + (n - near) * w
    return int((n + side * (1 if causal else 2)).sum())


def step_flops(config: Config, batches: Sequence[PackedBatch], causal: bool) -> int:
    """Returns the FLOPs of forward and backward (twice the forward); a multiply-add is 2. Recomputation is not counted."""
    family, size, layers = family_of(config), config.hidden_size, config.num_hidden_layers
    windows = [family.half_window(config, layer) for layer in range(layers)]
    forward = 0
    for batch in batches:
        lengths = np.diff(batch.cu_seqlens.numpy())
        pairs = {window: attended_pairs(lengths, causal, window) for window in set(windows)}
        forward += 2 * batch.tokens * layers * family.layer_weights(config)
        forward += 4 * size * sum(pairs[window] for window in windows)
        forward += 2 * len(batch.labels) * (size * size + size * config.vocab_size)
    return 3 * forward


def peak_of(name: str) -> float | None:
    """Returns the peak of a GPU by its name, such as "NVIDIA A100-SXM4-80GB"; None where the table lacks it."""
    return next((peak for key, peak in GPU_PEAK.items() if re.search(rf"\b{key}\b", name)), None)


@cache
def device_peak(device: torch.device) -> float | None:
    """Returns a rank's peak FLOP/s: a GPU's from the table (None: not in it), a CPU's measured by a matrix product."""
    if device.type == "cuda":
        return peak_of(torch.cuda.get_device_name(device))
    size = 1024
    a, b = torch.ones(size, size), torch.ones(size, size)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        a @ b
        best = max(best, 2 * size**3 / (time.perf_counter() - begin))
    return best
