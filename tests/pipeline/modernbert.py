"""Small ModernBERT models of every kind, made by transformers, for the tests of our own encoder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import ModernBertConfig, ModernBertForMaskedLM

from pipeline.model import Encoder, PackedBatch

# Around every edge of a window of 64 and of the blocks that the CPU kernels work in.
LENGTHS = (1, 2, 63, 64, 65, 66, 128, 129, 700)
VOCABULARY = 301

torch.set_num_threads(
    1
)  # on tensors this small, and a busy machine, threads wait for each other far longer than they work


def config(**fields: Any) -> ModernBertConfig:
    """4 layers, of which 0 and 3 are global; 4 heads of 16."""
    small = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,  # attention far from uniform: a wrong key must show
        "pad_token_id": 0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
        "reference_compile": False,
    }
    return ModernBertConfig(**(small | fields))


def theirs(of: ModernBertConfig, seed: int = 0, attention: str = "eager") -> ModernBertForMaskedLM:
    """transformers' model with no weight at a value that could hide a mistake (norms of 1, biases of 0)."""
    of._attn_implementation = attention
    torch.manual_seed(seed)
    model = ModernBertForMaskedLM(of).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def ours(model: ModernBertForMaskedLM, folder: Path) -> Encoder:
    model.save_pretrained(folder)
    return Encoder.from_pretrained(folder, attention="sdpa")


def documents(lengths: Sequence[int] = LENGTHS, seed: int = 1, vocabulary: int = VOCABULARY) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocabulary, size=n).tolist() for n in lengths]


def one_by_one(model: torch.nn.Module, docs: Sequence[Sequence[int]]) -> Tensor:
    """transformers' logits of each document alone, one after the other: [T, V]."""
    inputs = [torch.tensor([d]) for d in docs]
    return torch.cat([model(input_ids=i, attention_mask=torch.ones_like(i)).logits[0] for i in inputs])


def labelled(docs: Sequence[Sequence[int]], every: int = 3, seed: int = 2) -> PackedBatch:
    """A batch with every `every`-th position labelled at random."""
    flat = np.concatenate([np.asarray(d) for d in docs])
    positions = np.arange(0, len(flat), every)
    labels = np.random.default_rng(seed).integers(3, VOCABULARY, size=len(positions))
    return PackedBatch.from_arrays(flat, np.array([len(d) for d in docs]), positions, labels)


def error(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value of `b`."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
