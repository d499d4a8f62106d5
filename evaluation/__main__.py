"""`python -m evaluation COMMAND`: what came out of one or more runs.

    python -m evaluation report RUN... --out FILE.html      curves and tables of one or more run folders, on one page

Each command is a function that takes the parsed arguments and returns an exit code. It imports its room only when it
is called, so that `report` does not wait for torch nor `finetune` for matplotlib.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from data_prep.errors import UsageError, run


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage before the error; our commands promise one plain line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (`{self.prog} --help` shows the usage)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m evaluation", description="What came out of one or more runs.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    report = commands.add_parser(
        "report",
        help="one self-contained HTML page that compares run folders",
        description="Writes one HTML page without any external part: tables and curves of one or more run folders, "
        "such as a detour and its matched MLM twin. Differences are shown to the first run.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder; it may still be training")
    report.add_argument("--out", metavar="FILE.html", required=True, type=Path, help="the page to write (replaced)")
    report.add_argument("--traceback", action="store_true", help="show where an error came from")
    report.set_defaults(command=_report)
    return parser


def _report(arguments: argparse.Namespace) -> int:
    from evaluation.report import write_report

    write_report(arguments.runs, arguments.out)
    print(arguments.out)
    return 0


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    code: int = arguments.command(arguments)
    return code


if __name__ == "__main__":
    sys.exit(run(main))
