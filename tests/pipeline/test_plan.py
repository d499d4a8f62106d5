import json
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Failure, UsageError
from pipeline import plan
from pipeline.model import GPU_PEAK
from pipeline.plan import GPU_MEMORY, _gpu, main
from tests.conftest import metrics
from tests.ranks import train

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_it_says_is_what_training_does(recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe()
    run = tmp_path / "run"
    assert main([str(path), "--gpus", "2", "--run-dir", str(run)]) == 0
    said = capsys.readouterr().out
    assert not run.exists()  # it only looks
    train(2, tmp_path / "log", path, "--run-dir", run)
    steps = metrics(run, "clm")[-1]["step"]
    assert f"phase clm (clm): 12,000 tokens, about {steps} steps" in said
    assert "2 ranks x 2 rows x 2 accumulated" in said
    from safetensors import safe_open

    checkpoint = next((run / "clm" / "checkpoints").glob("step-*"))
    size = sum(f.stat().st_size for f in checkpoint.glob("*.safetensors"))
    with safe_open(checkpoint / "weights.safetensors", "pt") as weights:
        count = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
    assert f"{count:,} parameters" in said
    assert abs(size - 12 * count) < 0.1 * size
    assert main([str(path), "--run-dir", str(run), "--for-submit"]) == 0
    assert capsys.readouterr().out == "phase clm clm done\nphase mlm_decay mlm done\n"


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, ["--gpus", "3"], "batch: rows 8 cannot be divided over 3 ranks"),
        ({}, ["--gpus", "0"], "--gpus must be 1 or more"),
        ({}, ["--gpu", "Voodoo"], "--gpu Voodoo: known are"),
        ({"phases__0__frozen_layers": [7]}, [], "frozen_layers names layer 7"),
        ({"model__config__vocab_size": 100}, [], "the rows' vocabulary of 600 ids does not fit the model's 100"),
        ({"model__config__max_position_embeddings": 64}, [], "longer than the model's max_position_embeddings 64"),
        ({"data__rows": "nowhere"}, [], "no rows at .*nowhere: there is no such folder"),
        ({"engine__deepspeed": "none.json"}, [], "engine.deepspeed: .*none.json cannot be read"),
        ({"model": {"init": "/nowhere/model"}}, [], "model /nowhere/model: no such folder"),
    ],
)
def test_what_a_job_would_have_died_of(recipe: Write, changes: dict, words: list[str], message: str) -> None:
    with pytest.raises(Failure, match=message):
        main([str(recipe(**changes)), *words])


def test_the_run_folder(recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe()
    run = tmp_path / "run"
    train(1, tmp_path / "log", path, "--run-dir", run, "--phase", "clm")
    with pytest.raises(UsageError, match="seed differs"):
        main([str(path), "--run-dir", str(run), "seed=9"])
    import fcntl

    with open(run / ".lock") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(Failure, match="in use by another run"):
            main([str(path), "--run-dir", str(run)])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not empty and holds no run"):
        main([str(path), "--run-dir", str(tmp_path / "full")])
    monkeypatch.setattr(plan, "CHECKPOINT", 1 << 40)
    with pytest.raises(Failure, match="TB for checkpoints and exports, and .* are free there"):
        main([str(path), "--run-dir", str(tmp_path / "new")])


def test_a_model_of_another_tokenizer(recipe: Write, tmp_path: Path, rows: Path) -> None:
    run = tmp_path / "run"
    train(1, tmp_path / "log", recipe(), "--run-dir", run, "--phase", "clm")
    export = run / "clm" / "export"
    assert main([str(recipe(model={"init": str(export)}))]) == 0
    content = json.loads((export / "tokenizer.json").read_text())
    content["normalizer"] = None
    content["model"]["continuing_subword_prefix"] = "%"
    (export / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        Failure, match="the rows' tokenizer .* is not .*export's .*: build the rows again with --tokenizer"
    ):
        main([str(recipe(model={"init": str(export)}))])


def test_a_real_recipes_figures(recipe: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """ModernBERT-base's size: 149,655,232 weights with the tied head (its config is transformers' default)."""
    base = {"config": {"vocab_size": 50368}}
    path = recipe(model=base, batch={"rows": 384, "rows_per_device": 8}, phases__0__tokens=10_000_000_000)
    assert main([str(path), "--gpus", "4", "--gpu", "NVIDIA H100 80GB HBM3"]) == 0
    out = capsys.readouterr().out
    assert "149,655,232 parameters" in out
    assert "a checkpoint 1.8 GB" in out
    assert "on 4 H100 at 25% of their peak" in out
    with pytest.raises(UsageError):
        main([str(path), "--gpus", "7"])


@pytest.mark.parametrize(
    ("name", "known", "memory"),
    [
        ("A10", "A10", 24e9),
        ("a100", "A100", 80e9),
        ("A100-40GB", "A100", 40e9),
        ("NVIDIA A100-SXM4-80GB", "A100", 80e9),
    ],
)
def test_a_gpu_is_found_by_its_name(name: str, known: str, memory: float) -> None:
    gpu = _gpu(name)
    assert gpu is not None
    assert (gpu.name, gpu.memory) == (known, memory)


def test_every_gpu_has_a_memory() -> None:
    assert GPU_MEMORY.keys() == GPU_PEAK.keys()


def test_a_model_of_the_hub_is_pinned_to_its_commit(
    recipe: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What launch/submit hands to offline jobs; later starts keep the first one's commit whatever the hub has by then."""
    import shutil

    from huggingface_hub import constants

    train(1, tmp_path / "log", recipe(), "--run-dir", tmp_path / "first", "--phase", "clm")
    hub, run = tmp_path / "hub" / "models--lab--tiny", tmp_path / "run"
    for commit in ("a" * 40, "b" * 40):
        shutil.copytree(tmp_path / "first" / "clm" / "export", hub / "snapshots" / commit)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path = recipe(model={"init": "lab/tiny"})
    capsys.readouterr()
    assert main([str(path), "--run-dir", str(run), "--for-submit"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"override model.revision={'a' * 40}"
    from pipeline.recipe import load
    from pipeline.run import RunFolder

    run.mkdir()
    RunFolder(run).accept(load(path, [f"model.revision={'a' * 40}"]))  # as the first job does
    (hub / "refs" / "main").write_text("b" * 40)
    assert main([str(path), "--run-dir", str(run), "--for-submit"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"override model.revision={'a' * 40}"
