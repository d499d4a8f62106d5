import json
import os
import time
from pathlib import Path

import pytest

from command_line import Failure
from pipeline.status import duration, last_error, main, phases

RECIPE = {
    "phases": [
        {"name": "clm", "objective": "clm", "tokens": 10_000},
        {"name": "mlm_decay", "objective": "mlm", "tokens": 1000},
    ]
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in the middle of its first phase, in whose metrics a line is just being written."""
    folder = tmp_path / "run"
    (folder / "clm").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    steps = [
        {"phase": "clm", "step": n, "tokens": 1000 * n, "loss": 6 - n / 10, "tokens_per_second": 50.0}
        for n in (1, 2, 3, 4)
    ]
    validation = {"phase": "clm", "step": 4, "tokens": 4000, "validation": True, "mlm_loss": 5.5, "clm_loss": 5.25}
    text = "".join(json.dumps(r) + "\n" for r in [*steps, validation]) + '{"phase": "clm", "st'
    (folder / "clm" / "metrics.jsonl").write_text(text)
    return folder


def test_a_run_in_progress(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clm, decay = phases(run)
    assert (clm.step, clm.tokens, clm.loss, clm.seconds_left) == (4, 4000, 5.6, 120)
    assert decay.state == "not started"
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    assert "clm (clm): running or stopped  step 4  4,000 of 10,000 tokens (40.0%)  loss 5.6000" in out
    assert "validation MLM 5.5000 CLM 5.2500" in out
    assert "50 tokens/s  2 min of training left" in out
    (run / "clm" / "DONE").touch()
    assert phases(run)[0].seconds_left is None


def test_the_last_error(run: Path) -> None:
    assert last_error(run) is None
    log = run / "logs" / "clm-3.out"
    log.write_text(
        "error: an old one\nclm step 1\nerror: recipe r.yaml: no such file\nsrun: error: n1: task 0: Exited with exit code 2\n"
    )
    assert last_error(run) == "error: recipe r.yaml: no such file"
    with log.open("a") as file:
        file.write(
            "phase clm: job 3, start 2, 1 nodes, 2026-01-01T00:00:00Z\nsrun: error: n1: task 0: Exited with exit code 75\n"
        )
    assert last_error(run) is None  # of this start
    (run / "logs" / "error.json").write_text(json.dumps({"message": "out of memory", "time": time.time()}))
    assert last_error(run) == "error: out of memory"
    later = time.time() + 100  # the run went on since
    os.utime(run / "clm" / "metrics.jsonl", (later, later))
    assert last_error(run) is None


def test_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="holds no run"):
        main([str(tmp_path)])
    with pytest.raises(Failure, match="no such folder"):
        main([str(tmp_path / "none")])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "clm-1.out").write_text("error: phase x: no\n")
    with pytest.raises(Failure, match="has not started yet; error: phase x: no"):
        main([str(tmp_path)])


def test_durations() -> None:
    assert [duration(s) for s in (5, 600, 12_000, 200_000)] == ["5 s", "10 min", "3 h 20 min", "2 d 7 h"]
