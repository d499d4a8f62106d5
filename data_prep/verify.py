"""`verify`: are the rows still what the build wrote? In a folder or at a URL.

It checks from the outside inwards: manifest, index, the files of the folder, the size and hash of each shard, each row, then the
counts. It reads no further in a shard whose hash is wrong. It reads all others row by row, and so also finds rows that were wrong
from the start, and an index that was rewritten to match damaged shards. Findings name shards and rows, never their content.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_line import Failure
from data_prep.rows import (
    HASH,
    INDEX,
    MANIFEST,
    TOKENIZER,
    AtomicFiles,
    Manifest,
    ShardData,
    columns,
    digest,
    is_url,
    rows_digest,
    tokenizer_digest,
)

SPLITS = ("train", "validation")


@dataclass
class Totals:
    """The sums over the rows themselves."""

    rows: int = 0
    pieces: int = 0
    tokens: int = 0
    unread: bool = False  # a shard could not be read to its end, so the sums are too small


@dataclass
class Finding:
    what: str  # a file, such as "train/shard.00003.mds", or a folder
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass
class Verdict:
    findings: list[Finding] = field(default_factory=list)
    totals: dict[str, Totals] = field(default_factory=dict)  # by folder


def folders_of_rows(location: str) -> list[str]:
    """`location` itself, or its train/ and validation/ if it has such. Raises Failure if there are no rows."""
    place = location.rstrip("/") or "/"
    names = AtomicFiles(place).sizes()
    if MANIFEST in names or INDEX in names:
        return [place]
    splits = [f"{place}/{split}" for split in SPLITS if any(name.startswith(f"{split}/") for name in names)]
    if not splits:
        there = is_url(location) or Path(location).is_dir()
        reason = f"neither {MANIFEST} nor {INDEX} is in it" if there else "there is no such folder"
        raise Failure(f"no rows at {location}: {reason}; `python -m data_prep build` makes them")
    return splits


def verify(location: str) -> Verdict:
    """All findings about the rows at `location`: a folder or URL of rows, or the one above train/ and validation/."""
    verdict = Verdict()
    folders = folders_of_rows(location)
    manifests = []
    splits = len(folders) > 1 or folders[0] != (location.rstrip("/") or "/")
    for folder in folders:
        prefix = f"{folder.rpartition('/')[2]}/" if splits else ""
        totals = verdict.totals[prefix] = Totals()
        store = AtomicFiles(folder)
        read = read_manifest(store)
        if isinstance(read, str):
            verdict.findings.append(Finding(prefix + MANIFEST, read))
        manifest = read if isinstance(read, Manifest) else None
        manifests.append(manifest)
        for finding in _verify_folder(store, manifest, totals):
            finding.what = prefix + finding.what
            verdict.findings.append(finding)
    if splits:
        found = {folder.rpartition("/")[2] for folder in folders}
        verdict.findings += [Finding(split, "the folder is missing") for split in SPLITS if split not in found]
        if len({(m.tokenizer.digest, m.row_length) for m in manifests if m}) > 1:
            verdict.findings.append(Finding(location, "train and validation differ in tokenizer or row length"))
    return verdict


def _verify_folder(store: AtomicFiles, manifest: Manifest | None, totals: Totals) -> Iterator[Finding]:
    if manifest:
        yield from _verify_tokenizer(store, manifest)
    on_disk = shard_files(store)
    index = read_index(store)
    if isinstance(index, str):
        yield Finding(INDEX, index)
        yield from (Finding(name, "no index says what it should hold") for name in on_disk)
        return
    shards: list[dict[str, Any]] = index["shards"]
    names = [stored(shard)["basename"] for shard in shards]
    known = {
        *names,
        *(shard["raw_data"]["basename"] for shard in shards),
    }  # streaming puts an unpacked shard beside the packed one
    for name in on_disk:
        if name not in known:
            yield Finding(name, f"it is foreign: {INDEX} has no such shard")
    for number, name in enumerate(names):
        if name in names[:number]:
            yield Finding(INDEX, f"it lists {name} twice")
    if manifest and rows_digest(index) != manifest.rows_digest:
        yield Finding(
            INDEX, f"it is not the one the build wrote: {MANIFEST} has another digest of sizes, rows and hashes"
        )
    hashes = {stored(shard)["hashes"][HASH]: stored(shard)["basename"] for shard in shards}
    for shard in shards:
        data = shard_bytes(store, shard, hashes)
        why = data if isinstance(data, str) else None
        if isinstance(data, bytes) and manifest:
            why = rows_damage(data, shard, manifest, totals)
        if why:
            totals.unread = True
            yield Finding(stored(shard)["basename"], why)
    if manifest and not totals.unread:
        counted = {"rows": totals.rows, "pieces": totals.pieces, "tokens": totals.tokens}
        for what, count in counted.items():
            said = getattr(manifest.counts, what)
            if said != count:
                yield Finding(MANIFEST, f"it says {said} {what}, the shards hold {count}")
    if manifest and manifest.counts.documents != sum(source.documents for source in manifest.sources):
        yield Finding(MANIFEST, "its documents are not the sum of its sources' documents")
    if manifest and manifest.counts.documents > manifest.counts.pieces and not manifest.repaired:
        yield Finding(MANIFEST, "it says more documents than pieces")


def shard_files(store: AtomicFiles) -> list[str]:
    return sorted(name for name in store.sizes() if ".mds" in name and "/" not in name)


def stored(shard: dict[str, Any]) -> dict[str, Any]:
    """The index's entry of the file that is stored: the packed one if the shards are compressed."""
    described: dict[str, Any] = shard["zip_data"] or shard["raw_data"]
    return described


def read_manifest(store: AtomicFiles) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    from pydantic import ValidationError

    try:
        return Manifest.model_validate_json(store.get(MANIFEST))
    except FileNotFoundError:
        return "it is missing, so the build is not complete"
    except OSError as error:
        return f"it cannot be read ({error.strerror or type(error).__name__})"
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        return f"its field {where} is damaged or of another version" if where else "it is damaged: not valid JSON"


def read_index(store: AtomicFiles) -> dict[str, Any] | str:
    """index.json, or what is wrong with it. All fields that are used here have been checked."""
    try:
        index: dict[str, Any] = json.loads(store.get(INDEX))
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read ({error.strerror or type(error).__name__})"
    except (ValueError, RecursionError):
        return "it is damaged: not valid JSON"
    try:
        for shard in index["shards"]:
            for entry in (shard["raw_data"], *([shard["zip_data"]] if shard["zip_data"] else [])):
                name = entry["basename"]
                if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                    return "it is damaged: it names a shard outside its folder"
                if not isinstance(entry["hashes"][HASH], str):
                    return f"it is damaged: no {HASH} hash of {name}"
                for number in (shard["samples"], entry["bytes"]):
                    if type(number) is not int or number < 0:
                        return f"it is damaged: an impossible size or number of rows of {name}"
            packed = shard["compression"]
            if (shard["format"], shard["version"]) != ("mds", 2) or packed not in (None, "zstd"):
                return f"it is damaged or foreign: {name} is not an MDS shard of version 2, plain or with zstd"
            if bool(packed) != bool(shard["zip_data"]):
                return f"it is damaged: it does not agree with itself whether {name} is compressed"
            dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    except (KeyError, TypeError, ValueError):
        return "it is damaged: fields of MDS shards are missing"
    return index


def _verify_tokenizer(store: AtomicFiles, manifest: Manifest) -> Iterator[Finding]:
    try:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "tokenizer.json").write_bytes(store.get(f"{TOKENIZER}/tokenizer.json"))
            if tokenizer_digest(folder) != manifest.tokenizer.digest:
                yield Finding(f"{TOKENIZER}/tokenizer.json", f"it is not the one the rows were made with ({MANIFEST})")
    except (Failure, OSError):
        yield Finding(f"{TOKENIZER}/tokenizer.json", "it is missing or damaged")


def shard_bytes(store: AtomicFiles, shard: dict[str, Any], hashes: dict[str, str]) -> bytes | str:
    """A shard, unpacked, or what is wrong with its bytes. `hashes` of all shards in the index tell which shards were swapped."""
    entry = stored(shard)
    try:
        data = store.get(entry["basename"])
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read ({error.strerror or type(error).__name__})"
    found, expected = digest(data), entry["bytes"]
    if found != entry["hashes"][HASH] or len(data) != expected:
        other = hashes.get(found)
        if other and other != entry["basename"]:
            return f"it holds what belongs to {other}: shards were swapped or copied over"
        if len(data) != expected:
            return f"it has {len(data)} bytes instead of {expected}: cut, or written over"
        return f"its bytes were changed: {HASH} is {found} instead of {entry['hashes'][HASH]}"
    if not shard["zip_data"]:
        return data
    import zstandard

    raw = shard["raw_data"]
    try:
        data = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw["bytes"])
    except zstandard.ZstdError:
        return "it cannot be unpacked"
    if len(data) != raw["bytes"] or digest(data) != raw["hashes"][HASH]:
        return f"unpacked, it is not what {INDEX} says"
    return data


def rows_damage(data: bytes, shard: dict[str, Any], manifest: Manifest, totals: Totals) -> str | None:
    """Read the rows of a shard whose bytes are right, and add them to `totals`. Returns what is wrong with the first bad row."""
    expected = columns(manifest.tokenizer.vocabulary)
    if dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) != expected:
        return f"its columns are not those of packed rows of this vocabulary ({expected})"
    try:
        rows = ShardData(data)
    except ValueError as error:
        return str(error)
    if rows.samples != shard["samples"]:
        return f"it holds {rows.samples} rows, and {INDEX} says {shard['samples']}"
    if rows.columns != expected:
        return f"its columns are not those of packed rows of this vocabulary ({expected})"
    number = 0
    try:
        for number, row in enumerate(rows):
            problem = row.check(manifest.row_length, manifest.tokenizer.vocabulary)
            if problem:
                return f"row {number} is wrong: {problem}"
            totals.rows += 1
            totals.pieces += len(row.lengths)
            totals.tokens += len(row.tokens)
    except Exception as error:  # a decoder's message about damaged bytes may quote them
        return f"row {number} cannot be read ({type(error).__name__})"
    return None
