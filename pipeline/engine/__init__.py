"""The training step by DeepSpeed, and checkpoints whose format is the same for every ZeRO stage and number of ranks.

It may import the rooms `model`, `ranks` and `recipe`, and `data_prep.rows`.
It offers `Engine`, the process group, the rules for a DeepSpeed file, and checkpoints.
"""

from pipeline.engine.checkpoint import LATEST, Checkpoint, State, latest, retain, save, write_aside
from pipeline.engine.deepspeed_engine import Engine, start_processes
from pipeline.engine.deepspeed_file import accumulation, read_deepspeed_file, resolve_precision

__all__ = [
    "LATEST",
    "Checkpoint",
    "Engine",
    "State",
    "accumulation",
    "latest",
    "read_deepspeed_file",
    "resolve_precision",
    "retain",
    "save",
    "start_processes",
    "write_aside",
]
