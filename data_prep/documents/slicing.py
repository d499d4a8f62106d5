"""From source files to slices, each of which can be read alone, and from a slice to its units.

    file, plain JSONL    slices of 32 units by bytes; a record belongs to the slice in which it begins
    file, Parquet        slices of row groups of about 32 units
    any other file       one slice; small files share one, up to the size of a unit
    slice                units of about `unit_bytes` of text, in the order of the files
    unit                 chunks of consecutive records, each of one file

--part shares out slices, and --resume skips finished slices without reading them. A worker tokenises one unit at a time. Reading
is a hundred times faster than tokenising, so one reader feeds all workers, even from a single compressed file.
"""

from collections.abc import Iterator

from command_line import Failure
from data_prep.documents.fields import Fields, Reason
from data_prep.documents.formats import FORMATS
from data_prep.documents.reading import Member, Reading
from data_prep.documents.records import BrokenRecord, Chunk, Document, documents, explain
from data_prep.documents.source_file import Advance, SourceFile, open_file

UNITS_PER_SLICE = 32


def slices(files: list[SourceFile], unit_bytes: int) -> list[list[Member]]:
    """All files cut into slices, in order. The cuts depend on the files and `unit_bytes` only."""
    size = UNITS_PER_SLICE * unit_bytes
    found: list[list[Member]] = []
    shared: list[Member] = []
    shared_bytes = 0
    for source, file in enumerate(files):
        ends = _cuts(file, size)
        if len(ends) < 2:
            shared.append(Member(source))
            shared_bytes += max(1, file.bytes)
            if shared_bytes < unit_bytes:
                continue
            found.append(shared)
        else:
            found += [shared] if shared else []
            found += [[Member(source, begin, end)] for begin, end in zip([0, *ends], ends, strict=False)]
        shared, shared_bytes = [], 0
    return found + ([shared] if shared else [])


def _cuts(file: SourceFile, size: int) -> list[int]:
    """Where the slices of a file end; empty if it stays whole."""
    cuts = FORMATS[file.format].cuts
    return [] if cuts is None or file.compression or file.bytes <= size else cuts(file, size)


def units(
    files: list[SourceFile], members: list[Member], reading: Reading, advance: Advance, digests: dict[int, str]
) -> Iterator[list[Chunk]]:
    """The units of a slice, in order. `digests` gets the sha256 of each file whose bytes were all read on the way."""
    unit: list[Chunk] = []
    held = 0
    for member in members:
        for chunk, size in chunks(files[member.source], member, reading, advance, digests):
            unit.append(chunk)
            held += size
            if held >= reading.unit_bytes:
                yield unit
                unit, held = [], 0
    if unit:
        yield unit


def chunks(
    file: SourceFile, member: Member, reading: Reading, advance: Advance, digests: dict[int, str]
) -> Iterator[tuple[Chunk, int]]:
    """The chunks of a file or a share of it, each of about a unit at most, with their sizes in bytes or characters."""
    format = FORMATS[file.format]
    with open_file(file, advance) as opened:
        yield from format.chunks(opened, member, reading)
        if member.whole and not format.digested_apart:
            digests[member.source] = opened.digest()


def corpus(files: list[SourceFile], reading: Reading, on_error: str, advance: Advance) -> Iterator[Document | Reason]:
    """Every document of all files, in order, or the reason for a record that gives none. Reads in this process."""
    for source, file in enumerate(files):
        for chunk, _ in chunks(file, Member(source), reading, advance, {}):
            try:
                yield from documents(chunk, reading.fields, on_error)
            except BrokenRecord as broken:
                raise in_words(broken, files, reading.fields) from None


def in_words(broken: BrokenRecord, files: list[SourceFile], fields: Fields) -> Failure:
    """The message about a broken record: its file and number, never its content."""
    file, number = files[broken.source], broken.number
    if broken.begin:  # the slice does not know how many lines come before it
        with open_file(file) as opened:
            left = broken.begin
            while left and (block := opened.stream.read(min(left, 1 << 20))):
                number += block.count(b"\n")
                left -= len(block)
    return Failure(f"{file.label}, record {number}: {explain(broken.reason, fields)}")
