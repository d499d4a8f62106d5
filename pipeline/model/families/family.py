"""What differs between families of encoders; the encoder, the engine and the plan ask only a `Family` about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Config = Any  # transformers' config of the family; transformers 4 and 5 name the base class differently


@dataclass(frozen=True)
class Family:
    """One family. Modules and weights go by their names in Hugging Face's masked language model.

    The trunk's `forward(batch, causal, backend, keys, recompute)` returns hidden states [T, D]. `backend` is a name
    that `attend` knows, `keys` [T] are the dropout keys or None, `recompute` asks for activation checkpointing. Its
    `layers` have `before` and `after`, functions of tensors before and after the attention, which may be compiled.
    """

    title: str
    config: type[Any]  # transformers' class
    architecture: str  # transformers' masked language model, for config.json
    supported: Callable[[Config], Config]  # returns the completed config; Failure names an unsupported field
    modules: Callable[[Config, int], dict[str, nn.Module]]  # untrained, for a config and a number of vocabulary rows
    trunk: str  # the module that gives hidden states
    head: str  # the module between them and the output matrix
    embeddings: str  # the weight [V, D] of the ids
    output: str  # the weight [V, D] of the logits, where it is not tied to the embeddings
    bias: str  # [V], of the logits, where the config has one
    dropout: tuple[str, ...]  # config fields with dropout rates that the encoder supports
    of_one_major: tuple[str, ...]  # fields that only transformers 4 or only 5 has: a recipe may set either
    half_window: Callable[[Config, int], int | None]  # of a layer, as `attend` takes it
    layer_weights: Callable[[Config], int]  # numbers in the matrices of a layer; each token is multiplied with all
    spread: Callable[[Config, str], tuple[float, float]]  # of a new matrix: standard deviation and cutoff

    @property
    def of_vocabulary(self) -> tuple[str, str, str]:
        """Names of the weights that have a row for each id."""
        return self.embeddings, self.output, self.bias

    def rates(self, config: Config) -> str:
        """Returns the dropout rates above 0 as text for a message; empty where there are none."""
        return " and ".join(
            f"config.{name} is {getattr(config, name)}" for name in self.dropout if getattr(config, name)
        )
