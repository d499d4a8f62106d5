"""Processes that carry out tasks. A task is a callable; it and its result can be pickled.

Each worker has one pipe and at most one task, so that nothing piles up in memory. Workers start one by one as tasks come. Each is
a fresh process, for a fork of a process with threads can hang, and multiprocessing's "spawn" runs the caller's script again. This
process carries out a single task itself, since a small corpus is done before a worker has started. A worker dies with its
parent, even when the parent is killed.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from command_line import Failure, describe

Result = TypeVar("Result")
Task = Callable[[], Result]
PR_SET_PDEATHSIG = 1


class WorkerFailure(Failure):
    """An unexpected error in a worker. The worker wrote the message; `frames` are for --traceback."""

    def __init__(self, message: str, frames: str) -> None:
        super().__init__(message, frames)
        self.message, self.frames = message, frames

    def __str__(self) -> str:
        return self.message


def in_processes(tasks: Iterable[Task[Result]], workers: int) -> Iterator[Result]:
    """The results of all tasks, as they come. At most `workers` tasks run at a time.

    An exception of a task is raised here: a Failure as it is, any other as a WorkerFailure.
    """
    coming = iter(tasks)
    ahead = list(islice(coming, 2))
    if len(ahead) < 2 or workers == 1:
        for task in ahead:
            yield task()
        for task in coming:
            yield task()
        return
    pool = _Pool()
    try:
        more = True
        while more or pool.busy:
            if more and not ahead:
                ahead = list(islice(coming, 1))
                more = bool(ahead)
            if ahead and pool.take(ahead[0], workers):
                ahead.pop(0)
            elif pool.busy:
                yield from pool.results()
    finally:
        pool.close()


class _Pool:
    def __init__(self) -> None:
        self.idle: list[Connection] = []
        self.busy: dict[Connection, Any] = {}
        self.processes: dict[Connection, subprocess.Popen[bytes]] = {}

    def take(self, task: Task[Any], workers: int) -> bool:
        """Give the task to an idle or a new worker. Returns False if all are busy."""
        if not self.idle:
            if len(self.processes) == workers:
                return False
            self._start()
        connection = self.idle.pop()
        try:
            connection.send(task)
        except OSError:
            raise self._died(connection) from None
        self.busy[connection] = task
        return True

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Ctrl-C is the builder's to answer, also while the worker imports.
            code = (
                "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
                f"from data_prep.building.worker_processes import work; work({theirs.fileno()}, {os.getpid()})"
            )
            here = str(Path(__file__).resolve().parents[2])
            path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},  # a worker uses one core
            )
        connection = Connection(ours.detach())
        self.processes[connection] = process
        self.idle.append(connection)

    def results(self) -> Iterator[Any]:
        """Wait for at least one result, and give those that are there."""
        for ready in wait(list(self.busy)):
            assert isinstance(ready, Connection)
            try:
                done, value = ready.recv()
            except (EOFError, OSError):
                raise self._died(ready) from None
            del self.busy[ready]
            self.idle.append(ready)
            if not done:
                raise value
            yield value

    def _died(self, connection: Connection) -> Failure:
        process = self.processes[connection]
        process.kill()  # its end of the pipe is gone, and nearly always the process too
        code = process.wait()
        why = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return Failure(f"a worker process ended {why}, perhaps for want of memory: try fewer --workers")

    def close(self) -> None:
        for connection, process in self.processes.items():
            process.kill()  # its files are complete or absent; before its pipe closes, for it would complain of that
            process.wait()
            connection.close()


def work(pipe: int, parent: int) -> None:
    """Carry out tasks until the pipe closes: a worker's life."""
    connection = Connection(pipe)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends its workers
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before that call
            return
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        answer: tuple[bool, Any]
        try:
            answer = True, task()
        except Failure as error:
            answer = False, error
        except Exception as error:
            answer = False, WorkerFailure(describe(error), "".join(traceback.format_tb(error.__traceback__)))
        try:
            connection.send(answer)
        except OSError:  # nobody waits for the answer any more
            return
