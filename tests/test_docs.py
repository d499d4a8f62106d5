"""README and docs keep their word: links lead somewhere, commands and paths exist, the picture is what its script draws."""

import contextlib
import importlib
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]
LINK = re.compile(r"\]\(([^)\s]+)\)")

on_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    drawn = tmp_path / "detour.svg"
    subprocess.run([sys.executable, ROOT / "docs" / "draw_detour.py", drawn], check=True)
    assert drawn.read_bytes() == (ROOT / "docs" / "detour.svg").read_bytes()


def test_the_readme_is_short() -> None:
    lines = README.read_text("utf-8").splitlines()
    assert len(lines) < 150
    result = next(number for number, line in enumerate(lines) if "report: build/demo/report.html" in line)
    assert result < 40  # the first command's result is on the first screen
    assert any("docs/detour.svg" in line for line in lines[:result])


def test_the_readme_links_each_page_of_docs_once() -> None:
    links = LINK.findall(README.read_text("utf-8"))
    assert sorted(link for link in links if link.endswith(".md") and "docs/" in link) == [
        f"docs/{p.name}" for p in DOCS
    ]


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@on_each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.is_file(), link
            assert not anchor or anchor in slugs(target), link


@on_each_page
def test_named_files_exist(page: Path) -> None:
    """Paths from the project's folder, and tests by their name alone. A file called `mine` is the reader's own."""
    text = page.read_text("utf-8")
    folders = "benchmarks|command_line|data_prep|docs|ds_configs|evaluation|launch|pipeline|recipes|tests"
    for path in re.findall(rf"(?<![\w./$-])(?:{folders})/[\w./-]*\w", text):
        assert Path(path).stem == "mine" or (ROOT / path).exists(), path
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name


def commands(page: Path) -> list[list[str]]:
    """The words of each `python -m MODULE ...`, `python FILE ...` and `deepspeed FILE ...` on the page."""
    text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
    blocks = re.findall(r"^    ((?:python|deepspeed) .*)$", text, re.MULTILINE)
    inline = re.findall(r"`((?:python|deepspeed) [^`\n]*)`", text)
    written = [re.sub(r"\s#\s.*|\s{3,}.*|[\[\]]|\.\.\.", "", command) for command in [*blocks, *inline]]
    return [shlex.split(command) for command in written]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command says to --help, in this process, because torch takes seconds to import."""
    monkeypatch.setattr(sys, "argv", ["", *words[1:], "--help"])
    main = importlib.import_module(words[0]).main
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with contextlib.suppress(SystemExit):
            main(sys.argv[1:]) if main.__code__.co_argcount else main()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # training blocks the signals that stop it
    return capsys.readouterr().out


@pytest.mark.parametrize("page", [README, *DOCS], ids=lambda page: page.name)
def test_commands_know_their_options(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words in commands(page):
        if words[:2] == ["python", "-m"]:
            called = words[2:]
        else:
            assert (ROOT / words[1]).is_file(), words
            called = [words[1].removesuffix(".py").replace("/", "."), *words[2:]]
        room = called[0] in ("data_prep", "evaluation")
        module = f"{called[0]}.__main__" if room else called[0]
        # Only a room's command has a name of its own, and help of its own.
        named = [word for word in called[1:2] if room or module.startswith("benchmarks.")]
        said = help_of([module, *named], capsys, monkeypatch)
        assert "usage:" in said, words
        for option in {word.partition("=")[0] for word in called if word.startswith("--")}:
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", said), (words, option)


def test_the_annotated_recipe_is_a_recipe_with_every_key(tmp_path: Path) -> None:
    from pipeline.recipe import Recipe, load

    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "recipe.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(block, "utf-8")
    load(tmp_path / "recipe.yaml")
    written = yaml.safe_load(block)
    assert set(written) == set(Recipe.model_fields)
    for name, field in Recipe.model_fields.items():
        keys = getattr(field.annotation, "model_fields", None)
        if keys and field.default is not None:
            assert set(written[name]) == set(keys), name
            for key, part in keys.items():
                if not part.is_required() and name not in ("model", "data"):
                    value = written[name][key]
                    assert (tuple(value) if isinstance(part.default, tuple) else value) == part.default, f"{name}.{key}"


def test_the_messages_that_troubleshooting_quotes_are_said_somewhere() -> None:
    sources = [*(p for room in ("data_prep", "pipeline") for p in (ROOT / room).rglob("*.py"))]
    sources += [p for p in (ROOT / "launch").iterdir() if p.is_file()]
    said = "\n".join(path.read_text("utf-8") for path in sources)
    table = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8").partition("## Messages")[2]
    for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", row):
            for part in re.split(r"\.\.\.|\d+", message):
                assert part.strip(" :") in said, message
