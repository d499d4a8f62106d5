"""Our shards are streaming's: the same bytes as its writer gives, read by its reader, plain and compressed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.format.mds.reader import MDSReader

from data_prep.building import OnePerRow
from data_prep.rows import HASH, Row, ShardData, ShardWriter, columns, index_bytes
from tests.data_prep.data_prep_helpers import Result, pieces, write_jsonl

Cli = Callable[..., Result]


def rows_of(vocabulary: int, count: int) -> list[Row]:
    """Rows of 1 to 70,000 tokens: the sizes are written in one, two and four bytes."""
    source = np.random.default_rng(vocabulary)
    dtype = np.uint16 if vocabulary <= 1 << 16 else np.uint32
    sizes = [1, 255, 256, 65_535, 65_536, 70_000, *source.integers(1, 3000, count).tolist()]
    return [
        Row(
            source.integers(0, vocabulary, size).astype(dtype),
            np.array([*[1] * min(3, size - 1), size - min(3, size - 1)], np.uint32),
        )
        for size in sizes
    ]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("vocabulary", [1000, 70_000])
def test_the_bytes_are_those_of_streaming(tmp_path: Path, vocabulary: int, compression: str | None) -> None:
    rows = rows_of(vocabulary, 200)
    options = {"columns": columns(vocabulary), "hashes": [HASH], "size_limit": 300_000, "compression": compression}
    with MDSWriter(out=str(tmp_path / "theirs"), **options) as theirs:
        for row in rows:
            theirs.write({"tokens": row.tokens, "lengths": row.lengths})
    ours = tmp_path / "ours"
    ours.mkdir()
    writer = ShardWriter(lambda name, data: (ours / name).write_bytes(data), vocabulary, 300_000, compression)
    for row in rows:
        writer.write(row)
    index = writer.finish()
    (ours / "index.json").write_bytes(index_bytes(index))
    assert len(index["shards"]) > 3
    if compression is None:
        files = sorted(path.name for path in ours.iterdir())
        assert files == sorted(path.name for path in (tmp_path / "theirs").iterdir())
        for file in files:
            assert (ours / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes(), file
    else:  # two zstd libraries pack differently; what is packed is the same
        said = json.loads((tmp_path / "theirs" / "index.json").read_text())
        assert [s["raw_data"] for s in said["shards"]] == [s["raw_data"] for s in index["shards"]]
        return
    found = [row for shard in index["shards"] for row in ShardData((ours / shard["raw_data"]["basename"]).read_bytes())]
    reader = [MDSReader.from_json(str(ours), "", shard) for shard in index["shards"]]
    read = [shard[n] for shard in reader for n in range(shard.samples)]
    for row, our, their in zip(rows, found, read, strict=True):
        assert row.tokens.dtype == our.tokens.dtype == their["tokens"].dtype
        assert row.tokens.tolist() == our.tokens.tolist() == their["tokens"].tolist()
        assert row.lengths.tolist() == our.lengths.tolist() == their["lengths"].tolist()


def test_a_damaged_shard_is_told_from_a_sound_one(tmp_path: Path) -> None:
    made: dict[str, bytes] = {}
    writer = ShardWriter(made.__setitem__, 1000, 1 << 20)
    for row in rows_of(1000, 5):
        writer.write(row)
    writer.finish()
    data = made["shard.00000.mds"]
    assert ShardData(data).samples == 11
    for broken in (b"", data[:3], data[:20], data[:100], data[:-1], data + b"\0", b"\xff" * 200, data[:60] + data[80:]):
        with pytest.raises(ValueError, match="it|its"):
            list(ShardData(broken))


def test_compressed_rows_are_read_verified_and_inspected(cli: Cli, tmp_path: Path, words: Path) -> None:
    source = write_jsonl(
        tmp_path / "a.jsonl", [" ".join(f"w{5 + (n + k) % 900}" for k in range(20)) for n in range(200)]
    )
    options = ("--tokenizer", words, "--row-length", 32, "--shard-size", "4kb")
    assert cli("build", source, *options, "--out", tmp_path / "plain").code == 0
    assert cli("build", source, *options, "--compression", "zstd", "--out", tmp_path / "packed").code == 0
    assert len(list((tmp_path / "packed").glob("*.mds.zstd"))) > 3
    assert not list((tmp_path / "packed").glob("*.mds"))
    assert cli("verify", tmp_path / "packed").code == 0
    assert pieces(tmp_path / "packed") == pieces(tmp_path / "plain")
    assert cli("verify", tmp_path / "packed").code == 0  # beside what the reader has unpacked
    assert cli("inspect", tmp_path / "packed").code == 0
    shard = tmp_path / "packed" / "shard.00001.mds.zstd"
    shard.write_bytes(shard.read_bytes()[:-1])
    told = cli("verify", tmp_path / "packed")
    assert "shard.00001.mds.zstd: it has " in told.out


def test_one_document_a_row(cli: Cli, tmp_path: Path, words: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6", "w7", " ".join(["w8"] * 20)])
    options = ("--tokenizer", words, "--row-length", 8, "--no-packing")
    assert cli("build", source, *options, "--out", tmp_path / "rows").code == 0
    assert [len(piece) for piece in pieces(tmp_path / "rows")] == [4, 3, 8, 8, 6]
    assert "none: one document a row" in cli("inspect", tmp_path / "rows").out
    rows = list(OnePerRow(4, 1).add(np.arange(9, dtype=np.uint16)))
    assert [row.tokens.tolist() for row in rows] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert all(row.lengths.tolist() == [len(row.tokens)] for row in rows)
