"""Documents to packed rows, read top to bottom.

    files -> slices -> units, tokenised by the workers into files that are complete or absent     (`tokenise`)
    units, in order -> without duplicates -> packer -> shards, index, manifest -> put in place    (`assemble`)

What a unit holds and the order of units depend on the input alone, and packing is one pass over them in that order (30 to 300
million tokens a second, against 0.2 a core of tokenising). So the rows are the same bytes whatever the number of workers and
parts, and whenever the build was killed and resumed: only units that are missing are made.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data_prep.documents.records import BrokenRecord, Reason
from data_prep.documents.duplicates import duplicates
from command_line import Failure, UsageError, describe
from data_prep.building.packing import FILL, BestFit, OnePerRow
from data_prep.documents.slices import Member, Reading, in_words, slices, units
from data_prep.rows.format import TOKENIZER, Manifest
from data_prep.documents.find_files import find_files
from data_prep.building.build_state import Plan, SliceRecord, State, make_plan
from data_prep.rows.atomic_files import AtomicFiles, said_of
from data_prep.documents.source_file import SourceFile, open_file
from data_prep.tokenizer.document_tokenizer import DocumentTokenizer, load_tokenizer
from data_prep.building.tokenised_unit import HASHES, Done, Settings, TokeniseUnit, Unit
from data_prep.building.worker_processes import in_processes
from data_prep.building.rows_writer import SHARD_BYTES, RowsWriter

SHORTEST_ROW = 8
KEEP_AFTER = 60  # seconds of work that a failed build does not throw away


@dataclass(frozen=True)
class BuildOptions:
    inputs: list[str]
    tokenizer: str  # folder or hub name
    out: str  # folder or URL
    row_length: int  # tokens
    reading: Reading = field(default_factory=Reading)
    add_prefix_space: bool | None = None  # None: as the tokenizer has it
    validation: float | None = None  # share of documents
    deduplicate: bool = False
    on_error: str = "fail"  # or "skip"
    seed: int = 17
    packing: bool = True
    fill: float = FILL  # below it documents are cut
    shard_bytes: int = SHARD_BYTES
    compression: str | None = None  # or "zstd"
    workers: int = 1
    resume: bool = False
    part: tuple[int, int] | None = None  # (i, n), i from 1

    def check(self) -> None:
        if self.row_length < SHORTEST_ROW:
            raise UsageError(f"--row-length {self.row_length} is too short: at least {SHORTEST_ROW} tokens")
        if self.validation is not None and not 0 < self.validation < 1:
            raise UsageError(
                f"--validation {self.validation:g} is no share between 0 and 1; 0.01 keeps 1 % of the documents back"
            )
        if not 0 <= self.fill < 1:
            raise UsageError(f"--fill {self.fill:g} is no share from 0 to below 1, such as 0.995")
        if not 1 << 10 <= self.shard_bytes < 1 << 32:
            raise UsageError("--shard-size must lie between 1 kb and 4 gb")
        if not 1 << 10 <= self.reading.unit_bytes < 1 << 30:
            raise UsageError("--unit-size must lie between 1 kb and 1 gb")
        if self.workers < 1:
            raise UsageError(f"--workers {self.workers}: at least one must do the work")
        if self.part is not None and not 1 <= self.part[0] <= self.part[1]:
            raise UsageError(f"--part {self.part[0]}/{self.part[1]}: parts go from 1/n to n/n")
        if self.reading.fields.group and not self.validation:
            raise UsageError("--group-field says what stays on one side of the split: it needs --validation")
        if self.out.startswith(("http://", "https://", "hf://")):
            raise UsageError(f"--out {self.out!r}: rows are written to a folder or to s3://, gs://, oci:// or azure://")
        self.reading.check()

    def deciding(self, tokenizer: DocumentTokenizer) -> dict[str, Any]:
        """What decides the content of a unit, by the name of the option."""
        reading, fields = self.reading, self.reading.fields
        return {
            "tokenizer": tokenizer.info.digest,
            "text-field": fields.text,
            "template": fields.template,
            "group-field": fields.group,
            "encoding": reading.encoding,
            "delimiter": reading.delimiter,
            "separator": reading.separator,
            "unit-size": reading.unit_bytes,
            "validation": self.validation,
            "deduplicate": self.deduplicate,
        }

    def packing_options(self) -> dict[str, Any]:
        return {
            "row-length": self.row_length,
            "seed": self.seed,
            "fill": self.fill,
            "no-packing": not self.packing,
            "shard-size": self.shard_bytes,
            "compression": self.compression,
            "add-prefix-space": self.add_prefix_space,
        }


@dataclass(frozen=True)
class BuildReport:
    manifests: list[Manifest]  # none after a part of a build
    dropped: dict[str, int]
    left_out: int  # files of unknown kind in folders
    edges: int  # special tokens of a document
    seconds: float
    note: str = ""


def build(options: BuildOptions) -> BuildReport:
    """Build the rows that `options` asks for, or a part of them. Raises Failure and UsageError.

    When it fails, nothing is left behind, unless more than a minute of work would be lost: finished units are then kept for
    `resume`, as they always are with `resume` and `part`, and the message says so.
    """
    options.check()
    start = time.perf_counter()
    state = State(options.out)
    tokenizer = load_tokenizer(options.tokenizer, options.add_prefix_space)
    if (options.resume or options.part) and (complete := state.finished(_splits(options.validation))):
        return _complete_already(complete, options, tokenizer, state)
    found = find_files(options.inputs)
    shares = slices(found.files, options.reading.unit_bytes)
    deciding = options.deciding(tokenizer)
    plan = make_plan(
        deciding | options.packing_options(), deciding, tokenizer.info.name, found.files, shares, found.left_out
    )
    state.begin(plan, options.resume, options.part)
    try:
        for name, data in tokenizer.files().items():
            state.store.put(f"{TOKENIZER}/{name}", data)
        tokenise(options, tokenizer, state, plan, found.files, shares)
        if options.part:
            return _part_report(options, state, plan, tokenizer, time.perf_counter() - start)
        return assemble(state, plan, tokenizer, start, f"{' '.join(map(repr, options.inputs))}")
    except BaseException as error:
        if not (options.resume or options.part) and time.perf_counter() - start < KEEP_AFTER:
            state.discard()
        elif type(error) is Failure:
            kept = f"what is done is kept in {state.shown}: then run the same command with --resume"
            raise Failure(f"{describe(error)} ({kept})") from None
        raise


def tokenise(
    options: BuildOptions,
    tokenizer: DocumentTokenizer,
    state: State,
    plan: Plan,
    files: list[SourceFile],
    shares: list[list[Member]],
) -> None:
    """Make every unit of this part that is not there yet."""
    settings = Settings(
        state.store,
        tokenizer.arguments,
        options.reading.fields,
        options.validation,
        options.deduplicate,
        options.on_error,
    )
    stored = set(state.store.sizes())
    first, of = options.part or (1, 1)
    mine = range(first - 1, len(shares), of)
    waiting: Counter[int] = Counter()  # units of a slice that are not done
    read: dict[int, SliceRecord] = {}  # slices read to their end

    def settle(number: int) -> None:
        if number in read and not waiting[number]:
            record = read.pop(number).model_dump_json().encode()
            state.store.put(f"slices/{plan.slices[number].key}.json", record)

    def tasks() -> Iterator[TokeniseUnit | Digest]:
        for source in range(first - 1, len(files), of):
            if plan.digests[source] and f"digests/{plan.digests[source]}" not in stored:
                yield Digest(state.store, f"digests/{plan.digests[source]}", files[source])
        for number in mine:
            key = plan.slices[number].key
            if f"slices/{key}.json" in stored:
                bar.update(plan.slices[number].bytes)
                continue
            digests: dict[int, str] = {}
            count = 0
            for chunks in units(files, shares[number], options.reading, bar.update, digests):
                name = f"units/{key}-{count:06}"
                count += 1
                if name not in stored:
                    waiting[number] += 1
                    yield TokeniseUnit(settings, number, name, chunks)
            read[number] = SliceRecord(units=count, digests=digests)
            settle(number)

    documents = tokens = 0
    begin = time.perf_counter()
    total = sum(plan.slices[number].bytes for number in mine)
    with tqdm(total=total, unit="B", unit_scale=True, desc="tokenise", disable=None) as bar:
        try:
            for done in in_processes(tasks(), options.workers):
                if not isinstance(done, Done):
                    continue
                waiting[done.slice] -= 1
                settle(done.slice)
                documents, tokens = documents + done.documents, tokens + done.tokens
                seconds = time.perf_counter() - begin
                bar.set_postfix_str(
                    f"{documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s", refresh=False
                )
        except BrokenRecord as broken:
            raise in_words(broken, files, options.reading.fields) from None


@dataclass(frozen=True)
class Digest:
    """A task: the sha256 of a file of which no one reads all bytes in a row."""

    store: AtomicFiles
    name: str
    file: SourceFile

    def __call__(self) -> None:
        with open_file(self.file) as opened:
            digest = opened.digest()
        self.store.put(self.name, digest.encode())


def finish(out: str) -> BuildReport:
    """Merge the parts of a build. Raises Failure where one is missing."""
    start = time.perf_counter()
    state = State(out)
    plan = state.plan()
    if plan is None:
        for splits in (_splits(None), _splits(0.5)):
            if complete := state.finished(splits):
                return BuildReport(complete, complete[0].counts.dropped, 0, 1, 0.0, "complete already")
        raise Failure(f"no parts of a build of {out!r} are there: `build --part i/n` makes them")
    if not state.store.remote:
        state._own("lock")
    with tempfile.TemporaryDirectory() as folder:
        for name in state.store.sizes():
            if name.startswith(f"{TOKENIZER}/"):
                Path(folder, os.path.basename(name)).write_bytes(state.store.get(name))
        tokenizer = DocumentTokenizer(Path(folder), plan.tokenizer_name, plan.options["add-prefix-space"])
        return assemble(state, plan, tokenizer, start, repr(out))


def assemble(state: State, plan: Plan, tokenizer: DocumentTokenizer, start: float, shown: str) -> BuildReport:
    """Pack all units in their order and put the rows in place; `shown` names the input in messages."""
    options = plan.options
    names, digests = _finished_units(state, plan)
    same = duplicates(state.store, [name + HASHES for name in names]) if options["deduplicate"] else None
    splits = _splits(options["validation"])
    writers = [
        RowsWriter(
            state.rows,
            tokenizer,
            OnePerRow(options["row-length"], options["seed"])
            if options["no-packing"]
            else BestFit(options["row-length"], options["seed"], options["fill"]),
            split or None,
            options["shard-size"],
            options["compression"],
        )
        for split in splits
    ]
    dropped: Counter[str] = Counter()
    dropped_tokens = number = 0
    for name in tqdm(names, unit="unit", desc="pack", disable=None, delay=2):
        with said_of(state.out):
            unit = Unit.from_bytes(state.store.get(name), tokenizer.info.vocabulary)
        dropped.update(unit.dropped)
        drop = same[number : number + len(unit.lengths)] if same is not None else np.zeros(len(unit.lengths), bool)
        number += len(unit.lengths)
        facts = zip(drop.tolist(), unit.sources.tolist(), unit.validation.tolist(), strict=True)
        for ids, (again, source, held) in zip(unit.documents(), facts, strict=True):
            if again:
                dropped[Reason.DUPLICATE] += 1
                dropped_tokens += len(ids)
            else:
                writers[held].add(ids.copy(), source)  # a view would keep its whole unit in memory
    _refuse_empty(writers, dropped, shown, options["validation"])
    sources = list(zip(digests, plan.sizes, strict=True))
    counted = dict(sorted(dropped.items()))
    manifests: list[Manifest] = []
    for writer in writers:
        # A dropped record is on no side of the split: all of them are counted in the first manifest.
        manifests.append(writer.finish(sources, {} if manifests else counted, 0 if manifests else dropped_tokens))
    state.publish({name for writer in writers for name in writer.written})
    return BuildReport(manifests, counted, plan.left_out, tokenizer.edges, time.perf_counter() - start)


def _splits(validation: float | None) -> list[str]:
    """Folders of the rows; "" is the place itself."""
    return ["train", "validation"] if validation else [""]


def _finished_units(state: State, plan: Plan) -> tuple[list[str], list[str]]:
    """The names of all units, in order, and the sha256 of each file. Raises Failure where something is not done."""
    stored = state.store.sizes()
    missing = [n for n, part in enumerate(plan.slices) if f"slices/{part.key}.json" not in stored]
    lost = [n for n, key in enumerate(plan.digests) if key and f"digests/{key}" not in stored]
    if missing or lost:
        first = (missing or lost)[0]
        raise Failure(
            f"{len(missing) or len(lost)} of {len(plan.slices)} slices of {state.out!r} are not done, the first of them {first}: "
            f"run the missing parts (with n parts it belongs to part {first} mod n + 1), then `finish` again"
        )
    names: list[str] = []
    digests = [state.store.get(f"digests/{key}").decode() if key else "" for key in plan.digests]
    for part in plan.slices:
        record = SliceRecord.model_validate_json(state.store.get(f"slices/{part.key}.json"))
        names += [f"units/{part.key}-{number:06}" for number in range(record.units)]
        for source, digest in record.digests.items():
            digests[source] = digests[source] or digest
    return names, digests


def _part_report(
    options: BuildOptions, state: State, plan: Plan, tokenizer: DocumentTokenizer, seconds: float
) -> BuildReport:
    assert options.part is not None
    stored = state.store.sizes()
    left = sum(f"slices/{part.key}.json" not in stored for part in plan.slices)
    then = f"{left} slices of other parts are left" if left else f"all is there: run `finish {options.out}`"
    return BuildReport(
        [], {}, plan.left_out, tokenizer.edges, seconds, f"part {options.part[0]} of {options.part[1]} is done; {then}"
    )


def _complete_already(
    manifests: list[Manifest], options: BuildOptions, tokenizer: DocumentTokenizer, state: State
) -> BuildReport:
    found = manifests[0]
    if (found.tokenizer.digest, found.row_length, found.seed) != (
        tokenizer.info.digest,
        options.row_length,
        options.seed,
    ):
        raise Failure(f"--out {options.out!r} holds other rows, already complete: remove it or name another place")
    state.discard()  # killed between the last file and the clearing up
    return BuildReport(manifests, found.counts.dropped, 0, tokenizer.edges, 0.0, "complete already")


def _refuse_empty(writers: list[RowsWriter], dropped: Counter[str], shown: str, validation: float | None) -> None:
    counts = [writer.documents.total() for writer in writers]
    if not sum(counts):
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "no records at all"
        raise Failure(f"the corpus is empty: no document is left of {shown} ({why})")
    for writer, count in zip(writers, counts, strict=True):
        if not count:
            raise Failure(
                f"no document of {sum(counts)} falls into {writer.split} with --validation {validation:g};"
                " change the share, or leave it out"
            )
