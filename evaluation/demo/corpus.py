"""The demo's corpus: invented case reports in English and French, from a grammar and the facts of `sample_facts`.

    case (who, which disease, what it gave)  ->  sentences in one of the languages  ->  {"id", "text", "lang"} a line

A case is drawn first and then told, so that a report agrees with itself: disease, symptoms, test, finding, drug and values
recur, and a hidden word can be found from other parts of the report. All of it is invented; nobody's record was used.
"""

import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, BinaryIO

from command_line import Failure, UsageError
from evaluation.demo.english import english
from evaluation.demo.medical_facts import Disease, Lab, diseases, symptoms
from evaluation.demo.french import french

SHORTEST, LONGEST = 60, 300  # words of a report


@dataclass(frozen=True)
class Case:
    """What a report tells, whatever the language."""

    age: int  # years
    female: bool
    disease: Disease
    symptoms: list[tuple[str, str]]  # (English, French with gender)
    other: Disease  # considered and excluded
    absent: tuple[str, str]  # a symptom of `other` that the patient has not
    background: Disease | None  # an older disease, under treatment
    lab: Lab | None
    ill: float  # the laboratory value at admission
    well: float  # and after treatment
    weeks: int  # of symptoms before admission
    days: int  # in hospital
    months: int  # until the follow-up
    cured: bool  # by the first drug alone
    temperature: float  # °C
    pulse: int  # a minute
    pressure: tuple[int, int]  # mmHg


def draw_case(random: Random, world: list[Disease], words: dict[str, str]) -> Case:
    """A case from the world's diseases; `words` are the symptoms, English -> French."""
    disease = random.choice(world)
    female = disease.sex == "f" or (disease.sex is None and random.random() < 0.5)
    possible = [d for d in world if d.sex in (None, "f" if female else "m") and d.specialty != disease.specialty]
    told = random.sample(disease.symptoms, k=min(len(disease.symptoms), random.choice((2, 3, 3, 4))))
    others = [d for d in possible if any(symptom not in disease.symptoms for symptom in d.symptoms)]
    other = random.choice(others)
    absent = random.choice([symptom for symptom in other.symptoms if symptom not in disease.symptoms])
    background = random.choice([d for d in possible if d is not other]) if random.random() < 0.6 else None
    lab = disease.lab
    fever = "fever" in told
    return Case(
        age=random.randint(19, 91),
        female=female,
        disease=disease,
        symptoms=[(symptom, words[symptom]) for symptom in told],
        other=other,
        absent=(absent, words[absent]),
        background=background,
        lab=lab,
        ill=random.uniform(*lab.ill) if lab else 0.0,
        well=random.uniform(*lab.well) if lab else 0.0,
        weeks=random.randint(2, 16),
        days=random.randint(3, 21),
        months=random.choice((2, 3, 6, 9, 12, 18)),
        cured=random.random() < 0.65,
        temperature=random.uniform(38.2, 40.1) if fever else random.uniform(36.4, 37.4),
        pulse=random.randint(92, 124) if fever else random.randint(58, 90),
        pressure=(random.randint(104, 152), random.randint(58, 92)),
    )


def documents(count: int, seed: int) -> Iterator[dict[str, str]]:
    """`count` documents; number i depends on `seed` and i only, so a larger corpus begins like a smaller one."""
    world, words = diseases(), symptoms()
    for number in range(count):
        random = Random(f"{seed} {number}")
        lang = random.choice(("en", "fr"))
        case = draw_case(random, world, words)
        text = ""
        while not SHORTEST <= len(text.split()) <= LONGEST:
            text = english(case, random) if lang == "en" else french(case, random)
        yield {"id": f"case-{number:06d}", "text": text, "lang": lang}


def write_sample(out: str, count: int, seed: int) -> int:
    """Write `count` documents as JSONL to the new file `out`; returns its number of words.

    Raises UsageError for a count below 1 or another ending, Failure where the file is there or cannot be written.
    """
    if count < 1:
        raise UsageError(f"--documents {count}: at least 1")
    if not out.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        raise UsageError(f"{out!r}: the name of the sample must end in .jsonl, .jsonl.gz or .jsonl.zst")
    if os.path.exists(out):
        raise Failure(f"{out!r} exists: nothing is overwritten; remove it or name another file")
    words = 0
    aside = f"{out}.{os.getpid()}.tmp"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(out)), exist_ok=True)
        with _compressed(aside, out) as file:
            for document in documents(count, seed):
                words += len(document["text"].split())
                file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
        os.rename(aside, out)
    except OSError as error:
        raise Failure(f"{out!r} cannot be written: {error.strerror}") from None
    finally:
        if os.path.exists(aside):
            os.remove(aside)
    return words


@contextmanager
def _compressed(path: str, name: str) -> Iterator[BinaryIO]:
    """A binary file at `path`, compressed as `name` ends, with no time stamp inside."""
    with open(path, "wb") as raw:
        stream: Any = raw
        if name.endswith(".gz"):
            stream = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
        elif name.endswith(".zst"):
            import zstandard

            stream = io.BufferedWriter(zstandard.ZstdCompressor().stream_writer(raw, closefd=False))
        yield stream
        if stream is not raw:
            stream.close()
