"""AdamW and StableAdamW over parameter groups that are the same in all phases: one per layer with decay, one without.

Weight decay is decoupled and multiplied by the learning rate, as in torch.optim.AdamW. The paper's Composer form,
`p -= (lr / peak_lr) * 1e-5 * p`, is the same with weight_decay = 1e-5 / 2e-4 = 0.05. Norms and biases have no decay.

A frozen group has learning rate 0 and gradients of 0; `requires_grad` stays as it is. Without `requires_grad`, momentum
and decay would go on moving the weights at stages 1 and 2, and stage 3 would crash.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pipeline.recipe import Optimizer


def group_of(name: str) -> str:
    """Returns a parameter's group by its Hugging Face name: a layer's number, "embeddings" (with the decoder) or "head"."""
    layer = re.search(r"\.layers?\.(\d+)\.", name)
    if layer:
        return layer[1]
    return "embeddings" if re.search(r"(^|\.)(embeddings|decoder)\.", name) else "head"


def decays(parameter: Tensor) -> bool:
    """Matrices decay; norms and biases are vectors."""
    return len(getattr(parameter, "ds_shape", parameter.shape)) > 1


def build(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], settings: Optimizer, fused: bool
) -> torch.optim.Optimizer:
    """Returns the optimizer that DeepSpeed partitions. Its learning rates are 0 until a step writes them."""
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        decay = decays(parameter)
        empty = {"params": [], "name": group_of(name), "weight_decay": settings.weight_decay if decay else 0.0}
        groups.setdefault((group_of(name), decay), empty)["params"].append(parameter)
    common: dict[str, Any] = {"lr": 0.0, "betas": settings.betas, "eps": settings.eps}
    if settings.name == "stable_adamw":
        return StableAdamW(list(groups.values()), **common)
    return torch.optim.AdamW(list(groups.values()), **common, fused=fused)


Piece = tuple[int, int, int, int]


class StableAdamW(torch.optim.Optimizer):
    """AdamW whose step shrinks, tensor by tensor, where the gradient outruns its second moment (arXiv 2304.13013, algorithm 2).

    With bias-corrected moments m and v: rate = lr / max(1, RMS(g / max(sqrt(v), eps))), then
    p -= rate * (weight_decay * p + m / (sqrt(v) + eps)). The RMS is over a whole parameter; ZeRO's flat
    partitions hold pieces of several, so the engine says which piece belongs to which (`pieces`) and sums over ranks
    (`reduce`).
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        # Of a flat tensor: pieces (start, size, parameter's index, parameter's whole size), and how many parameters.
        self.pieces: Callable[[Tensor], tuple[list[Piece], int]] = lambda flat: (
            [(0, flat.numel(), 0, flat.numel())],
            1,
        )
        self.reduce: Callable[[Tensor], None] = lambda sums: None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for flat in group["params"]:
                if flat.grad is None:
                    continue
                state = self.state[flat]
                state["step"] += 1
                step = float(state["step"])
                grad, p = flat.grad.view(-1), flat.data.view(-1)
                m, v = state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1)
                m.lerp_(grad, 1 - beta1)
                v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (v / (1 - beta2**step)).sqrt_()
                ratio = (grad / root.clamp(min=group["eps"])).square_()
                pieces, parameters = self.pieces(flat)
                sums = torch.zeros(parameters, dtype=torch.float32, device=flat.device)
                for start, size, index, _ in pieces:
                    sums[index] += ratio[start : start + size].sum()
                self.reduce(sums)
                for start, size, index, whole in pieces:
                    rate = group["lr"] / (sums[index] / whole).sqrt().clamp(min=1.0)
                    at = slice(start, start + size)
                    p[at].mul_(1 - rate * group["weight_decay"])
                    p[at].sub_(m[at] / (1 - beta1**step) / (root[at] + group["eps"]) * rate)
