"""JSON Lines: one object a line. A large plain file is cut into shares by bytes."""

from data_prep.documents.formats.format import Chunks, Format
from data_prep.documents.reading import Member, Reading
from data_prep.documents.records import Chunk
from data_prep.documents.source_file import OpenFile, SourceFile


def _chunks(opened: OpenFile, member: Member, reading: Reading) -> Chunks:
    """Blocks of whole lines, which the workers parse. A line belongs to the share in which it begins."""
    stream, position, number = opened.stream, member.begin, 1
    if member.begin:  # the line that crosses the cut belongs to the share before
        opened.handle.seek(member.begin - 1)
        position = member.begin - 1 + len(stream.readline())
    start = position
    while member.end is None or position < member.end:
        block = stream.read(
            reading.unit_bytes if member.end is None else min(reading.unit_bytes, member.end - position)
        )
        if not block:
            return
        if not block.endswith(b"\n"):
            block += stream.readline()
        position += len(block)
        yield Chunk(member.source, start, number, lines=block), len(block)
        number += block.count(b"\n")


def _cuts(file: SourceFile, size: int) -> list[int]:
    return [*range(size, file.bytes, size), file.bytes]


JSONL = Format((".jsonl", ".ndjson"), _chunks, cuts=_cuts)
