"""One run of a recipe: its folder, its parts, its phases step by step, and the handling of faults.

It may import every other room of `pipeline`, and `data_prep.rows`; the commands of `pipeline` import it.
It offers the classes and functions that `train.py` is written in, and the checks that `plan.py` makes before a run.
"""

from pipeline.run.checks import check_fit, check_tokenizer, compatible, open_streams, random_config
from pipeline.run.faults import explain
from pipeline.run.folder import RunFolder, last_checkpoint
from pipeline.run.node_cache import JobCache, look_ahead
from pipeline.run.parts import Parts, assemble
from pipeline.run.phase_run import PhaseRun
from pipeline.run.phase_start import enter_phase
from pipeline.run.stop_requests import SCRIPTS, StopRequests

__all__ = [
    "SCRIPTS",
    "JobCache",
    "Parts",
    "PhaseRun",
    "RunFolder",
    "StopRequests",
    "assemble",
    "check_fit",
    "check_tokenizer",
    "compatible",
    "enter_phase",
    "explain",
    "last_checkpoint",
    "look_ahead",
    "open_streams",
    "random_config",
]
