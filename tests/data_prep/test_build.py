"""`build`: what goes in comes out, or is counted; the same each time; the split by content."""

import gzip
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from data_prep.building.packing import split
from data_prep.documents import split_of
from data_prep.documents.text_hash import normalised
from data_prep.rows import Rows, tokenizer_digest
from tests.data_prep.data_prep_helpers import (
    SHARED,
    SPECIAL,
    Result,
    encoded,
    manifest,
    pieces,
    save_word_tokenizer,
    write_jsonl,
)

Cli = Callable[..., Result]


def text_of(count: int, start: int = 5) -> str:
    """`count` words, all known to the word tokenizer."""
    return " ".join(f"w{start + number % 900}" for number in range(count))


def corpus(count: int, seed: int = 0) -> list[str]:
    source = np.random.default_rng(seed)
    return [
        text_of(int(n), int(s))
        for n, s in zip(source.integers(1, 60, count), source.integers(5, 90, count), strict=True)
    ]


def cut(documents: list[tuple[int, ...]], row_length: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(p.tolist()) for d in documents for p in split(np.array(d), row_length))


def test_odd_documents(cli: Cli, tmp_path: Path, words: Path) -> None:
    """Trial 3: tokens in = tokens out, and every record that gave none is counted."""
    good = {
        "one token": "w7",
        "exactly a row": text_of(14),
        "one more": text_of(15),
        "ten rows": text_of(158),
        "NUL": "w5 \0 w6",
        "special words": "w5 [SEP] w6 [MASK][CLS] w7 [PAD]",
    }
    lines = [json.dumps({"text": text}).encode() for text in ["", " \n\t ", *good.values()]]
    lines.insert(3, b'{"text": "w5 \xff\xfe w6"}')
    lines.insert(5, b'{"text": "half a surrogate pair \\ud800"}')
    source = tmp_path / "odd.jsonl"
    source.write_bytes(b"\n\n".join(lines))
    arguments = ("build", source, "--tokenizer", words, "--out", tmp_path / "rows", "--row-length", 16)
    assert cli(*arguments).code == 1
    result = cli(*arguments, "--on-error", "skip")
    assert result.code == 0, result.err
    expected = encoded(words, good.values())
    assert [len(ids) for ids in expected[:4]] == [3, 16, 17, 160]
    assert Counter(pieces(tmp_path / "rows")) == cut(expected, 16)
    counts = manifest(tmp_path / "rows")["counts"]
    assert counts["dropped"] == {"empty": 2, "undecodable": 2}
    assert counts["documents"] == len(good)
    assert counts["tokens"] == sum(map(len, expected))
    # Words that look like special tokens are words: each document has one [CLS] and one [SEP], at its ends.
    special = next(ids for ids in expected if ids == expected[-1])
    assert Counter(special)[2] == Counter(special)[3] == 1
    assert not {0, 4} & set(special)


def test_a_model_that_holds_special_tokens_as_words_gives_unknown_ones(cli: Cli, tmp_path: Path) -> None:
    folder = save_word_tokenizer(tmp_path / "tok", 50, pre_tokenizers.WhitespaceSplit())
    write_jsonl(tmp_path / "a.jsonl", ["w5 [SEP] w6 [MASK]"])
    assert (
        cli("build", tmp_path / "a.jsonl", "--tokenizer", folder, "--out", tmp_path / "rows", "--row-length", 16).code
        == 0
    )
    assert pieces(tmp_path / "rows") == [(2, 5, 1, 6, 1, 3)]


def test_a_text_that_the_tokenizer_makes_nothing_of_is_empty(cli: Cli, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "a": 4}, []))
    tokenizer.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    write_jsonl(tmp_path / "a.jsonl", ["aa", "xyz"])
    build = (
        "build",
        tmp_path / "a.jsonl",
        "--tokenizer",
        tmp_path / "tok",
        "--out",
        tmp_path / "rows",
        "--row-length",
        8,
    )
    assert cli(*build).code == 0
    assert pieces(tmp_path / "rows") == [(1, 4, 4, 2)]
    assert manifest(tmp_path / "rows")["counts"]["dropped"] == {"empty": 1}


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1000, np.uint16), (65_536, np.uint16), (70_000, np.uint32)])
def test_dtype_by_vocabulary(cli: Cli, tmp_path: Path, vocabulary: int, dtype: type) -> None:
    """Trial 1: the ids around 65,535 come back as they went in."""
    folder = save_word_tokenizer(tmp_path / "tok", vocabulary)
    ids = [n for n in (5, 999, 65_534, 65_535, 65_536, 65_537, 69_999) if n < vocabulary]
    write_jsonl(tmp_path / "a.jsonl", [f"w{n}" for n in ids])
    assert (
        cli("build", tmp_path / "a.jsonl", "--tokenizer", folder, "--out", tmp_path / "rows", "--row-length", 8).code
        == 0
    )
    assert sorted(piece[1] for piece in pieces(tmp_path / "rows")) == ids
    assert Rows(tmp_path / "rows")[0].tokens.dtype == dtype


def test_every_kind_of_file_gives_the_same_rows(cli: Cli, tmp_path: Path, words: Path) -> None:
    texts = corpus(40)
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    data = b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n")
    frames = [zstandard.compress(data[:500]), zstandard.compress(data[500:])]  # two frames, as `cat a.zst b.zst` gives
    kinds = {"gz": gzip.compress(data), "zst": b"".join(frames)}
    for ending, content in kinds.items():
        (tmp_path / f"a.jsonl.{ending}").write_bytes(content)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    (tmp_path / "texts" / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "texts" / ".hidden.txt").write_text("w5")
    found = []
    for number, given in enumerate(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "texts", "texts/*.txt"]):
        out = tmp_path / f"rows{number}"
        result = cli("build", tmp_path / given, "--tokenizer", words, "--out", out, "--row-length", 64)
        assert result.code == 0, result.err
        assert ("left out: 1 files of other kinds" in result.out) == (given == "texts")
        found.append(pieces(out))
    assert all(other == found[0] for other in found)
    assert Counter(found[0]) == cut(encoded(words, texts), 64)


def test_two_builds_are_byte_identical(cli: Cli, tmp_path: Path, words: Path) -> None:
    """In this process and in another one with other hash seeds and another working folder."""
    write_jsonl(tmp_path / "a.jsonl", corpus(500))
    options = ("--tokenizer", words, "--row-length", 64, "--validation", 0.1, "--shard-size", "8kb")
    assert cli("build", tmp_path / "a.jsonl", *options, "--out", tmp_path / "one").code == 0
    command = [sys.executable, "-m", "data_prep", "build", "a.jsonl", *map(str, options), "--out", "two"]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": path}, check=True)
    files = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*") if p.is_file())
    assert len(files) > 10
    assert files == sorted(p.relative_to(tmp_path / "two") for p in (tmp_path / "two").rglob("*") if p.is_file())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_the_split_goes_by_content(cli: Cli, tmp_path: Path, words: Path) -> None:
    """It does not move when the corpus grows or the seed changes, and duplicates are on one side."""
    texts = list(dict.fromkeys(corpus(300)))
    doubled = [*reversed(texts), *(f"  {text.replace(' ', chr(10))} " for text in texts), *corpus(200, seed=9)]
    found = {}
    for name, documents, seed in (("small", texts, 1), ("large", doubled, 2)):
        write_jsonl(tmp_path / f"{name}.jsonl", documents)
        options = ("--tokenizer", words, "--row-length", 64, "--validation", 0.2, "--seed", seed)
        assert cli("build", tmp_path / f"{name}.jsonl", *options, "--out", tmp_path / name).code == 0
        found[name] = {side: set(pieces(tmp_path / name / side)) for side in ("train", "validation")}
        assert not found[name]["train"] & found[name]["validation"]
    ids = set(encoded(words, texts))
    assert found["large"]["validation"] & ids == found["small"]["validation"]
    assert found["large"]["train"] & ids == found["small"]["train"]
    assert 0.1 < len(found["small"]["validation"]) / len(ids) < 0.3
    sums = [manifest(tmp_path / "large" / side) for side in ("train", "validation")]
    assert sum(m["counts"]["documents"] for m in sums) == len(doubled)
    assert [m["split"] for m in sums] == ["train", "validation"]


def test_a_larger_share_only_adds_to_validation() -> None:
    texts = [f"document {number}" for number in range(5000)]
    held = {share: {t for t in texts if split_of(t, share) == "validation"} for share in (0.01, 0.1, 0.5)}
    assert held[0.01] < held[0.1] < held[0.5]
    assert all(abs(len(kept) / 5000 - share) < 4 * (share * (1 - share) / 5000) ** 0.5 for share, kept in held.items())
    assert normalised("e\u0301te\u0301 \u00a0 x\n") == normalised("été x")


def test_manifest_and_folder(cli: Cli, tmp_path: Path, words: Path) -> None:
    texts = corpus(100)
    write_jsonl(tmp_path / "a.jsonl", texts[:70])
    write_jsonl(tmp_path / "b.jsonl", texts[70:])
    out = tmp_path / "new" / "rows"
    result = cli(
        "build", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--tokenizer", words, "--out", out, "--row-length", 64
    )
    assert result.code == 0
    said, rows = manifest(out), Rows(out)
    assert [source["documents"] for source in said["sources"]] == [70, 30]
    assert [source["bytes"] for source in said["sources"]] == [
        (tmp_path / n).stat().st_size for n in ("a.jsonl", "b.jsonl")
    ]
    assert said["counts"]["rows"] == len(rows)
    assert said["counts"]["pieces"] == sum(len(row.lengths) for row in rows)
    assert said["counts"]["tokens"] == sum(len(row.tokens) for row in rows) == sum(map(len, encoded(words, texts)))
    assert said["tokenizer"]["digest"] == tokenizer_digest(out / "tokenizer") == tokenizer_digest(words)
    assert said["tokenizer"]["special"] == {token: number for number, token in enumerate(SPECIAL)}
    assert said["tokenizer"]["roles"]["mask"] == 4
    assert said["tokenizer"]["name"] == "words"
    for folder in (out, out / "tokenizer"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in out.parent.iterdir()) == ["rows"]
    for word in ("100 documents", "tokens", "fill", "dropped: none", "tokens/s"):
        assert word in result.out


def test_text_field(cli: Cli, tmp_path: Path, words: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["w5 w6"], field="body")
    arguments = ("build", tmp_path / "a.jsonl", "--tokenizer", words, "--out", tmp_path / "rows", "--row-length", 8)
    assert cli(*arguments, "--text-field", "body").code == 0
    assert pieces(tmp_path / "rows") == [(2, 5, 6, 3)]


@pytest.fixture
def olmo(tmp_path: Path) -> Path:
    """The OLMo tokenizer with the four special tokens that an encoder needs."""
    if not (SHARED / "tokenizer").is_dir():
        pytest.skip("no ../shared/data: real text and tokenizer are not here")
    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizer" / "olmo-tokenizer.json"))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("[CLS]", "[SEP]", "[MASK]", "[PAD]")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")]
    )
    (tmp_path / "olmo").mkdir()
    tokenizer.save(str(tmp_path / "olmo" / "tokenizer.json"))
    return tmp_path / "olmo"


def test_real_text_with_the_olmo_tokenizer(cli: Cli, tmp_path: Path, olmo: Path) -> None:
    source = SHARED / "text" / "e3c_l3_fr_journal.jsonl.zst"
    with zstandard.open(source, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    result = cli("build", source, "--tokenizer", olmo, "--out", tmp_path / "rows", "--row-length", 1024)
    assert result.code == 0, result.err
    expected = encoded(olmo, texts)
    found = pieces(tmp_path / "rows")
    assert sorted(token for piece in found for token in piece) == sorted(token for ids in expected for token in ids)
    whole = {ids for ids in expected if len(ids) <= 1024}
    assert whole <= set(found)
    said = Rows(tmp_path / "rows").manifest
    assert said.tokenizer.vocabulary == 50_284
    assert said.fill > 0.9  # few documents, each near half a row, none cut: large corpora see test_packing
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path / "rows" / "tokenizer")
    assert (loaded.cls_token, loaded.sep_token, loaded.mask_token, loaded.pad_token) == (
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "[PAD]",
    )
    assert tuple(loaded(texts[0]).input_ids) == expected[0]
    assert cli("verify", tmp_path / "rows").code == 0


def test_a_tokenizer_without_a_rule_for_special_tokens_is_noted(cli: Cli, tmp_path: Path, olmo: Path) -> None:
    content = json.loads((olmo / "tokenizer.json").read_text("utf-8"))
    content["post_processor"] = None
    (olmo / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    write_jsonl(tmp_path / "a.jsonl", ["fever and [SEP] chills"])
    result = cli("build", tmp_path / "a.jsonl", "--tokenizer", olmo, "--out", tmp_path / "rows", "--row-length", 32)
    assert result.code == 0
    assert "adds no special tokens" in result.out
    assert not set(pieces(tmp_path / "rows")[0]) & set(manifest(tmp_path / "rows")["tokenizer"]["special"].values())
