"""The loss at labelled positions, and the module that DeepSpeed wraps: encoder, head and loss in one forward.

Logits [L, V] are the largest tensor of a step (8,192 x 50,368 float32 is 1.65 GB) and are never held whole: linear map
and cross-entropy are fused over chunks of positions. Since the gradient of a sum of cross-entropies is known with the
logits (softmax minus one-hot), it is formed chunk by chunk in the forward, and the backward only scales it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.batch import PackedBatch
from pipeline.encoder import Encoder

CHUNK_LOGITS = 1 << 24  # of a chunk: 64 MiB in float32


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over L of the cross-entropy of hidden [L, D] @ weight [V, D]^T + bias [V] against labels [L]; float32 sum."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        want = any(ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if want else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if want and bias is not None else None
        chunk = max(1, CHUNK_LOGITS // len(weight))
        for begin in range(0, len(hidden), chunk):
            rows = hidden[begin : begin + chunk]
            target = labels[begin : begin + chunk, None]
            logits = (rows @ weight.T).float()
            if bias is not None:
                logits += bias
            log_sum = logits.logsumexp(-1, keepdim=True)
            total += (log_sum - logits.gather(1, target)).sum()
            if d_hidden is not None and d_weight is not None:
                d_logits = logits.sub_(log_sum).exp_()  # softmax, in the logits' own memory
                d_logits.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
                if d_bias is not None:
                    d_bias += d_logits.sum(0)
                d_logits = d_logits.to(weight.dtype)
                d_hidden[begin : begin + chunk] = d_logits @ weight
                d_weight += d_logits.T @ rows
        ctx.save_for_backward(*(x for x in (d_hidden, d_weight, d_bias) if x is not None))
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [(x * grad).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)]
        return grads[0], grads[1], grads[2] if len(grads) > 2 else None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """Sum of cross-entropies, float32 scalar: hidden [L, D], weight [V, D], bias [V] or None, labels [L] int64. L may be 0."""
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels)
    return total


class LossModel(nn.Module):
    """What the engine wraps: packed batch and objective in, loss summed over the batch's labels out."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, batch: PackedBatch, causal: bool) -> Tensor:
        """Sum, not mean: the count that divides it is the whole step's, over all ranks (see `engine`)."""
        hidden = self.encoder(batch, causal)[batch.label_positions]
        hidden = self.encoder.head(hidden)
        return linear_cross_entropy(hidden, self.encoder.output_weight, self.encoder.decoder.bias, batch.labels)
