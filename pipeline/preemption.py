"""Requests to stop: a signal that SLURM or a person sends, or the file RUN/STOP. Polled, never handled.

SIGUSR2 and SIGTERM are blocked before anything heavy is imported: a signal that comes during start-up waits instead of
killing the process, loader threads inherit the mask, and `sigpending` says at each step whether one has come. NCCL
catches SIGUSR1 itself, hence SIGUSR2.
"""

import signal

SIGNALS = {signal.SIGUSR2, signal.SIGTERM}


def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def pending() -> bool:
    return bool(signal.sigpending() & SIGNALS)
