"""The tokenizer of a build: prefix space, ids that must not wrap, and what a build does not import."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from data_prep.rows import Rows, software, tokenizer_digest
from data_prep.tokenizer import DocumentTokenizer
from tests.data_prep.data_prep_helpers import Result, manifest, pieces, save_word_tokenizer, tree, write_jsonl

Cli = Callable[..., Result]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data_prep.__main__ import main

    folder = tmp_path_factory.mktemp("bpe")
    source = write_jsonl(folder / "a.jsonl", ["fever and chills, fever and cough"] * 20)
    assert main(["tokenizer", str(source), "--vocab-size", "300", "--out", str(folder / "tok")]) == 0
    return folder / "tok"


def test_prefix_space_is_explicit_and_recorded(cli: Cli, tmp_path: Path, byte_level: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["fever and chills"])
    options = ("--tokenizer", byte_level, "--row-length", 16)
    plain = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    expected = {None: "fever and chills", "no": "fever and chills", "yes": " fever and chills"}
    for wanted, text in expected.items():
        out = tmp_path / f"rows-{wanted}"
        flag = ("--add-prefix-space", wanted) if wanted else ()
        assert cli("build", source, *options, *flag, "--out", out).code == 0
        assert pieces(out) == [tuple(plain.encode(text).ids)]
        assert manifest(out)["tokenizer"]["add_prefix_space"] is (wanted == "yes")
        assert manifest(out)["tokenizer"]["digest"] == tokenizer_digest(out / "tokenizer")
        beside = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
        assert tuple(beside.encode("fever and chills").ids) == pieces(out)[0]
        assert (tokenizer_digest(out / "tokenizer") == tokenizer_digest(byte_level)) == (wanted != "yes")
    part = cli("build", source, *options, "--add-prefix-space", "yes", "--part", "1/1", "--out", tmp_path / "parts")
    assert part.code == 0
    assert cli("finish", tmp_path / "parts").code == 0
    assert tree(tmp_path / "parts") == tree(tmp_path / "rows-yes")


def test_ids_never_wrap(tmp_path: Path) -> None:
    """Trial 1: forcing 16 bits on a vocabulary of 70,000 is an error."""
    tokenizer = DocumentTokenizer(save_word_tokenizer(tmp_path / "tok", 70_000), "tok")
    ids = [65_534, 65_535, 65_536, 65_537]
    assert tokenizer.encode([" ".join(f"w{n}" for n in ids)])[0].tolist() == [2, *ids, 3]
    tokenizer.dtype = np.dtype(np.uint16)
    assert tokenizer.encode(["w65535"])[0].tolist() == [2, 65_535, 3]
    with pytest.raises(OverflowError):
        tokenizer.encode(["w65536"])


def test_the_software_is_the_same_installed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("data_prep.rows.format.version", missing)
    assert software().startswith("clm-detour 0.")


def test_a_build_with_workers_imports_neither_torch_nor_streaming(tmp_path: Path, words: Path) -> None:
    """They cost 0.85 GB a process and 6 s."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"w{5 + n % 900}" for n in range(500)])
    arguments = ["build", str(source), "--tokenizer", str(words), "--row-length", "16", "--out", str(tmp_path / "rows")]
    more = ["--unit-size", "2kb", "--workers", "2", "--deduplicate", "exact", "--compression", "zstd"]
    code = "import sys; from data_prep.__main__ import main; assert main(sys.argv[1:]) == 0; print(sorted(sys.modules))"
    # A worker that imports torch fails here: a module of that name stands first on its path.
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch')")
    (tmp_path / "streaming.py").write_text("raise RuntimeError('streaming')")
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{root}"}
    command = [sys.executable, "-c", code, *arguments, *more]
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    for module in ("torch", "streaming", "transformers", "datasets", "pandas"):
        assert f"'{module}'" not in told
    assert json.loads((tmp_path / "rows" / "manifest.json").read_text())["counts"]["documents"] == 500
    assert len(Rows(tmp_path / "rows")) > 10
