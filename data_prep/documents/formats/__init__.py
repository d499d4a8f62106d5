"""The formats of input files, by name. A new format is one file here and one line in the table.

The help of `build` (`INPUT_HELP` in `data_prep/__main__.py`) names the endings too; it is plain text, so that --help imports
nothing heavy.
"""

from data_prep.documents.formats.columnar import ARROW, PARQUET
from data_prep.documents.formats.delimited import CSV, TSV
from data_prep.documents.formats.format import Format
from data_prep.documents.formats.jsonl import JSONL
from data_prep.documents.formats.text import TEXT

FORMATS: dict[str, Format] = {
    "jsonl": JSONL,
    "csv": CSV,
    "tsv": TSV,
    "text": TEXT,
    "parquet": PARQUET,
    "arrow": ARROW,
}

__all__ = ["FORMATS"]
