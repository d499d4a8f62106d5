"""Model folders in Hugging Face's format: read strictly, and written so that transformers 4 and 5 both load them."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from command_line import Failure
from pipeline.model.families import FAMILIES, Config, family_of

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def write_model(config: Config, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a Hugging Face folder, without the padding rows of the vocabulary. Failure on a weight that is not finite."""
    broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise Failure(f"weights are not finite and will not be exported: {some(broken)}")
    padded = family_of(config).of_vocabulary
    unpadded = {n: tensor[: config.vocab_size] if n in padded else tensor for n, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in unpadded.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    (folder / INDEX).unlink(missing_ok=True)  # left by an earlier model in several files
    write_config(config, folder)


def write_config(config: Config, folder: Path) -> None:
    """Write config.json as transformers does, except for the dtype, whose name and type differ among its versions."""
    fields = config.to_diff_dict()
    for name in ("_name_or_path", "torch_dtype"):  # _name_or_path may be a path of this machine
        fields.pop(name, None)
    fields |= {"architectures": [family_of(config).architecture], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def read_config(folder: str | Path) -> Config:
    """Returns the config of a local folder; Failure where it is of no family that we train."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise Failure(f"{folder} has no config.json: it is not a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception:  # each version of transformers has its own kinds
        raise Failure(f"{path} cannot be read as a model config") from None
    if config.model_type not in FAMILIES:
        known = ", ".join(family.title for family in FAMILIES.values())
        raise Failure(f"{folder} holds a model of type '{config.model_type}'; this version trains {known}")
    return family_of(config).supported(config)


def local_folder(folder: str | Path, revision: str | None) -> Path:
    """Returns a folder as it is, or the local snapshot of a hub name, downloaded where it is missing."""
    if Path(folder).is_dir():
        return Path(folder)
    if Path(folder).exists() or os.sep in str(folder).replace("/", "", 1) or str(folder).startswith((".", "~", os.sep)):
        raise Failure(f"model {folder}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.json", "*.safetensors"]
        return Path(snapshot_download(str(folder), revision=revision, allow_patterns=patterns))
    except Exception as error:
        reason = type(error).__name__
        raise Failure(
            f"model {folder}: no such folder, and the hub gives no such model ({reason}); is it reachable?"
        ) from None


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder, from one safetensors file or, without it, from the files that its index names."""
    index = folder / INDEX
    if index.is_file() and not (folder / WEIGHTS).is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise Failure(f"{index} is damaged") from None
        if any(not isinstance(name, str) or name != os.path.basename(name) for name in names):
            raise Failure(f"{index} names a file outside its folder")
    else:
        names = [WEIGHTS]
    weights: dict[str, Tensor] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise Failure(f"{folder} has no {name}: only safetensors are read, never pickled weights")
        try:
            with safe_open(path, framework="pt") as file:
                weights.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118, not a dict
        except SafetensorError:
            raise Failure(f"{path} is damaged or not a safetensors file") from None
    return weights


def some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def from_config_fields(fields: dict[str, Any]) -> Config:
    """Returns the config for a recipe's model.config, by default ModernBERT's; Failure names an unknown field."""
    kind = fields.get("model_type", "modernbert")
    if kind not in FAMILIES:
        raise Failure(f"model.config: model_type {kind!r} is none of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    known = family.config()
    for name in fields:
        if not hasattr(known, name) and name not in family.of_one_major:
            raise Failure(f"model.config: {family.config.__name__} has no field '{name}'")
    try:
        return family.supported(family.config(**fields))
    except Failure:
        raise
    except Exception as error:  # each version of transformers has its own kinds
        raise Failure(f"model.config: {error}") from None
