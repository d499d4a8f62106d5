"""A checkpoint as an ordinary Hugging Face folder: weights, config, tokenizer, model card, lineage.

    python -m pipeline.export CHECKPOINT_OR_RUN OUT

Before the folder counts as good, transformers loads it back: no missing, unexpected or mismatched key, and the same
logits. The card and the lineage hold counts, digests and hyper-parameters; no paths, file names, hosts or users.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMaskedLM

from command_line import Failure, Parser, run
from data_prep.rows import TOKENIZER
from pipeline.engine import Checkpoint
from pipeline.model import Encoder, PackedBatch, family_of, write_model

TOLERANCE = 1e-4  # largest difference of a float32 logit from transformers'


def export(checkpoint: Checkpoint, out: Path) -> Path:
    """Write and check a folder, then rename it to `out`; Failure where `out` already holds something else."""
    if out.exists() and any(out.iterdir()) and not (out / "lineage.json").exists():
        raise Failure(f"{out} is not empty and holds no export; choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    lineage = checkpoint.state.lineage
    weights = {name: checkpoint.tensor("weights", name) for name in checkpoint.names()}
    try:
        write_model(checkpoint.config, weights, aside)
        shutil.copytree(checkpoint.folder / TOKENIZER, aside, dirs_exist_ok=True)
        (aside / "lineage.json").write_text(json.dumps(lineage, indent=2) + "\n")
        (aside / "README.md").write_text(model_card(lineage, family_of(checkpoint.config).title), encoding="utf-8")
        check(aside)
        if out.exists():
            shutil.rmtree(out)
        aside.rename(out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


@torch.no_grad()
def check(folder: Path) -> None:
    """Failure unless transformers loads `folder` strictly and agrees with our encoder on the logits of two documents."""
    theirs, info = AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    wrong = {what: names for what, names in info.items() if names}
    if wrong:
        raise Failure(f"transformers does not load the export: {wrong}")
    theirs.eval()
    ours = Encoder.from_pretrained(folder, attention="sdpa").eval()
    if (
        ours.config.tie_word_embeddings
        and theirs.get_output_embeddings().weight is not theirs.get_input_embeddings().weight
    ):
        raise Failure(f"transformers does not tie {ours.family.output} to {ours.family.embeddings} in the export")
    ids = torch.arange(200, dtype=torch.int64) * 7919 % ours.config.vocab_size  # spread over the vocabulary
    documents = [ids[:150].tolist(), ids[150:].tolist()]
    batch = PackedBatch.from_documents(documents)
    expected = torch.cat([theirs(t := torch.tensor([d]), torch.ones_like(t)).logits[0] for d in documents])
    difference = float((ours.logits(ours(batch, causal=False)) - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise Failure(f"the export's logits differ from transformers' by {difference:.2g}")


def model_card(lineage: dict[str, Any], family: str) -> str:
    """Returns README.md for the hub: what was done, in numbers."""
    base = lineage["init"].get("name")
    card = lineage["card"]
    front = {"license": card.get("license"), "language": card.get("language"), "base_model": base}
    lines = ["---", "library_name: transformers", "pipeline_tag: fill-mask", "tags:", "- clm-detour"]
    for key, value in front.items():
        if isinstance(value, list):
            lines += [f"{key}:", *(f"- {item}" for item in value)]
        elif value:
            lines.append(f"{key}: {value}")
    documents, tokens = (sum(rows[key] for rows in lineage["rows"]) for key in ("documents", "tokens"))
    longest = max(rows["row_length"] for rows in lineage["rows"])
    lines += [
        "---",
        "",
        f"# {lineage['name']}",
        "",
        f"A {family} encoder{f' adapted from {base}' if base else ''}, trained with {lineage['software']} "
        "(the CLM detour, arXiv 2605.12438: continue pretraining causally, then return to masked language modelling).",
        "",
        "| phase | objective | mask rate | tokens | steps | peak rate | shape | MLM loss, start to end | CLM loss, start to end |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in lineage["phases"]:
        rate = phase["learning_rate"]
        lines.append(
            f"| {phase['name']} | {phase['objective']} | {phase['mask_rate'] or '-'} | {phase['tokens']:,} | {phase['steps']:,} "
            f"| {rate['peak']:.3g} | {rate['shape']} | {_change(phase, 'mlm_loss')} | {_change(phase, 'clm_loss')} |"
        )
    lines += [
        "",
        f"Training rows: {documents:,} documents, {tokens:,} tokens in rows of up to {longest:,}, documents isolated "
        f"from each other. A step held {lineage['batch_rows']:,} rows. Losses are validation losses in nats a label. "
        "Hyper-parameters and digests of the data are in `lineage.json`.",
        "",
        "```python",
        "from transformers import pipeline",
        'fill = pipeline("fill-mask", model="path/to/this/folder")',
        "```",
        "",
    ]
    return "\n".join(lines)


def _change(phase: dict[str, Any], key: str) -> str:
    validation = phase["validation"]
    return f"{validation['start'][key]:.4f} to {validation['end'][key]:.4f}" if validation else "-"


def main(argv: list[str]) -> int:
    from pipeline.run import last_checkpoint

    parser = Parser(
        prog="python -m pipeline.export",
        description="Write a checkpoint as a Hugging Face folder.",
        epilog="--traceback shows the frames of an error. A phase that finishes exports by itself, to RUN/PHASE/export.",
    )
    parser.add_argument(
        "checkpoint", type=Path, help="a checkpoint folder, a phase's folder, or a run (its newest checkpoint)"
    )
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args(argv)
    print(export(last_checkpoint(arguments.checkpoint), arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(run(main))
