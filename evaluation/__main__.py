"""`python -m evaluation COMMAND` shows what one or more runs gave.

    python -m evaluation report RUN... --out FILE.html                  curves and tables of run folders, on one page
    python -m evaluation sample OUT --documents N [--seed S]            write a made-up corpus of medical case reports
    python -m evaluation demo --out DIR [--documents N] [key=value ...] the whole detour on such a corpus

Each command is a function that takes the parsed arguments and returns an exit code. It imports its room only when it is
called, so that `--help` answers at once and `sample` does not wait for matplotlib.
"""

import argparse
import sys
from pathlib import Path

from command_line import Parser, run


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m evaluation",
        description="Shows what one or more runs gave.",
        epilog="--traceback, with any command, adds the frames of a failure.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    report = commands.add_parser(
        "report",
        help="write one self-contained HTML page that compares run folders",
        description="Writes one HTML page without any external part: tables and curves of one or more run folders, "
        "such as a detour and its matched MLM twin. Differences are to the first run.",
    )
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run folder; it may still be training")
    report.add_argument("--out", metavar="FILE.html", required=True, type=Path, help="the page to write (replaced)")
    report.set_defaults(command=_report)

    sample = commands.add_parser(
        "sample",
        help="write a made-up corpus of medical case reports, English and French",
        description="Writes JSONL with id, text and lang. A grammar invents the reports: no real person, no medical advice.",
    )
    sample.add_argument("out", metavar="OUT", help="new file, .jsonl, .jsonl.gz or .jsonl.zst")
    sample.add_argument("--documents", required=True, type=int, metavar="N", help="how many")
    sample.add_argument(
        "--seed", type=int, default=17, metavar="N", help="the same seed gives the same corpus (default: 17)"
    )
    sample.set_defaults(command=_sample)

    demo = commands.add_parser(
        "demo",
        help="run the whole detour and its MLM twin on a generated corpus, in minutes on a CPU",
        description="Does what `make demo` does: sample corpus, tokenizer, rows, both phases of the detour and of its "
        "matched MLM twin, export, fill-mask and report. Shows each command as it runs.",
    )
    demo.add_argument("--out", metavar="DIR", required=True, type=Path, help="folder for all of it")
    demo.add_argument("--documents", metavar="N", type=int, default=24_000, help="size of the corpus (default: 24,000)")
    demo.add_argument("overrides", nargs="*", metavar="key=value", help="change a key of recipes/demo.yaml")
    demo.set_defaults(command=_demo)
    return parser


def _report(arguments: argparse.Namespace) -> int:
    from evaluation.report import write_report

    write_report(arguments.runs, arguments.out)
    print(arguments.out)
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from evaluation.demo import write_sample

    words = write_sample(arguments.out, arguments.documents, arguments.seed)
    print(f"{arguments.documents:,} invented case reports, {words:,} words, in {arguments.out}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from evaluation.demo import demo

    demo(arguments.out, arguments.documents, arguments.overrides)
    return 0


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    code: int = arguments.command(arguments)
    return code


if __name__ == "__main__":
    sys.exit(run(main))
