"""What the user asks of a build, and the checks before any work begins."""

from dataclasses import dataclass, field
from typing import Any

from command_line import UsageError
from data_prep.building.packing import FILL
from data_prep.building.rows_writer import SHARD_BYTES
from data_prep.documents import Reading
from data_prep.tokenizer import DocumentTokenizer

SHORTEST_ROW = 8


@dataclass(frozen=True)
class BuildOptions:
    inputs: list[str]
    tokenizer: str  # folder or hub name
    out: str  # folder or URL
    row_length: int  # tokens
    reading: Reading = field(default_factory=Reading)
    add_prefix_space: bool | None = None  # None: as the tokenizer does
    validation: float | None = None  # share of documents
    deduplicate: bool = False
    on_error: str = "fail"  # or "skip"
    seed: int = 17
    packing: bool = True
    fill: float = FILL  # below this fill documents are cut
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
        """What else decides the rows, by the name of the option."""
        return {
            "row-length": self.row_length,
            "seed": self.seed,
            "fill": self.fill,
            "no-packing": not self.packing,
            "shard-size": self.shard_bytes,
            "compression": self.compression,
            "add-prefix-space": self.add_prefix_space,
        }
