"""ModernBERT's architecture (arXiv 2412.13663) over packed documents, with Hugging Face's weight names and config.

It is our own module, not a patch of transformers': the causal mask is an argument of the call down to the kernel, the
model holds no mode. Shapes: T packed tokens, D hidden size, N heads, H head dimension, V vocabulary, L labelled positions.
"""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, ModernBertConfig
from transformers.activations import ACT2FN

from data_prep.errors import Failure
from pipeline.attention import attend, available
from pipeline.batch import PackedBatch

WEIGHTS = "model.safetensors"
TIED = ("model.embeddings.tok_embeddings.weight", "decoder.weight")


def is_global(config: ModernBertConfig, layer: int) -> bool:
    """Whether a layer sees the whole document; transformers 5 lists it per layer, transformers 4 says every how many."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return bool(layer_types[layer] == "full_attention")
    return bool(layer % config.global_attn_every_n_layers == 0)


def rope_theta(config: ModernBertConfig, of_global: bool) -> float:
    """RoPE base of global or local layers: ModernBERT has two, under both objectives."""
    parameters = getattr(config, "rope_parameters", None)  # transformers 5
    if parameters:
        return float(parameters["full_attention" if of_global else "sliding_attention"]["rope_theta"])
    local = config.local_rope_theta
    return float(config.global_rope_theta if of_global or local is None else local)


@dataclass(frozen=True)
class Rotation:
    """RoPE's cos and sin at the batch's positions, float32 [T, 1, H/2], computed once a batch for each theta."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, position_ids: Tensor, head_dim: int, theta: float) -> "Rotation":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_ids.device) / head_dim
        angle = position_ids.float()[:, None, None] * theta**-exponent
        return cls(angle.cos(), angle.sin())

    def queries_and_keys(self, qkv: Tensor, heads: int) -> Tensor:
        """Turn q and k of qkv [T, 3D] and leave v: computed in float32, returned in qkv's dtype, as [T, 3, N, H]."""
        turned: Tensor = _Turn.apply(qkv, self.cos, self.sin, heads)
        return turned.view(len(qkv), 3, heads, -1)


class _Turn(torch.autograd.Function):
    """In place, since nothing else needs the projection's output: less memory and half the passes of the plain formula."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        ctx.mark_dirty(qkv)
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _turn(qkv, qkv, cos, sin, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, torch.empty_like(grad), cos, -sin, ctx.heads), None, None, None  # the inverse turns back


def _turn(qkv: Tensor, into: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """q and k of qkv [T, 3D] turned, v as it is, written to `into`, which may be qkv itself."""
    source, target = (x.view(len(x), 3, heads, 2, -1) for x in (qkv, into))
    first, second = source[:, :2].unbind(-2)
    cos, sin = cos[:, None], sin[:, None]
    x = (first * cos).addcmul_(second, sin, value=-1)
    y = (second * cos).addcmul_(first, sin)
    target[:, :2, :, 0], target[:, :2, :, 1] = x, y
    if into is not qkv:
        target[:, 2] = source[:, 2]
    return into


def _norm(config: ModernBertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.norm(self.tok_embeddings(input_ids))
        return embedded


class Attention(nn.Module):
    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.is_global = is_global(config, layer)
        self.half_window = None if self.is_global else config.local_attention // 2
        self.Wqkv = nn.Linear(size, 3 * size, bias=config.attention_bias)
        self.Wo = nn.Linear(size, size, bias=config.attention_bias)

    def forward(self, x: Tensor, batch: PackedBatch, rotation: Rotation, causal: bool, backend: str) -> Tensor:
        q, k, v = rotation.queries_and_keys(self.Wqkv(x), self.heads).unbind(1)
        context = attend(
            q,
            k,
            v,
            batch.cu_seqlens,
            batch.max_seqlen,
            causal=causal,
            half_window=self.half_window,
            backend=backend,
        )
        out: Tensor = self.Wo(context.flatten(1))
        return out


class MLP(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.act = ACT2FN[config.hidden_activation]
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.Wi(x).chunk(2, dim=-1)
        out: Tensor = self.Wo(self.act(value) * gate)
        return out


class Layer(nn.Module):
    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()  # layer 0 follows the embeddings' norm
        self.attn = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, batch: PackedBatch, rotation: Rotation, causal: bool, backend: str) -> Tensor:
        x = x + self.attn(self.attn_norm(x), batch, rotation, causal, backend)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Trunk(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = _norm(config)


class Head(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.act = ACT2FN[config.classifier_activation]
        self.norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.act(self.dense(x)))
        return out


class Decoder(nn.Module):
    """Hidden states to logits. Tied: the weight is the embedding matrix, which the caller hands in."""

    def __init__(self, config: ModernBertConfig) -> None:
        super().__init__()
        if not config.tie_word_embeddings:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.decoder_bias else None


class Encoder(nn.Module):
    """`encoder(batch, causal=...)` gives hidden states [T, D]; `encoder.logits(hidden)` gives [.., V]."""

    def __init__(self, config: ModernBertConfig, attention: str = "auto") -> None:
        super().__init__()
        _refuse_what_we_lack(config)
        self.config = config
        self.attention = attention
        self.activation_checkpointing = False
        self.initialised: list[str] = []  # weights that the loaded folder lacked
        self.model = Trunk(config)
        self.head = Head(config)
        self.decoder = Decoder(config)

    def forward(self, batch: PackedBatch, causal: bool) -> Tensor:
        """Hidden states [T, D] of every token, after the final norm."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rotations = {g: Rotation.at(batch.position_ids, head_dim, rope_theta(self.config, g)) for g in (True, False)}
        x = self.model.embeddings(batch.input_ids)
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            arguments = (x, batch, rotations[layer.attn.is_global], causal, self.attention)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x = layer(*arguments)
        hidden: Tensor = self.model.final_norm(x)
        return hidden

    @property
    def output_weight(self) -> Tensor:
        """[V, D], the decoder's: the embedding matrix itself where they are tied."""
        tied = self.config.tie_word_embeddings
        weight: Tensor = self.model.embeddings.tok_embeddings.weight if tied else self.decoder.weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] of any rows of hidden states [.., D]: for inference; training never holds them whole."""
        return F.linear(self.head(hidden), self.output_weight, self.decoder.bias)

    # --- folders in Hugging Face's format ---

    @classmethod
    def random(cls, config: ModernBertConfig, seed: int, attention: str = "auto") -> "Encoder":
        """Fresh float32 weights as transformers initialises ModernBERT: truncated normal, smaller on outputs with depth."""
        encoder = cls(config, attention)
        for name in dict(encoder.named_parameters()):
            encoder._initialise(name, seed)
        return encoder

    @classmethod
    def from_pretrained(cls, folder: str | Path, attention: str = "auto", revision: str | None = None) -> "Encoder":
        """A Hugging Face ModernBERT folder (or hub name) in float32; weights are matched strictly.

        A bare encoder without its prediction head is accepted: the head is initialised, and `initialised` names it.
        Anything else missing, and anything unexpected or of another shape, is a Failure that lists it.
        """
        path = _local(folder, revision)
        config = read_config(path)
        encoder = cls(config, attention)
        found = _read_weights(path)
        if not any(name.startswith("model.") for name in found):  # saved from the bare ModernBertModel
            found = {f"model.{name}": tensor for name, tensor in found.items()}
        if config.tie_word_embeddings and TIED[1] in found:
            copy = found.pop(TIED[1])
            if TIED[0] in found and not torch.equal(copy, found[TIED[0]]):
                raise Failure(f"{folder}: config ties the decoder to the embeddings, but their weights differ")
        wanted = dict(encoder.named_parameters())
        missing = [name for name in wanted if name not in found]
        unexpected = [name for name in found if name not in wanted]
        mismatched = [n for n, t in found.items() if n in wanted and t.shape != wanted[n].shape]
        headless = [name for name in missing if name.startswith(("head.", "decoder."))]
        if unexpected or mismatched or len(missing) > len(headless):
            parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
            listed = "; ".join(f"{what}: {_some(names)}" for what, names in parts if names)
            raise Failure(f"{folder} does not hold a ModernBERT masked language model ({listed})")
        with torch.no_grad():
            for name, tensor in found.items():
                wanted[name].copy_(tensor)
        for name in headless:
            encoder._initialise(name, seed=0)
        encoder.initialised = headless
        return encoder

    @torch.no_grad()
    def _initialise(self, name: str, seed: int) -> None:
        """One weight, from a generator of its own: independent of the order and of the other weights."""
        parameter = dict(self.named_parameters())[name]
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        std = self.config.initializer_range
        if name.endswith(("Wo.weight", "dense.weight", "decoder.weight")):
            std /= math.sqrt(2.0 * self.config.num_hidden_layers)
        cut = std * (self.config.initializer_cutoff_factor or 3)
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        own = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        nn.init.trunc_normal_(parameter, 0.0, std, -cut, cut, generator=own)

    def save_pretrained(self, folder: str | Path) -> None:
        """config.json and model.safetensors, float32, under Hugging Face's names (a tied decoder is stored once)."""
        save(self.config, {n: p.detach() for n, p in self.named_parameters()}, Path(folder))


def save(config: ModernBertConfig, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a Hugging Face folder. Failure on a weight that is not finite."""
    broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise Failure(f"weights are not finite and will not be exported: {_some(broken)}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to("cpu", torch.float32).contiguous() for name, tensor in weights.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    write_config(config, folder)


def write_config(config: ModernBertConfig, folder: Path) -> None:
    config = type(config).from_dict(config.to_dict())
    config._name_or_path = ""  # may be a path of this machine
    config.architectures = ["ModernBertForMaskedLM"]
    config.dtype = torch.float32
    config.save_pretrained(folder)


def read_config(folder: str | Path) -> ModernBertConfig:
    """The config of a local folder; Failure where it is not ModernBERT's."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise Failure(f"{folder} has no config.json: it is not a Hugging Face model folder")
    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, KeyError):
        raise Failure(f"{path} cannot be read as a model config") from None
    if not isinstance(config, ModernBertConfig):
        raise Failure(f"{folder} holds a model of type '{config.model_type}'; this version trains ModernBERT")
    return config


def _refuse_what_we_lack(config: ModernBertConfig) -> None:
    for name in ("attention_dropout", "mlp_dropout", "embedding_dropout"):
        if getattr(config, name, 0.0):
            raise Failure(f"config.{name} is {getattr(config, name)}: dropout is not supported, set it to 0")
    if config.hidden_size % config.num_attention_heads or (config.hidden_size // config.num_attention_heads) % 2:
        raise Failure("config.hidden_size must be an even multiple of config.num_attention_heads")


def _local(folder: str | Path, revision: str | None) -> Path:
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


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one safetensors file or from the files that its index names."""
    index = folder / f"{WEIGHTS}.index.json"
    if index.is_file():
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def from_config_fields(fields: dict[str, Any]) -> ModernBertConfig:
    """ModernBertConfig from a recipe's model.config; Failure names a field that it does not have."""
    known = ModernBertConfig()
    for name in fields:
        if not hasattr(known, name):
            raise Failure(f"model.config: ModernBertConfig has no field '{name}'")
    try:
        return ModernBertConfig(**fields)
    except (TypeError, ValueError) as error:
        raise Failure(f"model.config: {error}") from None


def with_backend(encoder: Encoder, device: torch.device) -> Encoder:
    """Check that the chosen attention back end runs on `device`, then move there."""
    available(encoder.attention, device)
    return encoder.to(device)
