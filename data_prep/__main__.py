"""The command line of data preparation: `python -m data_prep build|finish|verify|repair|inspect|tokenizer`."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from command_line import Failure, Parser, UsageError, run

if TYPE_CHECKING:
    from data_prep.documents import Reading

# Each command imports the heavy libraries that it needs, so that --help answers at once.

INPUT_HELP = (
    "files (.jsonl, .ndjson, .csv, .tsv, .txt, plain, .gz or .zst; .parquet), folders of such files, folders saved by `datasets`, "
    "quoted patterns, URLs of any of these (s3://, gs://, hf://, https://), or hub:OWNER/NAME[:CONFIGURATION[:SPLIT]]"
)
ROWS_HELP = "folder of rows, or the one above train/ and validation/"
EPILOG = (
    "Exit codes: 0 done; 1 failed, with one line on stderr that names the file and record; 2 wrong usage. "
    "Messages never show text, ids or names of files found in folders. --traceback, with any command, adds the frames of a failure."
)


def parser() -> Parser:
    top = Parser(
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
        "The rows go to OUT, or with --validation to OUT/train and OUT/validation; OUT is complete or absent. "
        "No document is truncated: one longer than a row is split, and so are some others where rows would stay empty (--fill). The tokenizer's files are copied beside the rows. "
        "The rows are the same bytes whatever the number of workers and parts, and however often the build was killed and resumed.",
    )
    _add_inputs(build)
    _add_build_options(build)

    finish = command(
        "finish",
        "merge the parts of a build done with --part",
        "Packs the documents that all parts have tokenised, or says which part is missing.",
    )
    finish.add_argument("out", metavar="OUT", help="the --out of the parts")

    verify = command(
        "verify",
        "check every shard and row against the index and the manifest",
        "Prints a line for each damage found and exits with 1, or says that all is well.",
    )
    verify.add_argument("rows", metavar="DIR_OR_URL", help=ROWS_HELP)

    repair = command(
        "repair",
        "rebuild a lost index, and set aside shards that cannot be used",
        "Says what it dropped. Such shards go to DIR/damaged, and the manifest's counts change to what is left.",
    )
    repair.add_argument("rows", metavar="DIR", help=ROWS_HELP)

    inspect = command("inspect", "show what a folder of rows holds: manifest, fill, document lengths")
    inspect.add_argument("rows", metavar="DIR_OR_URL", help=ROWS_HELP)
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
    return top


def _add_build_options(build: argparse.ArgumentParser) -> None:
    build.add_argument(
        "--tokenizer",
        required=True,
        metavar="DIR_OR_NAME",
        help="Hugging Face tokenizer: a folder, or a name on the hub",
    )
    build.add_argument("--out", required=True, metavar="DIR_OR_URL", help="new or empty folder, or a place at a URL")
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
        "--group-field",
        metavar="NAME",
        help="field whose value keeps records on one side of the split, such as the patient: the hash is then taken of that value",
    )
    build.add_argument(
        "--deduplicate",
        choices=("exact",),
        help="of documents with the same text, apart from white space and the form of accents, keep only the first",
    )
    build.add_argument(
        "--add-prefix-space",
        choices=("yes", "no"),
        help="treat a document's first word as if a space stood before it, or not (default: as the tokenizer does)",
    )
    build.add_argument(
        "--seed", type=int, default=17, metavar="N", help="decides the order of documents within a row (default 17)"
    )
    build.add_argument("--no-packing", action="store_true", help="one document a row, for comparisons")
    build.add_argument(
        "--fill",
        type=float,
        default=0.995,
        metavar="SHARE",
        help="rows are filled to this share: where whole documents leave more room, as many as needed are cut "
        "(default 0.995); 0 cuts only documents longer than a row, and so does a corpus of less than 500 to 1,000 rows",
    )
    build.add_argument("--shard-size", default="64mb", metavar="SIZE", help="of a shard file, such as 64mb (default)")
    build.add_argument("--compression", choices=("zstd",), help="of the shard files (default none)")
    build.add_argument(
        "--workers", type=int, metavar="N", help="processes that tokenise, one core each (default: the cores there are)"
    )
    build.add_argument(
        "--unit-size",
        default="1mb",
        metavar="SIZE",
        help="text that a worker tokenises at a time, and loses at most when it is killed (default 1mb)",
    )
    build.add_argument(
        "--resume",
        action="store_true",
        help="go on with a build that was killed, or begin one that may be; a hidden folder beside OUT (OUT/_build of a URL) keeps finished units",
    )
    build.add_argument(
        "--part",
        metavar="I/N",
        help="do share I of N of the work, on as many machines as you like, all with the same inputs and options; then `finish OUT`",
    )


def _add_inputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT_HELP)
    text = command.add_mutually_exclusive_group()
    text.add_argument(
        "--text-field", default="text", metavar="NAME", help="field that holds the text, such as text (default) or a.b"
    )
    text.add_argument("--template", metavar="TEXT", help="text made of several fields, such as '{title} {body}'")
    command.add_argument("--delimiter", metavar="C", help="of CSV files (default , and a tab for .tsv)")
    command.add_argument(
        "--separator",
        metavar="TEXT",
        help="text between the documents of a text file, \\n for a line end (default: a file is one document)",
    )
    command.add_argument("--encoding", default="utf-8", metavar="NAME", help="of text and CSV files (default utf-8)")
    command.add_argument(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="a broken record (bad JSON, bad UTF-8, no such field, not a string) stops the command (default), or is dropped and counted; "
        "empty documents are always dropped and counted",
    )


def _reading(arguments: argparse.Namespace, unit_bytes: int) -> "Reading":
    from data_prep.documents import Fields, Reading

    separator = arguments.separator
    if separator is not None:
        for written, meant in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
            separator = separator.replace(written, meant)
    delimiter = "\t" if arguments.delimiter == "\\t" else arguments.delimiter
    fields = Fields(arguments.text_field, arguments.template, getattr(arguments, "group_field", None))
    return Reading(fields, arguments.encoding, delimiter, separator, unit_bytes)


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise UsageError(f"--part {text!r} is not a share such as 1/4")
    return int(match[1]), int(match[2])


def size(text: str, option: str = "--shard-size") -> int:
    """Bytes of a size such as 64mb, 512kb, 1gb or 65536. Raises UsageError."""
    match = re.fullmatch(r"(\d+) *(|b|kb|mb|gb)", text.strip().lower())
    if match is None:
        raise UsageError(f"{option} {text!r} is not a size such as 64mb")
    return int(match[1]) << {"": 0, "b": 0, "kb": 10, "mb": 20, "gb": 30}[match[2]]


def dispatch(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    return COMMANDS[arguments.command](arguments)


def _build(arguments: argparse.Namespace) -> int:
    from data_prep.build import build
    from data_prep.building import BuildOptions, build_summary

    prefix_space = {"yes": True, "no": False, None: None}[arguments.add_prefix_space]
    options = BuildOptions(
        inputs=arguments.inputs,
        tokenizer=arguments.tokenizer,
        out=arguments.out,
        row_length=arguments.row_length,
        reading=_reading(arguments, size(arguments.unit_size, "--unit-size")),
        add_prefix_space=prefix_space,
        validation=arguments.validation,
        deduplicate=arguments.deduplicate is not None,
        on_error=arguments.on_error,
        seed=arguments.seed,
        packing=not arguments.no_packing,
        fill=arguments.fill,
        shard_bytes=size(arguments.shard_size),
        compression=arguments.compression,
        workers=len(os.sched_getaffinity(0)) if arguments.workers is None else arguments.workers,
        resume=arguments.resume,
        part=_part(arguments.part),
    )
    print(build_summary(build(options), arguments.out))
    return 0


def _finish(arguments: argparse.Namespace) -> int:
    from data_prep.build import finish
    from data_prep.building import build_summary

    print(build_summary(finish(arguments.out), arguments.out))
    return 0


def _repair(arguments: argparse.Namespace) -> int:
    from data_prep.repair import repair

    for line in repair(arguments.rows):
        print(line)
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
    from data_prep.inspect_rows import inspect

    inspect(arguments.rows, arguments.shown if arguments.show_text else 0)
    return 0


def _tokenizer(arguments: argparse.Namespace) -> int:
    from data_prep.tokenizer import NOTE, train_tokenizer

    trained = train_tokenizer(
        arguments.inputs, arguments.vocab_size, arguments.out, _reading(arguments, 1 << 20), arguments.on_error
    )
    dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in trained.dropped.items())
    print(
        f"tokenizer of {trained.vocabulary:,} entries from {trained.documents:,} documents{dropped} in {arguments.out}"
    )
    print(NOTE)
    return 0


COMMANDS = {
    "build": _build,
    "finish": _finish,
    "verify": _verify,
    "repair": _repair,
    "inspect": _inspect,
    "tokenizer": _tokenizer,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code (see `command_line`)."""
    # Switch off the telemetry of all libraries, which read these at their import.
    for name in ("HF_HUB_DISABLE_TELEMETRY", "DO_NOT_TRACK"):
        os.environ.setdefault(name, "1")
    return run(dispatch, list(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    sys.exit(main())
