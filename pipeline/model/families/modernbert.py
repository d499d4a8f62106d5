"""ModernBERT (arXiv 2412.13663): its configs of transformers 4 and 5, and its modules under Hugging Face's names.

transformers 4 says `global_attn_every_n_layers`, `global_rope_theta`, `local_rope_theta`; transformers 5 says `layer_types`
and `rope_parameters`. Both kinds are read, and completed so that the fields of both versions agree.

Shapes: T packed tokens, D hidden size, N heads, H head dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ModernBertConfig
from transformers.activations import ACT2FN

from command_line import Failure
from pipeline.model.attention import attend
from pipeline.model.batch import PackedBatch
from pipeline.model.dropout import dropout, layer_keys
from pipeline.model.families.family import Config, Family
from pipeline.model.rotary import Rotation, turn

DROPOUT = ("embedding_dropout", "mlp_dropout")
OF_ONE_MAJOR = (
    *("layer_types", "rope_parameters"),
    *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"),
)
FULL, SLIDING = "full_attention", "sliding_attention"


# --- config -----------------------------------------------------------------------------------------------------------


def is_global(config: Config, layer: int) -> bool:
    """Whether a layer sees the whole document."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        return bool(layer_types[layer] == FULL)
    return bool(layer % config.global_attn_every_n_layers == 0)


def half_window(config: Config, layer: int) -> int | None:
    """Returns a layer's half window for `attend`: None is global; 64 to each side where local_attention is 128."""
    return None if is_global(config, layer) else config.local_attention // 2


def rope_theta(config: Config, of_global: bool) -> float:
    """Returns the RoPE base of global or local layers; ModernBERT has one for each, under both objectives."""
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = (parameters.get(FULL if of_global else SLIDING) or {}).get("rope_theta")
    if theta is not None:
        return float(theta)
    local = config.local_rope_theta
    return float(config.global_rope_theta if of_global or local is None else local)


def _is_default_rope(parameters: Any) -> bool:
    """Whether the parameters of one kind of layer are the default RoPE, with any rope_theta."""
    default = {"rope_type": "default", "partial_rotary_factor": 1.0}
    return not parameters or (
        isinstance(parameters, dict)
        and all(name == "rope_theta" or default.get(name) == value for name, value in parameters.items())
    )


def supported(config: Config) -> Config:
    """Complete and return the config; Failure names a field that our encoder or a version of transformers lacks.

    Completion makes the fields of both versions agree: transformers 4 ignores those of 5 and would build another model.
    """
    if config.attention_dropout:
        raise Failure(
            f"config.attention_dropout is {config.attention_dropout}: attention kernels draw it themselves, "
            "independent of the row stream, so that no run could be repeated; set it to 0 (embedding_dropout and "
            "mlp_dropout are supported)"
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
            "config.layer_types must be full_attention at every n-th layer from layer 0, num_hidden_layers in all"
        )
    thetas = {kind: rope_theta(config, kind == FULL) for kind in (FULL, SLIDING)}
    config.layer_types = types
    config.rope_parameters = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    config.global_attn_every_n_layers = every
    config.global_rope_theta, config.local_rope_theta = thetas[FULL], thetas[SLIDING]
    return config


# --- modules -----------------------------------------------------------------------------------------------------------


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class Embeddings(nn.Module):
    def __init__(self, config: Config, rows: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(rows, config.hidden_size)
        self.norm = _norm(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.norm(self.tok_embeddings(input_ids))
        return embedded


class Attention(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads = config.num_attention_heads
        self.is_global = is_global(config, layer)
        self.half_window = half_window(config, layer)
        self.Wqkv = nn.Linear(size, 3 * size, bias=config.attention_bias)
        self.Wo = nn.Linear(size, size, bias=config.attention_bias)


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.act = ACT2FN[config.hidden_activation]
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.dropout = config.mlp_dropout

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        value, gate = self.Wi(x).chunk(2, dim=-1)
        gated = self.act(value) * gate
        if keys is not None and self.dropout:
            gated = dropout(gated, keys, self.dropout)
        out: Tensor = self.Wo(gated)
        return out


class Layer(nn.Module):
    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()  # layer 0 follows the embeddings' norm
        self.attn = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation, causal: bool, backend: str, keys: Tensor | None
    ) -> Tensor:
        """`before` and `after` take only tensors, so that they can be compiled; boundaries and masks stay between them."""
        q, k, v = self.before(x, rotation.cos, rotation.sin).unbind(1)
        boundaries = (batch.cu_seqlens, batch.max_seqlen)
        context = attend(q, k, v, *boundaries, causal=causal, half_window=self.attn.half_window, backend=backend)
        return self.after(x, context, keys)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns rotated queries, rotated keys and values [T, 3, N, H] for x [T, D]."""
        return turn(self.attn.Wqkv(self.attn_norm(x)), cos, sin, self.attn.heads)

    def after(self, x: Tensor, context: Tensor, keys: Tensor | None) -> Tensor:
        """Add attention output and MLP to x. keys: [T] int64, for dropout (see `dropout.layer_keys`); None: no dropout."""
        x = x + self.attn.Wo(context.flatten(1))
        out: Tensor = x + self.mlp(self.mlp_norm(x), keys)
        return out


class Trunk(nn.Module):
    def __init__(self, config: Config, rows: int) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, rows)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.final_norm = _norm(config)

    def forward(self, batch: PackedBatch, causal: bool, backend: str, keys: Tensor | None, recompute: bool) -> Tensor:
        """Returns hidden states [T, D] of every token, after the final norm; `Family` explains the arguments."""
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rotations = {g: Rotation.at(batch.position_ids, head_dim, rope_theta(self.config, g)) for g in (True, False)}
        x = self.embeddings(batch.input_ids)
        if keys is not None and self.config.embedding_dropout:
            x = dropout(x, layer_keys(keys, 0), self.config.embedding_dropout)
        for number, layer in enumerate(self.layers, 1):
            assert isinstance(layer, Layer)
            own = None if keys is None else layer_keys(keys, number)
            arguments = (x, batch, rotations[layer.attn.is_global], causal, backend, own)
            if recompute:
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        hidden: Tensor = self.final_norm(x)
        return hidden


class Head(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.classifier_bias)
        self.act = ACT2FN[config.classifier_activation]
        self.norm = _norm(config)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.act(self.dense(x)))
        return out


class Decoder(nn.Module):
    """Maps hidden states to logits. Where it is tied, it has no weight: the embedding matrix takes its place."""

    def __init__(self, config: Config, rows: int) -> None:
        super().__init__()
        if not config.tie_word_embeddings:
            self.weight = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(rows)) if config.decoder_bias else None


# --- what the rest of the project asks ----------------------------------------------------------------------------------


def modules(config: Config, rows: int) -> dict[str, nn.Module]:
    return {"model": Trunk(config, rows), "head": Head(config), "decoder": Decoder(config, rows)}


def layer_weights(config: Config) -> int:
    return int(4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size)


def spread(config: Config, name: str) -> tuple[float, float]:
    """Returns standard deviation and cutoff as in transformers: truncated normal, smaller on outputs of deep models."""
    std = config.initializer_range
    if name.endswith(("Wo.weight", "dense.weight", "decoder.weight")):
        std /= math.sqrt(2.0 * config.num_hidden_layers)
    return std, std * (config.initializer_cutoff_factor or 3)


FAMILY = Family(
    title="ModernBERT",
    config=ModernBertConfig,
    architecture="ModernBertForMaskedLM",
    supported=supported,
    modules=modules,
    trunk="model",
    head="head",
    embeddings="model.embeddings.tok_embeddings.weight",
    output="decoder.weight",
    bias="decoder.bias",
    dropout=DROPOUT,
    of_one_major=OF_ONE_MAJOR,
    half_window=half_window,
    layer_weights=layer_weights,
    spread=spread,
)
