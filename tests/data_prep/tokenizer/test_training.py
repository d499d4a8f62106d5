"""`tokenizer`: a Hugging Face folder that transformers loads, the same each time, with nothing of this machine in it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_prep.tokenizer.train import SMALLEST
from evaluation.demo.corpus import documents
from tests.data_prep.data_prep_helpers import Result, pieces, write_jsonl

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "a.jsonl", [d["text"] for d in documents(300, 1)])


def test_the_folder_loads_and_means_the_same_everywhere(cli: Cli, tmp_path: Path, corpus: Path) -> None:
    result = cli("tokenizer", corpus, "--vocab-size", 1500, "--out", tmp_path / "tok")
    assert result.code == 0, result.err
    assert "a vocabulary can hold names" in result.out
    loaded = AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert loaded.is_fast
    assert len(loaded) == loaded.vocab_size == 1500
    special = [loaded.pad_token, loaded.unk_token, loaded.cls_token, loaded.sep_token, loaded.mask_token]
    assert special == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert sorted(loaded.all_special_ids) == [0, 1, 2, 3, 4]
    assert 512 <= loaded.model_max_length <= 1_000_000
    text = "Une fièvre à 39,5 °C — naïve “quotes”, 🙂 \t tabs, e\u0301."
    ids = loaded(text).input_ids
    assert (ids[0], ids[-1]) == (2, 3)
    assert 1 not in ids
    assert loaded.decode(ids[1:-1]) == text.replace("e\u0301", "é")  # NFC
    assert loaded.mask_token_id in loaded("The patient was treated with [MASK].").input_ids
    write_jsonl(tmp_path / "one.jsonl", [text])
    build = (
        "build",
        tmp_path / "one.jsonl",
        "--tokenizer",
        tmp_path / "tok",
        "--out",
        tmp_path / "rows",
        "--row-length",
        128,
    )
    assert cli(*build).code == 0
    assert pieces(tmp_path / "rows") == [tuple(ids)]
    for file in (tmp_path / "tok").iterdir():
        assert str(tmp_path) not in file.read_text("utf-8")
    assert oct((tmp_path / "tok").stat().st_mode)[-3:] == "700"


def test_the_same_corpus_gives_the_same_bytes(cli: Cli, tmp_path: Path, corpus: Path) -> None:
    assert cli("tokenizer", corpus, "--vocab-size", 2000, "--out", tmp_path / "one").code == 0
    path = os.pathsep.join([str(Path(__file__).resolve().parents[3]), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "data_prep",
        "tokenizer",
        corpus,
        "--vocab-size",
        "2000",
        "--out",
        tmp_path / "two",
    ]
    subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "5", "RAYON_NUM_THREADS": "1"}, check=True
    )
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name


def test_what_cannot_be_trained(cli: Cli, tmp_path: Path, corpus: Path) -> None:
    result = cli("tokenizer", corpus, "--vocab-size", SMALLEST - 1, "--out", tmp_path / "tok")
    assert result.code == 2
    assert str(SMALLEST) in result.err
    write_jsonl(tmp_path / "empty.jsonl", ["", " "])
    result = cli("tokenizer", tmp_path / "empty.jsonl", "--vocab-size", 300, "--out", tmp_path / "tok")
    assert result.code == 1
    assert "corpus is empty" in result.err
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    result = cli("tokenizer", tmp_path / "bad.jsonl", "--vocab-size", 300, "--out", tmp_path / "tok")
    assert result.code == 1
    assert "record 2" in result.err
    assert (
        cli(
            "tokenizer", tmp_path / "bad.jsonl", "--vocab-size", 300, "--out", tmp_path / "ok", "--on-error", "skip"
        ).code
        == 0
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "empty.jsonl", "ok"]
