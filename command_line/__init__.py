"""What every command shares: argument parsing, failures, exit codes, and the signals that stop it.

It imports no other room and no library, so that a command answers `--help` at once.
It offers `run` and `Parser`, the failures, and the stop signals.
"""

from command_line.command import Parser, run
from command_line.failures import STOPPED_EARLY, Failure, Passing, UsageError, describe
from command_line.signals import STOP_SIGNALS, block_stop_signals

__all__ = [
    "STOPPED_EARLY",
    "STOP_SIGNALS",
    "Failure",
    "Parser",
    "Passing",
    "UsageError",
    "block_stop_signals",
    "describe",
    "run",
]
