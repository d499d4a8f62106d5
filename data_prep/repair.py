"""`repair`: rebuild a lost index from the shards, and make the counts fit the shards that are left.

    index lost or edited          written anew from the shards; it is exact if the manifest's digest agrees
    shard cut, changed, foreign   moved to damaged/, so its rows are gone; another build brings them back
    manifest lost                 beyond repair, for it alone names the tokenizer and the row length

Nothing is deleted. Each shard whose rows are dropped is named.
"""

import os
from pathlib import Path
from typing import Any

from command_line import Failure, UsageError
from data_prep.rows import (
    HASH,
    INDEX,
    MANIFEST,
    AtomicFiles,
    Manifest,
    ShardData,
    digest,
    index_bytes,
    is_url,
    rows_digest,
)
from data_prep.verify import (
    Totals,
    folders_of_rows,
    read_index,
    read_manifest,
    rows_damage,
    shard_bytes,
    shard_files,
    stored,
)

DAMAGED = "damaged"


def repair(location: str) -> list[str]:
    """Repair the rows in a local folder, or in its train/ and validation/. Returns a line for each thing done."""
    if is_url(location):
        raise UsageError(f"{location} is a URL: copy the rows to a local folder, repair them there and copy them back")
    lines = []
    for folder in folders_of_rows(location):
        prefix = os.path.relpath(folder, location)
        lines += [f"{line}" if prefix == "." else f"{prefix}/{line}" for line in _repair_folder(Path(folder))]
    return lines or [f"{location}: nothing to repair"]


def _repair_folder(folder: Path) -> list[str]:
    store = AtomicFiles(str(folder))
    manifest = read_manifest(store)
    if isinstance(manifest, str):
        raise Failure(f"{folder}/{MANIFEST}: {manifest}; without it the rows cannot be repaired: build them again")
    index = read_index(store)
    trusted = isinstance(index, dict) and rows_digest(index) == manifest.rows_digest
    described = {stored(shard)["basename"]: shard for shard in index["shards"]} if isinstance(index, dict) else {}
    totals = Totals()
    kept: list[dict[str, Any]] = []
    bad: dict[str, str] = {}
    files = shard_files(store)
    unpacked = [
        name for name in files if f"{name}.zstd" in files
    ]  # by streaming, which leaves them beside the packed ones
    for name in sorted(set(files) - set(unpacked)):
        found = _described(store, name, described.get(name) if trusted else None, trusted, manifest, totals)
        if isinstance(found, str):
            bad[name] = found
        else:
            kept.append(found)
    lines = [f"{name}: moved to {DAMAGED}/, its rows are dropped: {why}" for name, why in bad.items()]
    lines += [f"{name}: it is missing, its rows are dropped" for name in described if not (folder / name).exists()]
    if trusted and not lines:
        return []
    if not kept:
        raise Failure(f"no shard in {folder} can be used: build the rows again")
    for name in [*bad, *(name for name in unpacked if f"{name}.zstd" in bad)]:
        (folder / DAMAGED).mkdir(mode=0o700, exist_ok=True)
        os.replace(folder / name, folder / DAMAGED / name)
    rebuilt = {"version": 2, "shards": kept}
    store.put(INDEX, index_bytes(rebuilt))
    if rows_digest(rebuilt) == manifest.rows_digest:
        return [*lines, f"{INDEX}: rebuilt from the shards; it is exactly the one the build wrote"]
    lost = manifest.counts.rows - totals.rows
    lines.append(f"{INDEX}: rebuilt from {len(kept)} shards with {totals.rows:,} rows; {lost:,} rows are lost")
    counts = manifest.counts.model_copy(update={"rows": totals.rows, "pieces": totals.pieces, "tokens": totals.tokens})
    notes = [f"{lost} rows and {manifest.counts.tokens - totals.tokens} tokens dropped with damaged or missing shards"]
    changed = manifest.model_copy(
        update={"counts": counts, "rows_digest": rows_digest(rebuilt), "repaired": [*manifest.repaired, *notes]}
    )
    store.put(MANIFEST, changed.model_dump_json(indent=2).encode() + b"\n")
    return [*lines, f"{MANIFEST}: counts of rows, pieces and tokens made to fit; documents and sources are the build's"]


def _described(
    store: AtomicFiles, name: str, shard: dict[str, Any] | None, trusted: bool, manifest: Manifest, totals: Totals
) -> dict[str, Any] | str:
    """The index's entry of a shard, the old one if the index can be trusted, else a new one; or why the shard cannot be used."""
    if trusted and shard is None:
        return f"it is foreign: {INDEX} has no such shard"
    before = (totals.rows, totals.pieces, totals.tokens)
    if shard is None:
        made = _from_bytes(store.get(name), name)
        if isinstance(made, str):
            return made
        shard = made
    data = shard_bytes(store, shard, {})
    why = data if isinstance(data, str) else rows_damage(data, shard, manifest, totals)
    if why:
        totals.rows, totals.pieces, totals.tokens = before
        return why
    return shard


def _from_bytes(data: bytes, name: str) -> dict[str, Any] | str:
    packed = data if name.endswith(".zstd") else None
    raw_name = name.removesuffix(".zstd")
    try:
        if packed is not None:
            import zstandard

            data = zstandard.ZstdDecompressor().decompress(data)
        rows = ShardData(data)
    except ValueError as error:
        return f"partial or damaged: {error}"
    except Exception as error:
        return f"partial or damaged: it cannot be unpacked ({type(error).__name__})"
    entry = {"basename": raw_name, "bytes": len(data), "hashes": {HASH: digest(data)}}
    zipped = None if packed is None else {"basename": name, "bytes": len(packed), "hashes": {HASH: digest(packed)}}
    return {"samples": rows.samples, "raw_data": entry, "zip_data": zipped} | rows.settings
