"""Runs a command: parses its arguments, and turns every exception into one line and an exit code."""

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from command_line.failures import Failure, UsageError, describe


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error as one plain line with exit code 2, without printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows the usage)")


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """Call `main` with the arguments except `--traceback`; turn any exception into one line and its exit code."""
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
            print(
                "".join(frames), getattr(error, "frames", ""), sep="", file=sys.stderr, end=""
            )  # and a worker's frames
        print(f"error: {describe(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, Failure) else 1
