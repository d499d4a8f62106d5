"""The command line of data preparation: `python -m data_prep build|verify|inspect|tokenizer|sample`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from data_prep import errors
from data_prep.errors import Failure, UsageError

# Heavy libraries are imported by the commands that need them, so that --help answers at once.

INPUT_HELP = "files (.jsonl, .ndjson or .txt, plain, .gz or .zst; a .txt is one document), folders of such files, or quoted patterns"
EPILOG = (
    "Exit codes: 0 done; 1 failed, with one line on stderr that names the file and record; 2 wrong usage. "
    "Messages never show text, ids or names of files found in folders. --traceback, with any command, adds the frames of a failure."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="python -m data_prep",
        description="Documents to tokenised, packed, verified rows for training.",
        epilog=EPILOG,
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, detail: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}. {detail}", epilog=EPILOG
        )

    build = command(
        "build",
        "tokenise documents and pack them into rows",
        "The rows go to OUT, or with --validation to OUT/train and OUT/validation; OUT appears when all is written. "
        "No document is truncated: one longer than a row is split, and so are some others where rows would stay empty (--fill). The tokenizer's files are copied beside the rows.",
    )
    _add_inputs(build)
    build.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR_OR_NAME",
        help="Hugging Face tokenizer: a folder, or a name on the hub",
    )
    build.add_argument("--out", required=True, metavar="DIR", help="new or empty folder")
    build.add_argument(
        "--row-length", required=True, type=int, metavar="N", help="tokens of a row at most, such as 8192"
    )
    build.add_argument(
        "--validation",
        type=float,
        metavar="SHARE",
        help="share of documents kept back, such as 0.01, chosen by a hash of their text: duplicates stay on one side",
    )
    build.add_argument(
        "--seed", type=int, default=17, metavar="N", help="of the order of documents within a row (default 17)"
    )
    build.add_argument(
        "--fill",
        type=float,
        default=0.995,
        metavar="SHARE",
        help="fill of the rows below which documents that would fit a row are cut as well, only as many as it takes "
        "(default 0.995); 0 keeps them whole, as does a corpus of less than 500 to 1,000 rows",
    )
    build.add_argument("--shard-size", default="64mb", metavar="SIZE", help="of a shard file, such as 64mb (default)")

    verify = command(
        "verify",
        "check every shard and row against the index and the manifest",
        "Prints a line for each damage found and exits with 1, or says that all is well.",
    )
    verify.add_argument("rows", metavar="DIR", help="folder of rows, or the one above train/ and validation/")

    inspect = command("inspect", "show what a folder of rows holds: manifest, fill, document lengths")
    inspect.add_argument("rows", metavar="DIR", help="folder of rows, or the one above train/ and validation/")
    inspect.add_argument(
        "--show-text", action="store_true", help="also print decoded rows, a line for each document: real text"
    )
    inspect.add_argument(
        "--rows", dest="shown", type=int, default=3, metavar="N", help="rows that --show-text prints (default 3)"
    )

    tokenizer = command(
        "tokenizer",
        "train a tokenizer on documents",
        "Byte-level BPE with [PAD], [UNK], [CLS], [SEP] and [MASK], saved as a Hugging Face folder.",
    )
    _add_inputs(tokenizer)
    tokenizer.add_argument(
        "--vocab-size", required=True, type=int, metavar="N", help="entries at most, special tokens included"
    )
    tokenizer.add_argument("--out", required=True, metavar="DIR", help="new or empty folder")

    sample = command(
        "sample",
        "write a made-up corpus of medical case reports, English and French",
        "JSONL with id, text and lang. Invented by a grammar: no real person, no medical advice.",
    )
    sample.add_argument("out", metavar="OUT", help="new file, .jsonl, .jsonl.gz or .jsonl.zst")
    sample.add_argument("--documents", required=True, type=int, metavar="N", help="how many")
    sample.add_argument(
        "--seed", type=int, default=17, metavar="N", help="the same seed gives the same corpus (default 17)"
    )
    return top


def _add_inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT_HELP)
    command.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field of a JSONL record that holds the text (default text)",
    )
    command.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="a broken record (bad JSON, bad UTF-8, no such field, not a string) stops the command (default), or is dropped and counted; "
        "empty documents are always dropped and counted",
    )


def size(text: str) -> int:
    """Bytes of a size such as 64mb, 512kb, 1gb or 65536. Raises UsageError."""
    match = re.fullmatch(r"(\d+) *(|b|kb|mb|gb)", text.strip().lower())
    if match is None:
        raise UsageError(f"--shard-size {text!r} is not a size such as 64mb")
    return int(match[1]) << {"": 0, "b": 0, "kb": 10, "mb": 20, "gb": 30}[match[2]]


def dispatch(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    return COMMANDS[arguments.command](arguments)


def _build(arguments: argparse.Namespace) -> int:
    from data_prep.build import BuildOptions, build
    from data_prep.report import build_summary

    options = BuildOptions(
        inputs=arguments.inputs,
        tokenizer=arguments.tokenizer,
        out=arguments.out,
        row_length=arguments.row_length,
        text_field=arguments.text_field,
        validation=arguments.validation,
        on_error=arguments.on_error,
        seed=arguments.seed,
        fill=arguments.fill,
        shard_bytes=size(arguments.shard_size),
    )
    print(build_summary(build(options), arguments.out))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from data_prep.verify import verify

    verdict = verify(arguments.rows)
    for finding in verdict.findings:
        print(finding)
    if verdict.findings:
        raise Failure(f"{arguments.rows}: {len(verdict.findings)} findings; rebuild the rows, or copy them again")
    rows, tokens = (sum(getattr(t, what) for t in verdict.totals.values()) for what in ("rows", "tokens"))
    print(f"{arguments.rows}: all well, {rows:,} rows with {tokens:,} tokens read")
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from data_prep.report import inspect

    inspect(arguments.rows, arguments.shown if arguments.show_text else 0)
    return 0


def _tokenizer(arguments: argparse.Namespace) -> int:
    from data_prep.training import NOTE, train_tokenizer

    trained = train_tokenizer(
        arguments.inputs, arguments.vocab_size, arguments.out, arguments.text_field, arguments.on_error
    )
    dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in trained.dropped.items())
    print(
        f"tokenizer of {trained.vocabulary:,} entries from {trained.documents:,} documents{dropped} in {arguments.out}"
    )
    print(NOTE)
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from data_prep.sample import write_sample

    words = write_sample(arguments.out, arguments.documents, arguments.seed)
    print(f"{arguments.documents:,} invented case reports, {words:,} words, in {arguments.out}")
    return 0


COMMANDS = {"build": _build, "verify": _verify, "inspect": _inspect, "tokenizer": _tokenizer, "sample": _sample}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see `errors`)."""
    # No telemetry, whoever's: libraries read these when they are imported.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
    return errors.run(dispatch, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
