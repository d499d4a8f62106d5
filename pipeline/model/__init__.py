"""The encoder over packed documents: families, attention, loss, and Hugging Face folders in and out.

It may import only `command_line`.
It offers `Encoder`, `PackedBatch` and `attend`, on which scripts of others rely; and the loss that training wraps, the
back ends and families by name, and the floating-point operations of a step.
"""

from pipeline.model.attention import BACKENDS, attend, available, describe, reference
from pipeline.model.batch import PackedBatch
from pipeline.model.dropout import token_keys
from pipeline.model.encoder import REFUSED, Encoder, with_backend
from pipeline.model.families import Config, family_of
from pipeline.model.flops import GPU_PEAK, attended_pairs, device_peak, step_flops
from pipeline.model.hugging_face import (
    WEIGHTS,
    from_config_fields,
    local_folder,
    read_config,
    write_config,
    write_model,
)
from pipeline.model.loss import LossModel

__all__ = [
    "BACKENDS",
    "GPU_PEAK",
    "REFUSED",
    "WEIGHTS",
    "Config",
    "Encoder",
    "LossModel",
    "PackedBatch",
    "attend",
    "attended_pairs",
    "available",
    "describe",
    "device_peak",
    "family_of",
    "from_config_fields",
    "local_folder",
    "read_config",
    "reference",
    "step_flops",
    "token_keys",
    "with_backend",
    "write_config",
    "write_model",
]
