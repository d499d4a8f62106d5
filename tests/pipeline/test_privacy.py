"""PITFALLS trial 19: what is in the corpus is in the rows, and nowhere else."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.ranks import train

CANARIES = ("Zyxquartz", "patient-4711-qv", "ward-mumblesworth")  # in a text, an id, a file's name
# A canary may be cut into tokens, so the rows are not searched; everything else that was written is.


def _written(folder: Path, but: tuple[str, ...]) -> str:
    files = [
        p for p in folder.rglob("*") if p.is_file() and not any(part in but for part in p.relative_to(folder).parts)
    ]
    assert files
    return "".join(f"{p.relative_to(folder)}\n{p.read_bytes().decode('latin-1')}" for p in files)


def test_nothing_of_the_corpus_stands_outside_the_rows(
    recipe: Callable[..., Path], tokenizer: Path, corpus: Path, tmp_path: Path, capfd
) -> None:
    from command_line import run as run_command
    from data_prep.__main__ import main

    text, identity, name = CANARIES
    documents = [json.loads(line)["text"] for line in corpus.read_text().splitlines()[:200]]
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    good = inputs / f"{name}.jsonl"
    good.write_text("".join(json.dumps({"id": identity, "text": f"{d} {text} came back."}) + "\n" for d in documents))
    out = tmp_path / "rows"
    build = ["build", str(inputs), "--tokenizer", str(tokenizer), "--row-length", "128"]
    assert run_command(main, [*build, "--out", str(out), "--validation", "0.2"]) == 0

    changes = {"data": {"rows": str(out / "train"), "validation": str(out / "validation")}, "phases__0__tokens": 4000}
    results = train(2, tmp_path / "log", recipe(**changes, logging__tensorboard=True), "--run-dir", tmp_path / "run")
    assert run_command(main, ["inspect", str(out / "train")]) == 0
    assert run_command(main, ["verify", str(out / "train")]) == 0
    from evaluation.__main__ import main as evaluate

    assert evaluate(["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")]) == 0

    # The same once more, failing: a broken record, and a shard damaged under a run.
    with good.open("a") as file:
        file.write(f'{{"id": "{identity}", "text": "{text} \n')
    for extra in ([], ["--traceback"]):
        assert run_command(main, [*build, "--out", str(tmp_path / "failed"), *extra]) == 1
    for shard in (out / "train").glob("*.mds"):
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    results += train(2, tmp_path / "log", recipe(**changes), "--run-dir", tmp_path / "broken", "--traceback", code=1)
    assert run_command(main, ["verify", str(out / "train")]) == 1

    captured = capfd.readouterr()
    said = captured.out + captured.err + "".join(result.out + result.err for result in results)
    assert "error: " in said
    kept = said + _written(tmp_path, but=("inputs", "train", "validation"))
    assert "mlm_loss" in kept
    for canary in CANARIES:
        assert canary not in kept, canary
    for folder in (out, out / "train"):
        assert folder.stat().st_mode & 0o077 == 0
    for manifest in out.glob("*/manifest.json"):
        assert not any(canary in manifest.read_text() for canary in CANARIES)
