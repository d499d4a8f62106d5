"""The whole detour on a generated corpus, command by command: what `make demo` shows.

Each command is printed before it runs, so that a reader can repeat it on text of their own. The detour and its matched
MLM twin see the same rows in the same order with the same schedule; only the first phase's objective differs.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from command_line import Failure
from pipeline.recipe.file import INSTALLED

VOCABULARY = 2048
ROW_LENGTH = 512
TWIN = ["name=demo-mlm-twin", "phases.0.name=mlm", "phases.0.objective=mlm", "phases.0.mask_rate=0.3"]

# Sentences as the corpus has them, with the answer a reader of the corpus would give.
QUESTIONS = [
    ("[MASK] was given for the Lyme disease.", "Doxycycline"),
    ("The patient was found to have Lyme [MASK].", "disease"),
    ("A serology showed [MASK] against Borrelia.", "antibodies"),
]


def demo(out: Path, documents: int, overrides: list[str]) -> Path:
    """Run every step under `out` (what is finished is not done again) and print what came of it; returns the report."""
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer, rows = out / "corpus.jsonl", out / "tokenizer", out / "rows"
    prepare = "-m", "data_prep"
    if not corpus.exists():
        _run(*prepare, "sample", corpus, "--documents", documents, "--seed", 1)
    if not tokenizer.exists():
        _run(*prepare, "tokenizer", corpus, "--vocab-size", VOCABULARY, "--out", tokenizer)
    if not rows.exists():
        split = "--row-length", ROW_LENGTH, "--validation", 0.02
        _run(*prepare, "build", corpus, "--tokenizer", tokenizer, "--out", rows, *split)

    recipe = INSTALLED / "recipes" / "demo.yaml"
    here = [f"data.rows={(rows / 'train').resolve()}", f"data.validation={(rows / 'validation').resolve()}", *overrides]
    detour, twin = out / "detour", out / "mlm-twin"
    _run(INSTALLED / "pipeline" / "train.py", recipe, "--run-dir", detour, *here)
    _run(INSTALLED / "pipeline" / "train.py", recipe, "--run-dir", twin, *TWIN, *here)
    report = out / "report.html"
    _run("-m", "evaluation", "report", detour, twin, "--out", report)

    losses = {name: _validation(run) for name, run in (("detour", detour), ("MLM twin", twin))}
    print("\nvalidation loss, in nats a label, on the same rows under the same masks")
    print(f"{'':34}{'MLM loss':>10}{'CLM loss':>10}")
    for name, lines in losses.items():
        for where, record in lines:
            print(f"{name + ', ' + where:34}{record['mlm_loss']:10.4f}{record['clm_loss']:10.4f}")
    print(
        "(From random weights, as here, the twin is ahead: what the detour improves is an encoder that is pretrained already.)"
    )
    print("\nfill-mask, by transformers' own pipeline, on the exported detour")
    for question, answer, guesses in _fill_mask(detour / "mlm_decay" / "export"):
        print(f"  {question}   (the corpus says: {answer})\n      {guesses}")
    print(f"\n{time.monotonic() - begin:.0f} s; exported encoder: {detour / 'mlm_decay' / 'export'}\nreport: {report}")
    return report


def _run(*command: object) -> None:
    """One command of ours with this Python, shown first; Failure where it fails (it has said why)."""
    words = [str(word) for word in command]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    if subprocess.run([sys.executable, *words]).returncode:
        raise Failure("the command above failed")


def _validation(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """The run's validation lines that matter: the very first, and the last of each phase in order."""
    found: list[tuple[str, dict[str, Any]]] = []
    phases = [p for p in run.iterdir() if (p / "DONE").exists()]
    for phase in sorted(phases, key=lambda p: (p / "DONE").stat().st_mtime):
        lines = [json.loads(line) for line in (phase / "metrics.jsonl").read_text().splitlines()]
        checks = [line for line in lines if line.get("validation")]
        found += [("start", checks[0])] if not found else []
        found.append((f"after {phase.name}", checks[-1]))
    return found


def _fill_mask(model: Path) -> list[tuple[str, str, str]]:
    from transformers import pipeline

    fill = pipeline("fill-mask", model=str(model), device="cpu")
    answers = []
    for question, answer in QUESTIONS:
        guesses = ", ".join(f"{g['token_str'].strip()} {g['score']:.0%}" for g in fill(question, top_k=4))
        answers.append((question, answer, guesses))
    return answers
