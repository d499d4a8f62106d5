"""The tokenizer of a build: it is loaded by folder or Hugging Face name, checked, applied to documents, copied beside the rows.

A document gets the special tokens that the tokenizer's own post-processor adds, such as [CLS] text [SEP]. A word of the *text*
that looks like a special token, such as "[SEP]" in a note about BERT, is tokenised as a word.
"""

import json
import os
import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from command_line import Failure
from data_prep.rows import TokenizerInfo, content_digest, token_dtype, tokenizer_content

ROLES = {  # role -> usual names, tried if the tokenizer's configuration names no token
    "cls": ("[CLS]", "<s>", "<cls>"),
    "sep": ("[SEP]", "</s>", "<sep>", "<eos>"),
    "mask": ("[MASK]", "<mask>"),
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),  # may be absent: byte-level vocabularies know everything
}
CONFIG = "tokenizer_config.json"
FILES = (
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json", "merges.txt"),
    *("sentencepiece.bpe.model", "spiece.model", "tokenizer.model"),
)
# Keys of tokenizer_config.json that hold paths of the machine where it was saved, or that would run a stranger's code.
PRIVATE_KEYS = ("name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "auto_map")
MODEL_MAX_LENGTH = 8192  # for a tokenizer that comes without a configuration


class DocumentTokenizer:
    """Turns texts into arrays of ids. Raises Failure if the tokenizer does not suit an encoder."""

    def __init__(self, folder: Path, name: str, add_prefix_space: bool | None = None) -> None:
        """`add_prefix_space`: treat a document's first word as if a space stood before it. None: as the tokenizer does."""
        from tokenizers import Tokenizer

        self.folder = folder
        self.arguments = (str(folder), name, add_prefix_space)
        content = tokenizer_content(folder)
        self._prefix_space = _prefix_space(content.get("pre_tokenizer"), add_prefix_space)
        self._changed = None if add_prefix_space is None else json.dumps(content, ensure_ascii=False)
        if add_prefix_space is not None and self._prefix_space is None:
            raise Failure(f"tokenizer {name!r} has no prefix space to set: leave --add-prefix-space out")
        try:
            if self._changed is None:
                self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            else:
                self._tokenizer = Tokenizer.from_str(self._changed)
        except Exception:
            raise Failure(f"tokenizer {name!r}: its tokenizer.json cannot be used by the tokenizers library") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # random merges would give other rows at each build
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.roles = _roles(folder, name, ids)
        special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        special |= {token: ids[token] for token in self.roles.values()}
        vocabulary = max(ids.values()) + 1  # not the number of entries: ids may have gaps
        self._vocabulary = vocabulary
        self._special = dict(sorted(special.items(), key=lambda item: item[1]))
        self._role_ids = {role: ids[token] for role, token in self.roles.items()}
        self.dtype = np.dtype(token_dtype(vocabulary))
        self._unknown = ids.get(self.roles.get("unk", ""))
        self._is_special = np.zeros(vocabulary, bool)
        self._is_special[[i for i in special.values() if i != self._unknown]] = True
        edges = np.array(self._tokenizer.encode("").ids, np.int64)
        self.edges = int(
            self._is_special[edges].sum()
        )  # number of special tokens that a document gets; 0: no rule adds any

    @cached_property
    def info(self) -> TokenizerInfo:
        """The manifest's entry. Made on first use, for the digest takes 0.3 s and workers do not need it."""
        content = tokenizer_content(self.folder) if self._changed is None else json.loads(self._changed)
        return TokenizerInfo(
            name=self.arguments[1],
            digest=content_digest(content),
            vocabulary=self._vocabulary,
            special=self._special,
            roles=self._role_ids,
            add_prefix_space=self._prefix_space,
        )

    def encode(self, texts: list[str]) -> list[NDArray[np.unsignedinteger]]:
        """One array [n] a text, special tokens included; an empty one if nothing of the text is left. Uses every core."""
        return [self._ids(encoding) for encoding in self._tokenizer.encode_batch_fast(texts)]

    def _ids(self, encoding: Any) -> NDArray[np.unsignedinteger]:
        ids = np.array(encoding.ids, self.dtype)  # an id that does not fit raises OverflowError and never wraps
        special = self._is_special[ids]
        if int(special.sum()) != self.edges:
            # Some models (unigram, word level) have "<mask>" as an ordinary entry, so they find it in a text with that word.
            stray = special & ~np.array(encoding.special_tokens_mask, bool)
            if self._unknown is None:
                ids = ids[~stray]
            else:
                ids[stray] = self._unknown
        return ids if len(ids) > self.edges else ids[:0]

    def decode(self, ids: NDArray[np.unsignedinteger]) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def files(self) -> dict[str, bytes]:
        """The tokenizer's files by name. The configuration names its special tokens, and holds no path."""
        found = {file: (self.folder / file).read_bytes() for file in FILES if (self.folder / file).is_file()}
        if self._changed is not None:
            found["tokenizer.json"] = self._changed.encode()
        config = _read_json(self.folder / CONFIG)
        if not config:
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MODEL_MAX_LENGTH}
        for key in PRIVATE_KEYS:
            config.pop(key, None)
        for role, token in self.roles.items():
            if not config.get(f"{role}_token"):
                config[f"{role}_token"] = token
        if self.arguments[2] is not None:
            config["add_prefix_space"] = self.arguments[2]
        return found | {CONFIG: json_bytes(config)}


@lru_cache(maxsize=1)
def tokenizer_of(folder: str, name: str, add_prefix_space: bool | None) -> DocumentTokenizer:
    """The tokenizer for the tasks of this process, loaded once."""
    return DocumentTokenizer(Path(folder), name, add_prefix_space)


def load_tokenizer(given: str, add_prefix_space: bool | None = None) -> DocumentTokenizer:
    """Load `given`, a folder with a tokenizer.json or a name on the Hugging Face hub (downloaded, or found in its cache)."""
    tokenizer_of.cache_clear()  # the folder may hold another tokenizer by now
    path = Path(given)
    if path.is_dir():
        return tokenizer_of(str(path.resolve()), path.resolve().name, add_prefix_space)
    if path.exists():
        raise Failure(f"--tokenizer {given!r} is a file; name the folder that holds tokenizer.json")
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", given):
        raise Failure(f"--tokenizer: there is no folder {given!r}")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(given, allow_patterns=[*FILES, CONFIG]))
    except Exception as error:
        raise Failure(
            f"--tokenizer: there is no folder {given!r}, and the Hugging Face hub gives nothing of that name ({type(error).__name__})"
        ) from None
    return tokenizer_of(str(folder), given.split("/")[-1], add_prefix_space)


def json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _prefix_space(part: Any, wanted: bool | None) -> bool | None:
    """The setting in a pre-tokenizer's description, after setting it to `wanted` unless that is None; None if it has no such setting."""
    if not isinstance(part, dict):
        return None
    found = [state for inner in part.get("pretokenizers", []) if (state := _prefix_space(inner, wanted)) is not None]
    if part.get("type") == "ByteLevel":
        if wanted is not None:
            part["add_prefix_space"] = wanted
        found.append(bool(part.get("add_prefix_space")))
    elif part.get("type") == "Metaspace":
        if wanted is not None:
            part["prepend_scheme"] = "first" if wanted else "never"
        found.append(part.get("prepend_scheme", "always") != "never")
    return any(found) if found else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise Failure(f"the tokenizer's {path.name} is not JSON") from None
    if not isinstance(content, dict):
        raise Failure(f"the tokenizer's {path.name} is not a JSON object")
    return content


def _roles(folder: Path, name: str, ids: dict[str, int]) -> dict[str, str]:
    """role -> token, from the configuration, else by the usual names. Raises Failure if an encoder would miss one."""
    named = _read_json(folder / "special_tokens_map.json") | _read_json(folder / CONFIG)
    roles = {}
    for role, usual in ROLES.items():
        token = named.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        candidates = [token] if token else list(usual)
        roles[role] = next((candidate for candidate in candidates if candidate in ids), "")
    missing = [role for role, token in roles.items() if not token and role != "unk"]
    if missing:
        raise Failure(
            f"tokenizer {name!r} has no {', '.join(missing)} token: an encoder needs cls, sep, mask and pad; add them to its vocabulary"
        )
    return {role: token for role, token in roles.items() if token}
