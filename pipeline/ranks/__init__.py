"""Who this process is among the ranks, where they meet, and how they agree.

It may import only `command_line`.
It offers `Ranks` and `Agreement`, the device of a rank, and the meeting place for torch.distributed.
"""

from pipeline.ranks.agreement import Agreement, failures, raise_together
from pipeline.ranks.environment import Ranks, device_of, from_environment
from pipeline.ranks.meeting_place import free_port, rendezvous

__all__ = [
    "Agreement",
    "Ranks",
    "device_of",
    "failures",
    "free_port",
    "from_environment",
    "raise_together",
    "rendezvous",
]
