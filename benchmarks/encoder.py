"""Our encoder beside transformers': whole training steps, attention alone, peak memory; and on a GPU, every back end.

    python -m benchmarks.encoder steps [--size small|base] [--share 1.0] [--rounds 3]
    python -m benchmarks.encoder attention
    python -m benchmarks.encoder memory [--length 8192]
    python -m benchmarks.encoder gpu                           (bf16; needs a CUDA GPU)

`steps` runs one forward, backward and AdamW step on the same real documents, the same masks and the same weights in float32
on 2 threads: 64 of e3c_l3_en and 16 of pmc_ei_open, cut at 1,024 tokens. transformers gets them in padded batches of 8,
sorted by length or not; we get them packed in micro-batches of 8,192 tokens. Tokens are counted without padding. The ways are
timed in turn, round by round, after a step on two documents that warms them up; the best round counts, as does the best
matrix product of the same run ("GEMM peak").
"""

import argparse
import gc
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM

from command_line import Failure
from data_prep.rows import Row
from pipeline.data import LabelledRow, Objective, Vocabulary, label, pack
from pipeline.model import (
    BACKENDS,
    Encoder,
    LossModel,
    PackedBatch,
    attend,
    available,
    device_peak,
    reference,
    step_flops,
)

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
CLS, SEP, MASK, PAD = 50281, 50282, 50284, 50283
VOCABULARY = Vocabulary(50_280, (CLS, SEP, MASK, PAD), MASK)
CUT, ROW = 1024, 8192
SIZES: dict[str, dict[str, int]] = {
    "small": {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4},
    "base": {},  # the defaults of ModernBertConfig
}


clock = time.perf_counter


def config_of(size: str, **more: Any) -> ModernBertConfig:
    return ModernBertConfig(**SIZES[size], reference_compile=False, **more)


def documents(share: float) -> list[list[int]]:
    """Real documents as ids with [CLS] and [SEP], in a fixed random order."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer" / "olmo-tokenizer.json"))
    found = []
    for name, count in (("e3c_l3_en", 64), ("pmc_ei_open", 16)):
        with zstandard.open(DATA / "text" / f"{name}.jsonl.zst", "rt", encoding="utf-8") as lines:
            for _, line in zip(range(max(1, round(count * share))), lines, strict=False):
                ids = tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
                found.append([CLS, *ids[: CUT - 2], SEP])
    return [found[i] for i in np.random.default_rng(0).permutation(len(found))]


def labelled(docs: Sequence[Sequence[int]], objective: Objective) -> list[PackedBatch]:
    """The documents packed in rows of at most ROW tokens, a micro-batch each; a document's masks are its own."""
    rows: list[list[Sequence[int]]] = []
    for doc in docs:
        if not rows or sum(map(len, rows[-1])) + len(doc) > ROW:
            rows.append([])
        rows[-1].append(doc)
    return [pack([of_document(doc, objective) for doc in row], []) for row in rows]


def of_document(doc: Sequence[int], objective: Objective) -> LabelledRow:
    row = Row(np.array(doc, np.uint16), np.array([len(doc)], np.uint32))
    return label(row, objective, VOCABULARY, zlib.crc32(row.tokens.tobytes()))


def padded(docs: Sequence[Sequence[int]], rate: float, by_length: bool, rows: int = 8) -> list[dict[str, Tensor]]:
    """transformers' inputs: the same masks, padded to the longest of each batch."""
    batches = []
    ordered = sorted(docs, key=len) if by_length else docs
    for begin in range(0, len(ordered), rows):
        part = ordered[begin : begin + rows]
        shape = (len(part), max(map(len, part)))
        ids, labels, seen = np.full(shape, PAD), np.full(shape, -100), np.zeros(shape, np.int64)
        for i, doc in enumerate(part):
            row = of_document(doc, Objective("mlm", rate))
            ids[i, : len(doc)] = row.input_ids
            seen[i, : len(doc)] = 1
            labels[i, row.label_positions] = row.labels
        arrays = {"input_ids": ids, "labels": labels, "attention_mask": seen}
        batches.append({name: torch.from_numpy(array.astype(np.int64)) for name, array in arrays.items()})
    return batches


def gemm_peak(size: int = 2048) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / best_of(5, lambda: a @ b)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def step_of_theirs(model: ModernBertForMaskedLM, batches: list[dict[str, Tensor]]) -> Callable[[], None]:
    model.train()
    optimizer = adamw(model)

    def step() -> None:
        for batch in batches:
            (model(**batch).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of_ours(encoder: Encoder, batches: list[PackedBatch], causal: bool) -> Callable[[], None]:
    model = LossModel(encoder).train()
    optimizer = adamw(model)
    labels = sum(len(batch.labels) for batch in batches)

    def step() -> None:
        for batch in batches:
            (model(batch, causal) / labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


OURS = {
    "(c) ours, MLM 30 %": Objective("mlm", 0.30),
    "(c) ours, MLM 15 %": Objective("mlm", 0.15),
    "(c) ours, CLM": Objective("clm"),
}


def ways(folder: str, docs: list[list[int]], only: str) -> Iterator[tuple[str, Callable[[], None], int | None]]:
    """Name, step, and its exact FLOPs (None: transformers', which computes more than it needs), of the model in `folder`."""
    for sparse in (False, True):
        for by_length in (False, True):
            name = f"({'b' if sparse else 'a'}) transformers{', sparse' if sparse else ''}, {'sorted' if by_length else 'unsorted'}"
            if only in name:
                settings = {"attn_implementation": "sdpa", "reference_compile": False, "sparse_prediction": sparse}
                model = ModernBertForMaskedLM.from_pretrained(folder, **settings)
                step_of_theirs(model, padded(docs[:2], 0.30, by_length))()
                yield name, step_of_theirs(model, padded(docs, 0.30, by_length)), None
    for name, objective in OURS.items():
        if only in name:
            encoder = Encoder.from_pretrained(folder, attention="sdpa")
            step_of_ours(encoder, labelled(docs[:2], objective), objective.causal)()
            batches = labelled(docs, objective)
            flops = step_flops(encoder.config, batches, objective.causal)
            yield name, step_of_ours(encoder, batches, objective.causal), flops


def steps(size: str, share: float, rounds: int, only: str) -> None:
    docs = documents(share)
    tokens = sum(map(len, docs))
    print(f"{size}: {len(docs)} documents, {tokens:,} tokens, {torch.get_num_threads()} threads", flush=True)
    best: dict[str, float] = {}
    flops: dict[str, int | None] = {}
    peak = 0.0
    with tempfile.TemporaryDirectory() as folder:
        Encoder.random(config_of(size), seed=0, attention="sdpa").save_pretrained(folder)
        # One model at a time: seven of base size with their moments would not fit beside their activations.
        for _ in range(rounds):
            for name, step, count in ways(folder, docs, only):
                flops[name] = count
                peak = max(peak, gemm_peak())
                best[name] = min(best.get(name, math.inf), best_of(1, step))
                print(f"{name}: {best[name]:.2f} s", file=sys.stderr, flush=True)
                gc.collect()
    print(f"GEMM peak of this run: {peak / 1e9:.0f} GFLOP/s\n")
    a, b = (best.get(f"({x}) transformers{s}, unsorted") for x, s in (("a", ""), ("b", ", sparse")))
    print("| way | seconds | tokens/s | times (a) unsorted | times (b) unsorted | of GEMM peak |")
    print("|---|---|---|---|---|---|")
    for name, seconds in best.items():
        ratios = " | ".join(f"{x / seconds:.2f}" if x else "-" for x in (a, b))
        count = flops[name]
        share_ = f"{count / seconds / peak:.0%}" if count else "-"
        print(f"| {name} | {seconds:.2f} | {tokens / seconds:,.0f} | {ratios} | {share_} |")


def attention_alone() -> None:
    """Forward and backward of one layer's attention, 12 heads of 64, float32: ours, and dense SDPA under a mask."""
    print("| layer | length | ours, us a token | dense SDPA with a mask | times |\n|---|---|---|---|---|")
    for window, causal in ((64, False), (64, True), (None, False), (None, True)):
        for length in (512, 1024, 2048, 4096, 8192):
            qkv = [torch.randn(ROW, 12, 64, requires_grad=True) for _ in range(3)]
            cu = torch.arange(0, ROW + 1, length, dtype=torch.int32)
            one = [x[:length].detach().requires_grad_() for x in qkv]
            alone = torch.tensor([0, length], dtype=torch.int32)

            def ours(qkv=qkv, cu=cu, length=length, window=window, causal=causal) -> None:  # type: ignore[no-untyped-def]
                attend(*qkv, cu, length, causal=causal, half_window=window).sum().backward()

            def dense(one=one, alone=alone, length=length, window=window, causal=causal) -> None:  # type: ignore[no-untyped-def]
                reference(*one, alone, length, causal, window).sum().backward()

            mine, theirs = best_of(3, ours) / ROW, best_of(2, dense) / length
            kind = f"{'global' if window is None else 'local'}, {'causal' if causal else 'both sides'}"
            print(f"| {kind} | {length} | {mine * 1e6:.1f} | {theirs * 1e6:.1f} | {theirs / mine:.1f} |", flush=True)
            del qkv, one


def best_of(rounds: int, call: Callable[[], object]) -> float:
    best = math.inf
    for _ in range(rounds):
        begin = clock()
        call()
        best = min(best, clock() - begin)
    return best


def memory(length: int) -> None:
    """Peak resident memory of a CLM step (every token labelled) on one row, each way in a process of its own."""
    print(
        f"one row of {length} tokens, base size\n\n| way | peak GiB | GiB above weights, gradients and moments |\n|---|---|---|"
    )
    for way in ("theirs", "ours", "ours, activation checkpointing"):
        command = [sys.executable, "-m", "benchmarks.encoder", "memory", "--length", str(length), "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        print(done.stdout.strip() or f"| {way} | did not finish (exit {done.returncode}) | - |", flush=True)


def memory_of(way: str, length: int) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, length)
    if way == "theirs":
        model: torch.nn.Module = ModernBertForMaskedLM(config_of("base", attn_implementation="sdpa"))
        row = torch.from_numpy(ids)[None]
        step = step_of_theirs(model, [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}])
    else:
        encoder = Encoder.random(config_of("base"), seed=0, attention="sdpa")
        encoder.activation_checkpointing = "checkpointing" in way
        model, step = encoder, step_of_ours(encoder, labelled([ids.tolist()], Objective("clm")), causal=True)
    step()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    fixed = 16 * sum(p.numel() for p in model.parameters())
    print(f"| {way} | {peak / 2**30:.1f} | {(peak - fixed) / 2**30:.1f} |")


def gpu() -> None:
    """bf16 training steps at base size on 16 rows' worth of tokens, every back end that is installed, compiled and not."""
    device = torch.device("cuda")
    peak = device_peak(device)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| back end | compiled | objective | length | tokens/s | MFU |\n|---|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for backend in BACKENDS:
        try:
            available(backend, device)
        except Failure as reason:
            print(f"| {backend} | {reason} | | | | |")
            continue
        for compiled, objective in itertools.product((False, True), (Objective("clm"), Objective("mlm", 0.30))):
            for length in (512, 1024, 2048, 4096, 8192):
                docs = [rng.integers(0, 50_000, length).tolist() for _ in range(16 * ROW // length)]
                encoder = Encoder.random(config_of("base"), 0, attention=backend).to(device, torch.bfloat16)
                if compiled:
                    encoder.compile_blocks(fill_to=ROW)
                batches = labelled(docs, objective)
                step = step_of_ours(encoder, [batch.to(device) for batch in batches], objective.causal)
                for _ in range(3):
                    step()
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(5):
                    step()
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - begin) / 5
                tokens = sum(batch.tokens for batch in batches)
                mfu = step_flops(encoder.config, batches, objective.causal) / seconds / peak if peak else math.nan
                print(
                    f"| {backend} | {compiled} | {objective.kind} | {length} | {tokens / seconds:,.0f} | {mfu:.1%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steps", "attention", "memory", "gpu"])
    parser.add_argument("--size", choices=list(SIZES), default="small")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the documents; 0.125 for a quick look at base size"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="with --threads 1, on a machine that others use too")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.cpu_time:
        global clock
        clock = time.process_time
    torch.manual_seed(0)
    if arguments.what == "steps":
        steps(arguments.size, arguments.share, arguments.rounds, arguments.only)
    elif arguments.what == "attention":
        attention_alone()
    elif arguments.what == "gpu":
        gpu()
    elif arguments.way:
        memory_of(arguments.way, arguments.length)
    else:
        memory(arguments.length)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
