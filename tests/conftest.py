"""What many tests share: a small corpus, its tokenizer and rows, real text where it is at hand, and recipes over them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Two ranks on two cores: more threads than that only wait for each other. Before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED = Path(__file__).resolve().parents[1].parent / "shared" / "data"


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of real text and tasks; it is not part of the project."""
    if not SHARED.is_dir():
        pytest.skip("no real text beside the project (../shared/data)")
    return SHARED


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 invented case reports."""
    from evaluation.__main__ import main

    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    assert main(["sample", str(path), "--documents", "800", "--seed", "3"]) == 0
    return path


@pytest.fixture(scope="session")
def tokenizer(corpus: Path) -> Path:
    from data_prep.__main__ import main

    folder = corpus.parent / "tokenizer"
    assert main(["tokenizer", str(corpus), "--vocab-size", "600", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def rows(corpus: Path, tokenizer: Path) -> Path:
    """train/ and validation/ in rows of 128 tokens."""
    from data_prep.__main__ import main

    out = corpus.parent / "rows"
    arguments = ["--tokenizer", str(tokenizer), "--out", str(out), "--row-length", "128", "--validation", "0.05"]
    assert main(["build", str(corpus), *arguments]) == 0
    return out


@pytest.fixture(scope="session")
def small_shards(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same rows, train/ in some 45 compressed shards."""
    from data_prep.__main__ import main

    out = tmp_path_factory.mktemp("small") / "rows"
    options = ["--tokenizer", str(tokenizer), "--out", str(out), "--row-length", "128", "--validation", "0.05"]
    assert main(["build", str(corpus), *options, "--shard-size", "16kb", "--compression", "zstd"]) == 0
    return out


def tiny_recipe(rows: Path) -> dict[str, Any]:
    """Two phases of about 12 and 5 steps for a model that trains in a second."""
    return {
        "name": "tiny",
        "model": {
            "config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 3,
                "num_attention_heads": 2,
                "local_attention": 32,
            }
        },
        "data": {"rows": str(rows / "train"), "validation": str(rows / "validation")},
        "phases": [
            {
                "name": "clm",
                "objective": "clm",
                "tokens": 12_000,
                "learning_rate": {"warmup_tokens": 3000, "peak": 2e-3},
            },
            {
                "name": "mlm_decay",
                "objective": "mlm",
                "mask_rate": 0.15,
                "tokens": 5000,
                "learning_rate": {"peak": 2e-3, "end": 2e-4, "shape": "one_minus_sqrt"},
            },
        ],
        "batch": {"rows": 8, "rows_per_device": 2},
        "validation": {"every_steps": 5, "rows": 5},
        "logging": {"every_steps": 1, "tensorboard": False},
    }


@pytest.fixture
def recipe(rows: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write the tiny recipe, with keys such as `batch__rows=4` changed, and return its path."""

    def write(file: str = "recipe.yaml", **changes: Any) -> Path:
        tree = tiny_recipe(rows)
        for key, value in changes.items():
            *parents, last = key.split("__")
            node: Any = tree
            for part in parents:
                node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
            node[last] = value
        path = tmp_path / file
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return write


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


TIMES = ("seconds", "tokens_per_second", "model_flops_utilization")  # of a line, not of the numbers


def metrics(run: Path, phase: str) -> list[dict[str, Any]]:
    """A phase's metrics without what a clock decides."""
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines(run / phase / "metrics.jsonl")]
