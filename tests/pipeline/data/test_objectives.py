import numpy as np

from data_prep.rows import Row, TokenizerInfo
from pipeline.data import Objective, Vocabulary, label, pack
from pipeline.data.objectives import clm_labels, generator, mlm_labels

VOCABULARY = Vocabulary(size=1000, special=(0, 1, 2, 3, 999), mask=3)


def row(*lengths: int, seed: int = 0) -> Row:
    """Returns a row of documents of these lengths, [CLS]=0 first and [SEP]=1 last where there is room."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(4, 999, sum(lengths)).astype(np.uint16)
    ends = np.cumsum(lengths)
    tokens[np.array(ends) - np.array(lengths)] = 0
    tokens[ends - 1] = 1
    return Row(tokens, np.array(lengths, np.uint32))


def test_clm_labels_stop_at_document_ends() -> None:
    """PITFALLS trial 7: cu_seqlens [0, 1, 3, 8]; no label at positions 0, 2 and 7."""
    r = row(1, 2, 5)
    labelled = clm_labels(r)
    assert labelled.label_positions.tolist() == [1, 3, 4, 5, 6]
    assert labelled.labels.tolist() == r.tokens[[2, 4, 5, 6, 7]].tolist()
    assert (labelled.input_ids == r.tokens).all()
    assert len(clm_labels(row(1, 1)).labels) == 0


def test_a_separator_inside_a_document_is_no_boundary() -> None:
    r = row(6)
    r.tokens[3] = 1
    assert clm_labels(r).label_positions.tolist() == [0, 1, 2, 3, 4]


def test_mlm_rates() -> None:
    r = row(*[500] * 400)
    labelled = mlm_labels(r, 0.3, VOCABULARY, generator(0, "phase", 7))
    special = np.isin(r.tokens, VOCABULARY.special)
    candidates = int((~special).sum())
    drawn = len(labelled.labels)

    def within(count: int, of: int, share: float) -> bool:
        return abs(count - of * share) < 3 * (of * share * (1 - share)) ** 0.5

    assert within(drawn, candidates, 0.3)
    assert not special[labelled.label_positions].any()
    assert (labelled.labels == r.tokens[labelled.label_positions]).all()
    now = labelled.input_ids[labelled.label_positions]
    masked, kept = now == VOCABULARY.mask, now == labelled.labels
    assert within(int(masked.sum()), drawn, 0.8)
    assert within(int(kept.sum()), drawn, 0.1 + 0.1 / 995)  # a random token may be the same
    random = now[~masked & ~kept]
    assert not np.isin(random, VOCABULARY.special).any()
    assert random.min() >= 4
    assert len(np.unique(random)) > 900  # all of the vocabulary, the last ordinary id too
    untouched = np.ones(len(r.tokens), bool)
    untouched[labelled.label_positions] = False
    assert (labelled.input_ids[untouched] == r.tokens[untouched]).all()


def test_masks_depend_on_seed_phase_and_position_alone() -> None:
    r = row(300)
    base = Objective("mlm", 0.15, "mlm_decay", seed=17)

    def drawn(objective: Objective, position: int) -> bytes:
        labelled = label(r, objective, VOCABULARY, position)
        return labelled.label_positions.tobytes() + labelled.input_ids.tobytes()

    assert drawn(base, 5) == drawn(base, 5)
    others = [(base, 6), (Objective("mlm", 0.15, "other", 17), 5), (Objective("mlm", 0.15, "mlm_decay", 18), 5)]
    assert len({drawn(base, 5), *(drawn(*other) for other in others)}) == 4


def test_rows_of_a_batch_keep_their_labels() -> None:
    rows = [row(3, 4, seed=1), row(5, seed=2), row(1, seed=3)]
    batch = pack([clm_labels(r) for r in rows], [10, 11, 12])
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 12, 13]
    assert batch.max_seqlen == 5
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0]
    flat = np.concatenate([r.tokens for r in rows])
    assert batch.labels.tolist() == flat[batch.label_positions.numpy() + 1].tolist()
    assert batch.row_ids == (10, 11, 12)


def test_the_manifest_names_the_mask_token() -> None:
    special = {"<s>": 0, "</s>": 2, "<mask>": 4}
    roles = {"cls": 0, "sep": 2, "pad": 2, "mask": 4}
    info = TokenizerInfo(name="t", digest="d", vocabulary=10, special=special, roles=roles)
    vocabulary = Vocabulary.from_manifest(info)
    assert (vocabulary.mask, vocabulary.special) == (4, (0, 2, 4))
    assert vocabulary.ordinary.tolist() == [1, 3, 5, 6, 7, 8, 9]
