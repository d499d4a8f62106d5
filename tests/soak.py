"""`make soak`: runs stopped at random moments in every way, gone on with until done, equal to an uninterrupted one.

    python -m tests.soak [--runs 20] [--out build/soak]

Each run is 40 steps on two ranks; the moments and ways (SIGKILL, SIGTERM, SIGUSR2, to one rank or both, STOP) are drawn from
the run's number. A run that is found equal leaves a record and is not done again, so the soak itself can be stopped.
"""

import argparse
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from tests.conftest import lines, metrics, tiny_recipe
from tests.ranks import start, train

PHASES = ("clm", "mlm_decay")
WAYS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR2, None)  # None: RUN/STOP


def prepare(out: Path) -> Path:
    """Corpus, tokenizer, rows and a recipe of 30 and 10 steps, once."""
    from data_prep.__main__ import main
    from evaluation.demo import write_sample

    corpus, tokenizer, rows, path = out / "corpus.jsonl", out / "tokenizer", out / "rows", out / "recipe.yaml"
    if not path.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        write_sample(str(corpus), count=800, seed=3)
        assert main(["tokenizer", str(corpus), "--vocab-size", "600", "--out", str(tokenizer)]) == 0
        build = ["--tokenizer", str(tokenizer), "--out", str(rows), "--row-length", "128", "--validation", "0.05"]
        assert main(["build", str(corpus), *build]) == 0
        recipe = tiny_recipe(rows)
        recipe["phases"][0]["tokens"], recipe["phases"][1]["tokens"] = 30 * 1000, 10 * 1000
        recipe["checkpoints"] = {"every_steps": 4}
        path.write_text(yaml.safe_dump(recipe))
    return path


def interrupt(number: int, recipe: Path, out: Path) -> int:
    """One run, stopped again and again; returns how often."""
    rng = random.Random(number)
    run = out / f"run-{number}"
    shutil.rmtree(run, ignore_errors=True)
    for stops in range(100):
        running = start(2, out / "log", recipe, "--run-dir", run)
        alive = [process.is_alive for process in running.processes]
        way, ranks = rng.choice(WAYS), rng.choice([[0], [1], [0, 1]])
        deadline = time.monotonic() + rng.uniform(0.5, 15.0)
        while time.monotonic() < deadline and alive[0]():
            time.sleep(0.005)
        if way is None and run.exists():
            (run / "STOP").touch()
        elif way is not None:
            running.signal(way, [rank for rank in ranks if alive[rank]()])
        codes = [result.code for result in running.wait()]
        print(
            f"run {number}, start {stops + 1}: {way.name if way else 'STOP'} to {ranks}, exit codes {codes}", flush=True
        )
        if codes == [0, 0]:
            return stops
        assert way == signal.SIGKILL or set(codes) == {75}, codes
    raise AssertionError("it never came to its end")


def equal(run: Path, whole: Path) -> None:
    for phase in PHASES:
        assert metrics(run, phase) == metrics(whole, phase), phase
        assert lines(run / phase / "rows.jsonl") == lines(whole / phase / "rows.jsonl"), phase
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        ours, theirs = (
            load_file(next((r / "mlm_decay" / "checkpoints").glob("step-*")) / f"{kind}.safetensors")
            for r in (run, whole)
        )
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), kind


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    recipe = prepare(out)
    whole = out / "whole"
    if not (whole / "mlm_decay" / "DONE").exists():
        train(2, out / "log", recipe, "--run-dir", whole)
    stops = 0
    for number in range(arguments.runs):
        record = out / f"equal-{number}"
        if not record.exists():
            stopped = interrupt(number, recipe, out)
            equal(out / f"run-{number}", whole)
            record.write_text(f"{stopped}\n")
        stops += int(record.read_text())
    print(f"{arguments.runs} runs, stopped {stops} times, all equal to the uninterrupted one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
