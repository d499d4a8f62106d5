"""What differs between families of encoders: the encoder, the engine and the plan ask a `Family` and know no other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Config = Any  # transformers' config of the family; its two majors name the base class differently


@dataclass(frozen=True)
class Family:
    """One family. Modules and weights go by their names in Hugging Face's masked language model.

    The trunk's `forward(batch, causal, backend, keys, recompute)` gives hidden states [T, D]. `backend` is a name that
    `attend` knows, `keys` [T] are those of dropout or None, `recompute` asks for activation checkpointing. Its `layers` have
    `before` and `after`, functions of tensors on both sides of the attention, which may be compiled.
    """

    title: str
    config: type[Any]  # transformers' class
    architecture: str  # transformers' masked language model, for config.json
    supported: Callable[[Config], Config]  # the config, completed; Failure names a field that cannot be followed
    modules: Callable[[Config, int], dict[str, nn.Module]]  # of a config and a number of vocabulary rows, untrained
    trunk: str  # the module that gives hidden states
    head: str  # the module between them and the output matrix
    embeddings: str  # the weight [V, D] of the ids
    output: str  # the weight [V, D] of the logits, where it is not tied to the embeddings
    bias: str  # [V], of the logits, where the config has one
    dropout: tuple[str, ...]  # fields of the config with rates that the encoder can draw
    of_one_major: tuple[str, ...]  # fields that only one major of transformers has: a recipe may set either
    half_window: Callable[[Config, int], int | None]  # of a layer, as `attend` takes it
    layer_weights: Callable[[Config], int]  # numbers in the matrices of a layer, which each token is multiplied with
    spread: Callable[[Config, str], tuple[float, float]]  # of a fresh matrix: standard deviation and where it is cut

    @property
    def of_vocabulary(self) -> tuple[str, str, str]:
        """The weights with a row for each id."""
        return self.embeddings, self.output, self.bias

    def rates(self, config: Config) -> str:
        """Dropout rates above 0, for a message; empty where there are none."""
        return " and ".join(
            f"config.{name} is {getattr(config, name)}" for name in self.dropout if getattr(config, name)
        )
