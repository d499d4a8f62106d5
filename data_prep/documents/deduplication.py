"""Which documents are copies of an earlier one, by the hashes that the units hold.

The first copy in the order of the corpus stays. Memory is bounded: the hash space is cut into shares of some million documents,
and one pass over the hashes looks at one share. The answer takes one byte a document.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from data_prep.documents.text_hash import content_hash
from data_prep.rows import AtomicFiles

AT_ONCE = 4_000_000  # documents; about 130 MB while they are sorted
HASH_BYTES = len(content_hash(""))


def duplicates(store: AtomicFiles, names: list[str], at_once: int = AT_ONCE) -> NDArray[np.bool_]:
    """[documents] True for each whose hash came earlier. `names` are the files of hashes, in the order of the corpus."""
    sizes = store.sizes()
    counts = [sizes[name] // HASH_BYTES for name in names]
    total = sum(counts)
    found = np.zeros(total, bool)
    shares = -(-total // at_once)
    for share in range(shares):
        hashes, places = [], []
        start = 0
        for name, count in zip(names, counts, strict=True):
            of_unit = np.frombuffer(store.get(name), np.uint64).reshape(count, 2)
            inside = np.flatnonzero(of_unit[:, 0] % np.uint64(shares) == share) if shares > 1 else np.arange(count)
            hashes.append(of_unit[inside])
            places.append(inside + start)
            start += count
        _mark(found, hashes, places)
    return found


def _mark(found: NDArray[np.bool_], hashes: Iterable[NDArray[np.uint64]], places: Iterable[NDArray[np.int64]]) -> None:
    keys, where = np.concatenate(list(hashes)), np.concatenate(list(places))
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: the copies of a document stay in the order of the corpus
    keys = keys[order]
    same = (keys[1:] == keys[:-1]).all(axis=1)
    found[where[order[1:][same]]] = True
