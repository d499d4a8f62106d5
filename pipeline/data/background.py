"""Runs work in a thread, and waits for it until a request to stop comes."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
POLL = 0.5  # seconds between two checks for a request to stop, while waiting for rows


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, because a read that waits out an outage must not keep the process from ending."""
    future: Future[T] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=carry_out, name="loader", daemon=True).start()
    return future


def result_unless(stopping: Callable[[], bool], future: Future[T]) -> T | None:
    """Wait for the future and return its result; None where `stopping`, asked every POLL seconds, says yes first."""
    while not wait([future], POLL).done:
        if stopping():
            return None
    return future.result()
