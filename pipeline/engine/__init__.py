"""The training step by DeepSpeed, and its state on disk in a form that no ZeRO stage or number of ranks changes.

It may import the rooms `model`, `ranks` and `recipe`, and `data_prep.rows`.
It offers `Engine`, the process group, what a DeepSpeed file may say, and checkpoints.
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
