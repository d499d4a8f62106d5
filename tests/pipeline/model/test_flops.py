"""FLOP accounting: equal to counting query-key pairs one by one, and to what torch counts of matrix products."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.model import Encoder, LossModel, attended_pairs, device_peak, step_flops
from pipeline.model.attention import packed as attention
from pipeline.model.attention.backend import Backend
from pipeline.model.flops import peak_of
from tests.pipeline.modernbert import config, documents, labelled


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
def test_pairs_equal_counting_them(causal: bool, window: int | None) -> None:
    lengths = [1, 2, 6, 7, 64, 65, 66, 130]
    counted = 0
    for n in lengths:
        distance = np.subtract.outer(np.arange(n), np.arange(n))
        seen = np.ones((n, n), bool) if window is None else np.abs(distance) <= window
        counted += int((seen & (distance >= 0) if causal else seen).sum())
    assert attended_pairs(np.array(lengths), causal, window) == counted


def test_step_equals_what_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers global and bidirectional, attention as plain matrix products: then torch's own counter sees every FLOP."""

    def plain(q, k, v, cu_seqlens, max_seqlen, causal, half_window):  # type: ignore[no-untyped-def]
        parts = []
        for i in range(len(cu_seqlens) - 1):
            a, b, c = (x[cu_seqlens[i] : cu_seqlens[i + 1]].transpose(0, 1) for x in (q, k, v))
            parts.append((a @ b.transpose(1, 2)).softmax(-1).matmul(c).transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setitem(attention.BACKENDS, "sdpa", Backend(plain))
    encoder = Encoder.random(config(global_attn_every_n_layers=1), seed=0, attention="sdpa")
    batch = labelled(documents((5, 30, 70)))
    # The counter knows addmm, but not its in-place form, by which the loss sums its weight gradient.
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **more: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        LossModel(encoder)(batch, causal=False).backward()
    assert step_flops(encoder.config, [batch], causal=False) == counter.get_total_flops()


def test_micro_batches_add_up() -> None:
    of = config()
    one, two = labelled(documents((5, 200))), labelled(documents((70,)))
    for causal in (False, True):
        assert step_flops(of, [one, two], causal) == step_flops(of, [one], causal) + step_flops(of, [two], causal)
    assert step_flops(of, [one], True) < step_flops(of, [one], False)


def test_the_peak_of_this_cpu_is_plausible() -> None:
    peak = device_peak(torch.device("cpu"))
    assert peak is not None
    assert 1e9 < peak < 1e14


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_gpu_is_known_by_whole_words(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak
