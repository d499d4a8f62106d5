"""Configs of both majors of transformers, and vocabularies padded while training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForMaskedLM

from command_line import Failure
from pipeline.model import Encoder, LossModel, PackedBatch, from_config_fields, read_config
from pipeline.model.families.modernbert import half_window, is_global, rope_theta
from tests.conftest import metrics
from tests.pipeline.modernbert import VOCABULARY, config, documents, error, labelled, one_by_one, ours, theirs
from tests.ranks import train

FULL, SLIDING = "full_attention", "sliding_attention"
OF_4 = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta")


def as_5_writes_it(folder: Path, types: list[str], thetas: dict[str, float]) -> None:
    """Rewrite a config as transformers 5.24.0 saves it: its own fields, and none of 4's."""
    path = folder / "config.json"
    fields = {key: value for key, value in json.loads(path.read_text()).items() if key not in OF_4}
    parameters = {kind: {"rope_theta": theta, "rope_type": "default"} for kind, theta in thetas.items()}
    fields |= {"layer_types": types, "rope_parameters": parameters, "transformers_version": "5.24.0"}
    path.write_text(json.dumps(fields))


def test_config_of_transformers_5(tmp_path: Path) -> None:
    """Fields that 4.57 does not know decide the model; what we save from it says the same to both versions."""
    model = theirs(config(global_attn_every_n_layers=2, global_rope_theta=5_000.0, local_rope_theta=300.0))
    model.save_pretrained(tmp_path / "five")
    as_5_writes_it(tmp_path / "five", [FULL, SLIDING, FULL, SLIDING], {FULL: 5_000.0, SLIDING: 300.0})
    encoder = Encoder.from_pretrained(tmp_path / "five", attention="sdpa")
    docs = documents((3, 150))
    expected = one_by_one(model, docs)
    assert error(encoder.logits(encoder(PackedBatch.from_documents(docs), causal=False)), expected) < 1e-5

    encoder.save_pretrained(tmp_path / "out")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert error(one_by_one(again, docs), expected) < 1e-5
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["layer_types"] == [FULL, SLIDING, FULL, SLIDING]
    assert saved["rope_parameters"][SLIDING] == {"rope_type": "default", "rope_theta": 300.0}
    assert [saved[name] for name in OF_4] == [2, 5_000.0, 300.0]


@pytest.mark.parametrize(("every", "local"), [(1, 10_000.0), (3, None), (2, 77.0), (9, 10_000.0)])
def test_config_of_transformers_4_gains_the_fields_of_5(every: int, local: float | None, tmp_path: Path) -> None:
    encoder = ours(theirs(config(global_attn_every_n_layers=every, local_rope_theta=local)), tmp_path / "four")
    encoder.save_pretrained(tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["layer_types"] == [SLIDING if i % every else FULL for i in range(4)]
    assert saved["rope_parameters"][SLIDING]["rope_theta"] == (160_000.0 if local is None else local)
    assert saved["rope_parameters"][FULL]["rope_theta"] == 160_000.0
    # transformers 5 rotates by local_rope_theta where it is written, and cannot by null.
    assert saved["local_rope_theta"] == (160_000.0 if local is None else local)
    assert saved["architectures"] == ["ModernBertForMaskedLM"]
    assert "_name_or_path" not in saved


def test_queries_on_configs() -> None:
    of = config(local_attention=16)
    assert [is_global(of, i) for i in range(4)] == [True, False, False, True]
    assert [half_window(of, i) for i in range(4)] == [None, 8, 8, None]
    assert (rope_theta(of, True), rope_theta(of, False)) == (160_000.0, 10_000.0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1: attention kernels draw it themselves"),
        ({"mlp_dropout": 1.0}, "mlp_dropout is 1.0: it must be from 0 to below 1"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"local_attention": 0}, "local_attention"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn", "rope_theta": 1e4}}}, "rope_parameters"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, "rope_parameters"),
        ({"hidden_activation": "gelo"}, "hidden_activation is 'gelo'"),
        ({"layer_types": [SLIDING] * 4}, "layer_types"),
        ({"layer_types": [FULL, FULL, SLIDING, SLIDING]}, "layer_types"),
        ({"hidden_sise": 64}, "hidden_sise"),
    ],
)
def test_what_could_not_be_followed_is_refused(fields: dict[str, Any], named: str) -> None:
    small = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    with pytest.raises(Failure, match=named):
        from_config_fields(small | fields)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(Failure, match="'bert'"):
        read_config(tmp_path)


# --- padding of the vocabulary ---


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    theirs(config(tie_word_embeddings=request.param)).save_pretrained(tmp_path)
    return tmp_path


def grads(encoder: Encoder, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    loss = LossModel(encoder)(batch, causal=True)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def test_padding_changes_no_number(folder: Path) -> None:
    plain = Encoder.from_pretrained(folder, attention="sdpa")
    padded = Encoder.from_pretrained(folder, attention="sdpa", vocab_multiple=64)
    assert padded.output_weight.shape == (320, 64)
    assert padded.config.vocab_size == VOCABULARY
    batch = labelled(documents((5, 70)))
    hidden = padded(batch, causal=False)
    assert padded.logits(hidden).shape == (75, VOCABULARY)
    assert error(padded.logits(hidden), plain.logits(plain(batch, causal=False))) < 1e-6
    (loss, gradients), (expected, wanted) = grads(padded, batch), grads(plain, batch)
    assert error(loss, expected) < 1e-6
    for name, gradient in gradients.items():
        assert error(gradient[: len(wanted[name])], wanted[name]) < 1e-5
        assert not gradient[len(wanted[name]) :].any()


def test_padding_stays_zero_in_training_and_leaves_the_export(folder: Path, tmp_path: Path) -> None:
    encoder = Encoder.from_pretrained(folder, attention="sdpa", vocab_multiple=64)
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2, weight_decay=0.1)
    for seed in range(3):
        LossModel(encoder)(labelled(documents((40,)), seed=seed), causal=True).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not encoder.output_weight[VOCABULARY:].any()
    encoder.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["model.embeddings.tok_embeddings.weight"].shape == (
        VOCABULARY,
        64,
    )
    model, info = AutoModelForMaskedLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values())
    docs = documents((3, 70))
    logits = encoder.logits(encoder(PackedBatch.from_documents(docs), causal=False))
    assert error(one_by_one(model.eval(), docs), logits) < 1e-5


def test_a_run_with_padding_is_the_run_without(recipe: Callable[..., Path], tmp_path: Path) -> None:
    """With model.vocab_multiple: the same metrics of both phases, and an export of the vocabulary's own size."""
    for name, multiple in (("plain", None), ("padded", 256)):
        train(1, tmp_path / "log", recipe(model__vocab_multiple=multiple), "--run-dir", tmp_path / name)
    for phase in ("clm", "mlm_decay"):
        for a, b in zip(metrics(tmp_path / "plain", phase), metrics(tmp_path / "padded", phase), strict=True):
            assert a == {key: pytest.approx(b[key], rel=1e-4) if isinstance(b[key], float) else b[key] for key in a}
    exports = [
        load_file(tmp_path / name / "mlm_decay" / "export" / "model.safetensors") for name in ("plain", "padded")
    ]
    assert {n: t.shape for n, t in exports[0].items()} == {n: t.shape for n, t in exports[1].items()}
    for name, tensor in exports[0].items():
        assert error(exports[1][name], tensor) < 1e-3


def test_random_weights_are_the_same_with_padding() -> None:
    plain, padded = Encoder.random(config(), seed=3), Encoder.random(config(), seed=3, vocab_multiple=128)
    for a, b in zip(plain.parameters(), padded.parameters(), strict=True):
        assert torch.equal(a, b[: len(a)])
    assert not padded.output_weight[VOCABULARY:].any()
