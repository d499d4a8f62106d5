"""Exact duplicates: the first copy stays, whatever unit the others are in; and groups stay on one side of the split."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.documents import content_hash, duplicates
from data_prep.rows import AtomicFiles
from tests.data_prep.data_prep_helpers import Result, encoded, manifest, pieces, write_jsonl

Cli = Callable[..., Result]


@pytest.mark.parametrize("at_once", [1, 7, 50, 1000])
def test_the_first_copy_stays(tmp_path: Path, at_once: int) -> None:
    source = random.Random(at_once)
    texts = [f"text {source.randint(0, 60)}" for _ in range(200)]
    store, names, cut = AtomicFiles(str(tmp_path)), [], sorted(source.sample(range(1, 200), 6))
    for begin, end in zip([0, *cut], [*cut, 200], strict=True):
        names.append(f"{begin}.hashes")
        store.put(names[-1], b"".join(content_hash(text) for text in texts[begin:end]))
    found = duplicates(store, names, at_once)
    assert found.tolist() == [text in texts[:number] for number, text in enumerate(texts)]
    assert duplicates(store, [], at_once).tolist() == []


def test_hashes_that_agree_in_half_are_not_the_same(tmp_path: Path) -> None:
    store = AtomicFiles(str(tmp_path))
    hashes = np.array([[1, 2], [1, 3], [2, 2], [1, 3], [1, 2]], np.uint64)
    store.put("a", hashes.tobytes())
    for at_once in (2, 10):
        assert duplicates(store, ["a"], at_once).tolist() == [False, False, False, True, True]


def test_duplicates_are_counted_with_their_tokens(cli: Cli, tmp_path: Path, words: Path) -> None:
    texts = ["w5 w6", "w7", " w5\n w6 ", "w5 w6 w7", "w7", "w5 e\u0301", "w5 \u00e9"]
    one = write_jsonl(tmp_path / "a.jsonl", texts[:3] * 40)
    two = write_jsonl(tmp_path / "b.jsonl", texts)
    options = ("--tokenizer", words, "--row-length", 16, "--unit-size", "1kb")
    out = tmp_path / "rows"
    assert cli("build", one, two, *options, "--deduplicate", "exact", "--out", out).code == 0
    assert sorted(pieces(out)) == sorted(encoded(words, ["w5 w6", "w7", "w5 w6 w7", "w5 é"]))
    said = manifest(out)
    everything = encoded(words, [*texts[:3] * 40, *texts])
    assert said["counts"]["dropped"] == {"duplicate": len(everything) - 4}
    assert said["counts"]["tokens"] + said["counts"]["dropped_tokens"] == sum(map(len, everything))
    assert [source["documents"] for source in said["sources"]] == [2, 2]
    assert cli("verify", out).code == 0
    assert cli("build", one, two, *options, "--out", tmp_path / "all").code == 0
    assert manifest(tmp_path / "all")["counts"]["documents"] == len(everything)


def test_a_patient_stays_on_one_side(cli: Cli, tmp_path: Path, words: Path) -> None:
    records = [{"text": f"w{5 + n} w{5 + n % 30}", "who": {"patient": n % 30}} for n in range(600)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--tokenizer", words, "--row-length", 64, "--validation", 0.3, "--group-field", "who.patient")
    assert cli("build", path, *options, "--out", tmp_path / "rows").code == 0
    sides = {
        split: {piece[2] for piece in pieces(tmp_path / "rows" / split) if len(piece) == 4}
        for split in ("train", "validation")
    }
    assert not sides["train"] & sides["validation"]
    assert len(sides["train"] | sides["validation"]) == 30
    assert len(sides["validation"]) > 3
    more = [*records, {"text": "w5", "who": {"patient": None}}, {"text": "w5"}, {"text": "w5", "who": {"patient": 900}}]
    path.write_text("".join(json.dumps(record) + "\n" for record in more))
    failed = cli("build", path, *options, "--out", tmp_path / "more")
    assert (failed.code, "record 601: it has no usable field 'who.patient'" in failed.err) == (1, True)
    assert cli("build", path, *options, "--on-error", "skip", "--out", tmp_path / "more").code == 0
    assert manifest(tmp_path / "more" / "train")["counts"]["dropped"] == {"no_group": 2}
    held = Counter(piece for piece in pieces(tmp_path / "rows" / "validation"))
    assert held <= Counter(pieces(tmp_path / "more" / "validation"))  # it does not move when the corpus grows
