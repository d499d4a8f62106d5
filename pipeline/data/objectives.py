"""The training objectives: the next token (clm) or masked tokens (mlm). Pure functions of the row and a random generator.

CLM labels position i with token i+1 of the *same document*; the last token of each document has no label. MLM selects
each ordinary token with the mask rate; 80 % of the selected tokens become the mask token, 10 % a random ordinary token,
10 % stay (BERT, arXiv 1810.04805). Special tokens are never selected, and never used as random tokens.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from data_prep.rows import Row, TokenizerInfo
from pipeline.model import PackedBatch, token_keys


@dataclass(frozen=True)
class Objective:
    """The objective of a phase or of the validation: all that decides labels, mask and dropout."""

    kind: str  # a key of OBJECTIVES
    mask_rate: float = 0.0  # for objectives that mask
    label: str = ""  # name of the phase: phases under the same seed draw different masks
    seed: int = 0
    dropout: bool = False

    @property
    def causal(self) -> bool:
        return OBJECTIVES[self.kind].causal


@dataclass(frozen=True)
class Vocabulary:
    """The ids that masking needs, from the manifest of the rows."""

    size: int
    special: tuple[int, ...]
    mask: int

    @classmethod
    def from_manifest(cls, info: TokenizerInfo) -> "Vocabulary":
        return cls(info.vocabulary, tuple(sorted(set(info.special.values()))), info.roles["mask"])

    @cached_property
    def ordinary(self) -> NDArray[np.int64]:
        """Every id that is not special, ascending."""
        return np.setdiff1d(np.arange(self.size), np.array(self.special))


@dataclass(frozen=True)
class LabelledRow:
    input_ids: NDArray[np.int64]  # [length]
    lengths: NDArray[np.uint32]  # [pieces]
    label_positions: NDArray[np.int64]  # [labels], ascending
    labels: NDArray[np.int64]  # [labels]
    dropout_keys: NDArray[np.int64] | None = None  # [length]


def generator(seed: int, label: str, position: int) -> np.random.Generator:
    """Returns the generator of a row's masks, a pure function of (seed, phase, position in the row stream).

    Masks are therefore the same on any rank or worker, in any micro-batch, after a resume; a later epoch draws new ones.
    """
    phase = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, phase, position])))


def clm_labels(row: Row) -> LabelledRow:
    tokens = row.tokens.astype(np.int64)
    labelled = np.ones(len(tokens), bool)
    labelled[np.cumsum(row.lengths, dtype=np.int64) - 1] = False
    positions = np.flatnonzero(labelled)
    return LabelledRow(tokens, row.lengths, positions, tokens[positions + 1])


def mlm_labels(row: Row, mask_rate: float, vocabulary: Vocabulary, rng: np.random.Generator) -> LabelledRow:
    tokens = row.tokens.astype(np.int64)
    drawn = (rng.random(len(tokens)) < mask_rate) & ~np.isin(tokens, vocabulary.special)
    positions = np.flatnonzero(drawn)
    labels = tokens[positions]
    fate = rng.random(len(positions))
    random = vocabulary.ordinary[rng.integers(len(vocabulary.ordinary), size=len(positions))]
    inputs = tokens.copy()
    inputs[positions] = np.where(fate < 0.8, vocabulary.mask, np.where(fate < 0.9, random, labels))
    return LabelledRow(inputs, row.lengths, positions, labels)


@dataclass(frozen=True)
class Kind:
    """What an objective does. `labels` takes the row, the mask rate, the vocabulary and the mask generator."""

    causal: bool  # whether the attention mask is causal
    masks: bool  # whether it hides tokens, at the phase's mask rate
    labels: Callable[[Row, float, Vocabulary, Callable[[], np.random.Generator]], LabelledRow]


# By the names that a recipe may give as phases[].objective.
OBJECTIVES = {
    "clm": Kind(causal=True, masks=False, labels=lambda row, *_: clm_labels(row)),
    "mlm": Kind(causal=False, masks=True, labels=lambda row, rate, ids, rng: mlm_labels(row, rate, ids, rng())),
}


def label(row: Row, objective: Objective, vocabulary: Vocabulary, position: int) -> LabelledRow:
    """Returns the row at `position` of its stream, labelled for `objective`."""
    rng = partial(generator, objective.seed, objective.label, position)  # made by the objectives that draw
    labelled = OBJECTIVES[objective.kind].labels(row, objective.mask_rate, vocabulary, rng)
    if not objective.dropout:
        return labelled
    return replace(labelled, dropout_keys=token_keys(objective.seed, objective.label, position, len(row.tokens)))


def pack(rows: Sequence[LabelledRow], row_ids: Sequence[int]) -> PackedBatch:
    """Returns the rows, one after the other, as one packed batch."""
    starts = np.cumsum([0, *(len(row.input_ids) for row in rows)])
    keys = [row.dropout_keys for row in rows if row.dropout_keys is not None]
    return PackedBatch.from_arrays(
        np.concatenate([row.input_ids for row in rows]),
        np.concatenate([row.lengths for row in rows]),
        np.concatenate([row.label_positions + start for row, start in zip(rows, starts, strict=False)]),
        np.concatenate([row.labels for row in rows]),
        row_ids,
        np.concatenate(keys) if keys else None,
    )
