"""What CONTRIBUTING.md says of additions is true: in a copy of the packages, each is made as told, and works."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ADDITIONS = ("An attention back end", "An objective", "An input format", "A SLURM rule", "An encoder family")

BACK_END = """
from pipeline.model.attention.backend import Backend


def attend(q, k, v, cu_seqlens, max_seqlen, causal, half_window):
    return v * 2


BACKEND = Backend(attend)
"""

OBJECTIVE = '''
def last_token(row, mask_rate, vocabulary, rng):
    """Each document's last token, predicted from itself."""
    ends = np.cumsum(row.lengths, dtype=np.int64) - 1
    tokens = row.tokens.astype(np.int64)
    return LabelledRow(tokens, row.lengths, ends, tokens[ends])


'''

FORMAT = """
from data_prep.documents.formats.format import Format, batched, decoded


def chunks(opened, member, reading):
    return batched(enumerate((line.strip() for line in decoded(opened, reading)), 1), member, reading.unit_bytes)


LINES = Format((".lines",), chunks)
"""

RULE = """
def main(argv):
    print("nodes", argv[1])
    return 0
"""

FAMILY = """
from dataclasses import replace

from transformers import BertConfig

from pipeline.model.families import modernbert

FAMILY = replace(modernbert.FAMILY, title="Mine", config=BertConfig, architecture="BertForMaskedLM")
"""

USE = """
import numpy as np, torch, pydantic, pytest
from data_prep.rows import Row
from pipeline.data import Objective, Vocabulary, label
from pipeline.model import attend, family_of
from pipeline.recipe.schema import Model, Phase
from transformers import BertConfig

x = torch.ones(3, 2, 8)
out = attend(x, x, x, torch.tensor([0, 3], dtype=torch.int32), 3, causal=True, half_window=None, backend="mine")
assert (out == 2).all()
Model(init="m", attention="mine")

row = Row(np.array([5, 6, 7], np.uint16), np.array([2, 1], np.uint32))
labelled = label(row, Objective("last_token"), Vocabulary(9, (0,), 1), 0)
assert labelled.labels.tolist() == [6, 7]
phase = dict(name="p", objective="last_token", tokens=9, learning_rate={"peak": 1e-4})
Phase(**phase)
with pytest.raises(pydantic.ValidationError, match="mask_rate has no effect with objective last_token"):
    Phase(**phase, mask_rate=0.3)

assert family_of(BertConfig()).title == "Mine"
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for package in ("command_line", "data_prep", "pipeline"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def insert(file: Path, before: str, line: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, f"{file} has no single {before!r}"
    file.write_text(text.replace(before, line + before))


def python(folder: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_contributing_names_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in ADDITIONS if f"**{name}" not in text] == []


def test_a_back_end_an_objective_and_a_family(copy: Path) -> None:
    model, objectives = copy / "pipeline" / "model", copy / "pipeline" / "data" / "objectives.py"
    (model / "attention" / "mine.py").write_text(BACK_END)
    insert(
        model / "attention" / "packed.py",
        "from pipeline.model.attention import",
        "from pipeline.model.attention import mine\n",
    )
    insert(model / "attention" / "packed.py", '    "sdpa": ', '    "mine": mine.BACKEND,\n')
    insert(objectives, "@dataclass(frozen=True)\nclass Kind:\n", OBJECTIVE)
    insert(objectives, '    "clm": ', '    "last_token": Kind(causal=False, masks=False, labels=last_token),\n')
    (model / "families" / "mine.py").write_text(FAMILY)
    insert(
        model / "families" / "__init__.py",
        "from pipeline.model.families import",
        "from pipeline.model.families import mine\n",
    )
    insert(model / "families" / "__init__.py", '    "modernbert": ', '    "bert": mine.FAMILY,\n')
    assert python(copy, "-c", USE) == ""


def test_an_input_format(copy: Path, tokenizer: Path, tmp_path: Path) -> None:
    formats = copy / "data_prep" / "documents" / "formats"
    (formats / "mine.py").write_text(FORMAT)
    insert(
        formats / "__init__.py",
        "from data_prep.documents.formats.text ",
        "from data_prep.documents.formats.mine import LINES\n",
    )
    insert(formats / "__init__.py", '    "jsonl": ', '    "lines": LINES,\n')
    (tmp_path / "notes.lines").write_text("A first note.\nA second note.\n")
    build = ["build", str(tmp_path / "notes.lines"), "--tokenizer", str(tokenizer), "--row-length", "64"]
    assert "rows: 2 documents" in python(copy, "-m", "data_prep", *build, "--out", str(tmp_path / "rows"))


def test_a_slurm_rule(copy: Path) -> None:
    slurm = copy / "pipeline" / "slurm"
    (slurm / "mine.py").write_text(RULE)
    insert(slurm / "__main__.py", "from pipeline.slurm import", "from pipeline.slurm import mine\n")
    insert(slurm / "__main__.py", '    "begin": ', '    "nodes": mine.main,\n')
    assert python(copy, "-m", "pipeline.slurm", "nodes", "3") == "nodes 3\n"
