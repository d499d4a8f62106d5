"""`verify` names each damaged shard and why (trial 4 and its kin); `inspect` shows rows and no text unless asked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streaming import MDSWriter

from data_prep.__main__ import main
from data_prep.rows import HASH, columns, rows_digest
from tests.data_prep.data_prep_helpers import Result, manifest, write_jsonl

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, words: Path) -> Path:
    """train/ with ten shards or more and validation/."""
    folder = tmp_path_factory.mktemp("verify")
    texts = [" ".join(f"w{5 + (7 * n + k) % 900}" for k in range(10 + n % 30)) for n in range(300)]
    source = write_jsonl(folder / "a.jsonl", texts)
    options = ["--row-length", "64", "--validation", "0.1", "--shard-size", "2kb"]
    assert main(["build", str(source), "--tokenizer", str(words), "--out", str(folder / "rows"), *options]) == 0
    return folder / "rows"


@pytest.fixture
def rows(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "rows")
    return tmp_path / "rows"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content), "utf-8")


def shard(folder: Path, number: int) -> Path:
    return folder / f"shard.{number:05}.mds"


def test_sound_rows(cli: Cli, rows: Path) -> None:
    assert len(list((rows / "train").glob("*.mds"))) >= 10
    for folder in (rows, rows / "train", rows / "validation"):
        result = cli("verify", folder)
        assert (result.code, result.err) == (0, "")
        assert "all well" in result.out


def flip(train: Path) -> None:
    data = bytearray(shard(train, 3).read_bytes())
    data[len(data) // 2] ^= 1
    shard(train, 3).write_bytes(data)


def swap(train: Path) -> None:
    one, two = shard(train, 2).read_bytes(), shard(train, 3).read_bytes()
    shard(train, 2).write_bytes(two)
    shard(train, 3).write_bytes(one)


def swap_in_index(index: dict[str, Any]) -> None:
    one, two = (index["shards"][number]["raw_data"] for number in (2, 3))
    one["basename"], two["basename"] = two["basename"], one["basename"]


def set_sample_count(index: dict[str, Any]) -> None:
    index["shards"][3]["samples"] += 1


def set_path(index: dict[str, Any]) -> None:
    index["shards"][3]["raw_data"]["basename"] = "../validation/shard.00000.mds"


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    # name: what is done to train/, the file that is named, a word of the reason
    "flipped byte": (flip, "shard.00003.mds", "bytes were changed"),
    "cut byte": (lambda t: shard(t, 3).write_bytes(shard(t, 3).read_bytes()[:-1]), "shard.00003.mds", "instead of"),
    "added byte": (lambda t: shard(t, 3).write_bytes(shard(t, 3).read_bytes() + b"x"), "shard.00003.mds", "instead of"),
    "emptied shard": (lambda t: shard(t, 3).write_bytes(b""), "shard.00003.mds", "0 bytes instead of"),
    "missing shard": (lambda t: shard(t, 3).unlink(), "shard.00003.mds", "missing"),
    "foreign shard": (lambda t: shutil.copy(shard(t, 0), shard(t, 999)), "shard.00999.mds", "foreign"),
    "swapped shards": (swap, "shard.00002.mds", "belongs to shard.00003.mds"),
    "copied over": (lambda t: shutil.copy(shard(t, 2), shard(t, 3)), "shard.00003.mds", "belongs to shard.00002.mds"),
    "lost index": (lambda t: (t / "index.json").unlink(), "index.json", "missing"),
    "broken index": (lambda t: (t / "index.json").write_text('{"version": 2, "sha'), "index.json", "not valid JSON"),
    "index without shards": (lambda t: (t / "index.json").write_text("{}"), "index.json", "fields"),
    "index without one shard": (lambda t: edit(t / "index.json", lambda i: i["shards"].pop()), "index.json", "digest"),
    "index in another order": (
        lambda t: edit(t / "index.json", lambda i: i["shards"].reverse()),
        "index.json",
        "digest",
    ),
    "index with other names": (lambda t: edit(t / "index.json", swap_in_index), "shard.00002.mds", "belongs to"),
    "index with other counts": (lambda t: edit(t / "index.json", set_sample_count), "shard.00003.mds", "rows"),
    "index that leads out": (lambda t: edit(t / "index.json", set_path), "index.json", "outside its folder"),
    "lost manifest": (lambda t: (t / "manifest.json").unlink(), "manifest.json", "missing"),
    "broken manifest": (lambda t: (t / "manifest.json").write_text("{"), "manifest.json", "damaged"),
    "other rows": (
        lambda t: edit(t / "manifest.json", lambda m: m["counts"].update(rows=7)),
        "manifest.json",
        "7 rows",
    ),
    "other tokens": (
        lambda t: edit(t / "manifest.json", lambda m: m["counts"].update(tokens=7)),
        "manifest.json",
        "7 tokens",
    ),
    "other pieces": (
        lambda t: edit(t / "manifest.json", lambda m: m["counts"].update(pieces=999)),
        "manifest.json",
        "999 pieces",
    ),
    "other documents": (
        lambda t: edit(t / "manifest.json", lambda m: m["counts"].update(documents=7)),
        "manifest.json",
        "documents",
    ),
    "shorter rows": (
        lambda t: edit(t / "manifest.json", lambda m: m.update(row_length=60)),
        "shard.00000.mds",
        "row length 60",
    ),
    "smaller vocabulary": (
        lambda t: edit(t / "manifest.json", lambda m: m["tokenizer"].update(vocabulary=300)),
        "shard.00000.mds",
        "beyond the vocabulary",
    ),
    "larger vocabulary": (
        lambda t: edit(t / "manifest.json", lambda m: m["tokenizer"].update(vocabulary=70_000)),
        "shard.00000.mds",
        "columns",
    ),
    "other tokenizer": (
        lambda t: edit(t / "tokenizer/tokenizer.json", lambda j: j["model"].update(unk_token="w5")),
        "tokenizer/tokenizer.json",
        "not the one",
    ),
    "lost tokenizer": (lambda t: shutil.rmtree(t / "tokenizer"), "tokenizer/tokenizer.json", "missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found(cli: Cli, rows: Path, name: str) -> None:
    damage, file, reason = DAMAGES[name]
    damage(rows / "train")
    # Of train/ alone, and from the folder above; without index and manifest only the latter knows rows were there.
    for folder, prefix in ((rows / "train", ""), (rows, "train/")):
        result = cli("verify", folder)
        assert result.code == 1
        lines = [line for line in result.out.splitlines() if line.startswith(f"{prefix}{file}: ")]
        assert lines, result.out
        assert any(reason in line for line in lines), result.out
        assert len(result.err.splitlines()) == 1
        damaged = {line.split(":")[0] for line in result.out.splitlines() if ".mds" in line.split(":")[0]}
        if name in ("flipped byte", "cut byte", "missing shard", "foreign shard"):
            assert damaged == {prefix + file}  # and no other shard is blamed


def test_a_lost_half_of_the_split(cli: Cli, rows: Path) -> None:
    shutil.rmtree(rows / "validation")
    result = cli("verify", rows)
    assert result.code == 1
    assert "validation: the folder is missing" in result.out


@pytest.mark.parametrize(
    ("tokens", "lengths", "reason"),
    [
        ([5, 6, 7], [2], "do not sum"),
        ([5, 6, 7], [3, 0], "do not sum"),
        ([5, 6, 70_000 % 65_536], [3], "beyond the vocabulary"),
        ([5] * 65, [65], "more than the row length"),
    ],
)
def test_rows_that_were_wrong_from_the_start(
    cli: Cli, rows: Path, tokens: list[int], lengths: list[int], reason: str
) -> None:
    """Shards, index and manifest agree with one another, but a row breaks the format."""
    train = rows / "train"
    for path in [*train.glob("*.mds"), train / "index.json"]:
        path.unlink()
    aside = rows / "aside"
    with MDSWriter(out=str(aside), columns=columns(1000), hashes=[HASH]) as writer:
        writer.write({"tokens": np.array([5, 6], np.uint16), "lengths": np.array([2], np.uint32)})
        writer.write({"tokens": np.array(tokens, np.uint16), "lengths": np.array(lengths, np.uint32)})
    for path in aside.iterdir():
        shutil.move(path, train / path.name)
    index = json.loads((train / "index.json").read_text())
    edit(train / "manifest.json", lambda m: m.update(rows_digest=rows_digest(index)))
    result = cli("verify", train)
    assert result.code == 1
    assert "shard.00000.mds: row 1 is wrong" in result.out
    assert reason in result.out


def test_no_rows_there(cli: Cli, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        for command in ("verify", "inspect"):
            result = cli(command, folder)
            assert result.code == 1
            assert result.err.startswith(f"error: no rows at {folder}")


def test_inspect(cli: Cli, rows: Path) -> None:
    quiet = cli("inspect", rows)
    assert quiet.code == 0
    said = manifest(rows / "train")["counts"]
    for part in (
        f"{said['documents']:,} in {said['pieces']:,} pieces",
        "fill of a row",
        "tokens of a piece",
        "#",
        "[MASK] 4",
    ):
        assert part in quiet.out
    assert "w1" not in quiet.out.replace("words", "")
    shown = cli("inspect", rows / "train", "--show-text", "--rows", 2)
    assert shown.code == 0
    assert shown.out.count("\nrow ") == 2
    assert "[CLS] w" in shown.out
