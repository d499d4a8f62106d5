"""The parts of a run, opened, checked against each other and put together; all that can fail before the first step."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import ModernBertConfig

from command_line import Failure, UsageError
from data_prep.rows.format import TOKENIZER, Rows, TokenizerInfo, software, tokenizer_digest
from pipeline.model.attention.attend import describe
from pipeline.data.node_cache import JobCache, look_ahead
from pipeline.engine.checkpoint import Checkpoint, State
from pipeline.data.loader import Loader, MixedRows
from pipeline.ranks.agreement import Agreement
from pipeline.model.encoder import Encoder, with_backend
from pipeline.engine.deepspeed_engine import Engine, resolve_precision
from pipeline.model.hugging_face import REFUSED, WEIGHTS, from_config_fields, has_dropout, local_folder, rates
from pipeline.data.objectives import Vocabulary
from pipeline.recipe.schema import OwnData, Recipe, Sources, frozen_groups, locations
from pipeline.run.folder import RunFolder, last_checkpoint
from pipeline.run.validation import Validation


@dataclass(frozen=True)
class Parts:
    folder: RunFolder
    engine: Engine
    loaders: list[Loader]  # of each phase
    validation: Validation | None
    start: Checkpoint | None  # of another run, to branch from
    tokenizer: Path  # the rows' own
    facts: dict[str, Any]  # for the lineage


def assemble(
    recipe: Recipe, folder: RunFolder, agreement: Agreement, device: torch.device, job_cache: JobCache
) -> Parts:
    """Everything that training needs, or a Failure on all ranks; a collective call."""
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
    facts = _facts(recipe, streams, init)

    def record() -> None:
        if leads:
            attention = describe(recipe.model.attention, device)
            print(f"attention: {attention}", flush=True)
            folder.record_start(recipe, agreement.ranks, device, attention, [stream.digest for stream in streams])
            folder.clear_stop()
            if encoder.initialised:
                print(f"initialised, for the model has none: {', '.join(encoder.initialised)}", flush=True)

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


def open_streams(recipe: Recipe, cache: Path | None, begun: bool = False) -> list[MixedRows]:
    """The row stream of each phase; phases on the same rows share one. `begun`: the run has a checkpoint."""
    opened: dict[str, MixedRows] = {}

    def stream(given: Sources) -> MixedRows:
        key = str(given)
        if key not in opened:
            proportions = [1.0] if isinstance(given, str) else [source.proportion for source in given]
            opened[key] = MixedRows(
                [Rows(place, cache, limit, begun) for place in locations(given)], proportions, recipe.data_seed
            )
        return opened[key]

    limit = recipe.data.cache_limit
    main = stream(recipe.data.rows)
    streams = [stream(phase.data.rows) if isinstance(phase.data, OwnData) else main for phase in recipe.phases]
    for row in recipe.faults.skip_rows:
        if row >= max(len(s) for s in streams):
            raise UsageError(f"faults.skip_rows: there is no row {row}")
    return streams


def compatible(everything: list[Rows]) -> Vocabulary:
    """All rows of a run hold ids of one tokenizer."""
    first = everything[0].manifest.tokenizer
    for rows in everything:
        if not len(rows):
            raise Failure(f"{rows.location} holds no rows")
        digest = rows.manifest.tokenizer.digest
        if digest != first.digest:
            raise Failure(
                f"{everything[0].location} and {rows.location} were built with different tokenizers "
                f"({first.digest[:12]}, {digest[:12]}): build one of them again"
            )
    return Vocabulary.from_manifest(first)


def _encoder(
    recipe: Recipe, everything: list[Rows], start: Checkpoint | None, device: torch.device
) -> tuple[Encoder, dict[str, Any]]:
    """The encoder in float32 on its device, and where its weights come from, for the lineage."""
    tokenizer, multiple = everything[0].manifest.tokenizer, recipe.model.vocab_multiple
    if start is not None:
        # The weights follow when the phase is entered.
        encoder = Encoder(start.config, recipe.model.attention, multiple)
        ours = tokenizer_digest(start.folder / TOKENIZER)
        if ours != tokenizer.digest:
            raise Failure(f"the rows' tokenizer ({tokenizer.digest[:12]}) is not start.checkpoint's ({ours[:12]})")
        init: dict[str, Any] = start.state.facts["init"]
    elif recipe.model.init is None:
        config = random_config(recipe, tokenizer)
        encoder = Encoder.random(config, recipe.seed, recipe.model.attention, multiple)
        init = {"name": None, "random_seed": recipe.seed}
    else:
        folder = local_folder(recipe.model.init, recipe.model.revision)
        encoder = Encoder.from_pretrained(folder, recipe.model.attention, vocab_multiple=multiple)
        if (folder / "tokenizer.json").is_file():
            ours = tokenizer_digest(folder)
            if ours != tokenizer.digest:
                raise Failure(
                    f"the rows' tokenizer ({tokenizer.digest[:12]}) is not the model's ({ours[:12]}): "
                    f"build the rows again with --tokenizer {recipe.model.init}"
                )
        name = None if Path(recipe.model.init).is_dir() else recipe.model.init
        init = {"name": name, "revision": recipe.model.revision, "weights_digest": _digest(folder / WEIGHTS)}
    check_fit(recipe, everything, encoder.config)
    encoder.activation_checkpointing = recipe.engine.activation_checkpointing
    if recipe.engine.compile:
        full = recipe.batch.rows_per_device * max(rows.manifest.row_length for rows in everything)
        encoder.compile_blocks(fill_to=full if device.type == "cuda" else None)
    return with_backend(encoder, device, resolve_precision(recipe, device)), init


def random_config(recipe: Recipe, tokenizer: TokenizerInfo) -> ModernBertConfig:
    """The config of a model that starts from nothing: the recipe's fields, completed from the rows' tokenizer."""
    fields = dict(recipe.model.config or {})
    fields.setdefault("vocab_size", tokenizer.vocabulary)
    roles = tokenizer.roles
    of_config = {"pad": "pad", "cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
    for field, role in of_config.items():
        fields.setdefault(f"{field}_token_id", roles[role])
    return from_config_fields(fields)


def check_fit(recipe: Recipe, everything: list[Rows], config: ModernBertConfig) -> None:
    """Failure where the rows, the phases or `model` do not fit a model of this config."""
    if has_dropout(config) and not recipe.model.dropout:
        raise Failure(REFUSED.format(rates=rates(config)))
    if recipe.model.dropout and not has_dropout(config):
        raise UsageError("model.dropout has no effect: the config's embedding_dropout and mlp_dropout are 0; remove it")
    tokenizer = everything[0].manifest.tokenizer
    if config.vocab_size < tokenizer.vocabulary:
        own = recipe.model.init is not None or recipe.start is not None
        remedy = "build the rows with the model's own tokenizer" if own else "leave model.config.vocab_size out"
        raise Failure(
            f"the rows' vocabulary of {tokenizer.vocabulary} ids does not fit the model's {config.vocab_size}: {remedy}"
        )
    longest = config.max_position_embeddings
    for rows in everything:
        length = rows.manifest.row_length
        if length > longest:
            raise Failure(
                f"{rows.location}: its rows of {length} tokens are longer than the model's max_position_embeddings {longest}"
            )
    layers = config.num_hidden_layers
    for phase in recipe.phases:
        unknown = frozen_groups(phase.frozen_layers) - {"embeddings", *map(str, range(layers))}
        if unknown:
            raise UsageError(
                f"phase {phase.name}: frozen_layers names layer {min(unknown)}, but the model has 0 to {layers - 1}"
            )


def _digest(path: Path) -> str | None:
    """sha256 of a weights file, or None where the weights are elsewhere (sharded, or a hub name)."""
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _facts(recipe: Recipe, streams: list[MixedRows], init: dict[str, Any]) -> dict[str, Any]:
    """What the export may tell: counts, digests, hyper-parameters; no path, file name, bucket, host or user."""

    def described(rows: Rows) -> dict[str, Any]:
        manifest = rows.manifest
        return {
            "digest": manifest.rows_digest,
            "documents": manifest.counts.documents,
            "tokens": manifest.counts.tokens,
            "rows": manifest.counts.rows,
            "row_length": manifest.row_length,
            "dropped": manifest.counts.dropped,
        }

    sources = {rows.manifest.rows_digest: described(rows) for stream in streams for rows in stream.sources}
    return {
        "name": recipe.name,
        "software": software(),
        "init": init,
        "tokenizer_digest": streams[0].sources[0].manifest.tokenizer.digest,
        "rows": list(sources.values()),
        "batch_rows": recipe.batch.rows,
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "precision": recipe.precision,
        "seed": recipe.seed,
        "data_seed": recipe.data_seed,
        "card": recipe.card.model_dump(mode="json"),
    }


def enter_phase(recipe: Recipe, index: int, parts: Parts) -> State:
    """Bring the engine to where phase `index` stands: its own latest checkpoint, the end of the phase before it, or
    another run's checkpoint.

    Always from disk, so that staged, continuous and resumed runs agree by construction.
    """
    phase, folder = recipe.phases[index], parts.folder
    digest = parts.loaders[index].rows.digest
    parts.engine.freeze(frozen_groups(phase.frozen_layers))
    own = folder.latest(phase.name)
    if own is not None:
        if own.state.rows_digest != digest:
            raise Failure(
                f"the rows of phase {phase.name} are not those it began with (their digests differ): "
                "give it those again, or begin anew with another --run-dir"
            )
        _load(parts.engine, own, keep=True)
        return replace(own.state, history=own.state.history[:-1])
    fresh = State(phase.name, rows_digest=digest, facts=parts.facts)
    before = recipe.phases[index - 1].name if index else None
    last = parts.start if before is None else folder.latest(before) if folder.done(before) else None
    if last is None:
        if before is None:
            return fresh
        raise Failure(f"phase {phase.name} starts from phase {before}, which is not done; run --phase {before} first")
    keep = phase.optimizer_state == "keep"
    _load(parts.engine, last, keep)
    positions = dict(last.state.positions)
    if phase.data == "restart":
        positions.pop(digest, None)
    elif phase.data == "continue" and last.state.positions and digest not in positions and index:
        raise Failure("data.rows are not the rows that this run began with (their digests differ)")
    adam_step = last.state.adam_step if keep else 0
    return replace(fresh, positions=positions, adam_step=adam_step, history=last.state.history)


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
        "skipped_steps": state.skipped,
        "rows_digest": state.rows_digest,
        "learning_rate": phase.learning_rate.model_dump(mode="json"),
        "frozen_layers": phase.frozen_layers,
        "optimizer_state": phase.optimizer_state,
        "validation": validation or None,
    }
