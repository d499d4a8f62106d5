"""What the engine costs besides the arithmetic: overhead of a step, the loader, the start, a checkpoint.

    python -m benchmarks.engine overhead      share of a step outside forward, backward and optimizer step (2 ranks)
    python -m benchmarks.engine start         seconds from the launch to the end of the first step, by part
    python -m benchmarks.engine checkpoint    seconds and bytes of a checkpoint at ModernBERT-base's size

Shares and ratios are of one run on one machine; the seconds are that machine's.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tests.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]


def prepare(folder: Path, width: int, layers: int, row_length: int, tokens: int) -> Path:
    """Rows of the sample corpus and a recipe over them."""
    from data_prep.__main__ import main
    from evaluation.demo import write_sample

    corpus, tokenizer, rows = folder / "corpus.jsonl", folder / "tokenizer", folder / "rows"
    write_sample(str(corpus), count=3000, seed=1)
    assert main(["tokenizer", str(corpus), "--vocab-size", "4096", "--out", str(tokenizer)]) == 0
    build = ["--tokenizer", str(tokenizer), "--out", str(rows), "--row-length", str(row_length)]
    assert main(["build", str(corpus), *build]) == 0
    recipe = {
        "name": "benchmark",
        "model": {
            "config": {
                "hidden_size": width,
                "intermediate_size": 3 * width // 2,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 64,
            }
        },
        "data": {"rows": str(rows)},
        "phases": [{"name": "clm", "objective": "clm", "tokens": tokens, "learning_rate": {"peak": 1e-4}}],
        "batch": {"rows": 16, "rows_per_device": 4},
        "checkpoints": {"every_steps": None, "every_minutes": None},
        "logging": {"every_steps": 1},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


# --- overhead ---------------------------------------------------------------------------------------------------------


def _timed_training(argv: list[str], out: str) -> int:
    """Train on each rank with clocks around DeepSpeed's forward, backward and step, and around the loader."""
    import json

    from deepspeed.runtime.engine import DeepSpeedEngine

    from command_line import run
    from pipeline import train
    from pipeline.data import Loader
    from pipeline.run import PhaseRun

    spent: dict[str, list[float]] = {"arithmetic": [], "loader": [], "step": []}
    within: list[float] = [0.0]

    def clocked(name: str) -> None:
        original = getattr(DeepSpeedEngine, name)

        def timed(self: Any, *arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = original(self, *arguments, **options)
            within[0] += time.perf_counter() - begin
            return result

        setattr(DeepSpeedEngine, name, timed)

    for name in ("forward", "backward", "step"):
        clocked(name)
    steps, last = Loader.steps, [0.0]

    def timed_steps(self: Any, *arguments: Any) -> Any:
        for step in steps(self, *arguments):
            now = time.perf_counter()
            spent["loader"].append(now - asked[0])
            yield step

    asked = [0.0]
    next_step = PhaseRun.next_step

    def timed_next_step(self: Any) -> Any:
        now = time.perf_counter()
        if last[0]:
            spent["step"].append(now - last[0])
            spent["arithmetic"].append(within[0])
        last[0], within[0], asked[0] = now, 0.0, now
        return next_step(self)

    Loader.steps, PhaseRun.next_step = timed_steps, timed_next_step  # type: ignore[method-assign]
    code = run(train.main, argv)
    if os.environ["RANK"] == "0":
        Path(out).write_text(json.dumps(spent))
    return code


def overhead(folder: Path) -> None:
    import json

    recipe = prepare(folder, width=256, layers=12, row_length=512, tokens=25 * 16 * 500)
    out = folder / "spent.json"
    results = Ranks(
        _timed_training, ([str(recipe), "--run-dir", str(folder / "run")], str(out)), 2, folder / "log"
    ).wait(900)
    assert [result.code for result in results] == [0, 0], results[0].err
    spent = json.loads(out.read_text())
    step, arithmetic = (statistics.median(spent[name][2:]) for name in ("step", "arithmetic"))
    shares = [1 - a / s for a, s in zip(spent["arithmetic"][2:], spent["step"][2:], strict=True)]
    waits = spent["loader"][1:]
    print("12 layers, 256 wide, 16 rows of 512, 2 gloo ranks, ZeRO 1, accumulation 2, a log line every step")
    print(f"step                                       {step * 1e3:8.1f} ms (median of {len(shares)})")
    print(f"forward, backward, optimizer step          {arithmetic * 1e3:8.1f} ms")
    print(
        f"everything else                            {statistics.median(shares):8.2%} of a step (median; target: under 5 %)"
    )
    print(
        f"waiting for the loader after the first step{max(waits) * 1e3:8.2f} ms at most, {sum(waits) / sum(spent['step']):.3%} of all time"
    )


# --- start ------------------------------------------------------------------------------------------------------------


def _started_at() -> float:
    """When this process started, on the clock of time.time()."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def stamped(argv: list[str]) -> int:
    """What the launcher starts on each rank: the trainer, with a time stamp after each part."""
    stamps = [("the launcher itself", float(os.environ["LAUNCHED_AT"]), _started_at())]
    import deepspeed  # noqa: F401

    from command_line import run
    from pipeline import train
    from pipeline.engine import Engine

    stamps.append(("imports", stamps[-1][2], time.time()))

    def after(name: str, function: Any) -> Any:
        def timed(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if not any(stamp[0] == name for stamp in stamps):
                stamps.append((name, stamps[-1][2], time.time()))
            return result

        return timed

    train.start_processes = after("process group", train.start_processes)
    train.assemble = after("rows, encoder, DeepSpeed engine", train.assemble)
    Engine.train_step = after("first step", Engine.train_step)  # type: ignore[method-assign]
    code = run(train.main, argv)
    if os.environ["RANK"] == "0":
        for name, begin, end in stamps:
            print(f"stamp: {name:34}{end - begin:6.1f} s")
        print(f"stamp: {'launch to the end of the first step':34}{stamps[-1][2] - stamps[0][1]:6.1f} s")
    return code


def start(folder: Path) -> None:
    from pipeline.ranks import free_port

    recipe = prepare(folder, width=128, layers=4, row_length=256, tokens=10_000)
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "LAUNCHED_AT": str(time.time()), "PYTHONPATH": str(ROOT)}
    words = [
        *launcher,
        str(ROOT / "benchmarks" / "engine.py"),
        "stamped",
        str(recipe),
        "--run-dir",
        str(folder / "run"),
    ]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    print("deepspeed --num_gpus 2, gloo")
    print("\n".join(line.removeprefix("stamp: ") for line in ended.stdout.splitlines() if line.startswith("stamp: ")))


# --- checkpoint -------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path) -> None:
    from transformers import ModernBertConfig

    from pipeline.engine import Checkpoint, Engine, State, save, start_processes
    from pipeline.model import Encoder
    from pipeline.ranks import Agreement
    from pipeline.ranks import Ranks as Rank
    from pipeline.recipe import load

    recipe = load(prepare(folder, width=128, layers=4, row_length=256, tokens=1000))
    import torch

    device, rank = torch.device("cpu"), Rank()
    start_processes(rank, device)
    encoder = Encoder.random(ModernBertConfig(), 1, "sdpa")
    parameters = sum(p.numel() for p in encoder.parameters())
    engine = Engine(encoder, recipe, rank, device)
    begin = time.perf_counter()
    path = save(folder / "checkpoints", engine, State("clm"), folder / "tokenizer", Agreement(rank))
    saved = time.perf_counter() - begin
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    begin = time.perf_counter()
    read = Checkpoint(path)
    engine.load(read.tensor, 0)
    loaded = time.perf_counter() - begin
    begin = time.perf_counter()
    (folder / "plain").write_bytes(os.urandom(1 << 20) * (size >> 20))
    plain = time.perf_counter() - begin
    print(f"ModernBERT-base, {parameters / 1e6:.1f} M parameters, one rank")
    print(f"checkpoint {size / 1e9:.2f} GB, {size / parameters:.1f} bytes a parameter")
    print(f"save {saved:.1f} s with fsync ({saved / plain:.1f} x writing as many bytes without), load {loaded:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("what", choices=["overhead", "start", "checkpoint", "stamped"])
    arguments, rest = parser.parse_known_args()
    if arguments.what == "stamped":
        return stamped(rest)
    with tempfile.TemporaryDirectory() as folder:
        {"overhead": overhead, "start": start, "checkpoint": checkpoint}[arguments.what](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
