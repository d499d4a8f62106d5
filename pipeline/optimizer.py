"""AdamW over parameter groups that stay the same through all phases: one per layer and decay kind.

Decoupled weight decay as torch.optim.AdamW multiplies it by the learning rate. The paper's Composer form,
`p -= (lr / peak_lr) * 1e-5 * p`, is the same with weight_decay = 1e-5 / 2e-4 = 0.05. None on norms and biases.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pipeline.recipe import Optimizer


def group_of(name: str) -> str:
    """The group's name for a parameter's Hugging Face name: "layer 3", "embeddings" (with the tied decoder) or "head"."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"layer {parts[2]}"
    return "embeddings" if parts[:2] == ["model", "embeddings"] else "head"


def decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim > 1 and not name.endswith(".bias")


def build(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], settings: Optimizer, device: torch.device
) -> torch.optim.AdamW:
    """The optimizer that DeepSpeed partitions. Its learning rates are written each step: 0 until then."""
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        decay = decays(name, parameter)
        group = groups.setdefault(
            (group_of(name), decay),
            {"params": [], "name": group_of(name), "weight_decay": settings.weight_decay if decay else 0.0},
        )
        group["params"].append(parameter)
    return torch.optim.AdamW(
        list(groups.values()), lr=0.0, betas=settings.betas, eps=settings.eps, fused=device.type == "cuda"
    )
