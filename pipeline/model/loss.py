"""The loss at labelled positions, and the module that DeepSpeed wraps: encoder, head and loss in one forward.

Logits [L, V] are the largest tensor of a step (8,192 x 50,368 float32 is 1.65 GB) and are never held whole: the linear
map and the cross-entropy are fused over chunks of positions. The gradient of a sum of cross-entropies follows from the
logits (softmax minus one-hot), so the forward computes it chunk by chunk, and the backward only scales it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from pipeline.model.batch import PackedBatch
from pipeline.model.encoder import Encoder

CHUNK_LOGITS = 1 << 24  # logits of a chunk: 64 MiB in float32


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum over L of the cross-entropy of hidden [L, D] @ weight [V, D]^T + bias [V] against labels [L]; float32 sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        vocabulary: int,
        z_loss: float,
        want: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if want else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if want else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if want and bias is not None else None
        chunk = max(1, CHUNK_LOGITS // len(weight))
        # One buffer for all chunks: the page faults of a fresh one cost a CPU more time than its softmax.
        buffer = torch.empty(min(chunk, len(hidden)), len(weight), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), chunk):
            rows = hidden[begin : begin + chunk]
            target = labels[begin : begin + chunk, None]
            logits = _logits(rows, weight, bias, buffer[: len(rows)])
            logits[:, vocabulary:] = -torch.inf  # padding rows: probability and gradient exactly 0
            of_target = logits.gather(1, target)
            if d_hidden is None or d_weight is None:
                total += (logits.logsumexp(-1, keepdim=True) - of_target).sum()
                continue
            if logits.is_cpu:
                top = logits.amax(-1, keepdim=True)
                # This softmax may write over its input (its kernel takes each row's maximum and sum before it writes).
                probability = torch.softmax(logits, -1, out=logits)
                # The largest probability is at least 1/V, so its logarithm is exact where the target's might underflow.
                log_sum = top - probability.amax(-1, keepdim=True).log()
            else:
                log_sum = logits.logsumexp(-1, keepdim=True)
                probability = logits.sub_(log_sum).exp_()
            total += (log_sum - of_target).sum()
            if z_loss:
                probability.mul_(1 + 2 * z_loss * log_sum)
            d_logits = probability.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            d_logits = d_logits.to(weight.dtype)
            torch.mm(d_logits, weight, out=d_hidden[begin : begin + chunk])
            if weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.T, rows)
            else:
                d_weight += d_logits.T @ rows
        ctx.save_for_backward(*(x for x in (d_hidden, d_weight, d_bias) if x is not None))
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # In place, to hold no second copy; autograd refuses a second backward through what was changed.
        grads = [x.mul_(grad).to(dtype) for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=False)]
        return grads[0], grads[1], grads[2] if len(grads) > 2 else None, None, None, None, None


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Write rows @ weight^T + bias in float32 to `out`; the product itself is in the weights' precision."""
    if weight.dtype == torch.float32 and bias is not None:
        return torch.addmm(bias, rows, weight.T, out=out)
    if weight.dtype == torch.float32:
        return torch.mm(rows, weight.T, out=out)
    out.copy_(rows @ weight.T)
    return out if bias is None else out.add_(bias)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    vocabulary: int | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns the sum of cross-entropies, a float32 scalar.

    hidden [L, D], weight [V, D], bias [V] or None, labels [L] int64; L may be 0. `vocabulary`: number of classes, where
    weight has more rows; None: all rows. `z_loss`: the gradient is that of the sum plus z_loss * log(sum of exp of the
    logits)^2 per label, which keeps logits from drifting (PaLM, arXiv 2204.02311). The returned value stays the
    cross-entropy alone, so that logged losses compare with those of a run without z_loss.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # autocast does not reach into an autograd function
        hidden, weight = (x.to(torch.get_autocast_dtype(device)) for x in (hidden, weight))
    # Asked here, because inside the function autograd is always off.
    want = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden, weight, bias) if x is not None)
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, vocabulary or len(weight), z_loss, want)
    return total


class LossModel(nn.Module):
    """The module that the engine wraps: it takes a packed batch and returns the loss summed over the batch's labels."""

    def __init__(self, encoder: Encoder, z_loss: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.z_loss = encoder, z_loss

    def forward(self, batch: PackedBatch, causal: bool) -> Tensor:
        """Returns the sum, not the mean: the engine divides by the label count of the whole step, over all ranks."""
        encoder = self.encoder
        hidden = encoder.before_logits(encoder(batch, causal)[batch.label_positions])
        weight, bias = encoder.output_weight, encoder.output_bias
        return linear_cross_entropy(hidden, weight, bias, batch.labels, encoder.config.vocab_size, self.z_loss)
