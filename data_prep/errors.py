"""How a command fails: one plain line on stderr, and an exit code that a script can rely on.

Exit codes (the same for every command): 0 done; 1 failed; 2 wrong usage or recipe; 75 stopped early on request.

Privacy: users train on patients' notes, and the message of an exception we did not write may quote them (a JSON
decoder quotes the line, a KeyError the key). Only messages of `Failure`, which we wrote ourselves, are ever
printed; of any other exception the type and the place in the code, and with `--traceback` the frames.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

STOPPED_EARLY = 75


class Failure(Exception):
    """Something the user can mend. The message names the file, record number or field, and the remedy; exit code 1."""

    exit_code = 1


class Passing(Failure):
    """A cause that may be gone at another start, such as a lost rank: a SLURM job then queues itself again."""


class UsageError(Failure):
    """A wrong command line or recipe; exit code 2."""

    exit_code = 2


class Parser(argparse.ArgumentParser):
    """argparse prints its usage before the error; our commands promise one plain line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows the usage)")


def describe(error: BaseException) -> str:
    """One line that says what `error` is without quoting anything that may stem from a corpus."""
    if isinstance(error, Failure):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror} (errno {error.errno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{place}; run again with --traceback for the frames"


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call `main` with the arguments, less `--traceback`; turn any exception into one line and its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_frames = "--traceback" in arguments
    arguments = [argument for argument in arguments if argument != "--traceback"]
    try:
        return main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if show_frames:
            frames = traceback.format_tb(error.__traceback__)
            print("".join(frames), getattr(error, "frames", ""), sep="", file=sys.stderr, end="")  # and a worker's
        print(f"error: {describe(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, Failure) else 1
