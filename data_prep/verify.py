"""Are the rows what the build wrote? Every shard and row against the index and the manifest."""

from pathlib import Path

from data_prep.errors import Failure
from data_prep.rows import MANIFEST

SPLITS = ("train", "validation")


def folders_of_rows(location: str) -> list[Path]:
    """`location` itself, or its train/ and validation/ where it has such. Raises Failure where there are no rows."""
    folder = Path(location)
    if (folder / MANIFEST).is_file() or (folder / "index.json").is_file():
        return [folder]
    splits = [folder / split for split in SPLITS if (folder / split).is_dir()]
    if not splits:
        reason = f"neither {MANIFEST} nor index.json is in it" if folder.is_dir() else "there is no such folder"
        raise Failure(f"no rows at {location}: {reason}; `python -m data_prep build` makes them")
    return splits


def verify(location: str) -> int:
    raise NotImplementedError
