"""Detects what goes wrong while training (hangs, loss spikes, too little memory, a lost rank) and says it in one line."""

import faulthandler
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from types import TracebackType

import torch

from command_line import Failure, Passing
from pipeline.recipe import Recipe

HISTORY = 100  # recent steps from which the median step time and spikes are judged


class Watchdog:
    """Ends the process when nothing has happened for too long, and writes the stacks of its threads to stderr.

    Every rank has one. When one rank hangs, the others wait for it in a collective and time out with it: the log then
    holds the stacks of all ranks and shows which one was elsewhere. Stacks show frames only, no values.
    """

    def __init__(self, medians: int, seconds: float, rank: int) -> None:
        self._medians, self._seconds, self._rank = medians, seconds, rank
        self._steps: deque[float] = deque(maxlen=HISTORY)
        self._last = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.alive()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def alive(self) -> None:
        """Note that the process made progress outside a step: in a validation or a save."""
        self._last = time.monotonic()

    def step(self, seconds: float) -> None:
        self._steps.append(seconds)
        self.alive()

    @property
    def limit(self) -> float:
        """Seconds of silence that count as a hang."""
        median = statistics.median(self._steps) if self._steps else 0.0
        return max(self._seconds, self._medians * median)

    def _watch(self) -> None:
        while not self._ended.wait(min(5.0, self._seconds / 4)):
            silent = time.monotonic() - self._last
            if silent > self.limit:
                print(
                    f"error: rank {self._rank} has hung for {silent:.0f} s (faults.hang_seconds); its stacks:",
                    file=sys.stderr,
                )
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.flush()
                os._exit(1)


class Spikes:
    """Finds losses more than 6 standard deviations and 10 % above the mean of up to 100 steps before."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=HISTORY)

    def __call__(self, loss: float) -> bool:
        """Returns whether `loss` is a spike; a spike does not enter the mean."""
        if not math.isfinite(loss):
            return False
        if len(self._losses) >= 20:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > mean + 6 * deviation and loss > 1.1 * mean:
                return True
        self._losses.append(loss)
        return False


def explain(error: BaseException, recipe: Recipe) -> Failure | None:
    """Returns a Failure with a remedy for an error of torch's that we know, or None."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return Failure(
            f"out of memory: lower batch.rows_per_device (now {recipe.batch.rows_per_device}), which changes no number, "
            "or set engine.activation_checkpointing: true"
        )
    if isinstance(error, RuntimeError) and any(sign in text for sign in LOST):
        return Passing("another rank ended or cannot be reached; its own message says why")
    return None


# How gloo and NCCL say that a peer is gone.
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
    "timed out",
    "Timed out",
)
