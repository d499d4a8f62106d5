"""The encoder: any family's modules over packed documents, with Hugging Face's weight names and config.

It is our own module, not a patch of transformers'. `causal` is an argument of each call, down to the kernel; the model
holds no mode. Shapes: T packed tokens, D hidden size, V vocabulary.
"""

import hashlib
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from command_line import Failure
from pipeline.model.attention import BACKENDS, available, check_boundaries
from pipeline.model.batch import PackedBatch
from pipeline.model.families import Config, family_of
from pipeline.model.hugging_face import local_folder, read_config, read_weights, some, write_model

REFUSED = "{rates}: dropout is refused unless it is asked for; set it to 0, or model.dropout: true to train with it"


class Encoder(nn.Module):
    """`encoder(batch, causal=...)` gives hidden states [T, D]; `encoder.logits(hidden)` gives [.., V].

    With `vocab_multiple` the vocabulary's weights are padded to more than V rows, which suits some kernels. The padding
    rows are zero, are never predicted (their logits count as minus infinity) and get no gradient, so that the loss and
    all else are those of the unpadded model. A saved folder omits them.
    """

    def __init__(self, config: Config, attention: str = "auto", vocab_multiple: int | None = None) -> None:
        super().__init__()
        self.family = family_of(config)
        self.config = self.family.supported(config)
        if attention not in ("auto", *BACKENDS):
            raise ValueError(f"attention is {attention!r}; it must be auto, {', '.join(BACKENDS)}")
        self.attention = attention
        self.activation_checkpointing = False
        self.fill_to: int | None = None  # tokens to which padding documents fill a batch: see `compile_blocks`
        self.initialised: list[str] = []  # weights that the loaded folder lacked
        rows = math.ceil(config.vocab_size / (vocab_multiple or 1)) * (vocab_multiple or 1)
        for name, module in self.family.modules(self.config, rows).items():
            self.add_module(name, module)

    def forward(self, batch: PackedBatch, causal: bool) -> Tensor:
        """Hidden states [T, D] of every token, after the final norm."""
        tokens = batch.tokens
        if self.fill_to is not None:
            batch = batch.filled(self.fill_to)
        check_boundaries(batch.cu_seqlens, batch.tokens, batch.max_seqlen)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        trunk = self.get_submodule(self.family.trunk)
        hidden: Tensor = trunk(batch, causal, self.attention, self._dropout_keys(batch), recompute)
        return hidden[:tokens]

    def _dropout_keys(self, batch: PackedBatch) -> Tensor | None:
        """Returns the batch's dropout keys, or None without dropout; Failure where the config has dropout but no keys."""
        rates = self.family.rates(self.config)
        if not self.training or not rates:
            return None
        if batch.dropout_keys is None:
            raise Failure(REFUSED.format(rates=rates))
        return batch.dropout_keys

    def compile_blocks(self, fill_to: int | None = None) -> None:
        """torch.compile each layer on both sides of its attention; all layers of a kind share their compiled code.

        `fill_to`: padding documents fill every batch up to this many tokens, for static shapes. None: one dynamic
        compilation serves any number of tokens. The number and lengths of documents never reach compiled code.
        """
        self.fill_to = fill_to
        for layer in self.layers:
            for part in ("before", "after"):
                setattr(layer, part, torch.compile(getattr(layer, part), dynamic=fill_to is None))

    @property
    def layers(self) -> nn.ModuleList:
        layers = self.get_submodule(self.family.trunk).layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def output_weight(self) -> nn.Parameter:
        """Weight [V, D] of the logits; the embedding matrix itself where they are tied."""
        return self.get_parameter(self.family.embeddings if self.config.tie_word_embeddings else self.family.output)

    @property
    def output_bias(self) -> nn.Parameter | None:
        """Bias [V] of the logits, where the config has one."""
        module, _, name = self.family.bias.rpartition(".")
        bias: nn.Parameter | None = getattr(self.get_submodule(module), name)
        return bias

    def before_logits(self, hidden: Tensor) -> Tensor:
        """Apply the prediction head to hidden states [.., D]; returns the input [.., D] of the output matrix."""
        out: Tensor = self.get_submodule(self.family.head)(hidden)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits [.., V] of hidden states [.., D], for inference; training never holds all logits at once."""
        size, bias = self.config.vocab_size, self.output_bias
        return F.linear(self.before_logits(hidden), self.output_weight[:size], None if bias is None else bias[:size])

    # --- folders in Hugging Face's format ---

    @classmethod
    def random(cls, config: Config, seed: int, attention: str = "auto", vocab_multiple: int | None = None) -> "Encoder":
        """Returns an encoder with random float32 weights, distributed as transformers initialises the family."""
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
        """Load a Hugging Face folder (or hub name) of a family we know, in float32; weights are matched strictly.

        A bare encoder without its prediction head is accepted: the head is initialised, and `initialised` names it.
        A Failure lists any other weight that is missing, and any that is unexpected or of another shape.
        """
        path = local_folder(folder, revision)
        config = read_config(path)
        encoder = cls(config, attention, vocab_multiple)
        family, found = encoder.family, read_weights(path)
        trunk = f"{family.trunk}."
        if not any(name.startswith(trunk) for name in found):  # saved from the bare model, without its head
            found = {trunk + name: tensor for name, tensor in found.items()}
        if config.tie_word_embeddings and family.output in found:
            copy = found.pop(family.output)
            if not torch.equal(copy, found.setdefault(family.embeddings, copy)):  # either name may have been stored
                raise Failure(f"{folder}: config ties the decoder to the embeddings, but their weights differ")
        wanted = {name: encoder._unpadded(name, parameter) for name, parameter in encoder.named_parameters()}
        missing = [name for name in wanted if name not in found]
        unexpected = [name for name in found if name not in wanted]
        mismatched = [n for n, t in found.items() if n in wanted and t.shape != wanted[n].shape]
        headless = [name for name in missing if not name.startswith(trunk)]
        if unexpected or mismatched or len(missing) > len(headless):
            parts = (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
            listed = "; ".join(f"{what}: {some(names)}" for what, names in parts if names)
            raise Failure(f"{folder} does not hold a {family.title} masked language model ({listed})")
        with torch.no_grad():
            for name in family.of_vocabulary:
                if name in wanted:
                    encoder.get_parameter(name).zero_()
            for name, tensor in found.items():
                wanted[name].copy_(tensor)
        for name in headless:
            encoder._initialise(name, seed=0)
        encoder.initialised = headless
        return encoder

    def _unpadded(self, name: str, parameter: Tensor) -> Tensor:
        return parameter[: self.config.vocab_size] if name in self.family.of_vocabulary else parameter

    @torch.no_grad()
    def _initialise(self, name: str, seed: int) -> None:
        """Initialise one weight from a generator of its own, independent of the order and of the other weights."""
        whole = self.get_parameter(name)
        whole.zero_()
        parameter = self._unpadded(name, whole)
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            return
        std, cut = self.family.spread(self.config, name)
        digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
        own = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        nn.init.trunc_normal_(parameter, 0.0, std, -cut, cut, generator=own)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, float32, under Hugging Face's names (a tied decoder is stored once)."""
        write_model(self.config, {n: p.detach() for n, p in self.named_parameters()}, Path(folder))


def with_backend(encoder: Encoder, device: torch.device, precision: str) -> Encoder:
    """Check that the chosen attention back end runs on `device` in `precision`, then move the encoder there."""
    head_dim = encoder.config.hidden_size // encoder.config.num_attention_heads
    available(encoder.attention, device, head_dim, precision)
    return encoder.to(device)
