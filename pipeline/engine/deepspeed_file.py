"""What DeepSpeed is told by its file, and what follows from the recipe: gradient accumulation and precision."""

import json
from typing import Any

import torch

from command_line import UsageError
from pipeline.ranks import Ranks
from pipeline.recipe import Recipe, deepspeed_file

# Keys that a DeepSpeed file may not set, and the key of the recipe that sets each.
OWNED = {
    "train_batch_size": "batch.rows",
    "train_micro_batch_size_per_gpu": "batch.rows_per_device",
    "gradient_accumulation_steps": "batch",
    "optimizer": "optimizer",
    "scheduler": "phases[].learning_rate",
    "gradient_clipping": "optimizer.clip",
    "bf16": "precision",
    "fp16": "precision",
    "torch_autocast": "precision",
}


def read_deepspeed_file(recipe: Recipe) -> dict[str, Any]:
    """Returns the DeepSpeed file; UsageError unless it sets a ZeRO stage and gradient accumulation in float32."""
    name = recipe.engine.deepspeed
    try:
        config: dict[str, Any] = json.loads(deepspeed_file(recipe).read_text())
    except OSError:
        raise UsageError(f"engine.deepspeed: {name} cannot be read") from None
    except ValueError:
        raise UsageError(f"engine.deepspeed: {name} is not JSON") from None
    for key in config:
        if key in OWNED:
            raise UsageError(f"engine.deepspeed: {name} sets {key}, which the recipe owns: {OWNED[key]}")
    if config.get("zero_optimization", {}).get("stage") not in (0, 1, 2, 3):
        raise UsageError(f"engine.deepspeed: {name} must set zero_optimization.stage to 0, 1, 2 or 3")
    if config.get("data_types", {}).get("grad_accum_dtype") != "fp32":
        # DeepSpeed's default is the model's dtype, in which long accumulation drifts.
        raise UsageError(f'engine.deepspeed: {name} must set data_types.grad_accum_dtype to "fp32"')
    return config


def accumulation(recipe: Recipe, ranks: Ranks) -> int:
    """Returns the micro-batches per step on each rank; UsageError where the global batch does not divide."""
    rows, per_device = recipe.batch.rows, recipe.batch.rows_per_device
    if rows % (per_device * ranks.world_size):
        raise UsageError(
            f"batch: rows {rows} cannot be divided over {ranks.world_size} ranks x rows_per_device {per_device}; "
            "change one of them so that it can"
        )
    return rows // (per_device * ranks.world_size)


def resolve_precision(recipe: Recipe, device: torch.device) -> str:
    if recipe.precision != "auto":
        return recipe.precision
    return "bf16" if device.type == "cuda" else "float32"
