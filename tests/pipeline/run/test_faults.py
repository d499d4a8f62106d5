"""What clusters do to a run: signals, deaths, hangs, full disks, damage; and what goes wrong in the numbers."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.slurm.next_attempt import end
from tests.conftest import lines, metrics
from tests.ranks import Ranks, start, train

Write = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[3]


def wait_for(condition: Callable[[], bool], alive: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def count(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def same(a: Path, b: Path) -> None:
    for phase in ("clm", "mlm_decay"):
        assert metrics(a, phase) == metrics(b, phase)
        assert lines(a / phase / "rows.jsonl") == lines(b / phase / "rows.jsonl")
    ours, theirs = (
        load_file(next((run / "mlm_decay" / "checkpoints").glob("step-*")) / "weights.safetensors") for run in (a, b)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def uninterrupted(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import yaml

    from tests.conftest import tiny_recipe

    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tiny_recipe(rows)))
    train(2, folder / "log", folder / "recipe.yaml", "--run-dir", folder / "run")
    return folder / "run"


def test_signals_and_kills_end_in_the_same_run(recipe: Write, tmp_path: Path, uninterrupted: Path) -> None:
    """A short soak: SIGUSR2 to all, SIGTERM to one rank (twice), SIGKILL to one rank; then on to the end."""
    run = tmp_path / "run"
    path = recipe(checkpoints__every_steps=2)
    for number, ranks, after in (
        (signal.SIGUSR2, [0, 1], 2),
        (signal.SIGTERM, [1], 3),
        (signal.SIGKILL, [0], 4),
        (None, [], 0),
    ):
        running = start(2, tmp_path / "log", path, "--run-dir", run)
        alive = running.processes[0].is_alive
        if number is not None:
            seen = sum(count(run / phase / "metrics.jsonl") for phase in ("clm", "mlm_decay"))

            def written(wanted: int) -> bool:
                return sum(count(run / phase / "metrics.jsonl") for phase in ("clm", "mlm_decay")) >= wanted

            wait_for(partial(written, seen + after), alive)
            running.signal(number, ranks)
            if number == signal.SIGTERM:
                running.signal(number, ranks)
        begin = time.monotonic()
        results = running.wait()
        if number == signal.SIGKILL:
            assert time.monotonic() - begin < 60
            assert results[1].code == 1
            assert "another rank ended" in results[1].err
        else:
            assert {r.code for r in results} == {75 if number else 0}, [r.err for r in results]
    same(uninterrupted, run)


def test_a_signal_while_importing_waits(recipe: Write, tmp_path: Path) -> None:
    """The real script, not forked: SIGUSR2 within its first imports."""
    command = [sys.executable, str(ROOT / "pipeline" / "train.py"), str(recipe()), "--run-dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    status = Path(f"/proc/{process.pid}/status")

    def blocked() -> bool:
        mask = next((x for x in status.read_text().splitlines() if x.startswith("SigBlk")), "SigBlk: 0")
        return bool(int(mask.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)

    wait_for(blocked, lambda: process.poll() is None)
    process.send_signal(signal.SIGUSR2)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert "stopped early" in out


def test_a_signal_to_the_launcher_stops_its_ranks(recipe: Write, tmp_path: Path) -> None:
    """It kills the `deepspeed` command alone; the ranks notice, save and leave: no orphan."""
    from pipeline.ranks import free_port

    run = tmp_path / "run"
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    words = [
        *launcher,
        str(ROOT / "pipeline" / "train.py"),
        str(recipe(phases__0__tokens=10_000_000)),
        "--run-dir",
        str(run),
    ]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: count(run / "clm" / "metrics.jsonl") >= 4, lambda: process.poll() is None, 120)
    process.send_signal(signal.SIGUSR2)
    process.wait(30)

    def left() -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if str(run).encode() in words:
                found.append(entry.name)
        return found

    wait_for(lambda: not left(), lambda: True, 60)
    latest = run / "clm" / "checkpoints" / (run / "clm" / "checkpoints" / "latest").read_text().strip()
    state = json.loads((latest / "state.json").read_text())
    assert state["step"] == metrics(run, "clm")[-1]["step"]


def test_the_end_of_the_jobs_time_stops_the_run(recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.run import StopRequests

    now = int(time.time())
    assert not StopRequests({"SLURM_JOB_END_TIME": str(now + 3600)}).pending()
    assert StopRequests({"SLURM_JOB_END_TIME": str(now + 30)}).pending()
    early = StopRequests({"CLM_DETOUR_END_TIME": str(now + 120), "SLURM_JOB_END_TIME": str(now)})
    assert not early.pending()
    early.leave_time_for(save=50)  # three of them do not fit
    assert early.pending()
    slow = StopRequests({"CLM_DETOUR_END_TIME": str(now + 200)})
    slow.leave_time_for(save=10, step=60)
    assert not slow.pending()
    slow.leave_time_for(step=100)  # the slowest counts
    slow.leave_time_for(step=1)
    assert slow.pending()


def _break(kind: str, at: int, argv: list[str]) -> int:
    """Train, with something broken from the start of step `at` of the run."""
    from command_line import block_stop_signals, run
    from pipeline import train as trainer
    from pipeline.engine import deepspeed_engine as engine
    from pipeline.model import loss

    block_stop_signals()
    original = engine.Engine.train_step
    calls = 0

    def broken(self, *arguments):
        nonlocal calls
        calls += 1
        if calls == at:
            if kind == "hang" and self.ranks.rank == 1:
                time.sleep(600)
            if kind == "memory" and self.ranks.rank == 0:
                raise torch.OutOfMemoryError("CUDA out of memory: a long story")
        return original(self, *arguments)

    def poisoned(self, *arguments):
        total = forward(self, *arguments)
        return total * float("inf") if kind == "inf" and calls == at and self.training else total

    loss.LossModel.forward, forward = poisoned, loss.LossModel.forward
    evaluate, passes = engine.Engine.evaluate, 0

    def interrupted(self, *arguments):
        nonlocal passes
        passes += 1
        if kind == "stop in validation" and passes == at:
            (Path(argv[argv.index("--run-dir") + 1]) / "STOP").touch()
        return evaluate(self, *arguments)

    engine.Engine.evaluate = interrupted
    engine.Engine.train_step = broken
    return run(trainer.main, argv)


def broken(world: int, tmp_path: Path, kind: str, at: int, *argv: object) -> Ranks:
    return Ranks(_break, (kind, at, [str(word) for word in argv]), world, tmp_path / "log")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_that_is_not_finite_stops_the_run(recipe: Write, tmp_path: Path, stage: int) -> None:
    """PITFALLS trial 12."""
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "fp32"}}))
    path = recipe(checkpoints__every_steps=1, engine={"deepspeed": str(file)})
    results = broken(2, tmp_path, "inf", 3, path, "--run-dir", tmp_path / "run").wait()
    assert [result.code for result in results] == [1, 1]
    step = lines(tmp_path / "run" / "clm" / "rows.jsonl")[-1]["step"]
    assert step == 2
    assert "phase clm, step 3: loss" in results[0].err
    assert "rows [" in results[0].err
    assert "the last checkpoint, of step 2, is intact" in results[0].err
    train(2, tmp_path / "log", path, "--run-dir", tmp_path / "run")  # and it goes on from there


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_that_is_not_finite_may_be_skipped(recipe: Write, tmp_path: Path, stage: int) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "fp32"}}))
    path = recipe(faults__on_nonfinite="skip", engine={"deepspeed": str(file)})
    results = broken(2, tmp_path, "inf", 3, path, "--run-dir", tmp_path / "run", "--phase", "clm").wait()
    assert [result.code for result in results] == [0, 0], results[0].err
    assert "skipped: phase clm, step 3" in results[0].out
    third = next(line for line in metrics(tmp_path / "run", "clm") if line["step"] == 3)
    assert third["grad_norm"] is None
    state = json.loads(next((tmp_path / "run" / "clm" / "checkpoints").glob("step-*/state.json")).read_text())
    assert (state["skipped"], state["adam_step"]) == (1, state["step"] - 1)
    weights = load_file(next((tmp_path / "run" / "clm" / "checkpoints").glob("step-*")) / "weights.safetensors")
    assert all(torch.isfinite(value).all() for value in weights.values())


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_stop_in_the_middle_of_a_validation(recipe: Write, tmp_path: Path, uninterrupted: Path, at: int) -> None:
    """One validation makes 4 passes (3 batches, 2 objectives, 2 ranks), at the start, at step 5 and at the end."""
    run = tmp_path / "run"
    results = broken(2, tmp_path, "stop in validation", at, recipe(), "--run-dir", run).wait()
    assert [result.code for result in results] == [75, 75], results[0].err
    steps = count(run / "clm" / "rows.jsonl")
    assert steps == {1: 0, 5: 5, 9: 10}[at]
    assert not any(line.get("validation") and line["step"] == steps for line in metrics(run, "clm"))
    train(2, tmp_path / "log", recipe(), "--run-dir", run)
    same(uninterrupted, run)


def test_a_rank_that_hangs_is_found(recipe: Write, tmp_path: Path) -> None:
    path = recipe(faults__hang_seconds=3, faults__hang_medians=5)
    begin = time.monotonic()
    results = broken(2, tmp_path, "hang", 4, path, "--run-dir", tmp_path / "run").wait()
    assert time.monotonic() - begin < 60
    assert [result.code for result in results] == [1, 1]
    assert "rank 1 has hung" in results[1].err
    assert "in broken" in results[1].err  # the stack shows where


def test_out_of_memory_names_the_remedy(recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    results = broken(2, tmp_path, "memory", 2, recipe(), "--run-dir", tmp_path / "run").wait()
    assert [result.code for result in results] == [1, 1]
    assert "lower batch.rows_per_device (now 2)" in results[0].err
    assert "a long story" not in results[0].err
    assert "another rank ended" in results[1].err
    assert end(tmp_path / "run", "clm", 1, job) == "failed"  # to another start it would happen too


def test_damage_is_one_clear_line(recipe: Write, tmp_path: Path, rows: Path) -> None:
    run = tmp_path / "run"
    train(1, tmp_path / "log", recipe(), "--run-dir", run, "--phase", "clm")
    for name, damage, says in (
        ("weights.safetensors", lambda p: p.write_bytes(p.read_bytes()[:1000]), "cannot be read"),
        ("state.json", lambda p: p.write_text("{"), "cannot be read"),
        ("exp_avg.safetensors", lambda p: p.unlink(), "cannot be read"),
    ):
        broken_run = tmp_path / "broken"
        shutil.copytree(run, broken_run)
        damage(next((broken_run / "clm" / "checkpoints").glob("step-*")) / name)
        [result] = train(1, tmp_path / "log", recipe(), "--run-dir", broken_run, "--phase", "mlm_decay", code=1)
        assert says in result.err
        assert len(result.err.strip().splitlines()) == 1
        shutil.rmtree(broken_run)

    changed = tmp_path / "changed"
    shutil.copytree(rows, changed)
    shard = next((changed / "train").glob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:40_000])
    results = train(2, tmp_path / "log", recipe(data__rows=str(changed / "train")), "--run-dir", tmp_path / "s", code=1)
    assert any("shard 0" in result.err for result in results)
    for result in results:
        assert [x for x in result.err.splitlines() if x.startswith("error: ")]
    whole = next((rows / "train").glob("*.mds")).read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    results = train(2, tmp_path / "log", recipe(data__rows=str(changed / "train")), "--run-dir", tmp_path / "u", code=1)
    assert any("is damaged: its hash is not the index's" in result.err for result in results)
    shard.unlink()
    results = train(2, tmp_path / "log", recipe(data__rows=str(changed / "train")), "--run-dir", tmp_path / "t", code=1)
    assert any("shard 0" in result.err for result in results)
    other = recipe(data__rows=str(rows / "validation"))
    assert "digests differ" in train(1, tmp_path / "log", other, "--run-dir", run, code=1)[0].err


def _full_disk(argv: list[str]) -> int:
    """Train where no file may grow beyond 60 kB: a checkpoint's weights do not fit."""
    import resource

    from command_line import run
    from pipeline.train import main

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    return run(main, argv)


def test_a_full_disk_leaves_the_last_checkpoint(recipe: Write, tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = recipe(checkpoints__every_steps=2)
    running = start(2, tmp_path / "log", path, "--run-dir", run)
    wait_for(lambda: count(run / "clm" / "rows.jsonl") >= 3, running.processes[0].is_alive)
    (run / "STOP").touch()
    assert {result.code for result in running.wait()} == {75}
    before = (run / "clm" / "checkpoints" / "latest").read_text()
    results = Ranks(_full_disk, ([str(path), "--run-dir", str(run)],), 2, tmp_path / "log").wait()
    assert [result.code for result in results] == [1, 1]
    assert "cannot be written" in results[0].err
    assert (run / "clm" / "checkpoints" / "latest").read_text() == before
    train(2, tmp_path / "log", path, "--run-dir", run)
    assert [line["step"] for line in metrics(run, "clm") if "loss" in line] == list(
        range(1, count(run / "clm" / "rows.jsonl") + 1)
    )


def test_spikes_are_told_with_their_rows() -> None:
    from pipeline.run.faults import Spikes

    spikes = Spikes()
    steady = [3 - 0.001 * n + 0.01 * (n % 3) for n in range(100)]
    assert not any(spikes(loss) for loss in steady)
    assert spikes(5.0)
    assert not spikes(2.95)
    assert not spikes(float("nan"))  # that is another fault


def test_uneven_rows_on_two_ranks(recipe: Write, tmp_path: Path) -> None:
    """PITFALLS trial 15: 3 validation rows on 2 ranks, and skipped rows: no hang, each validation row once."""
    two, one = tmp_path / "two", tmp_path / "one"
    uneven = {"validation__rows": 3, "batch": {"rows": 2, "rows_per_device": 1}, "phases__0__tokens": 4000}
    train(2, tmp_path / "log", recipe(**uneven), "--run-dir", two, "--phase", "clm")
    skip = lines(two / "clm" / "rows.jsonl")[1]["rows"][:1]
    train(1, tmp_path / "log", recipe(**uneven), "--run-dir", one, "--phase", "clm")
    for ours, theirs in zip(metrics(two, "clm"), metrics(one, "clm"), strict=True):
        assert ours == {k: pytest.approx(v, rel=1e-5) if isinstance(v, float) else v for k, v in theirs.items()}
    assert all(line["rows"] == 3 for line in metrics(two, "clm") if line.get("validation"))
    holed = tmp_path / "holed"
    train(2, tmp_path / "log", recipe(**uneven, faults__skip_rows=skip), "--run-dir", holed, "--phase", "clm")
    ours, theirs = lines(holed / "clm" / "rows.jsonl"), lines(two / "clm" / "rows.jsonl")
    assert ours[1]["rows"] == theirs[1]["rows"][1:]
    assert ours[2]["rows"] == theirs[2]["rows"]
