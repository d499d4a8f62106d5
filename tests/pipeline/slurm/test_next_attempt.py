"""What a job does next, decided without a cluster."""

import json
from pathlib import Path

import pytest

from command_line import Failure
from pipeline.slurm.next_attempt import begin, end, main

JOB = {"SLURM_JOB_ID": "7"}
AGAIN = {**JOB, "SLURM_RESTART_COUNT": "1"}


def write(path: Path, **content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def checkpoint(run: Path, tokens: int) -> None:
    write(run / "clm" / "checkpoints" / f"step-{tokens}" / "state.json", tokens=tokens)
    (run / "clm" / "checkpoints" / "latest").write_text(f"step-{tokens}\n")


def test_the_verdict_comes_from_records_not_from_the_exit_code(tmp_path: Path) -> None:
    assert end(tmp_path, "clm", 75, JOB) == "failed"  # no record: something else ended with 75
    assert end(tmp_path, "clm", 137, JOB) == "failed"
    assert end(tmp_path, "clm", 140, JOB) == "again"  # SIGUSR2 before Python could block it
    write(tmp_path / "clm" / "STOPPED", job="7", restart="0")
    assert end(tmp_path, "clm", 137, JOB) == "again"  # a neighbour was killed while it left
    assert end(tmp_path, "clm", 1, AGAIN) == "failed"  # the record is of an earlier start
    assert end(tmp_path, "clm", 1, {"SLURM_JOB_ID": "8"}) == "failed"
    (tmp_path / "STOP").touch()
    assert end(tmp_path, "clm", 75, JOB) == "stopped"
    assert end(tmp_path, "clm", 1, AGAIN) == "failed"
    (tmp_path / "clm" / "DONE").touch()
    assert end(tmp_path, "clm", 9, JOB) == "done"


def test_what_may_pass_is_tried_again(tmp_path: Path) -> None:
    error = tmp_path / "logs" / "error.json"
    write(error, message="another rank ended", passing=True, job="7", restart="0")
    assert end(tmp_path, "clm", 137, JOB) == "again"
    assert end(tmp_path, "clm", 1, AGAIN) == "failed"  # the record is of an earlier start
    write(error, message="out of memory", passing=False, job="7", restart="0")
    assert end(tmp_path, "clm", 1, JOB) == "failed"
    write(error, message="of an older version", job="7", restart="0")
    assert end(tmp_path, "clm", 1, JOB) == "failed"
    write(error, message="unreachable", passing=True, job="7", restart="1")
    assert end(tmp_path, "clm", 1, AGAIN) == "again"
    (tmp_path / "STOP").touch()
    assert end(tmp_path, "clm", 1, AGAIN) == "stopped"


def test_a_stop_asked_for_while_the_job_waits_is_kept(tmp_path: Path) -> None:
    stop = tmp_path / "STOP"
    stop.touch()
    assert begin(tmp_path, "clm", JOB) == "go"  # submitted by hand after a stop
    assert not stop.exists()
    stop.touch()
    assert (
        begin(tmp_path, "clm", {**JOB, "CLM_DETOUR_STOP_CLEARED": "1"}) == "stopped"
    )  # launch/submit removed the old one
    assert begin(tmp_path, "clm", AGAIN) == "stopped"
    assert begin(tmp_path, "clm", {"SLURM_JOB_ID": "9", "CLM_DETOUR_CHAIN": "7"}) == "stopped"
    assert stop.exists()


def test_attempts_in_vain_are_bounded(tmp_path: Path) -> None:
    assert begin(tmp_path, "clm", JOB) == "go"
    for _ in range(4):
        assert begin(tmp_path, "clm", AGAIN) == "go"
    with pytest.raises(Failure, match="phase clm: 5 attempts in a row trained no new token"):
        begin(tmp_path, "clm", AGAIN)
    checkpoint(tmp_path, 1000)  # progress sets the count back
    assert begin(tmp_path, "clm", AGAIN) == "go"
    successor = {"SLURM_JOB_ID": "8", "CLM_DETOUR_CHAIN": "7", "CLM_DETOUR_ATTEMPTS": "1"}
    with pytest.raises(Failure):
        begin(tmp_path, "clm", successor)
    assert begin(tmp_path, "clm", {"SLURM_JOB_ID": "9"}) == "go"  # a person submitted again


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["begin", str(tmp_path), "clm"]) == 0
    assert main(["end", str(tmp_path), "clm", "1"]) == 0
    assert capsys.readouterr().out == "go\nfailed\n"
