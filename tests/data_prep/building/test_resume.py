"""Killed at any moment and resumed, done by any number of workers or in parts: the rows are the same bytes (trial 2)."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep import build as building
from data_prep.building import in_processes
from data_prep.rows import AtomicFiles
from tests.data_prep.data_prep_helpers import Result, command, manifest, tree, write_jsonl

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Several files of 1,500 documents in all, plain and compressed, which make some 100 units of 4 kb."""
    import zstandard

    folder = tmp_path_factory.mktemp("corpus")
    source = random.Random(5)
    texts = [" ".join(f"w{source.randint(5, 900)}" for _ in range(source.randint(1, 90))) for _ in range(1500)]
    plain = [write_jsonl(folder / f"{name}.jsonl", texts[n::3] + texts[n::30]) for n, name in enumerate("abc")]
    packed = folder / "c.jsonl.zst"
    packed.write_bytes(zstandard.compress(plain[2].read_bytes()))
    (folder / "d.csv").write_text("text\n" + "\n".join(texts[:200]) + "\n")
    return [plain[0], plain[1], packed, folder / "d.csv"]


@pytest.fixture(scope="module")
def options(words: Path) -> list[object]:
    split = ("--validation", 0.2, "--deduplicate", "exact", "--shard-size", "8kb", "--unit-size", "4kb")
    return ["--tokenizer", words, "--row-length", 64, *split]


@pytest.fixture(scope="module")
def reference(corpus: list[Path], options: list[object], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    from data_prep.__main__ import main

    out = tmp_path_factory.mktemp("reference") / "rows"
    assert main([str(part) for part in ["build", *corpus, *options, "--workers", 1, "--out", out]]) == 0
    assert len(tree(out)) > 30
    return tree(out)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers(
    cli: Cli, tmp_path: Path, corpus: list[Path], options: list[object], reference: dict[str, bytes], workers: int
) -> None:
    assert cli("build", *corpus, *options, "--workers", workers, "--out", tmp_path / "rows").code == 0
    assert tree(tmp_path / "rows") == reference
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("workers", [1, 3])
def test_killed_after_two_units(
    cli: Cli, tmp_path: Path, corpus: list[Path], options: list[object], reference: dict[str, bytes], workers: int
) -> None:
    """SIGKILL to the parent alone: its workers end by themselves, and what is half written is not used."""
    run = ["build", *corpus, *options, "--workers", workers, "--out", tmp_path / "rows"]
    process = command(*run)
    state = tmp_path / ".rows.build"
    while process.poll() is None and len([path for path in state.glob("units/*") if not path.suffix]) < 2:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "rows").exists()
    deadline = time.monotonic() + 10
    while group_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not group_lives(process.pid)
    made = [path for path in state.glob("units/*") if path.suffix != ".tmp"]
    # A unit's hashes come before the unit: those alone do not make it, where the kill came between the two.
    done = {path.name: path.stat().st_mtime_ns for path in made if path.with_suffix("").exists()}
    assert 4 <= len(done) < 200  # two units and more, each with its hashes
    refused = cli(*run)
    assert (refused.code, "--resume" in refused.err, "remove" in refused.err) == (1, True, True)
    other = cli(*run, "--resume", "--seed", 5)
    assert (other.code, "--seed was 17" in other.err) == (2, True)
    kept = {}
    publish = building.BuildState.publish

    def look(self: building.BuildState, written: set[str]) -> None:
        kept.update({path.name: path.stat().st_mtime_ns for path in state.glob("units/*")})
        publish(self, written)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building.BuildState, "publish", look)
        result = cli(*run, "--resume", "--workers", 2)
    assert result.code == 0, result.err
    assert {name: kept[name] for name in done} == done  # nothing was made a second time
    assert tree(tmp_path / "rows") == reference
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    again = cli(*run, "--resume")
    assert (again.code, "complete already" in again.out) == (0, True)
    assert cli(*run).code == 1  # without --resume nothing is taken over


def group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_killed_again_and_again(
    tmp_path: Path, corpus: list[Path], options: list[object], reference: dict[str, bytes]
) -> None:
    """The whole process group at random moments, until it gets through: also while packing and while putting in place."""
    run = ["build", *corpus, *options, "--workers", 2, "--resume", "--out", tmp_path / "rows"]
    source, kills = random.Random(11), 0
    for _ in range(40):
        process = command(*run)
        try:
            process.communicate(timeout=source.uniform(0.2, 0.5) * 1.15**kills)  # soon enough on any machine
        except Exception:  # subprocess.TimeoutExpired
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            kills += 1
            continue
        assert process.returncode == 0
        break
    assert kills >= 2
    assert tree(tmp_path / "rows") == reference
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


@pytest.mark.parametrize("at", ["shards", "index", "manifest", "in place"])
def test_killed_while_packing(
    cli: Cli,
    tmp_path: Path,
    corpus: list[Path],
    options: list[object],
    reference: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    run = ["build", *corpus, *options, "--resume", "--workers", 1, "--out", tmp_path / "rows"]

    class Killed(BaseException):
        pass

    def dying(self: AtomicFiles, name: str, data: bytes) -> None:
        if {"shards": "shard.00003.mds", "index": "index.json", "manifest": "manifest.json"}.get(at, "-") in name:
            raise Killed
        put(self, name, data)

    def dying_discard(self: building.BuildState) -> None:
        raise Killed

    put = AtomicFiles.put
    with monkeypatch.context() as patch:
        if at == "in place":
            patch.setattr(building.BuildState, "discard", dying_discard)
        patch.setattr(AtomicFiles, "put", dying)
        with pytest.raises(Killed):
            cli(*run)
    assert cli(*run).code == 0
    assert tree(tmp_path / "rows") == reference
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_parts(
    cli: Cli, tmp_path: Path, corpus: list[Path], options: list[object], reference: dict[str, bytes]
) -> None:
    run = ["build", *corpus, *options, "--workers", 1, "--out", tmp_path / "rows"]
    for part in ("3/3", "1/3"):
        result = cli(*run, "--part", part)
        assert result.code == 0, result.err
        assert "slices of other parts are left" in result.out
    early = cli("finish", tmp_path / "rows")
    assert early.code == 1
    assert "not done" in early.err
    assert cli(*run).code == 1
    changed = cli(*run[:-4], "--row-length", 32, *run[-4:], "--part", "2/3")
    assert (changed.code, "--row-length was 64" in changed.err) == (2, True)
    fewer = cli("build", *corpus[:2], *options, "--out", tmp_path / "rows", "--part", "2/3")
    assert (fewer.code, "input is not what it was" in fewer.err) == (1, True)
    assert "all is there" in cli(*run, "--part", "2/3").out
    assert "is done" in cli(*run, "--part", "2/3").out  # a second time does nothing
    assert cli("finish", tmp_path / "rows").code == 0
    assert tree(tmp_path / "rows") == reference
    assert "complete already" in cli("finish", tmp_path / "rows").out
    assert "complete already" in cli(*run, "--part", "2/3").out
    assert cli("finish", tmp_path / "nothing").code == 1


def test_a_file_that_changed_is_done_anew(cli: Cli, tmp_path: Path, words: Path) -> None:
    files = [write_jsonl(tmp_path / f"{n}.jsonl", [f"w{5 + n * 10 + k} w6" for k in range(40)]) for n in range(3)]
    (tmp_path / "2.jsonl").write_text("broken")
    run = ["build", *files, "--tokenizer", words, "--row-length", 16, "--unit-size", "1kb", "--workers", 1]
    failed = cli(*run, "--resume", "--out", tmp_path / "rows")
    assert failed.code == 1
    assert "2.jsonl', record 1" in failed.err
    assert "kept in" in failed.err
    assert "--resume" in failed.err
    units = len(list((tmp_path / ".rows.build" / "units").iterdir()))
    assert units == 4
    write_jsonl(tmp_path / "2.jsonl", ["w900 w901"])
    assert cli(*run, "--resume", "--out", tmp_path / "rows").code == 0
    assert cli(*run, "--out", tmp_path / "fresh").code == 0
    assert tree(tmp_path / "rows") == tree(tmp_path / "fresh")


def test_a_long_build_that_fails_keeps_what_is_done(
    cli: Cli, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6"] * 100 + [7])
    run = ["build", source, "--tokenizer", words, "--row-length", 16, "--unit-size", "1kb", "--workers", 1]
    assert "kept" not in cli(*run, "--out", tmp_path / "rows").err
    assert not (tmp_path / ".rows.build").exists()
    monkeypatch.setattr(building, "KEEP_AFTER", 0)
    assert f"kept in {tmp_path}/.rows.build" in cli(*run, "--out", tmp_path / "rows").err
    assert cli(*run, "--out", tmp_path / "rows", "--resume", "--on-error", "skip").code == 0
    assert manifest(tmp_path / "rows")["counts"]["dropped"] == {"not_text": 1}


def test_two_builds_of_one_place(cli: Cli, tmp_path: Path, corpus: list[Path], options: list[object]) -> None:
    run = ["build", *corpus, *options, "--resume", "--out", tmp_path / "rows"]
    process = command(*run)
    while process.poll() is None and not (tmp_path / ".rows.build" / "plan.json").exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    second = cli(*run)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0
    process.communicate()
    assert (second.code, "another process is building" in second.err) == (1, True)


def test_the_state_names_no_file_and_is_private(cli: Cli, tmp_path: Path, words: Path) -> None:
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in" / "Canary7731.jsonl", ["w5 Canary7731"])
    run = ["build", tmp_path / "in", "--tokenizer", words, "--row-length", 16, "--out", tmp_path / "rows"]
    assert cli(*run, "--part", "1/1").code == 0
    state = tmp_path / ".rows.build"
    for path in [state, *state.rglob("*")]:
        assert b"Canary7731" not in (path.read_bytes() if path.is_file() else path.name.encode())
        assert not path.is_dir() or path.stat().st_mode & 0o077 == 0
    assert json.loads((state / "plan.json").read_text())["options"]["row-length"] == 16


class Square:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> int:
        if self.number == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.number**2 // (self.number - 7)


def test_tasks_in_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    few = [Square(n) for n in (1, 2, 3, 4, 5, 6, 20)]
    expected = sorted(task() for task in few)
    for workers in (1, 2, 3):
        assert sorted(in_processes(iter(few), workers)) == expected
    with pytest.raises(Exception, match="unexpected ZeroDivisionError at .*test_resume"):
        list(in_processes([Square(n) for n in (5, 6, 7, 8)], 2))
    with pytest.raises(Exception, match="ended by signal 9, perhaps for want of memory"):
        list(in_processes([Square(n) for n in (12, 13, 14)], 2))
    assert list(in_processes([], 2)) == []


def test_a_failure_in_a_worker_is_told_as_one_in_this_process(
    cli: Cli, tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, no text; with --traceback the worker's frames."""
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 Canary7731 w6"] * 300)
    run = ["build", source, "--tokenizer", words, "--row-length", 16, "--unit-size", "1kb", "--workers", 2]
    with source.open("a") as file:
        file.write('{"text": ["Canary7731"]}\n')
    broken = cli(*run, "--out", tmp_path / "rows")
    assert broken.code == 1
    assert broken.err.startswith(f"error: '{source}', record 301: its field 'text' is not a string")
    (tmp_path / "sitecustomize.py").write_text(
        "import data_prep.building.tokenised_unit as u\ndef f(text, *a): raise ValueError(text)\nu.split_of = f\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).resolve().parents[3]}:{tmp_path}")
    for flag in ([], ["--traceback"]):
        failed = cli(*run, "--on-error", "skip", "--out", tmp_path / "rows", *flag)
        assert failed.code == 1
        assert "unexpected ValueError at " in failed.err
        assert ("in __call__" in failed.err) == bool(flag)
        assert "Canary7731" not in failed.err
    assert not (tmp_path / ".rows.build").exists()
