"""Opens the parts of a run, checks them against each other and assembles them: all that can fail before the first step."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data_prep.rows import TOKENIZER, Rows
from pipeline.data import Loader
from pipeline.engine import Checkpoint, Engine, resolve_precision
from pipeline.model import WEIGHTS, Encoder, describe, local_folder, with_backend
from pipeline.ranks import Agreement
from pipeline.recipe import Recipe
from pipeline.run.checks import check_fit, check_tokenizer, compatible, open_streams, random_config
from pipeline.run.folder import RunFolder, last_checkpoint
from pipeline.run.lineage import run_facts
from pipeline.run.node_cache import JobCache, look_ahead
from pipeline.run.validation import Validation


@dataclass(frozen=True)
class Parts:
    folder: RunFolder
    engine: Engine
    loaders: list[Loader]  # of each phase
    validation: Validation | None
    start: Checkpoint | None  # of another run, to branch from
    tokenizer: Path  # folder of the rows' tokenizer
    facts: dict[str, Any]  # for the lineage


def assemble(
    recipe: Recipe, folder: RunFolder, agreement: Agreement, device: torch.device, job_cache: JobCache
) -> Parts:
    """Returns everything that training needs, or raises a Failure on all ranks; a collective call."""
    leads = agreement.ranks.leads

    def claim() -> None:
        if leads:
            folder.claim()
            folder.accept(recipe)

    agreement.together(claim)
    cache = agreement.together(job_cache.open)
    limit = recipe.data.cache_limit
    start = agreement.together(lambda: last_checkpoint(Path(recipe.start.checkpoint)) if recipe.start else None)
    begun = folder.begun(recipe)
    streams = agreement.together(lambda: open_streams(recipe, cache, begun))
    validation = recipe.data.validation
    held_out = agreement.together(lambda: Rows(validation, cache, limit, begun)) if validation else None
    everything = [*(rows for stream in streams for rows in stream.sources), *([held_out] if held_out else [])]
    vocabulary = agreement.together(lambda: compatible(everything))
    ahead = agreement.together(lambda: look_ahead(recipe, streams, held_out, agreement.ranks.world_size))
    first = streams[0].sources[0]
    encoder, init = agreement.together(lambda: _encoder(recipe, everything, start, device))
    facts = run_facts(recipe, streams, init)

    def record() -> None:
        if leads:
            attention = describe(recipe.model.attention, device)
            print(f"attention: {attention}", flush=True)
            folder.record_start(recipe, agreement.ranks, device, attention, [stream.digest for stream in streams])
            folder.clear_stop()
            if encoder.initialised:
                print(f"initialised, because the model lacks them: {', '.join(encoder.initialised)}", flush=True)

    agreement.together(record)
    batch, skip = recipe.batch, recipe.faults.skip_rows
    return Parts(
        folder=folder,
        engine=Engine(encoder, recipe, agreement.ranks, device),
        loaders=[
            Loader(s, vocabulary, agreement.ranks, batch.rows, batch.rows_per_device, skip, ahead) for s in streams
        ],
        validation=Validation(held_out, vocabulary, recipe, agreement) if held_out is not None else None,
        start=start,
        tokenizer=agreement.together(first.tokenizer_folder),
        facts=facts,
    )


def _encoder(
    recipe: Recipe, everything: list[Rows], start: Checkpoint | None, device: torch.device
) -> tuple[Encoder, dict[str, Any]]:
    """Returns the encoder in float32 on its device, and where its weights come from, for the lineage."""
    tokenizer, multiple = everything[0].manifest.tokenizer, recipe.model.vocab_multiple
    if start is not None:
        # `enter_phase` loads the weights later.
        encoder = Encoder(start.config, recipe.model.attention, multiple)
        check_tokenizer(tokenizer, start.folder / TOKENIZER, "start.checkpoint", str(start.folder / TOKENIZER))
        init: dict[str, Any] = start.state.facts["init"]
    elif recipe.model.init is None:
        config = random_config(recipe, tokenizer)
        encoder = Encoder.random(config, recipe.seed, recipe.model.attention, multiple)
        init = {"name": None, "random_seed": recipe.seed}
    else:
        folder = local_folder(recipe.model.init, recipe.model.revision)
        encoder = Encoder.from_pretrained(folder, recipe.model.attention, vocab_multiple=multiple)
        if (folder / "tokenizer.json").is_file():
            check_tokenizer(tokenizer, folder, recipe.model.init, recipe.model.init)
        name = None if Path(recipe.model.init).is_dir() else recipe.model.init
        init = {"name": name, "revision": recipe.model.revision, "weights_digest": _digest(folder / WEIGHTS)}
    check_fit(recipe, everything, encoder.config)
    encoder.activation_checkpointing = recipe.engine.activation_checkpointing
    if recipe.engine.compile:
        full = recipe.batch.rows_per_device * max(rows.manifest.row_length for rows in everything)
        encoder.compile_blocks(fill_to=full if device.type == "cuda" else None)
    return with_backend(encoder, device, resolve_precision(recipe, device)), init


def _digest(path: Path) -> str | None:
    """Returns the sha256 of a weights file, or None where the weights are elsewhere (sharded, or a hub name)."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
