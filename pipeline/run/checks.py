"""Checks that the parts of a run fit each other; both training and `pipeline.plan` make them before the first step."""

from pathlib import Path

from command_line import Failure, UsageError
from data_prep.rows import Rows, TokenizerInfo, tokenizer_digest
from pipeline.data import MixedRows, Vocabulary
from pipeline.model import REFUSED, Config, family_of, from_config_fields
from pipeline.recipe import OwnData, Recipe, Sources, frozen_groups, locations


def open_streams(recipe: Recipe, cache: Path | None, begun: bool = False) -> list[MixedRows]:
    """Returns the row stream of each phase; phases on the same rows share one. `begun`: the run has a checkpoint."""
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
    """Check that one tokenizer made all rows of a run; returns its vocabulary."""
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


def check_tokenizer(rows: TokenizerInfo, folder: Path, whose: str, name: str) -> None:
    """Failure where `folder` holds another tokenizer than the rows'. `name` is what --tokenizer would be given."""
    found = tokenizer_digest(folder)
    if found != rows.digest:
        raise Failure(
            f"the rows' tokenizer ({rows.digest[:12]}) is not {whose}'s ({found[:12]}): "
            f"build the rows again with --tokenizer {name}"
        )


def random_config(recipe: Recipe, tokenizer: TokenizerInfo) -> Config:
    """Returns the config of a randomly initialised model: the recipe's fields, completed from the rows' tokenizer."""
    fields = dict(recipe.model.config or {})
    fields.setdefault("vocab_size", tokenizer.vocabulary)
    roles = tokenizer.roles
    of_config = {"pad": "pad", "cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
    for field, role in of_config.items():
        fields.setdefault(f"{field}_token_id", roles[role])
    return from_config_fields(fields)


def check_fit(recipe: Recipe, everything: list[Rows], config: Config) -> None:
    """Raise a Failure where the rows, the phases or the recipe's `model` do not fit a model of this config."""
    family = family_of(config)
    rates = family.rates(config)
    if rates and not recipe.model.dropout:
        raise Failure(REFUSED.format(rates=rates))
    if recipe.model.dropout and not rates:
        raise UsageError(f"model.dropout has no effect: the config's {' and '.join(family.dropout)} are 0; remove it")
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
