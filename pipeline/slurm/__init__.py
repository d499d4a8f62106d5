"""What a SLURM job asks before and after its ranks run; `launch/` calls these modules as commands.

It imports `command_line` alone, no torch: a batch script asks and has its answer at once.
It offers the variable by which a job says that it has cleared an old request to stop.
"""

from pipeline.slurm.next_attempt import STOP_CLEARED

__all__ = ["STOP_CLEARED"]
