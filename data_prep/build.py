"""Documents to packed rows: the whole build, from top to bottom.

    files -> slices -> units, which the workers tokenise into files that are complete or absent   (`tokenise`)
    units, in order -> without duplicates -> packer -> shards, index, manifest -> put in place    (`assemble`)

The content of a unit and the order of units depend on the input alone. Packing is one pass over the units in that order; it packs
30 to 300 million tokens a second, while tokenising does 0.2 million a core. So the rows are the same bytes, whatever the number of
workers and parts, and however often the build was killed and resumed: a resumed build makes only the missing units.
"""

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from command_line import Failure, describe
from data_prep.building import (
    HASHES,
    BestFit,
    BuildOptions,
    BuildReport,
    BuildState,
    Done,
    OnePerRow,
    Plan,
    RowsWriter,
    Settings,
    SliceRecord,
    TokeniseUnit,
    Unit,
    in_processes,
    make_plan,
)
from data_prep.documents import (
    BrokenRecord,
    Member,
    Reason,
    SourceFile,
    duplicates,
    find_files,
    in_words,
    open_file,
    slices,
    units,
)
from data_prep.rows import TOKENIZER, AtomicFiles, Manifest, said_of
from data_prep.tokenizer import DocumentTokenizer, load_tokenizer

KEEP_AFTER = 60  # seconds of work from which on a failed build keeps its finished units


def build(options: BuildOptions) -> BuildReport:
    """Build the rows that `options` asks for, or a part of them. Raises Failure and UsageError.

    A build that fails leaves nothing behind, unless more than a minute of work would be lost. It then keeps its finished units
    for `resume`, and the message says so. With `resume` and `part` it always keeps them.
    """
    options.check()
    start = time.perf_counter()
    state = BuildState(options.out)
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
    state: BuildState,
    plan: Plan,
    files: list[SourceFile],
    shares: list[list[Member]],
) -> None:
    """Make every unit of this part that is not there yet, and the digests of files that reading does not digest."""
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
    """A task: the sha256 of a file that is not read from its first byte to its last."""

    store: AtomicFiles
    name: str
    file: SourceFile

    def __call__(self) -> None:
        with open_file(self.file) as opened:
            digest = opened.digest()
        self.store.put(self.name, digest.encode())


def finish(out: str) -> BuildReport:
    """Merge the parts of a build. Raises Failure if one is missing."""
    start = time.perf_counter()
    state = BuildState(out)
    plan = state.plan()
    if plan is None:
        for splits in (_splits(None), _splits(0.5)):
            if complete := state.finished(splits):
                return BuildReport(complete, complete[0].counts.dropped, 0, 1, 0.0, "complete already")
        raise Failure(f"no parts of a build of {out!r} are there: `build --part i/n` makes them")
    if not state.store.remote:
        state.lock()
    with tempfile.TemporaryDirectory() as folder:
        for name in state.store.sizes():
            if name.startswith(f"{TOKENIZER}/"):
                Path(folder, os.path.basename(name)).write_bytes(state.store.get(name))
        tokenizer = DocumentTokenizer(Path(folder), plan.tokenizer_name, plan.options["add-prefix-space"])
        return assemble(state, plan, tokenizer, start, repr(out))


def assemble(state: BuildState, plan: Plan, tokenizer: DocumentTokenizer, start: float, shown: str) -> BuildReport:
    """Pack all units in their order and put the rows in place. `shown` names the input in messages."""
    options = plan.options
    names, digests = state.finished_units(plan)
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
                writers[held].add(ids.copy(), source)  # a copy, for a view would keep its whole unit in memory
    _refuse_empty(writers, dropped, shown, options["validation"])
    sources = list(zip(digests, plan.sizes, strict=True))
    counted = dict(sorted(dropped.items()))
    manifests: list[Manifest] = []
    for writer in writers:
        # A dropped record is on no side of the split, so the first manifest counts all of them.
        manifests.append(writer.finish(sources, {} if manifests else counted, 0 if manifests else dropped_tokens))
    state.publish({name for writer in writers for name in writer.written})
    return BuildReport(manifests, counted, plan.left_out, tokenizer.edges, time.perf_counter() - start)


def _splits(validation: float | None) -> list[str]:
    """The folders of the rows; "" is OUT itself."""
    return ["train", "validation"] if validation else [""]


def _part_report(
    options: BuildOptions, state: BuildState, plan: Plan, tokenizer: DocumentTokenizer, seconds: float
) -> BuildReport:
    assert options.part is not None
    stored = state.store.sizes()
    left = sum(f"slices/{part.key}.json" not in stored for part in plan.slices)
    then = f"{left} slices of other parts are left" if left else f"all is there: run `finish {options.out}`"
    return BuildReport(
        [], {}, plan.left_out, tokenizer.edges, seconds, f"part {options.part[0]} of {options.part[1]} is done; {then}"
    )


def _complete_already(
    manifests: list[Manifest], options: BuildOptions, tokenizer: DocumentTokenizer, state: BuildState
) -> BuildReport:
    found = manifests[0]
    if (found.tokenizer.digest, found.row_length, found.seed) != (
        tokenizer.info.digest,
        options.row_length,
        options.seed,
    ):
        raise Failure(f"--out {options.out!r} holds other rows, already complete: remove it or name another place")
    state.discard()  # an earlier build was killed between its last file and the clearing up
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
