"""The signals that ask a command to stop early, which it answers with exit code 75.

They are blocked, not handled. A signal that comes during start-up or a save then waits instead of killing the process,
threads and children inherit the mask, and `signal.sigpending` tells whether one has come. NCCL catches SIGUSR1 itself,
hence SIGUSR2.
"""

import signal

STOP_SIGNALS = {signal.SIGUSR2, signal.SIGTERM}


def block_stop_signals() -> None:
    """Call this before any heavy import, because imports take seconds."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
