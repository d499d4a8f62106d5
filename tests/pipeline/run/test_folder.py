"""What the run folder records for job scripts and `pipeline.status`."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Failure, Passing
from pipeline.plan import check_folder
from pipeline.recipe import load
from pipeline.run import JobCache, RunFolder
from pipeline.slurm.next_attempt import end
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
    folder.mark_failed(Passing("another rank ended or cannot be reached"))
    assert "layer 9" in json.loads((run / "logs" / "error.json").read_text())["message"]
    (tmp_path / "strange").mkdir()
    RunFolder(tmp_path / "strange").mark_failed(Failure("x"))
    assert not list((tmp_path / "strange").iterdir())


def test_what_may_pass_never_hides_what_will_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks record in any order; an out-of-memory error on one means a lost rank to the others."""
    lost, unreachable, memory = Passing("another rank ended"), Passing("unreachable"), Failure("out of memory")
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    for order, verdict, says in (
        ((lost,), "again", "another rank ended"),
        ((unreachable, lost), "again", "unreachable"),
        ((lost, unreachable), "again", "unreachable"),
        ((memory, lost, unreachable), "failed", "out of memory"),
        ((lost, unreachable, memory), "failed", "out of memory"),
        ((lost, RuntimeError("of ours"), lost), "failed", "unexpected RuntimeError"),
    ):
        job["SLURM_RESTART_COUNT"] = str(
            int(job["SLURM_RESTART_COUNT"]) + 1
        )  # what an earlier start left counts nothing
        for name, value in job.items():
            monkeypatch.setenv(name, value)
        (tmp_path / "logs").mkdir(exist_ok=True)
        for error in order:
            RunFolder(tmp_path).mark_failed(error)
        assert end(tmp_path, "clm", 1, job) == verdict
        assert says in json.loads((tmp_path / "logs" / "error.json").read_text())["message"]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    names = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    return names


def test_a_rank_that_is_killed_is_tried_again(recipe: Write, tmp_path: Path, job: dict[str, str]) -> None:
    run = tmp_path / "run"
    running = start(2, tmp_path / "log", recipe(phases__0__tokens=10_000_000), "--run-dir", run)
    rows, deadline = run / "clm" / "rows.jsonl", time.monotonic() + 60
    while not (rows.exists() and len(rows.read_text().splitlines()) > 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    running.signal(signal.SIGKILL, [0])
    killed, left = running.wait()
    assert (killed.code, left.code) == (-signal.SIGKILL, 1)
    assert "another rank ended" in left.err
    assert end(run, "clm", 137, job) == "again"


def test_a_taken_port_is_tried_again(
    recipe: Write, tmp_path: Path, job: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr("pipeline.ranks.free_port", lambda: other.getsockname()[1])
        (tmp_path / "run" / "logs").mkdir(parents=True)  # as launch/phase.sh does
        running = start(2, tmp_path / "log", recipe(), "--run-dir", tmp_path / "run")
        running.processes[0].join(60)
        running.signal(signal.SIGKILL, [1])  # as srun does: it waits for an answer at that port
        leading, _ = running.wait()
    assert leading.code == 1
    assert "the ranks cannot meet at 127.0.0.1" in leading.err
    assert end(tmp_path / "run", "clm", 1, job) == "again"


def test_file_systems_without_locks(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lustre that is mounted without -o flock, say."""

    def flock(file: object, how: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = RunFolder(tmp_path / "run")
    run.claim()
    run.release()
    assert "no locks on this file system" in capsys.readouterr().out
    check_folder(tmp_path / "run", load(recipe()), 0)
    cache = JobCache(load(recipe(data__rows="s3://bucket/rows")), {"SLURM_JOB_ID": "7"})
    folder = cache.open()
    assert folder is not None
    assert f"{folder}: no locks on this file system" in capsys.readouterr().out
    cache.release()
