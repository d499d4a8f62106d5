"""Are the rows still what the build wrote? Every shard and row against the index and the manifest.

From the outside inwards: manifest, index, the folder's files, each shard's size and hash, each row, then the counts. A shard
that fails its hash is not read any further, and one that passes is read row by row, so that rows that were wrong from the
start (or an index rewritten to match damaged shards) are found too. Findings name shards and rows, never what is in them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep.errors import Failure
from data_prep.rows import HASH, MANIFEST, TOKENIZER, Manifest, Row, columns, rows_digest, tokenizer_digest

SPLITS = ("train", "validation")
INDEX = "index.json"


@dataclass
class Totals:
    """What the rows themselves add up to."""

    rows: int = 0
    pieces: int = 0
    tokens: int = 0
    unread: bool = False  # a shard could not be read to its end, so the sums say nothing


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


def folders_of_rows(location: str) -> list[Path]:
    """`location` itself, or its train/ and validation/ where it has such. Raises Failure where there are no rows."""
    folder = Path(location)
    if "://" in location:
        raise Failure(f"{location} is a URL: copy the rows to a local folder first")
    if (folder / MANIFEST).is_file() or (folder / INDEX).is_file():
        return [folder]
    splits = [folder / split for split in SPLITS if (folder / split).is_dir()]
    if not splits:
        reason = f"neither {MANIFEST} nor {INDEX} is in it" if folder.is_dir() else "there is no such folder"
        raise Failure(f"no rows at {location}: {reason}; `python -m data_prep build` makes them")
    return splits


def verify(location: str) -> Verdict:
    """All findings for the rows at `location`: a folder of rows, or the one above train/ and validation/."""
    verdict = Verdict()
    folders = folders_of_rows(location)
    manifests = []
    for folder in folders:
        prefix = f"{folder.name}/" if folder != Path(location) else ""
        totals = verdict.totals[prefix] = Totals()
        read = _read_manifest(folder)
        if isinstance(read, str):
            verdict.findings.append(Finding(prefix + MANIFEST, read))
        manifest = read if isinstance(read, Manifest) else None
        manifests.append(manifest)
        for finding in _verify_folder(folder, manifest, totals):
            finding.what = prefix + finding.what
            verdict.findings.append(finding)
    if folders != [Path(location)]:
        found = {folder.name for folder in folders}
        verdict.findings += [Finding(split, "the folder is missing") for split in SPLITS if split not in found]
        if len({(m.tokenizer.digest, m.row_length) for m in manifests if m}) > 1:
            verdict.findings.append(Finding(location, "train and validation differ in tokenizer or row length"))
    return verdict


def _verify_folder(folder: Path, manifest: Manifest | None, totals: Totals) -> Iterator[Finding]:
    if manifest:
        yield from _verify_tokenizer(folder, manifest)
    index = _read_index(folder)
    if isinstance(index, str):
        yield Finding(INDEX, index)
        on_disk = sorted(path.name for path in folder.glob("*.mds*"))
        yield from (Finding(name, "no index says what it should hold") for name in on_disk)
        return
    shards: list[dict[str, Any]] = index["shards"]
    names = [shard["raw_data"]["basename"] for shard in shards]
    for path in sorted(folder.glob("*.mds*")):
        if path.name not in names:
            yield Finding(path.name, f"it is foreign: {INDEX} has no such shard")
    for number, name in enumerate(names):
        if name in names[:number]:
            yield Finding(INDEX, f"it lists {name} twice")
    if manifest and rows_digest(index) != manifest.rows_digest:
        yield Finding(
            INDEX, f"it is not the one the build wrote: {MANIFEST} has another digest of sizes, rows and hashes"
        )
    hashes = {shard["raw_data"]["hashes"][HASH]: shard["raw_data"]["basename"] for shard in shards}
    for shard in shards:
        name, entry = shard["raw_data"]["basename"], shard["raw_data"]
        why = _shard_damage(folder / name, entry, hashes)
        if why is None and manifest:
            why = _rows_damage(folder, shard, manifest, totals)
        if why:
            totals.unread = True
            yield Finding(name, why)
    if manifest and not totals.unread:
        counted = {"rows": totals.rows, "pieces": totals.pieces, "tokens": totals.tokens}
        for what, count in counted.items():
            said = getattr(manifest.counts, what)
            if said != count:
                yield Finding(MANIFEST, f"it says {said} {what}, the shards hold {count}")
    if manifest and manifest.counts.documents != sum(source.documents for source in manifest.sources):
        yield Finding(MANIFEST, "its documents are not the sum of its sources' documents")
    if manifest and manifest.counts.documents > manifest.counts.pieces:
        yield Finding(MANIFEST, "it says more documents than pieces")


def _read_manifest(folder: Path) -> Manifest | str:
    """The manifest, or what is wrong with it."""
    from pydantic import ValidationError

    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return "it is missing, so the build is not complete"
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        return f"its field {where} is damaged or of another version" if where else "it is damaged: not valid JSON"


def _read_index(folder: Path) -> dict[str, Any] | str:
    """index.json with all the fields used here, of the right types, or what is wrong with it."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    except FileNotFoundError:
        return "it is missing"
    except (ValueError, RecursionError):
        return "it is damaged: not valid JSON"
    try:
        for shard in index["shards"]:
            entry = shard["raw_data"]
            name = entry["basename"]
            if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
                return "it is damaged: it names a shard outside its folder"
            if not isinstance(entry["hashes"][HASH], str):
                return f"it is damaged: no {HASH} hash of {name}"
            for number in (shard["samples"], entry["bytes"]):
                if type(number) is not int or number < 0:
                    return f"it is damaged: an impossible size or number of rows of {name}"
            if shard["format"] != "mds" or shard["version"] != 2 or shard["compression"] or shard["zip_data"]:
                return f"it is damaged or foreign: {name} is not an uncompressed MDS shard of version 2"
            dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    except (KeyError, TypeError, ValueError):
        return "it is damaged: fields of MDS shards are missing"
    return index


def _verify_tokenizer(folder: Path, manifest: Manifest) -> Iterator[Finding]:
    try:
        if tokenizer_digest(folder / TOKENIZER) != manifest.tokenizer.digest:
            yield Finding(f"{TOKENIZER}/tokenizer.json", f"it is not the one the rows were made with ({MANIFEST})")
    except Failure:
        yield Finding(f"{TOKENIZER}/tokenizer.json", "it is missing or damaged")


def _shard_damage(path: Path, entry: dict[str, Any], hashes: dict[str, str]) -> str | None:
    """What is wrong with the bytes of a shard; `hashes` are all shards' in the index, to know swapped ones."""
    import xxhash

    if not path.is_file():
        return "it is missing"
    digest = xxhash.xxh64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    if digest.hexdigest() == entry["hashes"][HASH] and path.stat().st_size == entry["bytes"]:
        return None
    other = hashes.get(digest.hexdigest())
    if other and other != path.name:
        return f"it holds what belongs to {other}: shards were swapped or copied over"
    size, expected = path.stat().st_size, entry["bytes"]
    if size != expected:
        return f"it has {size} bytes instead of {expected}: cut, or written over"
    return f"its bytes were changed: {HASH} is {digest.hexdigest()} instead of {entry['hashes'][HASH]}"


def _rows_damage(folder: Path, shard: dict[str, Any], manifest: Manifest, totals: Totals) -> str | None:
    """Read the rows of a shard whose bytes are right; what is wrong with the first bad one. Adds up `totals`."""
    from streaming.base.format.mds.reader import MDSReader

    expected = columns(manifest.tokenizer.vocabulary)
    if dict(zip(shard["column_names"], shard["column_encodings"], strict=True)) != expected:
        return f"its columns are not those of packed rows of this vocabulary ({expected})"
    path = folder / shard["raw_data"]["basename"]
    with path.open("rb") as file:
        held = int.from_bytes(file.read(4), "little")
    if held != shard["samples"]:
        return f"it holds {held} rows, and {INDEX} says {shard['samples']}"
    number = 0
    try:
        reader = MDSReader.from_json(str(folder), "", shard)
        for number in range(shard["samples"]):
            sample = reader[number]
            row = Row(sample["tokens"], sample["lengths"])
            problem = row.check(manifest.row_length, manifest.tokenizer.vocabulary)
            if problem:
                return f"row {number} is wrong: {problem}"
            totals.rows += 1
            totals.pieces += len(row.lengths)
            totals.tokens += len(row.tokens)
    except Exception as error:  # whatever a decoder says of damaged bytes may quote them
        return f"row {number} cannot be read ({type(error).__name__})"
    return None
