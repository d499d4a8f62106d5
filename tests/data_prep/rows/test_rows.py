"""The reader that training uses: what it gives, and what it says of rows it cannot use."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Failure
from data_prep.rows import Row, Rows, token_dtype, tokenizer_digest
from tests.data_prep.data_prep_helpers import Result, pieces, save_word_tokenizer, write_jsonl

Cli = Callable[..., Result]


@pytest.fixture
def rows(cli: Cli, tmp_path: Path, words: Path) -> Path:
    texts = [" ".join(f"w{5 + (n + k) % 900}" for k in range(3 + n % 20)) for n in range(200)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    options = ("--tokenizer", words, "--row-length", 32, "--shard-size", "1kb")
    assert cli("build", tmp_path / "a.jsonl", *options, "--out", tmp_path / "rows").code == 0
    return tmp_path / "rows"


def test_rows_by_index_in_any_order(rows: Path) -> None:
    read = Rows(rows)
    assert len(read.shard_rows) > 3
    assert len(read) == read.manifest.counts.rows == int(read.shard_rows.sum())
    forward = [row.tokens.tolist() for row in read]
    again = Rows(rows)
    assert [again[n].tokens.tolist() for n in reversed(range(len(again)))] == forward[::-1]
    assert sum(len(row.lengths) for row in read) == len(pieces(rows))
    for index in (-1, len(read)):
        with pytest.raises(IndexError):
            read[index]


def test_the_tokenizer_lies_beside_the_rows_and_a_url_needs_a_cache(rows: Path, words: Path) -> None:
    assert tokenizer_digest(Rows(rows).tokenizer_folder()) == tokenizer_digest(words)
    with pytest.raises(Failure, match="needs a local cache folder"):
        Rows("s3://bucket/rows")


@pytest.mark.parametrize(
    ("lost", "reason"), [("index.json", "no index.json"), ("manifest.json", "not a finished build")]
)
def test_incomplete_rows(rows: Path, lost: str, reason: str) -> None:
    (rows / lost).unlink()
    with pytest.raises(Failure, match=reason):
        Rows(rows)


def test_no_rows(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no such folder"):
        Rows(tmp_path / "nothing")


def test_a_damaged_shard_is_a_failure_that_names_it(rows: Path) -> None:
    path = rows / "shard.00002.mds"
    path.write_bytes(path.read_bytes()[:-40])
    read = Rows(rows)
    with pytest.raises(Failure, match=r"of shard 2 .*verify"):
        for index in range(len(read)):
            read[index]


def test_an_index_of_other_rows(rows: Path, tmp_path: Path) -> None:
    index = json.loads((rows / "index.json").read_text())
    index["shards"].reverse()
    (rows / "index.json").write_text(json.dumps(index))
    with pytest.raises(Failure, match="not the one its manifest describes"):
        Rows(rows)


def test_a_row_that_breaks_the_format_says_how() -> None:
    def check(tokens: list[int], lengths: list[int]) -> str | None:
        return Row(np.array(tokens, np.uint16), np.array(lengths, np.uint32)).check(4, 10)

    assert check([1, 2, 9], [1, 2]) is None
    for tokens, lengths, reason in (
        ([], [], "empty"),
        ([1] * 5, [5], "row length 4"),
        ([1, 2], [2, 0], "do not sum"),
        ([1, 2], [1], "do not sum"),
        ([1, 10], [2], "beyond the vocabulary of 10"),
    ):
        assert reason in (check(tokens, lengths) or "")


def test_dtype_and_digest(words: Path, tmp_path: Path) -> None:
    assert [token_dtype(n) for n in (5, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]
    copy = shutil.copytree(words, tmp_path / "copy")
    content = json.loads((copy / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 5, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (copy / "tokenizer.json").write_text(json.dumps(content, indent=3))
    assert tokenizer_digest(copy) == tokenizer_digest(words)
    assert tokenizer_digest(save_word_tokenizer(tmp_path / "other", 999)) != tokenizer_digest(words)
