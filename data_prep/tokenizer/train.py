"""Train a tokenizer on documents: byte-level BPE in the form of ModernBERT's, saved as a Hugging Face folder."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tqdm import tqdm

from command_line import Failure, UsageError
from data_prep.documents import Reading, Reason, corpus, find_files
from data_prep.rows import aside
from data_prep.tokenizer.document_tokenizer import CONFIG, MODEL_MAX_LENGTH, json_bytes

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # ids 0 to 4
SMALLEST = 256 + len(SPECIAL)  # every byte is a token, so no text is ever unknown
NOTE = "note: a vocabulary can hold names and other words of its corpus; treat the folder as you treat the corpus"


@dataclass(frozen=True)
class Trained:
    vocabulary: int
    documents: int
    dropped: dict[str, int]


def train_tokenizer(
    inputs: list[str], vocabulary: int, out: str, reading: Reading | None = None, on_error: str = "fail"
) -> Trained:
    """Learn at most `vocabulary` entries from all documents of `inputs`. The same input gives the same bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    if vocabulary < SMALLEST:
        raise UsageError(
            f"--vocab-size {vocabulary} is too small: 256 bytes and {len(SPECIAL)} special tokens need {SMALLEST}"
        )
    reading = reading or Reading()
    reading.check()
    found = find_files(inputs)
    documents = 0
    dropped: Counter[str] = Counter()

    def texts() -> Iterator[str]:
        nonlocal documents
        total = sum(file.bytes for file in found.files)
        with tqdm(total=total, unit="B", unit_scale=True, desc="read", disable=None) as bar:
            for document in corpus(found.files, reading, on_error, bar.update):
                if isinstance(document, Reason):
                    dropped[document] += 1
                else:
                    documents += 1
                    yield document.text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    with aside(out) as folder:
        # [MASK] takes the space before it, as in ModernBERT: "treated with [MASK]" then asks for " aspirin".
        special = [AddedToken(token, special=True, normalized=False, lstrip=token == "[MASK]") for token in SPECIAL]
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts(), trainer)
        if not documents:
            raise Failure(f"the corpus is empty: no document is left of {' '.join(map(repr, inputs))}")
        ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, ids[token]) for token in ("[CLS]", "[SEP]")],
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        roles = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
        (folder / "special_tokens_map.json").write_bytes(json_bytes(roles))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MODEL_MAX_LENGTH,
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        (folder / CONFIG).write_bytes(json_bytes(config | roles))
    return Trained(tokenizer.get_vocab_size(), documents, dict(sorted(dropped.items())))
