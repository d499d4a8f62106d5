"""Dropout whose masks follow the row stream: a hash of (seed, phase, position, token, layer, feature), no random state.

Masks are therefore the same on any rank or device, in any micro-batch, after a resume, and when activation
checkpointing recomputes a layer; a later epoch draws new ones. The hash has 32 bits and two factors below 2^31, so that
products of int64 do not overflow (lowbias32 of https://github.com/skeeto/hash-prospector).
"""

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

STRIDE = 0x9E3779B9  # 2^32 over the golden ratio: neighbours land far from each other
MASK = 0xFFFFFFFF


def token_keys(seed: int, phase: str, position: int, tokens: int) -> NDArray[np.int64]:
    """Returns keys [tokens] int64 below 2^32, one for each token of the row at `position` of the phase's stream."""
    digest = hashlib.blake2b(f"{seed} {position} {phase}".encode(), digest_size=4, person=b"dropout").digest()
    return (int.from_bytes(digest, "little") + np.arange(tokens, dtype=np.int64) * STRIDE) & MASK


def layer_keys(keys: Tensor, layer: int) -> Tensor:
    """Returns the keys [T] int64 of one place in the network: 0 is the embeddings, 1 and above are the layers."""
    return _hash((keys + layer * STRIDE) & MASK)


def dropout(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """Returns x [T, D], each value 0 at probability `rate`, else over (1 - rate); keys [T] int64 from `layer_keys`."""
    columns = _hash(torch.arange(x.shape[-1], device=x.device))
    drawn = _hash((keys[:, None] + columns) & MASK)
    return torch.where(drawn >= round(rate * 2**32), x / (1 - rate), 0.0)


def _hash(x: Tensor) -> Tensor:
    """Hash int64 values below 2^32 to values below 2^32; every bit of the result depends on every bit of x."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & MASK
    return x ^ (x >> 15)
