"""The whole run: phases, staged and in one go, stopped and resumed, on one rank and two, into a Hugging Face folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from pipeline.model import Encoder, PackedBatch
from tests.conftest import lines, metrics
from tests.ranks import start, train

ROOT = Path(__file__).resolve().parents[2]
Write = Callable[..., Path]


def close(a: list[dict], b: list[dict], tolerance: float) -> None:
    """The same lines, numbers within a relative tolerance."""
    assert [set(x) for x in a] == [set(x) for x in b]
    for x, y in zip(a, b, strict=True):
        for key, value in x.items():
            assert y[key] == (pytest.approx(value, rel=tolerance) if isinstance(value, float) else value), (key, x, y)


def test_one_go_and_staged_give_the_same_numbers(recipe: Write, tmp_path: Path) -> None:
    whole, staged = tmp_path / "whole", tmp_path / "staged"
    train(2, tmp_path / "log", recipe(), "--run-dir", whole)
    refused = train(2, tmp_path / "log", recipe(), "--run-dir", staged, "--phase", "mlm_decay", code=1)
    assert "run --phase clm first" in refused[0].err
    train(2, tmp_path / "log", recipe(), "--run-dir", staged, "--phase", "clm")
    assert not (staged / "mlm_decay").exists()
    train(2, tmp_path / "log", recipe(), "--run-dir", staged, "--phase", "mlm_decay")
    for phase in ("clm", "mlm_decay"):
        assert metrics(whole, phase) == metrics(staged, phase)
        assert lines(whole / phase / "rows.jsonl") == lines(staged / phase / "rows.jsonl")

    alone = tmp_path / "alone"
    train(1, tmp_path / "log", recipe(batch__rows_per_device=4), "--run-dir", alone)
    for phase in ("clm", "mlm_decay"):  # another number of ranks and another micro-batch: the same run
        close(metrics(whole, phase), metrics(alone, phase), 1e-5)
        assert lines(whole / phase / "rows.jsonl") == lines(alone / phase / "rows.jsonl")

    log = lines(whole / "clm" / "metrics.jsonl")
    steps = [line for line in log if not line.get("validation")]
    assert [line["step"] for line in steps] == list(range(1, len(steps) + 1))
    assert steps[-2]["tokens"] < 12_000 <= steps[-1]["tokens"]
    assert steps[-1]["learning_rate"] == 2e-3
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    validated = [line["step"] for line in log if line.get("validation")]
    assert validated == sorted({0, *range(5, len(steps), 5), len(steps)})
    decay = [line for line in lines(whole / "mlm_decay" / "metrics.jsonl") if not line.get("validation")]
    assert decay[-1]["learning_rate"] == 2e-4
    assert lines(whole / "mlm_decay" / "rows.jsonl")[0]["position"] == 8 * len(steps)  # the row stream goes on
    done = train(1, tmp_path / "log", recipe(), "--run-dir", whole)
    assert "done already" in done[0].out


def test_stopped_and_resumed_equals_uninterrupted(recipe: Write, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(1, tmp_path / "log", recipe(), "--run-dir", whole)
    stopped.mkdir()
    stops = resumed = 0
    for _ in range(20):
        running = start(1, tmp_path / "log", recipe(), "--run-dir", stopped)
        while running.processes[0].is_alive() and not (stopped / "environment.json").exists():
            running.processes[0].join(0.05)
        seen = sum(len(p.read_text().splitlines()) for p in stopped.glob("*/metrics.jsonl"))
        while running.processes[0].is_alive():  # stop after a few more lines
            now = sum(len(p.read_text().splitlines()) for p in stopped.glob("*/metrics.jsonl"))
            if now >= seen + 6:
                (stopped / "STOP").touch()
                break
            running.processes[0].join(0.01)
        [result] = running.wait()
        assert result.code in (0, 75), result.err
        resumed += " goes on at step " in result.out
        if result.code == 0:
            break
        stops += 1
        assert "stopped early" in result.out
    assert stops >= 2
    assert result.code == 0
    assert resumed >= 1
    for phase in ("clm", "mlm_decay"):
        assert metrics(whole, phase) == metrics(stopped, phase)
        assert lines(whole / phase / "rows.jsonl") == lines(stopped / phase / "rows.jsonl")
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        ours, theirs = (
            load_file(next((run / "mlm_decay" / "checkpoints").glob("step-*")) / f"{name}.safetensors")
            for run in (whole, stopped)
        )
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_export_is_an_ordinary_hugging_face_folder(recipe: Write, tmp_path: Path, rows: Path) -> None:
    run = tmp_path / "run"
    train(2, tmp_path / "log", recipe(), "--run-dir", run)
    export = run / "mlm_decay" / "export"
    model, info = AutoModelForMaskedLM.from_pretrained(export, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    ids = AutoTokenizer.from_pretrained(export)("The patient was treated for fever.")["input_ids"]
    batch = PackedBatch.from_documents([ids])
    ours = Encoder.from_pretrained(export, attention="sdpa")
    with torch.no_grad():
        difference = ours.logits(ours(batch, causal=False)) - model(torch.tensor([ids])).logits[0]
    assert difference.abs().max() < 1e-4

    trained = load_file(next((run / "mlm_decay" / "checkpoints").glob("step-*")) / "weights.safetensors")
    exported = load_file(export / "model.safetensors")
    assert all(torch.equal(trained[name], exported[name]) for name in trained)

    lineage = json.loads((export / "lineage.json").read_text())
    assert [phase["name"] for phase in lineage["phases"]] == ["clm", "mlm_decay"]
    assert lineage["phases"][0]["tokens"] >= 12_000
    assert lineage["phases"][1]["validation"]["end"]["mlm_loss"] > 0
    card = (export / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers")
    for told in (card, json.dumps(lineage), (export / "config.json").read_text()):
        assert str(tmp_path) not in told
        assert str(rows) not in told

    # What comes out goes in again: the rows' tokenizer is the model's, and training starts from these weights.
    again = recipe("again.yaml", model={"init": str(export)}, name="again")
    train(1, tmp_path / "log", again, "--run-dir", tmp_path / "again", "--phase", "clm")
    first, last = (lines(r / p / "metrics.jsonl") for r, p in ((tmp_path / "again", "clm"), (run, "mlm_decay")))
    assert first[0]["mlm_loss"] == pytest.approx(last[-1]["mlm_loss"], rel=1e-5)

    out = tmp_path / "exported"
    command = [sys.executable, "-m", "pipeline.export", str(run), str(out)]
    assert subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 0
    assert (out / "model.safetensors").read_bytes() == (export / "model.safetensors").read_bytes()


def test_deepspeed_launcher_and_plain_python(recipe: Write, tmp_path: Path) -> None:
    """The two documented ways to start, for real: two gloo ranks, and one process."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    path, script = recipe(), str(ROOT / "pipeline" / "train.py")
    from pipeline.ranks import free_port

    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    for command, run in ((launcher, "two"), ([sys.executable], "one")):
        words = [*command, script, str(path), "--run-dir", str(tmp_path / run), "--phase", "clm"]
        ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=170)
        assert ended.returncode == 0, ended.stderr[-3000:]
    close(metrics(tmp_path / "two", "clm"), metrics(tmp_path / "one", "clm"), 1e-5)
    starts = [json.loads((tmp_path / run / "environment.json").read_text()) for run in ("two", "one")]
    assert [start[0]["ranks"] for start in starts] == [2, 1]


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"batch__rows": 6}, 2, "rows 6 cannot be divided over 2 ranks x rows_per_device 2"),
        ({"phases__0__tokens": 0}, 2, "phases.0.tokens"),
        ({"data__rows": "nowhere"}, 1, "there is no such folder"),
        ({"model__config__hidden_sise": 3}, 1, "no field 'hidden_sise'"),
        ({"model": {"init": "./nowhere"}}, 1, "no such folder"),
        ({"model__config__vocab_size": 100}, 1, "does not fit the model's 100"),
        ({"model__config__mlp_dropout": 0.1}, 1, "mlp_dropout is 0.1: dropout is refused unless it is asked for"),
        ({"model__dropout": True}, 2, "model.dropout has no effect"),
        ({"model__config__max_position_embeddings": 64}, 1, "max_position_embeddings"),
        ({"model__attention": "flash"}, 1, "flash needs a CUDA GPU"),
        ({"engine__deepspeed": "nowhere.json"}, 2, "cannot be read"),
    ],
)
def test_bad_input_is_one_line(recipe: Write, tmp_path: Path, changes: dict, code: int, says: str) -> None:
    if torch.cuda.is_available() and "model__attention" in changes:
        pytest.skip("this machine has a GPU")
    first, *others = train(2, tmp_path / "log", recipe(**changes), "--run-dir", tmp_path / "run", code=code)
    messages = [line for line in first.err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, first.err
    assert says in messages[0]
    assert "Traceback" not in first.err + others[0].err


def test_a_run_folder_belongs_to_one_recipe_and_one_run(recipe: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    running = start(1, tmp_path / "first", recipe(phases__0__tokens=1_000_000), "--run-dir", run)
    log = run / "clm" / "metrics.jsonl"
    while running.processes[0].is_alive() and not (log.exists() and len(log.read_text().splitlines()) > 3):
        running.processes[0].join(0.05)
    second = train(1, tmp_path / "second", recipe(phases__0__tokens=1_000_000), "--run-dir", run, code=1)
    assert "in use by another run" in second[0].err
    (run / "STOP").touch()
    assert [result.code for result in running.wait()] == [75]

    other = train(1, tmp_path / "log", recipe(seed=18), "--run-dir", run, code=2)
    assert "seed differs" in other[0].err or "phases.0.tokens differs" in other[0].err
    allowed = recipe(phases__0__tokens=1_000_000, batch__rows_per_device=8, logging__every_steps=3)
    resumed = start(1, tmp_path / "log", allowed, "--run-dir", run)
    while resumed.processes[0].is_alive() and (run / "STOP").exists():
        resumed.processes[0].join(0.05)
    (run / "STOP").touch()
    assert [result.code for result in resumed.wait()] == [75]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    assert "holds no run" in train(1, tmp_path / "log", recipe(), "--run-dir", tmp_path / "full", code=2)[0].err


def test_a_start_that_failed_before_it_saved_anything_binds_nothing(recipe: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(1, tmp_path / "log", recipe(model__config__hidden_sise=3), "--run-dir", run, code=1)
    train(1, tmp_path / "log", recipe(phases__0__tokens=4000), "--run-dir", run, "--phase", "clm")
    assert yaml.safe_load((run / "recipe.yaml").read_text())["phases"][0]["tokens"] == 4000
    again = train(1, tmp_path / "log", recipe(phases__0__tokens=4000, seed=18), "--run-dir", run, code=2)
    assert "seed differs" in again[0].err


def test_rows_of_another_tokenizer_are_refused(recipe: Write, corpus: Path, tmp_path: Path) -> None:
    from data_prep.__main__ import main

    run = tmp_path / "run"
    train(1, tmp_path / "log", recipe(phases__0__tokens=4000), "--run-dir", run, "--phase", "clm")
    other = tmp_path / "other"
    assert main(["tokenizer", str(corpus), "--vocab-size", "500", "--out", str(other)]) == 0
    build = ["--tokenizer", str(other), "--out", str(tmp_path / "rows"), "--row-length", "128"]
    assert main(["build", str(corpus), *build]) == 0
    export = str(run / "clm" / "export")
    wrong = recipe("wrong.yaml", model={"init": export}, data={"rows": str(tmp_path / "rows")}, validation=None)
    [result] = train(1, tmp_path / "log", wrong, "--run-dir", tmp_path / "wrong", code=1)
    assert "tokenizer" in result.err
    assert f"--tokenizer {export}" in result.err
    mixed = recipe("mixed.yaml", data__rows=str(tmp_path / "rows"))
    [result] = train(1, tmp_path / "log", mixed, "--run-dir", tmp_path / "mixed", code=1)
    assert "different tokenizers" in result.err
