"""Dropout that follows the row stream: unbiased masks, the same for every split of the work, refused unless asked for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from command_line import Failure
from pipeline.model import Encoder, LossModel, PackedBatch, token_keys
from pipeline.model.dropout import dropout, layer_keys
from tests.conftest import metrics
from tests.pipeline.modernbert import config, documents, labelled
from tests.ranks import start, train

Write = Callable[..., Path]
RATES = {"model__config__embedding_dropout": 0.1, "model__config__mlp_dropout": 0.2}


def drawn(rate: float, position: int = 0, layer: int = 1, phase: str = "clm") -> torch.Tensor:
    keys = torch.from_numpy(token_keys(17, phase, position, 1000))
    return dropout(torch.ones(1000, 200), layer_keys(keys, layer), rate)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_masks_are_unbiased_and_independent(rate: float) -> None:
    values = drawn(rate)
    assert set(values.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1 - rate))}
    dropped = (values == 0).double()
    spread = (rate * (1 - rate)) ** 0.5
    assert dropped.mean().item() == pytest.approx(rate, abs=5 * spread / 200_000**0.5)
    assert (dropped.mean(0) - rate).abs().max() < 5 * spread / 1000**0.5  # each feature
    assert (dropped.mean(1) - rate).abs().max() < 5 * spread / 200**0.5  # each token
    others = [
        drawn(rate, position=1),
        drawn(rate, layer=2),
        drawn(rate, phase="mlm"),
        values.roll(1, 0),
        values.roll(1, 1),
    ]
    for other in others:
        both = ((other == 0).double() * dropped).mean().item()
        assert both == pytest.approx(rate**2, abs=5 * rate * (1 - rate**2) ** 0.5 / 200_000**0.5)


def test_a_row_has_its_masks_whatever_it_is_packed_with() -> None:
    encoder = Encoder.random(config(embedding_dropout=0.1, mlp_dropout=0.1), seed=0, attention="sdpa").train()

    def hidden(*positions: int) -> torch.Tensor:
        docs = [documents((40 + position,))[0] for position in positions]
        keys = [torch.from_numpy(token_keys(0, "clm", p, len(doc))) for p, doc in zip(positions, docs, strict=True)]
        batch = replace(PackedBatch.from_documents(docs), dropout_keys=torch.cat(keys))
        with torch.no_grad():
            return encoder(batch, causal=True)

    together = hidden(3, 7, 9)
    torch.testing.assert_close(together[43:90], hidden(7), atol=1e-6, rtol=0)
    torch.testing.assert_close(together[90:], hidden(9), atol=1e-6, rtol=0)
    encoder.eval()
    assert (hidden(7) - together[43:90]).abs().max() > 0.1


def test_recomputed_activations_have_the_same_masks() -> None:
    encoder = Encoder.random(config(embedding_dropout=0.1, mlp_dropout=0.1), seed=0, attention="sdpa").train()
    batch = labelled(documents((70, 9)))
    batch = replace(batch, dropout_keys=torch.from_numpy(token_keys(0, "clm", 0, 79)))
    grads = []
    for checkpointing in (False, True):
        encoder.activation_checkpointing = checkpointing
        grads.append(torch.autograd.grad(LossModel(encoder)(batch, causal=True), list(encoder.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_training_never_leaves_the_configs_dropout_out_in_silence() -> None:
    encoder = Encoder.random(config(mlp_dropout=0.1), seed=0, attention="sdpa")
    with pytest.raises(Failure, match=r"config.mlp_dropout is 0.1: dropout is refused unless"):
        encoder.train()(labelled(documents((9,))), causal=True)
    encoder.eval()(labelled(documents((9,))), causal=True)


def test_ranks_micro_batches_and_resuming_change_nothing(recipe: Write, tmp_path: Path) -> None:
    asked = {**RATES, "model__dropout": True, "faults__skip_rows": [3, 4, 5]}
    train(1, tmp_path / "log", recipe(**asked), "--run-dir", tmp_path / "one")
    train(2, tmp_path / "log", recipe(**asked, batch__rows_per_device=1), "--run-dir", tmp_path / "two")
    running = start(1, tmp_path / "log", recipe(**asked), "--run-dir", tmp_path / "stopped")
    log = tmp_path / "stopped" / "clm" / "metrics.jsonl"
    while running.processes[0].is_alive() and not (log.exists() and len(log.read_text().splitlines()) > 3):
        running.processes[0].join(0.01)
    (tmp_path / "stopped" / "STOP").touch()
    assert running.wait()[0].code == 75
    train(1, tmp_path / "log", recipe(**asked), "--run-dir", tmp_path / "stopped")
    for phase in ("clm", "mlm_decay"):
        one, two, stopped = (metrics(tmp_path / run, phase) for run in ("one", "two", "stopped"))
        assert one == stopped
        for a, b in zip(one, two, strict=True):
            for key in a.keys() & {"loss", "grad_norm", "mlm_loss", "clm_loss"}:
                assert a[key] == pytest.approx(b[key], abs=2e-5)
    train(1, tmp_path / "log", recipe(faults__skip_rows=[3, 4, 5]), "--run-dir", tmp_path / "without")
    plain = metrics(tmp_path / "without", "clm")
    with_it = metrics(tmp_path / "one", "clm")
    assert plain[0]["mlm_loss"] == with_it[0]["mlm_loss"]  # validation is without dropout
    assert abs(plain[1]["loss"] - with_it[1]["loss"]) > 1e-4
