"""The fused loss: equal to cross-entropy over whole logits, in chunks of any size."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from pipeline.model import Encoder, LossModel, PackedBatch
from pipeline.model import loss as loss_module
from pipeline.model.loss import linear_cross_entropy
from tests.pipeline.modernbert import config, documents, error, labelled

ROOT = Path(__file__).resolve().parents[3]


def inputs(labels: int, size: int = 24, vocabulary: int = 97) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(labels)
    hidden = torch.randn(labels, size, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, size, generator=generator, requires_grad=True)
    bias = torch.randn(vocabulary, generator=generator, requires_grad=True)
    return hidden, weight, bias, torch.randint(vocabulary, (labels,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("labels", [1, 6, 7, 8, 50])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_cross_entropy_in_chunks_of_any_size(
    chunk: int, labels: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", chunk * 97)
    hidden, weight, bias, target = inputs(labels)
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    total = linear_cross_entropy(hidden, weight, bias if with_bias else None, target)
    expected = cross_entropy(linear(hidden, weight, bias if with_bias else None), target, reduction="sum")
    assert error(total, expected) < 1e-6
    for a, b in zip(torch.autograd.grad(total * 0.3, leaves), torch.autograd.grad(expected * 0.3, leaves), strict=True):
        assert error(a, b) < 1e-5


def test_z_loss_is_in_the_gradient_and_not_in_the_value() -> None:
    hidden, weight, bias, labels = (x.double() if x.is_floating_point() else x for x in inputs(40))
    leaves = [x.float().detach().requires_grad_() for x in (hidden, weight, bias)]
    value = linear_cross_entropy(*leaves, labels, z_loss=1e-2)
    gradients = torch.autograd.grad(value, leaves)
    exact = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
    logits = linear(*exact)
    plain = cross_entropy(logits, labels, reduction="sum")
    expected = torch.autograd.grad(plain + 1e-2 * logits.logsumexp(-1).square().sum(), exact, retain_graph=True)
    without = torch.autograd.grad(plain, exact)
    assert value.item() == pytest.approx(plain.item(), rel=1e-6)
    for ours, theirs, unlike in zip(gradients, expected, without, strict=True):
        assert error(ours, theirs) < 1e-5
        assert error(ours, unlike) > 1e-3


def test_no_labels_is_a_loss_of_zero_with_zero_gradients() -> None:
    hidden, weight, bias, target = inputs(0)
    total = linear_cross_entropy(hidden, weight, bias, target)
    total.backward()
    assert total.item() == 0
    assert float(weight.grad.abs().sum()) == 0  # type: ignore[union-attr]
    assert hidden.grad is not None


def test_huge_logits_do_not_overflow() -> None:
    hidden, weight, bias, target = inputs(5)
    total = linear_cross_entropy(hidden * 1e4, weight, bias, target)
    assert error(total, cross_entropy(linear(hidden * 1e4, weight, bias), target, reduction="sum")) < 1e-6


def test_bf16_sums_in_float32() -> None:
    hidden, weight, bias, target = inputs(2000)
    half = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    exact = [x.detach().float().requires_grad_() for x in half]
    total = linear_cross_entropy(half[0], half[1], half[2], target)
    truth = cross_entropy(linear(exact[0], exact[1], exact[2]), target, reduction="sum")
    plain = cross_entropy(linear(half[0], half[1], half[2]), target, reduction="sum")
    assert total.dtype == torch.float32
    assert error(total, truth) < 1e-3
    for a, b, c in zip(
        torch.autograd.grad(total, half),
        torch.autograd.grad(plain, half),
        torch.autograd.grad(truth, exact),
        strict=True,
    ):
        assert error(a, c) <= 2 * error(b, c)


PEAK = """
import resource, torch
from pipeline.model.loss import linear_cross_entropy
hidden, weight = torch.randn(8192, 16, requires_grad=True), torch.randn(50_368, 16, requires_grad=True)
labels = torch.zeros(8192, dtype=torch.int64)
linear_cross_entropy(hidden[:2], weight[:200], None, labels[:2]).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy(hidden, weight, None, labels).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_extra_memory_stays_below_256_mib() -> None:
    """For 8,192 labels and 50,368 classes, gradients included; whole logits would take 1,574 MiB."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) < 256


def test_without_gradients_none_are_computed() -> None:
    """A validation spends neither time nor memory on them."""
    hidden, weight, bias, target = inputs(50)
    shapes: list[torch.Size] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            shapes.extend([out.shape] if isinstance(out, Tensor) else [])
            return out

    with torch.no_grad(), Watch():
        total = linear_cross_entropy(hidden, weight, bias, target)
    assert shapes
    assert weight.shape not in shapes
    assert total.item() == linear_cross_entropy(hidden, weight, bias, target).item()


def test_a_second_backward_is_refused() -> None:
    total = linear_cross_entropy(*inputs(5))
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


@pytest.mark.parametrize("causal", [False, True])
def test_loss_model_counts_labelled_positions_only(causal: bool) -> None:
    encoder = Encoder.random(config(), seed=0, attention="sdpa")
    batch = labelled(documents((5, 30, 70)))
    logits = encoder.logits(encoder(batch, causal))
    expected = cross_entropy(logits[batch.label_positions], batch.labels, reduction="sum")
    assert error(LossModel(encoder)(batch, causal), expected) < 1e-6


def test_batch_without_labels() -> None:
    encoder = Encoder.random(config(), seed=0, attention="sdpa")
    loss = LossModel(encoder)(PackedBatch.from_documents(documents((5, 3))), causal=True)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and float(p.grad.abs().sum()) == 0 for p in encoder.parameters())
