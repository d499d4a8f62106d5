"""Reads a YAML file and command-line overrides into a checked recipe with every path resolved; any error is a UsageError."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from command_line import UsageError
from data_prep.rows import is_url
from pipeline.recipe.schema import TAGS, OwnData, Recipe, Sources, Validation

INSTALLED = Path(__file__).resolve().parents[2]


def _override(tree: dict[str, Any], assignment: str) -> None:
    """Apply one `key.0.key=value` of the command line."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise UsageError(f"'{assignment}' is not key=value")
    node: Any = tree
    *parents, last = key.split(".")
    try:
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        if isinstance(node, list):
            node[int(last)] = yaml.safe_load(text)
        elif isinstance(node, dict):
            node[last] = yaml.safe_load(text)
        else:
            raise TypeError
    except (ValueError, IndexError, TypeError, AttributeError):
        raise UsageError(f"'{key}' names no key of the recipe") from None
    except yaml.YAMLError:
        raise UsageError(f"the value of '{key}' is not YAML") from None


def resolve(location: str | None, folder: Path) -> str | None:
    """Relative paths resolve against the recipe's own folder; URLs stay as they are."""
    return location if location is None or is_url(location) else str((folder / Path(location).expanduser()).resolve())


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = ".".join(str(part) for part in problem["loc"] if part not in TAGS)
    message = problem["msg"].removeprefix("Value error, ")
    given = problem["input"]
    shown = (
        f" (given: {given!r})" if isinstance(given, str | int | float | None) and problem["type"] != "missing" else ""
    )
    more = f"; and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    return f"{where + ': ' if where else ''}{message}{shown}{more}"


def parse(tree: Any, folder: Path, source: str) -> Recipe:
    """Returns the recipe from plain values, paths resolved against `folder`; a UsageError names the key and the remedy."""
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"{source}: {_first_problem(error)}") from None
    return _resolved(recipe, folder)


def _resolved(recipe: Recipe, folder: Path) -> Recipe:
    """Returns the recipe with absolute paths, and with the defaults that depend on other keys filled in."""

    def sources(given: Sources) -> Sources:
        if isinstance(given, str):
            return str(resolve(given, folder))
        return [source.model_copy(update={"rows": resolve(source.rows, folder)}) for source in given]

    def changed(part: Any, **update: Any) -> Any:
        return part.model_copy(update=update)

    init, file = recipe.model.init, recipe.engine.deepspeed
    if init is not None and (folder / Path(init).expanduser()).is_dir():
        init = resolve(init, folder)  # otherwise it is a hub name
    data = recipe.data
    return changed(
        recipe,
        model=changed(recipe.model, init=init),
        data=changed(
            data,
            rows=sources(data.rows),
            validation=resolve(data.validation, folder),
            cache=resolve(data.cache, folder),
        ),
        phases=[
            changed(phase, data=changed(phase.data, rows=sources(phase.data.rows)))
            if isinstance(phase.data, OwnData)
            else phase
            for phase in recipe.phases
        ],
        engine=changed(recipe.engine, deepspeed=file if file.startswith("ds_configs/") else resolve(file, folder)),
        validation=recipe.validation or (Validation() if data.validation else None),
        start=recipe.start and changed(recipe.start, checkpoint=resolve(recipe.start.checkpoint, folder)),
    )


def load(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read `path`, apply the command line's key=value pairs, and check everything that needs no other file."""
    path = Path(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"recipe {path}: {(error.strerror or 'cannot be read').lower()}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        raise UsageError(f"recipe {path} is not YAML" + (f": line {mark.line + 1}" if mark else "")) from None
    if not isinstance(tree, dict):
        raise UsageError(f"recipe {path} must be a mapping of keys")
    for assignment in overrides or []:
        _override(tree, assignment)
    return parse(tree, path.resolve().parent, f"recipe {path}")


def deepspeed_file(recipe: Recipe) -> Path:
    """Returns the DeepSpeed file's path; `ds_configs/...` lies in the installed project, whatever the working folder."""
    name = recipe.engine.deepspeed
    return INSTALLED / name if name.startswith("ds_configs/") else Path(name)
