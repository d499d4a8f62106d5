"""Hugging Face's side: ModernBERT configs as they really come, model folders read strictly and written for both majors.

transformers 4 says `global_attn_every_n_layers`, `global_rope_theta`, `local_rope_theta`; transformers 5 says `layer_types`
and `rope_parameters`. Either kind is read; what we write holds both, so that each major reads its own.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, ModernBertConfig
from transformers.activations import ACT2FN

from command_line import Failure

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
TIED = ("model.embeddings.tok_embeddings.weight", "decoder.weight")
OF_VOCABULARY = (*TIED, "decoder.bias")  # weights with a row for each id
OF_ONE_MAJOR = (
    *("layer_types", "rope_parameters"),
    *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"),
)
DROPOUT = ("embedding_dropout", "mlp_dropout")
REFUSED = "{rates}: dropout is refused unless it is asked for; set it to 0, or model.dropout: true to train with it"
FULL, SLIDING = "full_attention", "sliding_attention"


def is_global(config: ModernBertConfig, layer: int) -> bool:
    """Whether a layer sees the whole document."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return bool(layer_types[layer] == FULL)
    return bool(layer % config.global_attn_every_n_layers == 0)


def half_window(config: ModernBertConfig, layer: int) -> int | None:
    """Of a layer, as `attend` takes it: None is global; 64 to each side where local_attention is 128."""
    return None if is_global(config, layer) else config.local_attention // 2


def _is_default_rope(parameters: Any) -> bool:
    """Of one kind of layer."""
    default = {"rope_type": "default", "partial_rotary_factor": 1.0}
    return not parameters or (
        isinstance(parameters, dict)
        and all(name == "rope_theta" or default.get(name) == value for name, value in parameters.items())
    )


def rates(config: ModernBertConfig) -> str:
    """Those above 0, for a message."""
    return " and ".join(f"config.{name} is {getattr(config, name)}" for name in DROPOUT if getattr(config, name))


def has_dropout(config: ModernBertConfig) -> bool:
    return bool(rates(config))


def rope_theta(config: ModernBertConfig, of_global: bool) -> float:
    """RoPE base of global or local layers: ModernBERT has two, under both objectives."""
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = (parameters.get(FULL if of_global else SLIDING) or {}).get("rope_theta")
    if theta is not None:
        return float(theta)
    local = config.local_rope_theta
    return float(config.global_rope_theta if of_global or local is None else local)


def supported(config: ModernBertConfig) -> ModernBertConfig:
    """The config itself, completed; Failure names the field that our encoder, or one of the majors, could not follow.

    Completed: both majors' fields say the same. transformers 4 ignores those of 5, hence would build another model.
    """
    if config.attention_dropout:
        raise Failure(
            f"config.attention_dropout is {config.attention_dropout}: attention kernels draw it themselves, whatever the "
            "place in the row stream, so that no run could be repeated; set it to 0 (embedding_dropout and mlp_dropout can be had)"
        )
    for name in DROPOUT:
        if not 0 <= getattr(config, name) < 1:
            raise Failure(f"config.{name} is {getattr(config, name)}: it must be from 0 to below 1")
    if config.hidden_size % config.num_attention_heads or (config.hidden_size // config.num_attention_heads) % 2:
        raise Failure("config.hidden_size must be an even multiple of config.num_attention_heads")
    if config.local_attention < 2:
        raise Failure(f"config.local_attention is {config.local_attention}: the window must be 2 or more")
    for name in ("hidden_activation", "classifier_activation"):
        if getattr(config, name) not in ACT2FN:
            raise Failure(f"config.{name} is {getattr(config, name)!r}, which transformers does not know")
    # In transformers 5 rope_scaling is another name of rope_parameters.
    scaling = None if hasattr(type(config), "rope_scaling") else getattr(config, "rope_scaling", None)
    if scaling or not all(map(_is_default_rope, (getattr(config, "rope_parameters", None) or {}).values())):
        raise Failure(
            "config.rope_parameters: only the default RoPE is supported, with a rope_theta for each kind of layer"
        )
    layers = config.num_hidden_layers
    types = [FULL if is_global(config, layer) else SLIDING for layer in range(layers)]
    every = next(
        (n for n in range(1, layers + 1) if types == [SLIDING if i % n else FULL for i in range(layers)]), None
    )
    if len(getattr(config, "layer_types", None) or types) != layers or every is None:
        raise Failure(
            "config.layer_types must be full_attention at every n-th layer from layer 0, and of num_hidden_layers"
        )
    thetas = {kind: rope_theta(config, kind == FULL) for kind in (FULL, SLIDING)}
    config.layer_types = types
    config.rope_parameters = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    config.global_attn_every_n_layers = every
    config.global_rope_theta, config.local_rope_theta = thetas[FULL], thetas[SLIDING]
    return config


def save(config: ModernBertConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a Hugging Face folder, without rows that pad the vocabulary. Failure on a weight that is not finite."""
    broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise Failure(f"weights are not finite and will not be exported: {some(broken)}")
    unpadded = {n: tensor[: config.vocab_size] if n in OF_VOCABULARY else tensor for n, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in unpadded.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    (folder / INDEX).unlink(missing_ok=True)  # of what lay there before, in several files
    write_config(config, folder)


def write_config(config: ModernBertConfig, folder: Path) -> None:
    """config.json as transformers would write it, but for the dtype, whose name and type differ among its versions."""
    fields = config.to_diff_dict()
    for name in ("_name_or_path", "torch_dtype"):  # the former may be a path of this machine
        fields.pop(name, None)
    fields |= {"architectures": ["ModernBertForMaskedLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def read_config(folder: str | Path) -> ModernBertConfig:
    """The config of a local folder; Failure where it is not ModernBERT's."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise Failure(f"{folder} has no config.json: it is not a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except Exception:  # each version of transformers has its own kinds
        raise Failure(f"{path} cannot be read as a model config") from None
    if not isinstance(config, ModernBertConfig):
        raise Failure(f"{folder} holds a model of type '{config.model_type}'; this version trains ModernBERT")
    return supported(config)


def local_folder(folder: str | Path, revision: str | None) -> Path:
    """A folder as it is; a hub name as its local snapshot."""
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
    """All tensors of a folder, from one safetensors file or, without it, from the files that its index names."""
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


def from_config_fields(fields: dict[str, Any]) -> ModernBertConfig:
    """ModernBertConfig from a recipe's model.config; Failure names a field that it does not have."""
    known = ModernBertConfig()
    for name in fields:
        if not hasattr(known, name) and name not in OF_ONE_MAJOR:
            raise Failure(f"model.config: ModernBertConfig has no field '{name}'")
    try:
        return supported(ModernBertConfig(**fields))
    except Failure:
        raise
    except Exception as error:  # each version of transformers has its own kinds
        raise Failure(f"model.config: {error}") from None
