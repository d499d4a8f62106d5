"""Start ranks of the real trainer for a test, without paying a launch each time.

A launch costs three imports of torch and deepspeed. Here one server process imports them once and forks each rank:
the standard library's forkserver. What a test sees is what a shell would: exit code, stdout, stderr.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "deepspeed", "transformers", "streaming", "pipeline.train", "tests.ranks"])


@dataclass
class Result:
    code: int
    out: str
    err: str


class Ranks:
    """Running ranks: wait for them, signal them, kill them."""

    def __init__(self, work: Callable[..., Any], arguments: tuple[Any, ...], world: int, folder: Path) -> None:
        from pipeline.ranks import free_port

        port = free_port()
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.processes = []
        for rank in range(world):
            place = (rank, world, port, str(folder), os.getcwd(), dict(os.environ))
            process = _context.Process(target=_rank, args=(place, work, arguments), daemon=True)
            process.start()
            self.processes.append(process)

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, number)

    def wait(self, timeout: float = 120) -> list[Result]:
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        if hung:
            self.signal(signal.SIGKILL, hung)
        results = []
        for rank, process in enumerate(self.processes):
            process.join()
            out, err = ((self.folder / f"{rank}.{kind}").read_text() for kind in ("out", "err"))
            results.append(Result(process.exitcode or 0, out, err))
        assert not hung, f"ranks {hung} did not end: {[result.err[-2000:] for result in results]}"
        return results


def _rank(
    place: tuple[int, int, int, str, str, dict[str, str]], work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    rank, world, port, folder, cwd, environment = place
    os.environ.update(environment)  # the server has kept what it was started with
    tempfile.tempdir = None
    for number, kind in ((1, "out"), (2, "err")):
        handle = os.open(f"{folder}/{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.chdir(cwd)
    names = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    import torch

    torch.set_num_threads(1)
    code = work(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _train(argv: list[str]) -> int:
    from command_line import block_stop_signals, run
    from pipeline.train import main

    block_stop_signals()
    return run(main, argv)


def start(world: int, folder: Path, *argv: object) -> Ranks:
    """`pipeline/train.py argv...` on `world` ranks; `folder` takes their output."""
    return Ranks(_train, ([str(word) for word in argv],), world, folder)


def train(world: int, folder: Path, *argv: object, code: int = 0, timeout: float = 180) -> list[Result]:
    """Start, wait, and check that every rank ended with `code`."""
    results = start(world, folder, *argv).wait(timeout)
    assert [result.code for result in results] == [code] * world, [result.err[-3000:] for result in results]
    return results
