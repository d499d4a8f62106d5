"""Layers compiled on both sides of their attention: the same numbers, one compilation for all batches."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from pipeline.model import Encoder, LossModel, PackedBatch, token_keys
from tests.conftest import metrics
from tests.pipeline.modernbert import config, documents, error, labelled
from tests.ranks import train

SHAPES = [(5, 64, 65, 130), (200, 3), (9, 9, 9, 9, 9, 9, 100), (70,), (31, 2, 140)]


def batch_of(lengths: Sequence[int]) -> PackedBatch:
    keys = torch.from_numpy(token_keys(0, "clm", 0, sum(lengths)))
    return replace(labelled(documents(lengths)), dropout_keys=keys)


def results(encoder: Encoder, batch: PackedBatch, causal: bool) -> list[Tensor]:
    loss = LossModel(encoder)(batch, causal)
    return [loss.detach(), *torch.autograd.grad(loss, list(encoder.parameters()))]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    """Counts compilations, without generating code."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, backend=counter, fullgraph=True, **options))
    return counter


@pytest.mark.parametrize(("fill_to", "rate"), [(None, 0.0), (300, 0.0), (300, 0.1)])
def test_one_compilation_serves_every_batch(
    counter: CompileCounterWithBackend, fill_to: int | None, rate: float
) -> None:
    plain = Encoder.random(config(mlp_dropout=rate), seed=0, attention="sdpa")
    compiled = Encoder.random(config(mlp_dropout=rate), seed=0, attention="sdpa")
    compiled.compile_blocks(fill_to)
    warm = 0
    for i, lengths in enumerate(SHAPES):
        for causal in (False, True):
            batch = batch_of(lengths)
            for a, b in zip(results(compiled, batch, causal), results(plain, batch, causal), strict=True):
                assert error(a, b) < 1e-5
            with torch.no_grad():
                assert error(compiled(batch, causal), plain(batch, causal)) < 1e-5
        warm = warm or counter.frame_count
        assert counter.frame_count == warm, f"batch {i} was compiled again"
    assert 0 < warm <= 8  # two parts, the first layer apart, with and without gradients


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_equals_eager() -> None:
    torch._dynamo.reset()
    of = config(num_hidden_layers=1, mlp_dropout=0.1)
    plain, compiled = (Encoder.random(of, seed=0, attention="sdpa") for _ in range(2))
    compiled.compile_blocks()
    batch = batch_of((5, 64, 65))
    for a, b in zip(results(compiled, batch, True), results(plain, batch, True), strict=True):
        assert error(a, b) < 1e-5


def test_a_filled_batch_gives_the_same_numbers() -> None:
    encoder = Encoder.random(config(), seed=0, attention="sdpa")
    batch = labelled(documents((5, 64, 65, 130)))
    for total in (264, 265, 300, 394, 395, 600):
        filled = batch.filled(total)
        assert filled.tokens == total
        assert filled.cu_seqlens[-1] == total
        assert int(filled.cu_seqlens.diff().max()) == filled.max_seqlen >= 130
        again = PackedBatch.from_documents([[0] * int(n) for n in filled.cu_seqlens.diff()])
        assert torch.equal(filled.position_ids, again.position_ids)
        for causal in (False, True):
            with torch.no_grad():
                hidden, expected = encoder(filled, causal)[: batch.tokens], encoder(batch, causal)
                assert error(hidden, expected) < 1e-6
            for a, b in zip(results(encoder, filled, causal), results(encoder, batch, causal), strict=True):
                assert error(a, b) < 1e-5
    assert batch.filled(10) is batch


def test_filling_keeps_what_the_batch_knows() -> None:
    batch = replace(labelled(documents((5, 7))), row_ids=(3, 4))
    filled = batch.filled(40)
    assert filled.row_ids == (3, 4)
    assert torch.equal(filled.labels, batch.labels)
    assert torch.equal(filled.input_ids[:12], batch.input_ids)


def test_compiled_bf16_errs_at_most_twice_as_much_as_eager(counter: CompileCounterWithBackend) -> None:
    exact = Encoder.random(config(), seed=0, attention="sdpa").bfloat16().float()
    plain, compiled = (Encoder.random(config(), seed=0, attention="sdpa").bfloat16() for _ in range(2))
    compiled.compile_blocks()
    batch = labelled(documents((5, 64, 65, 130)))
    for causal in (False, True):
        for ours, theirs, truth in zip(*(results(e, batch, causal) for e in (compiled, plain, exact)), strict=True):
            assert error(ours, truth) <= 2 * error(theirs, truth) + 1e-3
    assert counter.frame_count


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_the_recipes_options_change_no_number(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """engine.compile and engine.activation_checkpointing, alone and together, through the trainer."""
    short = {"phases__0__tokens": 3000, "phases__1__tokens": 1000, "phases__0__learning_rate__warmup_tokens": 0}
    short["model__config__num_hidden_layers"] = 1
    train(1, tmp_path / "log", recipe(**short), "--run-dir", tmp_path / "plain")
    expected = metrics(tmp_path / "plain", "clm") + metrics(tmp_path / "plain", "mlm_decay")
    for compiled, recomputed in ((False, True), (True, True)):
        run = tmp_path / f"{compiled}-{recomputed}"
        options = {"engine__compile": compiled, "engine__activation_checkpointing": recomputed}
        train(1, tmp_path / "log", recipe(**short, **options), "--run-dir", run)
        found = metrics(run, "clm") + metrics(run, "mlm_decay")
        for a, b in zip(found, expected, strict=True):
            for key in a.keys() & {"loss", "grad_norm", "mlm_loss", "clm_loss"}:
                assert a[key] == pytest.approx(b[key], abs=1e-4)
