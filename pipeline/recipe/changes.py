"""Which recipe keys may change when a run resumes, and which may not because they decide the results."""

from typing import Any

from pipeline.recipe.schema import Recipe

# Keys that may change when a run resumes: they decide how the work is done, not its results.
FREE = {"data", "engine", "checkpoints", "logging", "faults", "card", "start"}


def numbers(recipe: Recipe) -> dict[str, Any]:
    """Returns the part of the recipe that decides the results, as plain values (rows are compared by digest, elsewhere)."""
    decisive = recipe.model_dump(mode="json", exclude=FREE)
    del decisive["model"]["attention"], decisive["batch"]["rows_per_device"]
    for phase in decisive["phases"]:
        if isinstance(phase["data"], dict):
            phase["data"] = "own"
    return decisive


def first_difference(old: Any, new: Any, path: str = "") -> str | None:
    """Returns the dotted key at which two plain values first differ, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(k for k in new if k not in old)]:
            found = first_difference(old.get(key), new.get(key), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return next((d for i, (a, b) in pairs if (d := first_difference(a, b, f"{path}.{i}"))), None)
    return None if old == new else path
