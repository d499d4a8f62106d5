"""What an export may tell about a run: counts, digests, hyper-parameters; no path, file name, bucket, host or user."""

from typing import Any

from data_prep.rows import Rows, software
from pipeline.data import MixedRows
from pipeline.engine import State
from pipeline.recipe import Recipe


def run_facts(recipe: Recipe, streams: list[MixedRows], init: dict[str, Any]) -> dict[str, Any]:
    """Returns the facts of the run as a whole. `init` says where its weights came from."""

    def of_rows(rows: Rows) -> dict[str, Any]:
        manifest = rows.manifest
        return {
            "digest": manifest.rows_digest,
            "documents": manifest.counts.documents,
            "tokens": manifest.counts.tokens,
            "rows": manifest.counts.rows,
            "row_length": manifest.row_length,
            "dropped": manifest.counts.dropped,
        }

    sources = {rows.manifest.rows_digest: of_rows(rows) for stream in streams for rows in stream.sources}
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


def phase_facts(recipe: Recipe, index: int, state: State, validation: dict[str, Any]) -> dict[str, Any]:
    """Returns a phase's entry in the lineage."""
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
