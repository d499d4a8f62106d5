"""How a command fails: one plain line on stderr, and an exit code that a script can rely on.

Exit codes (the same for every command): 0 done; 1 failed; 2 wrong usage or recipe; 75 stopped early on request.

Privacy: users train on patients' notes, and an exception that we did not write may quote them in its message (a JSON
decoder quotes the line, a KeyError the key). We print only the messages of `Failure`, which we wrote ourselves. For any
other exception we print its type and its place in the code, and with `--traceback` the frames.
"""

import traceback

STOPPED_EARLY = 75


class Failure(Exception):
    """An error that the user can fix. The message names the file, record number or field, and the remedy; exit code 1."""

    exit_code = 1


class Passing(Failure):
    """A failure that may not happen again at the next start, such as a lost rank: a SLURM job then requeues itself."""


class UsageError(Failure):
    """A wrong command line or recipe; exit code 2."""

    exit_code = 2


def describe(error: BaseException) -> str:
    """Returns one line that describes `error` and quotes nothing that may come from a corpus."""
    if isinstance(error, Failure):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return f"{type(error).__name__}: {error.strerror} (errno {error.errno})"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{place}; run again with --traceback for the frames"
