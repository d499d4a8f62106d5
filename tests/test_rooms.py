"""The map of the rooms in CONTRIBUTING.md holds: who may import whom, no circles, and nobody looks behind a room's surface.

A module's folder is its room: `pipeline.data` for pipeline/data/loader.py, `pipeline` for pipeline/train.py. Folders within a
room belong to it. All imports count, also those inside functions and for type checkers.
"""

import ast
import graphlib
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("command_line", "data_prep", "pipeline", "evaluation")
ARROWS = re.compile(r"^\| `([a-z_.]+)` \|.*\|([^|]*)\|$", re.MULTILINE)


class Code:
    """The modules of some packages under `root`, and what each imports of them."""

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self.files = {
            ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
            for package in packages
            for file in sorted((root / package).rglob("*.py"))
        }
        self.folders = {name for name, file in self.files.items() if file.name == "__init__.py"}
        self.imports = {name: sorted(set(self.of(file))) for name, file in self.files.items()}

    def of(self, file: Path) -> Iterator[str]:
        """The modules of ours that a file imports; of a package, the name of its surface."""
        tree = ast.parse(file.read_text())
        named = {}  # what a name of the file stands for, where it is a module
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f"{file}: a relative import"
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    target = inner if inner in self.files else node.module
                    if target in self.files:
                        named[alias.asname or alias.name] = inner
                        yield str(target)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.files)
        for node in ast.walk(tree):  # a.c.two, where `c` was imported from a
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                reached = f"{named.get(node.value.id)}.{node.attr}"
                if reached in self.files:
                    yield reached

    def folder(self, module: str) -> str:
        return module if module in self.folders else module.rpartition(".")[0]

    def room(self, module: str) -> str:
        """The folder, at most two deep: what lies deeper belongs to the room above it."""
        return ".".join(self.folder(module).split(".")[:2])

    def arrows(self) -> dict[str, set[str]]:
        """From each room to the other rooms that it imports."""
        found: dict[str, set[str]] = {self.room(name): set() for name in self.files}
        for name, targets in self.imports.items():
            found[self.room(name)] |= {self.room(target) for target in targets} - {self.room(name)}
        return found


def circle(imports: dict[str, list[str]]) -> list[str] | None:
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def allowed(text: str) -> dict[str, set[str]]:
    """The table of CONTRIBUTING.md: of each room, those that it may import."""
    return {room: set(re.findall(r"`([a-z_.]+)`", cell)) for room, cell in ARROWS.findall(text)}


def too_deep(importer: str, target: str) -> bool:
    """Whether an import looks behind a surface: more than one step down from the folder that both lie in.

    `importer` is a folder. Packages have no surface of their own: from one to another it is a step to the package and one more.
    """
    common = 0
    for ours, theirs in zip(importer.split("."), target.split("."), strict=False):
        if ours != theirs:
            break
        common += 1
    return target.count(".") + 1 > (common + 1 if common else 2)


def behind_surfaces(code: Code) -> list[str]:
    return [
        f"{name} imports {target}"
        for name, targets in code.imports.items()
        for target in targets
        if too_deep(code.folder(name), target)
    ]


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(ROOT)


def test_no_import_circle_between_files_or_rooms(code: Code) -> None:
    assert circle(code.imports) is None
    assert circle({room: sorted(targets) for room, targets in code.arrows().items()}) is None


def test_the_arrows_are_those_of_the_map(code: Code) -> None:
    """Each is allowed, and what is allowed is used: else the map would say less and less."""
    assert code.arrows() == allowed((ROOT / "CONTRIBUTING.md").read_text())


def test_nobody_looks_behind_a_surface(code: Code) -> None:
    assert behind_surfaces(code) == []
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    benchmarks = {str(f.name): [t for t in code.of(f) if too_deep("", t)] for f in (ROOT / "benchmarks").glob("*.py")}
    assert packages == set(PACKAGES)
    assert benchmarks
    assert {name: deep for name, deep in benchmarks.items() if deep} == {}


def test_a_surface_says_what_the_room_is_and_offers_what_others_use(code: Code) -> None:
    """Three lines of docstring, and in `__all__` neither more nor less than it imports; nothing that only a test asks for."""
    asked, problems = defaultdict(set), []
    users = [*code.files.values(), *(ROOT / "benchmarks").glob("*.py")]
    for file in users:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in code.folders and file != code.files[node.module]:
                asked[node.module] |= {alias.name for alias in node.names}
    for room in sorted(code.folders - set(PACKAGES[1:])):
        tree = ast.parse(code.files[room].read_text())
        said = ast.get_docstring(tree) or ""
        assert len(said.splitlines()) >= 3, f"{room}: what it does, what it may import, what it offers"
        offered = {
            constant.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
            for constant in ast.walk(node.value)
            if isinstance(constant, ast.Constant)
        }
        modules = {name.rpartition(".")[2] for name in code.files if name.startswith(f"{room}.")}
        problems += [f"{room}.{name} hides the module of that name" for name in offered & modules]
        problems += [f"{room} does not offer {name}" for name in asked[room] - modules - offered]
        problems += [f"{room} offers {name}, which nobody asks for" for name in offered - asked[room]]
    assert problems == []


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"a/b/one": "from a.b.two import x", "a/b/two": "from a.b.one import y"}, "circle"),
        ({"a/b/one": "def f():\n    from a.b import g", "a/b/__init__": "from a.b.one import f"}, "circle"),
        ({"a/b/one": "from a.c import x", "a/c/two": "if 0:\n    from a.b import x"}, "circle"),
        ({"a/b/one": "from a.c.two import x", "a/c/two": ""}, "behind"),
        ({"a/b/one": "import a.c.two", "a/c/two": ""}, "behind"),
        ({"a/b/one": "from a import c\nc.two.f()", "a/c/two": ""}, "behind"),
        ({"a/b/one": "from a.c import two", "a/c/two": ""}, "behind"),
        ({"a/top": "from a.b.one import x", "a/b/one": ""}, "behind"),
        ({"a/b/one": "from a.b.inner.two import x", "a/b/inner/two": ""}, "behind"),
        ({"a/b/one": "from a.b.inner import x", "a/b/inner/two": "from a.b.three import y", "a/b/three": ""}, "well"),
        ({"a/top": "from a.b import x", "a/b/one": "from a.b.two import x", "a/b/two": "from c.d import z"}, "well"),
        ({"a/b/one": "from c.d.e import z"}, "behind"),
    ],
)
def test_what_breaks_the_rules_is_found(files: dict[str, str], says: str, tmp_path: Path) -> None:
    everything = {"c/d/e": "z = 1", **files}
    for name, text in everything.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in file.relative_to(tmp_path).parents:
            (tmp_path / folder / "__init__.py").touch()
        file.write_text(text)
    code = Code(tmp_path, ("a", "c"))
    rooms = {room: sorted(targets) for room, targets in code.arrows().items()}
    assert bool(circle(code.imports) or circle(rooms)) == (says == "circle")
    assert bool(behind_surfaces(code)) == (says == "behind")


def test_the_table_is_read_as_it_is_written() -> None:
    table = "| room | what | may import |\n|---|---|---|\n| `a.b` | its `f` | `c`, `c.d` |\n| `c` | g | |\n"
    assert allowed(table) == {"a.b": {"c", "c.d"}, "c": set()}
