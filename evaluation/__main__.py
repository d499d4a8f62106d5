"""`python -m evaluation COMMAND`: what came out of one or more runs.

    python -m evaluation report RUN... --out FILE.html      curves and tables of one or more run folders, on one page
    python -m evaluation demo --out DIR                     the whole detour on a generated corpus

Each command is a function that takes the parsed arguments and returns an exit code. It imports its room only when it
is called, so that `report` does not wait for torch nor `finetune` for matplotlib.
"""

import argparse
import sys
from pathlib import Path

from command_line import Parser, run


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m evaluation",
        description="What came out of one or more runs.",
        epilog="--traceback shows the frames of an error.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    report = commands.add_parser(
        "report",
        help="one self-contained HTML page that compares run folders",
        description="Writes one HTML page without any external part: tables and curves of one or more run folders, "
        "such as a detour and its matched MLM twin. Differences are shown to the first run.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder; it may still be training")
    report.add_argument("--out", metavar="FILE.html", required=True, type=Path, help="the page to write (replaced)")
    report.set_defaults(command=_report)

    demo = commands.add_parser(
        "demo",
        help="the whole detour and its MLM twin on a generated corpus, in minutes on a CPU",
        description="What `make demo` runs: sample corpus, tokenizer, rows, both phases of the detour and of its "
        "matched MLM twin, export, fill-mask and report. Each command is shown as it runs.",
    )
    demo.add_argument("--out", metavar="DIR", required=True, type=Path, help="folder for all of it")
    demo.add_argument("--documents", metavar="N", type=int, default=24_000, help="size of the corpus (default: 24,000)")
    demo.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of recipes/demo.yaml")
    demo.set_defaults(command=_demo)
    return parser


def _report(arguments: argparse.Namespace) -> int:
    from evaluation.report.run_report import write_report

    write_report(arguments.runs, arguments.out)
    print(arguments.out)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from evaluation.demo.walkthrough import demo

    demo(arguments.out, arguments.documents, arguments.overrides)
    return 0


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    code: int = arguments.command(arguments)
    return code


if __name__ == "__main__":
    sys.exit(run(main))
