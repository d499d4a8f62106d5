"""What the tests of data preparation share: small tokenizers, small corpora, rows read back."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data_prep.rows import Rows

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def write_jsonl(path: Path, texts: Iterable[Any], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": f"n{i}", field: text}) + "\n" for i, text in enumerate(texts)), "utf-8")
    return path


def save_word_tokenizer(folder: Path, words: int, pre_tokenizer: Any = None) -> Path:
    """A word-level tokenizer that knows w5, w6 ... up to the id `words` - 1; a text of n words gives n + 2 tokens."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL)}
    vocabulary |= {f"w{number}": number for number in range(len(SPECIAL), words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def encoded(folder: Path, texts: Iterable[str]) -> list[tuple[int, ...]]:
    """The ids the tokenizers library itself gives, one text at a time."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return [tuple(tokenizer.encode(text).ids) for text in texts]


def pieces(folder: Path) -> list[tuple[int, ...]]:
    """All pieces of all rows, in the order they are stored."""
    found = []
    for row in Rows(folder):
        start = 0
        for length in row.lengths.tolist():
            found.append(tuple(row.tokens[start : start + length].tolist()))
            start += length
    return found


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def tree(folder: Path) -> dict[str, bytes]:
    """The content of every file below `folder`."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def command(*arguments: object, **environment: str) -> "subprocess.Popen[str]":
    """`python -m data_prep ARGUMENTS` in a process group of its own."""
    root = str(Path(__file__).resolve().parents[2])
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep", *map(str, arguments)],
        cwd=root,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
