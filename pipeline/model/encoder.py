"""ModernBERT's architecture (arXiv 2412.13663) over packed documents, with Hugging Face's weight names and config.

It is our own module, not a patch of transformers': the causal mask is an argument of the call down to the kernel, the
model holds no mode. Shapes: T packed tokens, D hidden size, N heads, H head dimension, V vocabulary, L labelled positions.
"""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import ModernBertConfig
from transformers.activations import ACT2FN

from command_line import Failure
from pipeline.model.attention.attend import BACKENDS, attend, available, check_boundaries
from pipeline.model.batch import PackedBatch
from pipeline.model.dropout import dropout, layer_keys
from pipeline.model.hugging_face import (
    OF_VOCABULARY,
    REFUSED,
    TIED,
    half_window,
    has_dropout,
    is_global,
    local_folder,
    rates,
    read_config,
    read_weights,
    rope_theta,
    save,
    some,
    supported,
)


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


def turn(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """q and k of qkv [T, 3D] turned and v as it is, as [T, 3, N, H]: computed in float32, returned in qkv's dtype.

    Overwrites qkv, except while it is being compiled.
    """
    if not torch.compiler.is_compiling():
        turned: Tensor = _Turn.apply(qkv, cos, sin, heads)
        return turned.view(len(qkv), 3, heads, -1)
    both, v = qkv.view(len(qkv), 3, heads, -1).split((2, 1), dim=1)
    first, second = both.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(v.dtype), v], 1)


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
        grad = grad.contiguous()
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
    def __init__(self, config: ModernBertConfig, rows: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(rows, config.hidden_size)
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
        self.half_window = half_window(config, layer)
        self.Wqkv = nn.Linear(size, 3 * size, bias=config.attention_bias)
        self.Wo = nn.Linear(size, size, bias=config.attention_bias)


class MLP(nn.Module):
    def __init__(self, config: ModernBertConfig) -> None:
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
    def __init__(self, config: ModernBertConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if layer else nn.Identity()  # layer 0 follows the embeddings' norm
        self.attn = Attention(config, layer)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, batch: PackedBatch, rotation: Rotation, causal: bool, backend: str, keys: Tensor | None
    ) -> Tensor:
        """`before` and `after` are tensors only, so that they can be compiled; boundaries and masks stay between them."""
        q, k, v = self.before(x, rotation.cos, rotation.sin).unbind(1)
        boundaries = (batch.cu_seqlens, batch.max_seqlen)
        context = attend(q, k, v, *boundaries, causal=causal, half_window=self.attn.half_window, backend=backend)
        return self.after(x, context, keys)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, D] to turned queries, turned keys and values [T, 3, N, H]."""
        return turn(self.attn.Wqkv(self.attn_norm(x)), cos, sin, self.attn.heads)

    def after(self, x: Tensor, context: Tensor, keys: Tensor | None) -> Tensor:
        """keys: [T] int64, of dropout (see `dropout.layer_keys`); None: without."""
        x = x + self.attn.Wo(context.flatten(1))
        out: Tensor = x + self.mlp(self.mlp_norm(x), keys)
        return out


class Trunk(nn.Module):
    def __init__(self, config: ModernBertConfig, rows: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(config, rows)
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

    def __init__(self, config: ModernBertConfig, rows: int) -> None:
        super().__init__()
        if not config.tie_word_embeddings:
            self.weight = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(rows)) if config.decoder_bias else None


class Encoder(nn.Module):
    """`encoder(batch, causal=...)` gives hidden states [T, D]; `encoder.logits(hidden)` gives [.., V].

    With `vocab_multiple` the weights of the vocabulary have more rows than V, which suits some kernels. The rows added are
    zero, are never predicted (their logits count as minus infinity) and get no gradient, so that the loss and all else
    are those of the unpadded model; a saved folder lacks them.
    """

    def __init__(self, config: ModernBertConfig, attention: str = "auto", vocab_multiple: int | None = None) -> None:
        super().__init__()
        self.config = supported(config)
        if attention not in ("auto", *BACKENDS):
            raise ValueError(f"attention is {attention!r}; it must be auto, {', '.join(BACKENDS)}")
        self.attention = attention
        self.activation_checkpointing = False
        self.fill_to: int | None = None  # tokens of a batch, with padding documents: see `compile_blocks`
        self.initialised: list[str] = []  # weights that the loaded folder lacked
        rows = math.ceil(config.vocab_size / (vocab_multiple or 1)) * (vocab_multiple or 1)
        self.model = Trunk(config, rows)
        self.head = Head(config)
        self.decoder = Decoder(config, rows)

    def forward(self, batch: PackedBatch, causal: bool) -> Tensor:
        """Hidden states [T, D] of every token, after the final norm."""
        tokens = batch.tokens
        if self.fill_to is not None:
            batch = batch.filled(self.fill_to)
        check_boundaries(batch.cu_seqlens, batch.tokens, batch.max_seqlen)
        head_dim = self.config.hidden_size // self.config.num_attention_heads
        rotations = {g: Rotation.at(batch.position_ids, head_dim, rope_theta(self.config, g)) for g in (True, False)}
        x = self.model.embeddings(batch.input_ids)
        keys = self._dropout_keys(batch)
        if keys is not None and self.config.embedding_dropout:
            x = dropout(x, layer_keys(keys, 0), self.config.embedding_dropout)
        for number, layer in enumerate(self.model.layers, 1):
            assert isinstance(layer, Layer)
            own = None if keys is None else layer_keys(keys, number)
            arguments = (x, batch, rotations[layer.attn.is_global], causal, self.attention, own)
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(*arguments)
        hidden: Tensor = self.model.final_norm(x)
        return hidden[:tokens]

    def _dropout_keys(self, batch: PackedBatch) -> Tensor | None:
        """None: no dropout here. Failure rather than training in silence without the dropout that the config has."""
        if not self.training or not has_dropout(self.config):
            return None
        if batch.dropout_keys is None:
            raise Failure(REFUSED.format(rates=rates(self.config)))
        return batch.dropout_keys

    def compile_blocks(self, fill_to: int | None = None) -> None:
        """torch.compile each layer on both sides of its attention; all layers of a kind share their compiled code.

        `fill_to`: tokens that every batch is filled up to with padding documents, for static shapes; None: any number of
        tokens with one dynamic compilation. Number and lengths of documents never reach compiled code.
        """
        self.fill_to = fill_to
        for layer in self.model.layers:
            for part in ("before", "after"):
                setattr(layer, part, torch.compile(getattr(layer, part), dynamic=fill_to is None))

    @property
    def output_weight(self) -> Tensor:
        """[V, D], the decoder's: the embedding matrix itself where they are tied."""
        tied = self.config.tie_word_embeddings
        weight: Tensor = self.model.embeddings.tok_embeddings.weight if tied else self.decoder.weight
        return weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [.., V] of any rows of hidden states [.., D]: for inference; training never holds them whole."""
        size, bias = self.config.vocab_size, self.decoder.bias
        return F.linear(self.head(hidden), self.output_weight[:size], None if bias is None else bias[:size])

    # --- folders in Hugging Face's format ---

    @classmethod
    def random(
        cls, config: ModernBertConfig, seed: int, attention: str = "auto", vocab_multiple: int | None = None
    ) -> "Encoder":
        """Fresh float32 weights as transformers initialises ModernBERT: truncated normal, smaller on outputs with depth."""
        encoder = cls(config, attention, vocab_multiple)
        for name in dict(encoder.named_parameters()):
            encoder._initialise(name, seed)
        return encoder

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        attention: str = "auto",
        revision: str | None = None,
        vocab_multiple: int | None = None,
    ) -> "Encoder":
        """A Hugging Face ModernBERT folder (or hub name) in float32; weights are matched strictly.

        A bare encoder without its prediction head is accepted: the head is initialised, and `initialised` names it.
        Anything else missing, and anything unexpected or of another shape, is a Failure that lists it.
        """
        path = local_folder(folder, revision)
        config = read_config(path)
        encoder = cls(config, attention, vocab_multiple)
        found = read_weights(path)
        if not any(name.startswith("model.") for name in found):  # saved from the bare ModernBertModel
            found = {f"model.{name}": tensor for name, tensor in found.items()}
        if config.tie_word_embeddings and TIED[1] in found:
            copy = found.pop(TIED[1])
            if not torch.equal(copy, found.setdefault(TIED[0], copy)):  # either name may be the one that was stored
                raise Failure(f"{folder}: config ties the decoder to the embeddings, but their weights differ")
        wanted = {name: encoder._unpadded(name, parameter) for name, parameter in encoder.named_parameters()}
        missing = [name for name in wanted if name not in found]
        unexpected = [name for name in found if name not in wanted]
        mismatched = [n for n, t in found.items() if n in wanted and t.shape != wanted[n].shape]
        headless = [name for name in missing if name.startswith(("head.", "decoder."))]
        if unexpected or mismatched or len(missing) > len(headless):
            parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
            listed = "; ".join(f"{what}: {some(names)}" for what, names in parts if names)
            raise Failure(f"{folder} does not hold a ModernBERT masked language model ({listed})")
        with torch.no_grad():
            for name in OF_VOCABULARY:
                if name in wanted:
                    encoder.get_parameter(name).zero_()
            for name, tensor in found.items():
                wanted[name].copy_(tensor)
        for name in headless:
            encoder._initialise(name, seed=0)
        encoder.initialised = headless
        return encoder

    def _unpadded(self, name: str, parameter: Tensor) -> Tensor:
        return parameter[: self.config.vocab_size] if name in OF_VOCABULARY else parameter

    @torch.no_grad()
    def _initialise(self, name: str, seed: int) -> None:
        """One weight, from a generator of its own: independent of the order and of the other weights."""
        whole = self.get_parameter(name)
        whole.zero_()
        parameter = self._unpadded(name, whole)
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


def with_backend(encoder: Encoder, device: torch.device, precision: str) -> Encoder:
    """Check that the chosen attention back end runs on `device` in `precision`, then move there."""
    head_dim = encoder.config.hidden_size // encoder.config.num_attention_heads
    available(encoder.attention, device, head_dim, precision)
    return encoder.to(device)
