"""The whole detour on a generated corpus, command by command: this is what `make demo` shows.

The demo prints each command before it runs it, so that a reader can repeat it on text of their own. The detour and its
matched MLM twin see the same rows in the same order with the same schedule. Only the first phase's objective differs.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from command_line import Failure

PROJECT = Path(__file__).resolve().parents[2]  # its commands run as processes, as a user starts them
VOCABULARY = 2048
ROW_LENGTH = 512
TWIN = ["name=demo-mlm-twin", "phases.0.name=mlm", "phases.0.objective=mlm", "phases.0.mask_rate=0.3"]

# Sentences from the corpus, each with the word that the corpus has there.
QUESTIONS = [
    ("[MASK] was given for the Lyme disease.", "Doxycycline"),
    ("The patient was found to have Lyme [MASK].", "disease"),
    ("A serology showed [MASK] against Borrelia.", "antibodies"),
]


def demo(out: Path, documents: int, overrides: list[str]) -> Path:
    """Run every step under `out`, print the results and return the report's path. Finished steps are not done again."""
    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer, rows = out / "corpus.jsonl", out / "tokenizer", out / "rows"
    prepare = "-m", "data_prep"
    if not corpus.exists():
        _run("-m", "evaluation", "sample", corpus, "--documents", documents, "--seed", 1)
    if not tokenizer.exists():
        _run(*prepare, "tokenizer", corpus, "--vocab-size", VOCABULARY, "--out", tokenizer)
    if not rows.exists():
        split = "--row-length", ROW_LENGTH, "--validation", 0.02
        _run(*prepare, "build", corpus, "--tokenizer", tokenizer, "--out", rows, *split)

    recipe = PROJECT / "recipes" / "demo.yaml"
    here = [f"data.rows={(rows / 'train').resolve()}", f"data.validation={(rows / 'validation').resolve()}", *overrides]
    detour, twin = out / "detour", out / "mlm-twin"
    _run(PROJECT / "pipeline" / "train.py", recipe, "--run-dir", detour, *here)
    _run(PROJECT / "pipeline" / "train.py", recipe, "--run-dir", twin, *TWIN, *here)
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
    """Show one of our commands and run it with this Python. Raises Failure if it fails; the command has said why."""
    words = [str(word) for word in command]
    print(f"\n$ python {shlex.join(words)}", flush=True)
    if subprocess.run([sys.executable, *words]).returncode:
        raise Failure("the command above failed: do what its message says, then run the demo again")


def _validation(run: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the very first validation line of the run and the last one of each phase, in order."""
    found: list[tuple[str, dict[str, Any]]] = []
    phases = [p for p in run.iterdir() if (p / "DONE").exists()]
    for phase in sorted(phases, key=lambda p: (p / "DONE").stat().st_mtime):
        lines = [json.loads(line) for line in (phase / "metrics.jsonl").read_text().splitlines()]
        checks = [line for line in lines if line.get("validation")]
        found += [("start", checks[0])] if not found else []
        found.append((f"after {phase.name}", checks[-1]))
    return found


def _fill_mask(model: Path) -> list[tuple[str, str, str]]:
    """Return (question, answer, guesses with their probabilities) for each of QUESTIONS."""
    from transformers import pipeline

    fill = pipeline("fill-mask", model=str(model), device="cpu")
    answers = []
    for question, answer in QUESTIONS:
        guesses = ", ".join(f"{g['token_str'].strip()} {g['score']:.0%}" for g in fill(question, top_k=4))
        answers.append((question, answer, guesses))
    return answers
