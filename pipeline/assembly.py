"""The parts of a run, opened, checked against each other and put together; all that can fail before the first step."""

import hashlib
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import Failure
from data_prep.rows import Manifest, Rows, is_url, tokenizer_digest
from pipeline.attention import choose
from pipeline.checkpoint import Checkpoint, State
from pipeline.data import Loader
from pipeline.distributed import Agreement
from pipeline.encoder import WEIGHTS, Encoder, from_config_fields, with_backend
from pipeline.engine import Engine
from pipeline.objectives import Vocabulary
from pipeline.recipe import Recipe
from pipeline.run import RunFolder, software
from pipeline.validation import Validation


@dataclass(frozen=True)
class Parts:
    folder: RunFolder
    engine: Engine
    loader: Loader
    validation: Validation | None
    tokenizer: Path  # the rows' own
    facts: dict[str, Any]  # for the lineage


def assemble(recipe: Recipe, folder: RunFolder, agreement: Agreement, device: torch.device) -> Parts:
    """Everything that training needs, or a Failure on all ranks; a collective call."""
    leads = agreement.ranks.leads

    def claim() -> None:
        if leads:
            folder.claim()
            folder.accept(recipe)

    agreement.together(claim)
    cache = _cache(recipe)
    rows = agreement.together(lambda: Rows(recipe.data.rows, cache))
    validation = recipe.data.validation
    held_out = agreement.together(lambda: Rows(validation, cache)) if validation else None
    vocabulary = agreement.together(lambda: _compatible(rows, held_out))
    encoder, init = agreement.together(lambda: _encoder(recipe, rows.manifest, device))

    def record() -> None:
        if leads:
            attention = choose(device) if recipe.model.attention == "auto" else recipe.model.attention
            folder.record_start(recipe, agreement.ranks, device, attention, rows.manifest.rows_digest)
            folder.clear_stop()
            if encoder.initialised:
                print(f"initialised, for the model has none: {', '.join(encoder.initialised)}", flush=True)

    agreement.together(record)
    batch = recipe.batch
    return Parts(
        folder=folder,
        engine=Engine(encoder, recipe, agreement.ranks, device),
        loader=Loader(rows, recipe.data_seed, vocabulary, agreement.ranks, batch.rows, batch.rows_per_device),
        validation=Validation(held_out, vocabulary, recipe, agreement) if held_out is not None else None,
        tokenizer=agreement.together(rows.tokenizer_folder),
        facts=_facts(recipe, rows.manifest, init),
    )


def _cache(recipe: Recipe) -> Path | None:
    """Where rows of a URL are kept: the recipe's folder, or one of this job's own."""
    if recipe.data.cache is not None:
        return Path(recipe.data.cache)
    if not is_url(recipe.data.rows) and not is_url(recipe.data.validation or ""):
        return None
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("MASTER_PORT", "")
    return Path(tempfile.gettempdir()) / f"clm-detour-{os.getuid()}-{job}"


def remove_cache(recipe: Recipe, agreement: Agreement) -> None:
    """At the job's end: a cache of the job's own holds text that may not stay."""
    cache = _cache(recipe)
    if cache is not None and recipe.data.cache is None:
        agreement.barrier()
        if agreement.ranks.local_rank == 0:
            shutil.rmtree(cache, ignore_errors=True)


def _compatible(rows: Rows, held_out: Rows | None) -> Vocabulary:
    if not len(rows) or (held_out is not None and not len(held_out)):
        raise Failure(f"{rows.location if not len(rows) else held_out.location} holds no rows")  # type: ignore[union-attr]
    if held_out is not None:
        ours, theirs = rows.manifest.tokenizer.digest, held_out.manifest.tokenizer.digest
        if ours != theirs:
            raise Failure(
                f"data.rows and data.validation were built with different tokenizers ({ours[:12]}, {theirs[:12]})"
            )
    return Vocabulary.from_manifest(rows.manifest.tokenizer)


def _encoder(recipe: Recipe, manifest: Manifest, device: torch.device) -> tuple[Encoder, dict[str, Any]]:
    """The encoder in float32 on its device, and where its weights come from, for the lineage."""
    tokenizer = manifest.tokenizer
    if recipe.model.init is None:
        fields = dict(recipe.model.config or {})
        fields.setdefault("vocab_size", tokenizer.vocabulary)
        roles = tokenizer.roles
        of_config = {"pad": "pad", "cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
        for field, role in of_config.items():
            fields.setdefault(f"{field}_token_id", roles[role])
        config = from_config_fields(fields)
        encoder = Encoder.random(config, recipe.seed, recipe.model.attention)
        init: dict[str, Any] = {"name": None, "random_seed": recipe.seed}
    else:
        encoder = Encoder.from_pretrained(recipe.model.init, recipe.model.attention, recipe.model.revision)
        folder = Path(recipe.model.init)
        if (folder / "tokenizer.json").is_file():
            ours = tokenizer_digest(folder)
            if ours != tokenizer.digest:
                raise Failure(
                    f"the rows' tokenizer ({tokenizer.digest[:12]}) is not the model's ({ours[:12]}): "
                    f"build the rows again with --tokenizer {recipe.model.init}"
                )
        name = None if folder.is_dir() else recipe.model.init
        init = {"name": name, "revision": recipe.model.revision, "weights_digest": _digest(folder / WEIGHTS)}
    if encoder.config.vocab_size < tokenizer.vocabulary:
        raise Failure(
            f"the rows' vocabulary of {tokenizer.vocabulary} ids does not fit the model's {encoder.config.vocab_size}: "
            "build the rows with the model's own tokenizer"
        )
    longest = encoder.config.max_position_embeddings
    if manifest.row_length > longest:
        raise Failure(
            f"rows of {manifest.row_length} tokens are longer than the model's {longest} (max_position_embeddings)"
        )
    encoder.activation_checkpointing = recipe.engine.activation_checkpointing
    return with_backend(encoder, device), init


def _digest(path: Path) -> str | None:
    """sha256 of a weights file, or None where the weights are elsewhere (sharded, or a hub name)."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts(recipe: Recipe, manifest: Manifest, init: dict[str, Any]) -> dict[str, Any]:
    """What the export may tell: counts, digests, hyper-parameters; no path, file name, bucket, host or user."""
    return {
        "name": recipe.name,
        "software": software(),
        "init": init,
        "rows": {
            "digest": manifest.rows_digest,
            "tokenizer_digest": manifest.tokenizer.digest,
            "documents": manifest.counts.documents,
            "tokens": manifest.counts.tokens,
            "rows": manifest.counts.rows,
            "row_length": manifest.row_length,
            "dropped": manifest.counts.dropped,
        },
        "batch_rows": recipe.batch.rows,
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "precision": recipe.precision,
        "seed": recipe.seed,
        "data_seed": recipe.data_seed,
        "card": recipe.card.model_dump(mode="json"),
    }


def enter_phase(recipe: Recipe, index: int, parts: Parts) -> State:
    """Bring the engine to where phase `index` stands: its own latest checkpoint, or the end of the phase before it.

    Always from disk, so that staged, continuous and resumed runs agree by construction.
    """
    phase, folder = recipe.phases[index], parts.folder
    digest = parts.facts["rows"]["digest"]
    own = folder.latest(phase.name)
    if own is not None:
        if own.state.rows_digest != digest:
            raise Failure("data.rows are not the rows that this run began with (their digests differ)")
        _load(parts.engine, own, keep=True)
        return replace(own.state, history=own.state.history[:-1])
    fresh = State(phase.name, rows_digest=digest, facts=parts.facts)
    if index == 0:
        return fresh
    before = recipe.phases[index - 1].name
    last = folder.latest(before) if folder.done(before) else None
    if last is None:
        raise Failure(f"phase {phase.name} starts from phase {before}, which is not done; run --phase {before} first")
    if phase.data == "continue" and last.state.rows_digest != digest:
        raise Failure("data.rows are not the rows that this run began with (their digests differ)")
    keep = phase.optimizer_state == "keep"
    _load(parts.engine, last, keep)
    return replace(
        fresh,
        position=last.state.position if phase.data == "continue" else 0,
        adam_step=last.state.adam_step if keep else 0,
        history=last.state.history,
    )


def _load(engine: Engine, checkpoint: Checkpoint, keep: bool) -> None:
    if set(checkpoint.names()) != set(engine.parameters):
        raise Failure(f"checkpoint {checkpoint.folder} is of another model: its weights have other names")
    engine.load(checkpoint.tensor, checkpoint.state.adam_step if keep else None)


def described(recipe: Recipe, index: int, state: State, validation: dict[str, Any]) -> dict[str, Any]:
    """A phase's entry in the lineage."""
    phase = recipe.phases[index]
    return {
        "name": phase.name,
        "objective": phase.objective,
        "mask_rate": phase.mask_rate,
        "tokens": state.tokens,
        "budget": phase.tokens,
        "steps": state.step,
        "learning_rate": phase.learning_rate.model_dump(mode="json"),
        "optimizer_state": phase.optimizer_state,
        "validation": validation or None,
    }
