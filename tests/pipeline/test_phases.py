"""Phases: freezing, branches, twins, own rows, points kept and exported; and going on at another scale."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.engine.optimizer import group_of
from tests.conftest import lines, metrics
from tests.ranks import start, train

Write = Callable[..., Path]


def weights(run: Path, phase: str, kind: str = "weights") -> dict[str, torch.Tensor]:
    checkpoints = run / phase / "checkpoints"
    return load_file(checkpoints / (checkpoints / "latest").read_text().strip() / f"{kind}.safetensors")


def training(run: Path, phase: str) -> list[dict[str, Any]]:
    return [line for line in metrics(run, phase) if not line.get("validation")]


def own_deepspeed(folder: Path, stage: int) -> str:
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "fp32"}}))
    return str(path)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_layers_do_not_move(recipe: Write, tmp_path: Path, stage: int) -> None:
    """In the second phase, with momentum from the first; and their gradients are not in the norm."""
    run = tmp_path / "run"
    frozen = {
        "phases__1__frozen_layers": ["0-1", "embeddings"],
        "engine": {"deepspeed": own_deepspeed(tmp_path, stage)},
    }
    train(2, tmp_path / "log", recipe(**frozen), "--run-dir", run)
    before, after = weights(run, "clm"), weights(run, "mlm_decay")
    for name in before:
        still = group_of(name) in ("0", "1", "embeddings")
        assert torch.equal(before[name], after[name]) == still, name
    free = tmp_path / "free"
    train(2, tmp_path / "log", recipe(), "--run-dir", free)
    assert training(run, "mlm_decay")[0]["grad_norm"] < 0.9 * training(free, "mlm_decay")[0]["grad_norm"]
    assert training(run, "mlm_decay")[0]["loss"] == pytest.approx(training(free, "mlm_decay")[0]["loss"], rel=1e-5)


def test_what_freezing_names_must_be_there(recipe: Write, tmp_path: Path) -> None:
    path = recipe(phases__0__frozen_layers=["1-3"])
    assert (
        "layer 3, but the model has 0 to 2"
        in train(1, tmp_path / "log", path, "--run-dir", tmp_path / "r", code=2)[0].err
    )


def test_twins_see_the_same_rows(recipe: Write, tmp_path: Path) -> None:
    twin = {"phases__0__objective": "mlm", "phases__0__mask_rate": 0.3, "phases__0__name": "mlm"}
    train(1, tmp_path / "log", recipe(), "--run-dir", tmp_path / "detour")
    train(2, tmp_path / "log", recipe("twin.yaml", **twin), "--run-dir", tmp_path / "twin")
    for ours, theirs in (("clm", "mlm"), ("mlm_decay", "mlm_decay")):
        assert lines(tmp_path / "detour" / ours / "rows.jsonl") == lines(tmp_path / "twin" / theirs / "rows.jsonl")
    labels = [line["labels"] for line in training(tmp_path / "detour", "mlm_decay")]
    assert labels == [line["labels"] for line in training(tmp_path / "twin", "mlm_decay")]  # the same masks too


def test_branches_from_points_of_another_run(recipe: Write, tmp_path: Path) -> None:
    """Several decays from one CLM phase; a decay branched at its end equals the decay of the run itself."""
    base = tmp_path / "base"
    points = {"checkpoints__keep_at_tokens": [4000], "checkpoints__export_at_tokens": [8000], "checkpoints__keep": 1}
    train(2, tmp_path / "log", recipe(**points, checkpoints__every_steps=2), "--run-dir", base)
    steps = {t: next(x["step"] for x in training(base, "clm") if x["tokens"] >= t) for t in (4000, 8000)}
    last = training(base, "clm")[-1]["step"]
    kept = sorted(p.name for p in (base / "clm" / "checkpoints").glob("step-*"))
    assert kept == [f"step-{n:08d}" for n in (steps[4000], steps[8000], last)]
    assert (base / "clm" / f"export-step-{steps[8000]:08d}" / "model.safetensors").is_file()

    decay = {"name": "mlm_decay", "objective": "mlm", "mask_rate": 0.15, "tokens": 5000}
    decay["learning_rate"] = {"peak": 2e-3, "end": 2e-4, "shape": "one_minus_sqrt"}
    branch = {"phases": [decay], "model": {}, "start": {"checkpoint": str(base / "clm")}}
    train(2, tmp_path / "log", recipe("end.yaml", **branch), "--run-dir", tmp_path / "end")
    assert metrics(tmp_path / "end", "mlm_decay") == metrics(base, "mlm_decay")
    ours, theirs = weights(tmp_path / "end", "mlm_decay"), weights(base, "mlm_decay")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    branch["start"] = {"checkpoint": str(base / "clm" / "checkpoints" / kept[0])}
    train(1, tmp_path / "log", recipe("early.yaml", **branch), "--run-dir", tmp_path / "early")
    assert lines(tmp_path / "early" / "mlm_decay" / "rows.jsonl")[0]["position"] == 8 * steps[4000]
    lineage = json.loads((tmp_path / "early" / "mlm_decay" / "export" / "lineage.json").read_text())
    assert (lineage["phases"][0]["name"], lineage["phases"][0]["steps"]) == ("clm", steps[4000])


def test_rows_of_a_phase(recipe: Write, rows: Path, tmp_path: Path) -> None:
    """A mix, rows of a phase's own, the stream taken up again, and started again."""
    mix = [{"rows": str(rows / "train"), "proportion": 3}, {"rows": str(rows / "validation"), "proportion": 1}]
    phase = {"objective": "clm", "tokens": 3000, "learning_rate": {"peak": 1e-3}}
    phases = [
        {**phase, "name": "first"},
        {**phase, "name": "own", "data": {"rows": mix}},
        {**phase, "name": "again"},
        {**phase, "name": "anew", "data": "restart", "optimizer_state": "reset"},
    ]
    run = tmp_path / "run"
    train(2, tmp_path / "log", recipe(phases=phases), "--run-dir", run)
    first, own, again, anew = (lines(run / p["name"] / "rows.jsonl") for p in phases)
    train_rows = json.loads((rows / "train" / "manifest.json").read_text())["counts"]["rows"]
    of_validation = [i for line in own for i in line["rows"] if i >= train_rows]
    assert 0 < len(of_validation) < sum(len(line["rows"]) for line in own) / 2
    assert own[0]["position"] == 0
    assert again[0]["position"] == first[-1]["position"] + 8
    assert [line["rows"] for line in anew] == [line["rows"] for line in first[: len(anew)]]
    state = json.loads(next((run / "anew" / "checkpoints").glob("step-*/state.json")).read_text())
    assert state["adam_step"] == len(anew)


SCALES = [
    # ranks, rows per device, stage: of the first part and of the second
    ((2, 2, 1), (1, 8, 1)),
    ((2, 2, 1), (4, 1, 2)),
    ((1, 4, 3), (2, 2, 0)),
    ((2, 1, 2), (2, 4, 3)),
    ((2, 2, 0), (4, 2, 1)),
]


@pytest.mark.parametrize(("before", "after"), SCALES)
def test_goes_on_at_another_scale(recipe: Write, tmp_path: Path, before: tuple, after: tuple) -> None:
    """PITFALLS trial 11: the same rows per step, the same numbers, from any stage and number of ranks to any other."""
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    train(1, tmp_path / "log", recipe(), "--run-dir", whole)
    for world, per_device, stage in (before, after):
        path = recipe(batch__rows_per_device=per_device, engine={"deepspeed": own_deepspeed(tmp_path, stage)})
        running = start(world, tmp_path / "log", path, "--run-dir", moved)
        if (world, per_device, stage) == before:
            while running.processes[0].is_alive() and len(_lines(moved / "clm" / "metrics.jsonl")) < 7:
                running.processes[0].join(0.01)
            (moved / "STOP").touch()
        codes = {result.code for result in running.wait()}
        assert codes == ({75} if (world, per_device, stage) == before else {0})
    for phase in ("clm", "mlm_decay"):
        assert lines(whole / phase / "rows.jsonl") == lines(moved / phase / "rows.jsonl")
        for ours, theirs in zip(metrics(whole, phase), metrics(moved, phase), strict=True):
            assert ours == {k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v for k, v in theirs.items()}
    ours, theirs = weights(whole, "mlm_decay"), weights(moved, "mlm_decay")
    assert max(float((ours[n] - theirs[n]).abs().max()) for n in ours) < 1e-4


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_a_constant_phase_may_go_on_for_longer(recipe: Write, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    running = start(1, tmp_path / "log", recipe(), "--run-dir", run, "--phase", "clm")
    while running.processes[0].is_alive() and len(_lines(run / "clm" / "metrics.jsonl")) < 4:
        running.processes[0].join(0.01)
    (run / "STOP").touch()
    assert running.wait()[0].code == 75
    longer = recipe(phases__0__tokens=16_000)
    train(1, tmp_path / "log", longer, "--run-dir", run, "--phase", "clm")
    train(1, tmp_path / "log", longer, "--run-dir", whole, "--phase", "clm")
    assert metrics(run, "clm") == metrics(whole, "clm")
    refused = recipe(phases__0__tokens=20_000)  # it is done now
    assert "phases.0.tokens differs" in train(1, tmp_path / "log", refused, "--run-dir", run, code=2)[0].err
