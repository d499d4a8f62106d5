"""Which files a build reads, and how messages may name them.

    python -m data_prep build notes.jsonl.zst scans/ 'letters/*.txt' s3://bucket/notes/ hub:owner/name ...
                              |               |       |              |                  |
                              a file          a folder, all levels; a pattern; a URL of any of these; a data set of the hub

A folder that `datasets` saved (`save_to_disk`) is read as one data set. A file *found* in a folder, by a pattern or in a bucket
may bear a patient's name, so messages never show its name: they say "file 3 of 12 in 'scans/'", counted in sorted order. They
repeat only what the command line itself says.
"""

import glob
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import Failure, UsageError
from data_prep.documents.formats import FORMATS
from data_prep.documents.source_file import SourceFile
from data_prep.rows import filesystem, is_url, said_of

COMPRESSIONS = (".gz", ".zst")
HUB = "hub:"


@dataclass(frozen=True)
class Found:
    files: list[SourceFile]
    left_out: int  # files of unknown kind in folders or among those that a pattern matches


def kind(name: str) -> tuple[str, str] | None:
    """(format, compression) by the endings of the name, or None."""
    stem, compression = name.lower(), ""
    for ending in COMPRESSIONS:
        if stem.endswith(ending):
            stem, compression = stem.removesuffix(ending), ending
    known = os.path.splitext(stem)[1]
    for key, format in FORMATS.items():
        if known in format.endings and (format.compressible or not compression):
            return key, compression
    return None


def _known() -> str:
    """The endings that are read, as messages name them."""
    compressible = [ending for format in FORMATS.values() if format.compressible for ending in format.endings]
    others = [ending for format in FORMATS.values() if not format.compressible for ending in format.endings]
    *first, last = compressible
    return f"{', '.join(first)} or {last} (plain or with {' or '.join(COMPRESSIONS)}) or in {' or '.join(others)}"


def find_files(inputs: list[str]) -> Found:
    """The files of all inputs, in the order of the command line. Those of one folder or pattern are sorted by path.

    Raises Failure for an input that does not exist, has no usable file or cannot be read, UsageError for a file that comes twice.
    """
    files: list[SourceFile] = []
    left_out = 0
    seen: dict[str, str] = {}
    for given in inputs:
        found, others = _of_input(given)
        left_out += others
        for file in found:
            real = file.location if is_url(file.location) else os.path.realpath(file.location)
            if real in seen:
                raise UsageError(
                    f"a file comes twice, by {seen[real]!r} and by {given!r}: its documents would count double"
                )
            seen[real] = given
        files += found
    return Found(files, left_out)


def _of_input(given: str) -> tuple[list[SourceFile], int]:
    if given.startswith(HUB):
        return _of_hub(given), 0
    if is_url(given):
        return _of_url(given)
    if os.path.isfile(given):
        return [_local(given, repr(given), *_kind_or_failure(given, given))], 0
    if os.path.isdir(given):
        if any(os.path.isfile(os.path.join(given, name)) for name in ("state.json", "dataset_dict.json")):
            return _of_saved_dataset(given), 0
        paths = _walk(given)
    else:
        paths = [path for path in glob.glob(given, recursive=True) if os.path.isfile(path)]
        if not paths:
            raise Failure(f"no such file or folder, and no file matches: {given!r}")
    usable, others = _usable(given, paths)
    return [_local(path, label, *known) for path, label, known in usable], others


def _kind_or_failure(given: str, name: str) -> tuple[str, str]:
    known = kind(name)
    if known is None:
        raise Failure(f"{given!r} is of no known kind: a name ends in {_known()}")
    return known


def _usable(given: str, paths: list[str]) -> tuple[list[tuple[str, str, tuple[str, str]]], int]:
    """(path, label, kind) of each usable file among those found, sorted, and the number of the others."""
    kinds = [(path, known) for path in sorted(paths) if (known := kind(path))]
    if not kinds:
        raise Failure(f"no file to read in {given!r}: names must end in {_known()}")
    usable = [(p, f"file {n} of {len(kinds)} in {given!r}", known) for n, (p, known) in enumerate(kinds, 1)]
    return usable, len(paths) - len(kinds)


def _local(path: str, label: str, format: str, compression: str) -> SourceFile:
    with said_of(label):
        state = os.stat(path)
    return SourceFile(path, label, format, compression, state.st_size, f"{state.st_size} {state.st_mtime_ns}")


def _walk(folder: str) -> list[str]:
    """Every file below `folder`, but no hidden file and nothing in a hidden folder (such as .git)."""

    def refuse(error: OSError) -> None:
        raise Failure(f"a folder in {folder!r} cannot be read: {error.strerror}")

    paths = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return paths


def _of_url(given: str) -> tuple[list[SourceFile], int]:
    """A file, a folder or a pattern behind a URL."""
    fs, path = filesystem(given)
    scheme = given.partition("://")[0]
    entries: dict[str, dict[str, Any]] = {}
    single: dict[str, Any] | None = None
    try:
        if any(sign in path for sign in "*[") and scheme not in ("http", "https"):
            entries = fs.glob(path, detail=True)
        else:
            info = fs.info(path)
            if info["type"] == "directory":
                entries = fs.find(path, detail=True)
            else:
                single = info
    except FileNotFoundError as error:
        raise Failure(f"nothing is at {given!r} ({error.strerror or 'not found'})") from None
    except Exception as error:  # each library raises its own; only the short reason of an OSError surely quotes nothing
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise Failure(f"{given!r} cannot be listed: {why}") from None
    if single is not None:
        name = path.partition("?")[0]
        return [_remote(given, repr(given), *_kind_or_failure(given, name), single)], 0
    found = {name: entry for name, entry in entries.items() if entry["type"] == "file" and "/." not in name}
    if not found:
        raise Failure(f"no file is at {given!r}, and none matches")
    usable, others = _usable(given, list(found))
    return [_remote(fs.unstrip_protocol(p), label, *known, found[p]) for p, label, known in usable], others


def _remote(location: str, label: str, format: str, compression: str, entry: dict[str, Any]) -> SourceFile:
    size = int(entry.get("size") or 0)  # some web servers give no size
    marks = [entry.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "LastModified", "blob_id")]
    return SourceFile(location, label, format, compression, size, f"{size} {[str(m) for m in marks if m]}")


def _of_saved_dataset(given: str) -> list[SourceFile]:
    """The Arrow files of a folder that `datasets` saved, found without importing `datasets`, which takes seconds."""
    if not os.path.isfile(os.path.join(given, "state.json")):
        splits = sorted(name for name in os.listdir(given) if os.path.isdir(os.path.join(given, name)))
        raise Failure(
            f"{given!r} holds several splits: name the one to read, such as {os.path.join(given, 'train')!r}"
            if "train" in splits
            else f"{given!r} holds several splits: name the folder of one of them"
        )
    try:
        state = json.loads(Path(given, "state.json").read_bytes())
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise Failure(f"{given!r}: its state.json is not one that `datasets` wrote") from None
    if any(os.path.basename(name) != name for name in names):
        raise Failure(f"{given!r}: its state.json names a file outside the folder")
    return [
        _local(os.path.join(given, name), f"file {number} of {len(names)} in {given!r}", "arrow", "")
        for number, name in enumerate(names, 1)
    ]


def _of_hub(given: str) -> list[SourceFile]:
    """The files of `hub:owner/name[:configuration[:split]]`. `datasets` downloads them into its cache of Arrow files."""
    name, configuration, split, *_ = [*given.removeprefix(HUB).split(":"), "", ""]
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from datasets import load_dataset

    try:
        loaded = load_dataset(name, configuration or None, split=split or "train")
    except Exception as error:
        raise Failure(f"{given!r} cannot be loaded from the Hugging Face hub ({type(error).__name__})") from None
    paths = [entry["filename"] for entry in loaded.cache_files]
    if not paths:
        raise Failure(f"{given!r} holds no records")
    return [_local(path, f"file {n} of {len(paths)} in {given!r}", "arrow", "") for n, path in enumerate(paths, 1)]
