"""What the run folder records for job scripts and `pipeline.status`."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.errors import Failure
from pipeline.attempts import end
from pipeline.recipe_file import load
from pipeline.run import RunFolder
from tests.ranks import start, train

Write = Callable[..., Path]


def _hold(path: str, ready: object, seconds: float) -> None:
    folder = RunFolder(Path(path))
    folder.claim()
    ready.set()  # type: ignore[attr-defined]
    time.sleep(seconds)


def test_a_restarted_job_waits_for_its_former_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM may start a job again while the ranks of a node that it gave up are still ending."""
    context = multiprocessing.get_context("forkserver")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(tmp_path), ready, 3.0))
    process.start()
    assert ready.wait(60)
    with pytest.raises(Failure, match="is in use by another run"):
        RunFolder(tmp_path).claim()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    again = RunFolder(tmp_path)
    again.claim()
    again.release()
    process.join()


def test_a_jobs_log_and_a_request_may_lie_there_beforehand(recipe: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    (run / "STOP").touch()
    RunFolder(run).accept(load(recipe()))
    assert (run / "recipe.yaml").exists()


def test_a_stop_asked_for_while_the_ranks_load_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop, folder = tmp_path / "STOP", RunFolder(tmp_path)
    folder.clear_stop()
    stop.touch()
    folder.clear_stop()
    assert folder.stop_requested()  # made after this process began
    os.utime(stop, (1, 1))
    monkeypatch.setenv("CLM_DETOUR_STOP_CLEARED", "1")
    folder.clear_stop()
    assert folder.stop_requested()  # the job had removed an old one before
    monkeypatch.delenv("CLM_DETOUR_STOP_CLEARED")
    folder.clear_stop()
    assert not folder.stop_requested()


def test_a_stop_leaves_a_record_of_this_start(recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    monkeypatch.setenv("CLM_DETOUR_END_TIME", "1")  # the job's time is over: stop before the first step
    run = tmp_path / "run"
    (result,) = start(1, tmp_path / "log", recipe(), "--run-dir", run).wait()
    assert result.code == 75
    record = json.loads((run / "clm" / "STOPPED").read_text())
    assert record == {"job": "", "restart": "2"}
    assert end(run, "clm", 137, {"SLURM_RESTART_COUNT": "2"}) == "again"
    assert end(run, "clm", 75, {"SLURM_RESTART_COUNT": "3"}) == "failed"


def test_the_line_of_a_failure_is_kept(recipe: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = recipe(phases__0__frozen_layers=[9])
    train(2, tmp_path / "log", path, "--run-dir", run, code=2)
    record = json.loads((run / "logs" / "error.json").read_text())
    assert "frozen_layers names layer 9" in record["message"]
    folder = RunFolder(run)
    folder.mark_failed("another rank ended or cannot be reached")
    assert "layer 9" in json.loads((run / "logs" / "error.json").read_text())["message"]
    (tmp_path / "strange").mkdir()
    RunFolder(tmp_path / "strange").mark_failed("x")
    assert not list((tmp_path / "strange").iterdir())
