"""Checks a recipe before its job waits in a queue, and estimates its steps, tokens, memory and time.

    python -m pipeline.plan RECIPE [--gpus N] [--gpu NAME] [--run-dir DIR] [key=value ...]

It checks the recipe and its DeepSpeed file, that the batch divides over N ranks, that the rows can be reached and
belong together, that tokenizer and model fit them, the disk space for checkpoints, the cache's limit, and that the run
folder belongs to this recipe and is not in use. Exit codes as everywhere: 0 all is well; 1 or 2 with the error line
that would have ended the job.
"""

import argparse
import fcntl
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from command_line import Failure, Parser, UsageError, run
from data_prep.rows import TOKENIZER, Rows
from pipeline.data import OBJECTIVES
from pipeline.engine import accumulation, read_deepspeed_file
from pipeline.model import GPU_PEAK, Config, Encoder, attended_pairs, family_of, local_folder, read_config
from pipeline.ranks import Ranks
from pipeline.recipe import Recipe, load
from pipeline.run import (
    RunFolder,
    check_fit,
    check_tokenizer,
    compatible,
    last_checkpoint,
    look_ahead,
    open_streams,
    random_config,
)
from pipeline.status import duration

UTILIZATION = 0.25  # share of the GPU's peak that training is assumed to reach; metrics.jsonl has the real one
# Bytes, for a name that does not say them itself, as "A100 40GB" does.
GPU_MEMORY = {
    "H200": 141e9,
    "GH200": 96e9,
    "H100 PCIe": 80e9,
    "H100 NVL": 94e9,
    "H100": 80e9,
    "B200": 180e9,
    "A100": 80e9,
    "L40S": 48e9,
    "L40": 48e9,
    "L4": 24e9,
    "RTX 4090": 24e9,
    "A40": 48e9,
    "A30": 24e9,
    "A10": 24e9,
    "A10G": 24e9,
    "V100": 32e9,
}
CHECKPOINT = 12  # bytes per parameter: weights and both moments in float32
EXPORT = 4
OVERHEAD = 1.5e9  # bytes of a GPU that CUDA, NCCL and the allocator take


@dataclass(frozen=True)
class Plan:
    """All figures of one recipe on `ranks` ranks; bytes and seconds are estimates."""

    ranks: int
    parameters: int
    steps: list[int]  # of each phase
    tokens_per_step: float
    accumulation: int
    memory: dict[str, float]  # bytes per rank, by what they hold
    checkpoint: int  # bytes
    disk: int  # the most bytes that the run folder may hold at any time
    flops_per_token: list[float]  # of each phase, forward and backward


@dataclass(frozen=True)
class Gpu:
    name: str
    peak: float  # FLOP/s
    memory: float  # bytes


def parameters_of(config: Config, multiple: int | None) -> int:
    with torch.device("meta"):
        encoder = Encoder(config, "sdpa", multiple)
    return sum(parameter.numel() for parameter in encoder.parameters())


def memory(
    recipe: Recipe, config: Config, parameters: int, ranks: int, stage: int, gpu: bool, row_length: int
) -> dict[str, float]:
    """Returns the bytes per rank: model state exactly for its ZeRO stage, activations for the backward within a third."""
    half = recipe.precision == "bf16" or (recipe.precision == "auto" and gpu)
    share = ranks if stage else 1  # ranks that share what is partitioned
    weights = parameters * (2 if half else 4) / (share if stage == 3 else 1)
    gradients = parameters * 4 / (share if stage >= 2 else 1)
    optimizer = (
        parameters * ((12 if half else 8) if stage else 8) / share
    )  # float32 masters, where there are any, and both moments
    if "offload" in recipe.engine.deepspeed:
        optimizer = 0.0
    tokens = recipe.batch.rows_per_device * row_length
    size, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    element = 2 if half or recipe.precision == "bf16_autocast" else 4
    per_layer = (
        10 * size + 4 * inner
    )  # norms, qkv, rotated q and k, attention, output; both halves of the MLP and their product
    kept = layers * size + per_layer if recipe.engine.activation_checkpointing else layers * per_layer
    activations = tokens * kept * element
    loss = (1 << 24) * 4 * 2 + config.vocab_size * size * 4 + 2 * tokens * size * element
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations,
        "loss": loss,
    }


def flops_per_token(config: Config, document: float, causal: bool, labelled: float) -> float:
    """Returns forward and backward FLOPs per token; `document`: mean length, `labelled`: share (see `flops.step_flops`)."""
    family, size, layers = family_of(config), config.hidden_size, config.num_hidden_layers
    one = np.array([max(1, round(document))])
    pairs = sum(attended_pairs(one, causal, family.half_window(config, layer)) for layer in range(layers)) / int(one[0])
    head = 2 * labelled * (size * size + size * config.vocab_size)
    return 3 * (2 * layers * family.layer_weights(config) + 4 * size * pairs + head)


def make_plan(recipe: Recipe, ranks: int, gpu: bool, cache: Path) -> tuple[Plan, list[Rows], str | None]:
    """Check the recipe. Returns its plan, its rows, and the commit of a model from the hub."""
    micro = accumulation(recipe, Ranks(0, ranks, 0, ranks))
    stage: int = read_deepspeed_file(recipe)["zero_optimization"]["stage"]
    streams = open_streams(recipe, cache)
    validation = recipe.data.validation
    everything = [rows for stream in streams for rows in stream.sources]
    if validation:
        everything.append(Rows(validation, cache))
    compatible(everything)
    look_ahead(recipe, streams, everything[-1] if validation else None, ranks)
    config, commit = _model(recipe, everything)
    check_fit(recipe, everything, config)
    parameters = parameters_of(config, recipe.model.vocab_multiple)
    counts = [rows.manifest.counts for rows in streams[0].sources]
    filled = sum(c.tokens for c in counts) / sum(c.rows for c in counts)
    document = sum(c.tokens for c in counts) / sum(c.pieces for c in counts)
    per_step = filled * recipe.batch.rows
    row_length = max(rows.manifest.row_length for rows in everything)
    kept = (
        recipe.checkpoints.keep + 1 + len(recipe.checkpoints.keep_at_tokens) + len(recipe.checkpoints.export_at_tokens)
    )
    exports = len(recipe.phases) * (1 + len(recipe.checkpoints.export_at_tokens))
    plan = Plan(
        ranks=ranks,
        parameters=parameters,
        steps=[-(-phase.tokens // round(per_step)) for phase in recipe.phases],
        tokens_per_step=per_step,
        accumulation=micro,
        memory=memory(recipe, config, parameters, ranks, stage, gpu, row_length),
        checkpoint=CHECKPOINT * parameters,
        disk=parameters * (CHECKPOINT * (kept + len(recipe.phases)) + EXPORT * exports),
        flops_per_token=[
            flops_per_token(config, document, OBJECTIVES[phase.objective].causal, phase.mask_rate or 1.0)
            for phase in recipe.phases
        ],
    )
    return plan, everything, commit


def _model(recipe: Recipe, everything: list[Rows]) -> tuple[Config, str | None]:
    """Returns the model's config and hub commit without loading weights; Failure where its tokenizer is not the rows'."""
    tokenizer = everything[0].manifest.tokenizer
    if recipe.start is not None:
        checkpoint = last_checkpoint(Path(recipe.start.checkpoint))
        folder = checkpoint.folder / TOKENIZER
        check_tokenizer(tokenizer, folder, "start.checkpoint", str(folder))
        return checkpoint.config, None
    name = recipe.model.init
    if name is None:
        return random_config(recipe, tokenizer), None
    folder = local_folder(name, recipe.model.revision)
    config = read_config(folder)
    if (folder / "tokenizer.json").is_file():
        check_tokenizer(tokenizer, folder, name, name)
    commit = folder.name if folder.parent.name == "snapshots" and not Path(name).is_dir() else None
    return config, commit


def check_folder(folder: Path, recipe: Recipe, disk: int) -> None:
    """Check that the run folder is this recipe's or new, not in use, and on a disk with enough room."""
    RunFolder(folder).check(recipe)
    lock = folder / ".lock"
    if lock.exists():
        with open(lock) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Failure(
                    f"{folder} is in use by another run: wait for it, or stop it with `touch {folder}/STOP`"
                ) from None
            except OSError:  # a file system without locks
                pass
    above = next(p for p in (folder.resolve(), *folder.resolve().parents) if p.exists())
    if not os.access(above, os.W_OK):
        raise Failure(f"{folder} cannot be written: {above} is not yours")
    free = shutil.disk_usage(above).free
    held = sum(f.stat().st_size for f in folder.rglob("*.safetensors")) if folder.is_dir() else 0
    if free + held < disk:
        raise Failure(
            f"{folder} needs up to {_size(disk)} for checkpoints and exports, and {_size(free)} are free there: "
            "free some, lower checkpoints.keep, or choose another --run-dir"
        )


def report(recipe: Recipe, plan: Plan, everything: list[Rows], gpu: Gpu | None) -> list[str]:
    trained = {r.manifest.rows_digest: len(r) for r in everything[: -1 if recipe.data.validation else None]}
    rows = sum(trained.values())
    lines = [
        f"recipe {recipe.name}: {plan.parameters:,} parameters",
        f"rows: {rows:,} of up to {max(r.manifest.row_length for r in everything):,} tokens, reached and fitting",
        f"step: {recipe.batch.rows} rows, about {plan.tokens_per_step:,.0f} tokens; {plan.ranks} ranks x "
        f"{recipe.batch.rows_per_device} rows x {plan.accumulation} accumulated",
    ]
    total = 0.0
    for phase, steps, flops in zip(recipe.phases, plan.steps, plan.flops_per_token, strict=True):
        line = f"phase {phase.name} ({phase.objective}): {phase.tokens:,} tokens, about {steps:,} steps"
        if gpu:
            seconds = flops * phase.tokens / (gpu.peak * UTILIZATION * plan.ranks)
            total += seconds
            line += f", about {duration(seconds)}"
        lines.append(line)
    epochs = sum(phase.tokens for phase in recipe.phases) / plan.tokens_per_step * recipe.batch.rows / rows
    lines.append(f"passes over the rows: {epochs:.2f}")
    if gpu:
        lines.append(
            f"time: about {duration(total)} on {plan.ranks} {gpu.name} at {UTILIZATION:.0%} of their peak, without start-up and saves"
        )
    needed = sum(plan.memory.values()) + (OVERHEAD if gpu else 0)
    detail = ", ".join(f"{what} {_size(n)}" for what, n in plan.memory.items())
    lines.append(f"memory of a rank: about {_size(needed)} ({detail})")
    if gpu and needed > 0.95 * gpu.memory:
        lines.append(
            f"warning: that may not fit a {gpu.name} of {_size(gpu.memory)}: lower batch.rows_per_device, which changes no number, "
            "or set engine.activation_checkpointing: true"
        )
    lines.append(f"disk: a checkpoint {_size(plan.checkpoint)}, the run folder up to {_size(plan.disk)}")
    return lines


def _size(count: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def main(argv: list[str]) -> int:
    parser = Parser(prog="python -m pipeline.plan", description="Steps, tokens, memory and time of a recipe, checked.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="ranks: one a GPU (or CPU task); default 1")
    parser.add_argument("--gpu", metavar="NAME", help=f"for the estimate of time and memory: {', '.join(GPU_PEAK)}")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/NAME of the recipe")
    parser.add_argument("--for-submit", action="store_true", help=argparse.SUPPRESS)  # for launch/submit, on stdout
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of the recipe, as in training")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.gpus < 1:
        raise UsageError("--gpus must be 1 or more")
    gpu = _gpu(arguments.gpu)
    recipe = load(arguments.recipe, arguments.overrides)
    folder = arguments.run_dir or Path("runs") / recipe.name
    known = RunFolder(folder).recipe() if folder.is_dir() else None
    pinned = known.model.revision if known and recipe.model.revision is None else None
    if known and pinned and known.model.init == recipe.model.init:  # launch/submit fixed it at the first start
        recipe = load(arguments.recipe, [*arguments.overrides, f"model.revision={pinned}"])
    with tempfile.TemporaryDirectory(prefix="clm-detour-plan-") as cache:
        plan, everything, commit = make_plan(recipe, arguments.gpus, gpu is not None, Path(cache))
        check_folder(folder, recipe, plan.disk)
        out = sys.stderr if arguments.for_submit else sys.stdout
        print("\n".join(report(recipe, plan, everything, gpu)), file=out)
    if arguments.for_submit:
        if commit and known is None and recipe.model.revision is None:
            print(f"override model.revision={commit}")
        elif pinned:
            print(f"override model.revision={pinned}")
        for phase in recipe.phases:
            print(f"phase {phase.name} {phase.objective} {'done' if RunFolder(folder).done(phase.name) else 'missing'}")
    return 0


def _gpu(name: str | None) -> Gpu | None:
    """Returns the GPU in our table that `name` contains: a100, "NVIDIA H100 80GB HBM3", "A100 40GB"."""
    if name is None:
        return None
    known = next((k for k in GPU_PEAK if re.search(rf"\b{k}\b", name.replace("-", " "), re.IGNORECASE)), None)
    if known is None:
        raise UsageError(f"--gpu {name}: known are {', '.join(GPU_PEAK)}")
    said = re.search(r"\b(\d+)\s*GB\b", name, re.IGNORECASE)
    return Gpu(known, GPU_PEAK[known], float(said[1]) * 1e9 if said else GPU_MEMORY[known])


if __name__ == "__main__":
    sys.exit(run(main))
