"""`repair` rebuilds what can be rebuilt, drops what cannot, and says so; afterwards the rows are sound."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.rows import Rows
from tests.data_prep.data_prep_helpers import Result, manifest, pieces, tree, write_jsonl

Cli = Callable[..., Result]


@pytest.fixture(scope="module", params=[None, "zstd"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, words: Path) -> Path:
    folder = tmp_path_factory.mktemp("repair")
    texts = [" ".join(f"w{5 + (7 * n + k) % 900}" for k in range(10 + n % 30)) for n in range(300)]
    source = write_jsonl(folder / "a.jsonl", texts)
    options = ["--row-length", "64", "--validation", "0.1", "--shard-size", "2kb"]
    packed = ["--compression", request.param] if request.param else []
    arguments = ["build", str(source), "--tokenizer", str(words), "--out", str(folder / "rows"), *options, *packed]
    assert main(arguments) == 0
    return folder / "rows"


@pytest.fixture
def rows(built: Path, tmp_path: Path) -> Path:
    shutil.copytree(built, tmp_path / "rows")
    return tmp_path / "rows"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.mds*"))


def test_sound_rows_are_left_alone(cli: Cli, rows: Path) -> None:
    before = tree(rows)
    result = cli("repair", rows)
    assert (result.code, "nothing to repair" in result.out) == (0, True)
    assert tree(rows) == before


def test_a_lost_index_comes_back_to_the_byte(cli: Cli, rows: Path) -> None:
    before = tree(rows)
    for damage in (
        lambda path: path.unlink(),
        lambda path: path.write_text("{"),
        lambda path: path.write_text('{"shards": [], "version": 2}'),
    ):
        damage(rows / "train" / "index.json")
        assert cli("verify", rows).code == 1
        result = cli("repair", rows)
        assert result.code == 0, result.err
        assert "train/index.json: rebuilt from the shards; it is exactly the one the build wrote" in result.out
        assert tree(rows) == before


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_a_partial_last_shard_is_dropped(cli: Cli, rows: Path, index: str) -> None:
    train = rows / "train"
    before, whole = manifest(train), pieces(train)
    last = shards(train)[-1]
    last.write_bytes(last.read_bytes()[:-1])
    if index == "lost":
        (train / "index.json").unlink()
    result = cli("repair", train)
    assert result.code == 0, result.err
    assert f"{last.name}: moved to damaged/, its rows are dropped" in result.out
    assert "rows are lost" in result.out
    assert (train / "damaged" / last.name).is_file()
    assert "all well" in cli("verify", rows).out
    after = manifest(train)
    assert after["counts"]["rows"] == len(Rows(train)) < before["counts"]["rows"]
    assert pieces(train) == whole[: after["counts"]["pieces"]]
    assert after["repaired"]
    assert "repaired" in cli("inspect", train).out
    assert "nothing to repair" in cli("repair", rows).out


def test_damaged_missing_and_foreign_shards(cli: Cli, rows: Path) -> None:
    train = rows / "train"
    first, second, third, *_ = shards(train)
    data = bytearray(first.read_bytes())
    data[-3] ^= 1
    first.write_bytes(data)
    second.unlink()
    shutil.copy(third, train / ("shard.99999" + "".join(third.suffixes[1:])))
    result = cli("repair", rows)
    assert result.code == 0, result.err
    for line in (f"train/{first.name}: moved to damaged/", f"train/{second.name}: it is missing", "train/shard.99999"):
        assert line in result.out
    assert "all well" in cli("verify", rows).out


def test_what_cannot_be_repaired(cli: Cli, rows: Path) -> None:
    assert cli("repair", "s3://bucket/rows").code == 2
    kept = (rows / "train" / "manifest.json").read_bytes()
    (rows / "train" / "manifest.json").unlink()
    result = cli("repair", rows)
    assert (result.code, "build them again" in result.err) == (1, True)
    (rows / "train" / "manifest.json").write_bytes(kept)
    for path in shards(rows / "train"):
        path.write_bytes(b"")
    before = tree(rows)
    result = cli("repair", rows)
    assert (result.code, "no shard" in result.err) == (1, True)
    assert tree(rows) == before
