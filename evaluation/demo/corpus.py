"""The sample corpus: invented case reports in English and French, from a grammar and the facts of `medical_facts`.

    a case (who, which disease, which treatment)  ->  sentences in one language  ->  one line {"id", "text", "lang"}

Everything is invented. No patient's record was used.
"""

import gzip
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, BinaryIO

from command_line import Failure, UsageError
from evaluation.demo.case import draw_case
from evaluation.demo.medical_facts import diseases, symptoms
from evaluation.demo.writer import Writer

SHORTEST, LONGEST = 60, 300  # words of a report


def documents(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield `count` documents. Number i depends on `seed` and i only, so a larger corpus begins like a smaller one."""
    world, words = diseases(), symptoms()
    writers = {lang: Writer(lang) for lang in ("en", "fr")}
    for number in range(count):
        random = Random(f"{seed} {number}")
        lang = random.choice(("en", "fr"))
        case = draw_case(random, world, words)
        text = ""
        while not SHORTEST <= len(text.split()) <= LONGEST:
            text = writers[lang].report(case, random)
        yield {"id": f"case-{number:06d}", "text": text, "lang": lang}


def write_sample(out: str, count: int, seed: int) -> int:
    """Write `count` documents as JSONL to the new file `out` and return their number of words.

    Raises UsageError for a count below 1 or an ending we do not write, and Failure if `out` exists or cannot be written.
    """
    if count < 1:
        raise UsageError(f"--documents {count}: at least 1")
    if not out.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        raise UsageError(f"{out!r}: the name of the sample must end in .jsonl, .jsonl.gz or .jsonl.zst")
    if os.path.exists(out):
        raise Failure(f"{out!r} exists and is never overwritten: remove it or name another file")
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
    """Open a binary file at `path`. The ending of `name` decides the compression; no time stamp is written."""
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
