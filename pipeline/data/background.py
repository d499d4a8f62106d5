"""Work in a thread, and a wait for it that a request to stop can end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
POLL = 0.5  # seconds between two questions whether to stop, while rows are waited for


def in_background(work: Callable[[], T]) -> Future[T]:
    """`work` in a thread: a daemon, as a read that waits out an outage must not keep the process from ending."""
    future: Future[T] = Future()

    def carry_out() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=carry_out, name="loader", daemon=True).start()
    return future


def result_unless(stopping: Callable[[], bool], future: Future[T]) -> T | None:
    """What the future comes to; None where `stopping` says so before, which is asked while there is nothing yet."""
    while not wait([future], POLL).done:
        if stopping():
            return None
    return future.result()
