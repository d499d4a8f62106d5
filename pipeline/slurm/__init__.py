"""What a SLURM job decides before and after its ranks run; `launch/` asks with `python -m pipeline.slurm`.

It imports only `command_line` and no torch, so that a batch script gets its answer at once.
It offers the name of the environment variable that says that a job has cleared an old request to stop.
"""

from pipeline.slurm.next_attempt import STOP_CLEARED

__all__ = ["STOP_CLEARED"]
