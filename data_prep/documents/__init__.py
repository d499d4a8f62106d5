"""From source files to documents: which files there are, their formats, fields and copies.

It may import `command_line` and `data_prep.rows` (URLs and files).
It offers the files of an input, slices that are read independently, and documents or the reason why a record holds none.
"""

from data_prep.documents.deduplication import duplicates
from data_prep.documents.fields import Fields, Reason
from data_prep.documents.formats import FORMATS
from data_prep.documents.inputs import find_files
from data_prep.documents.reading import Member, Reading
from data_prep.documents.records import BrokenRecord, Chunk, Document, documents
from data_prep.documents.slicing import corpus, in_words, slices, units
from data_prep.documents.source_file import SourceFile, ignore, open_file
from data_prep.documents.text_hash import content_hash, split_of

__all__ = [
    "FORMATS",
    "BrokenRecord",
    "Chunk",
    "Document",
    "Fields",
    "Member",
    "Reading",
    "Reason",
    "SourceFile",
    "content_hash",
    "corpus",
    "documents",
    "duplicates",
    "find_files",
    "ignore",
    "in_words",
    "open_file",
    "slices",
    "split_of",
    "units",
]
