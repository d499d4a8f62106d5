"""The sample corpus: seeded, varied, true to its own facts."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from command_line import run
from evaluation.__main__ import main
from evaluation.demo.corpus import documents
from evaluation.demo.medical_facts import SPECIALTIES, diseases, symptoms


def sample(out: Path, count: int, *options: object) -> int:
    return run(main, ["sample", str(out), "--documents", str(count), *map(str, options)])


def test_a_seed_gives_one_corpus_whatever_its_size(tmp_path: Path) -> None:
    assert list(documents(50, 3)) == list(documents(80, 3))[:50]
    assert list(documents(50, 3)) != list(documents(50, 4))
    for name in ("a.jsonl", "b.jsonl.gz", "new/c.jsonl.zst", "d.jsonl.gz"):
        assert sample(tmp_path / name, 30, "--seed", 3) == 0
    plain = (tmp_path / "a.jsonl").read_bytes()
    assert [json.loads(line) for line in plain.splitlines()] == list(documents(30, 3))
    assert gzip.decompress((tmp_path / "b.jsonl.gz").read_bytes()) == plain
    assert zstandard.ZstdDecompressor().stream_reader((tmp_path / "new/c.jsonl.zst").read_bytes()).read() == plain
    assert (tmp_path / "b.jsonl.gz").read_bytes() == (tmp_path / "d.jsonl.gz").read_bytes()


def test_the_facts_are_whole() -> None:
    known = symptoms()
    assert len(diseases()) >= 40
    assert len({disease.drug for disease in diseases()}) == len(diseases())  # one right answer each
    for disease in diseases():
        assert set(disease.symptoms) <= set(known)
        assert disease.specialty in SPECIALTIES
    nouns = [*known.values(), *(d.fr for d in diseases()), *(d.test[1] for d in diseases())]
    assert all(noun.split(" ")[0] in ("f", "m", "fp", "mp") for noun in nouns)


@pytest.fixture(scope="module")
def corpus() -> list[dict[str, str]]:
    return list(documents(4000, 17))


def test_reports_are_of_both_languages_and_of_some_length(corpus: list[dict[str, str]]) -> None:
    lengths = sorted(len(document["text"].split()) for document in corpus)
    assert lengths[0] >= 60
    assert lengths[-1] <= 300
    assert lengths[-1] > 2 * lengths[0]
    languages = Counter(document["lang"] for document in corpus)
    assert min(languages["en"], languages["fr"]) > 1800
    assert len({document["text"] for document in corpus}) == len(corpus)
    assert len({document["id"] for document in corpus}) == len(corpus)


def test_a_hidden_drug_has_a_right_answer(corpus: list[dict[str, str]]) -> None:
    english = {d.en: d.drug[0] for d in diseases()}
    seen: Counter[str] = Counter()
    for document in corpus:
        for drug, disease in re.findall(r"The patient was treated with (\w+) for ([^.]+)\.", document["text"]):
            assert english[disease] == drug
            seen[disease] += 1
    assert len(seen) == len(english)
    for document in corpus[:500]:  # a report names its disease and its drug
        facts = [
            (d.en, d.drug[0]) if document["lang"] == "en" else (d.fr.split(" ", 1)[1], d.drug[1]) for d in diseases()
        ]
        text = document["text"].lower()
        assert any(disease.lower() in text and drug in text for disease, drug in facts)


WRONG_ARTICLES = {
    "en": r"\ba [aeioAEIO]\w*|\ban [^aeiouAEIOU8\W1]\w*|\ba 8\d?\b|\ba 1[18]\b",
    "fr": r"\b[dl][ea] [aeéèêiîoôœuhAEÉIOUH]\w*|\bde les?\b|\bà les?\b|'[bcdfgjklmnpqrstvwxz]\w*|\bde une?\b",
}


def test_articles_agree(corpus: list[dict[str, str]]) -> None:
    for document in corpus:
        found = re.findall(WRONG_ARTICLES[document["lang"]], document["text"])
        assert set(found) <= {"de Hodgkin"}, (found, document["text"])


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    for out, count, code in (("there.jsonl", 5, 1), ("a.jsonl", 0, 2), ("folder", 5, 2)):
        assert sample(tmp_path / out, count) == code
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert (tmp_path / "there.jsonl").read_text() == "mine"
