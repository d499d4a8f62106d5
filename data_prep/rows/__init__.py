"""Packed rows: how they lie on a disk or in a bucket, and how they are read by index.

It may import `command_line` and no other room.
It offers the row format and manifest, the reader with its shard cache, and files that are written whole or not at all.
"""

from data_prep.rows.atomic_files import AtomicFiles, aside, empty_place, filesystem, put_in_place, said_of
from data_prep.rows.downloads import Remote
from data_prep.rows.format import (
    HASH,
    INDEX,
    MANIFEST,
    TOKENIZER,
    Counts,
    Manifest,
    Row,
    Source,
    TokenizerInfo,
    columns,
    content_digest,
    is_url,
    rows_digest,
    software,
    token_dtype,
    tokenizer_content,
    tokenizer_digest,
)
from data_prep.rows.mds import ShardData, ShardWriter, digest, index_bytes
from data_prep.rows.reader import Rows
from data_prep.rows.shard_cache import Shard, ShardFiles

__all__ = [
    "HASH",
    "INDEX",
    "MANIFEST",
    "TOKENIZER",
    "AtomicFiles",
    "Counts",
    "Manifest",
    "Remote",
    "Row",
    "Rows",
    "Shard",
    "ShardData",
    "ShardFiles",
    "ShardWriter",
    "Source",
    "TokenizerInfo",
    "aside",
    "columns",
    "content_digest",
    "digest",
    "empty_place",
    "filesystem",
    "index_bytes",
    "is_url",
    "put_in_place",
    "rows_digest",
    "said_of",
    "software",
    "token_dtype",
    "tokenizer_content",
    "tokenizer_digest",
]
