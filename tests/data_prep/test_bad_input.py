"""Every bad input gives one clear line and an exit code; nothing is left behind; and no message quotes the corpus (trial 19)."""

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer

from tests.data_prep.data_prep_helpers import Result, save_word_tokenizer, write_jsonl

Cli = Callable[..., Result]
CANARY = "Canary7731"


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def build(cli: Cli, tmp_path: Path, words: Path) -> Callable[..., Result]:
    """A build with good options where the test names no others; checks that a failure leaves nothing and says one line."""

    def call(*inputs: object, **options: object) -> Result:
        all_options = {"tokenizer": words, "out": tmp_path / "rows", "row_length": 16} | options
        flags = [part for key, value in all_options.items() for part in (f"--{key.replace('_', '-')}", value)]
        before = tree(tmp_path)
        result = cli("build", *inputs, *flags)
        if result.code:
            assert tree(tmp_path) == before
            assert len(result.err.splitlines()) == 1, result.err
            assert result.err.startswith("error: ")
            assert "Traceback" not in result.err
        return result

    return call


BAD_RECORDS = {
    "bad JSON": (b'{"text": "w5', "not valid JSON"),
    "bad UTF-8": (b'{"text": "\xff"}', "not valid UTF-8"),
    "half a pair": (rb'{"text": "\udc00"}', "not valid UTF-8"),
    "a number": (b'{"text": 5}', "field 'text' is not a string"),
    "a list": (b'{"text": ["w5"]}', "field 'text' is not a string"),
    "no such field": (b'{"body": "w5"}', "--text-field"),
    "not an object": (b'["w5"]', "not an object"),
    "too deep": (b'{"text": ' + b"[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_a_broken_record(build: Callable[..., Result], tmp_path: Path, name: str) -> None:
    line, reason = BAD_RECORDS[name]
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "w5"}\n\n' + line + b'\n{"text": "w6"}\n')
    result = build(source)
    assert result.code == 1
    assert f"'{source}', record 3: " in result.err
    assert reason in result.err
    skipped = build(source, on_error="skip")
    assert skipped.code == 0
    assert "rows: 2 documents" in skipped.out
    assert "dropped: 1 " in skipped.out


def test_inputs(build: Callable[..., Result], tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", ["w5 w6"])
    write_jsonl(tmp_path / "blank.jsonl", ["", "  "])
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes("fièvre".encode("latin-1"))
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    cases = [
        ([tmp_path / "missing.jsonl"], 1, "no such file"),
        ([tmp_path / "*.missing"], 1, "no such file"),
        ([tmp_path / "empty"], 1, "no file to read"),
        ([tmp_path / "a.pdf"], 1, "no known kind"),
        ([tmp_path / "nothing.jsonl"], 1, "corpus is empty"),
        ([tmp_path / "blank.jsonl"], 1, "corpus is empty: no document is left of"),
        ([tmp_path / "latin.txt"], 1, "record 1: it is not valid UTF-8"),
        ([good, tmp_path / "a.*l"], 2, "comes twice"),
        (["nothing://bucket/a.jsonl"], 2, "cannot be used here"),
    ]
    for inputs, code, reason in cases:
        result = build(*inputs)
        assert (result.code, reason in result.err) == (code, True), result.err


def test_damaged_compression(build: Callable[..., Result], tmp_path: Path) -> None:
    data = b"".join(b'{"text": "w%d w%d"}\n' % (5 + n % 900, 5 + n * 7 % 900) for n in range(20_000))
    for ending, content in ((".gz", gzip.compress(data)), (".zst", zstandard.compress(data))):
        for damaged in (
            content[:-100],
            content[: len(content) // 2],
            b"no such thing",
            content[:400] + b"\0" * 50 + content[450:],
        ):
            path = tmp_path / f"a.jsonl{ending}"
            path.write_bytes(damaged)
            result = build(path, on_error="skip")
            assert result.code == 1
            assert f"a.jsonl{ending}' is damaged" in result.err
        path.unlink()


@pytest.mark.parametrize(
    ("option", "value", "code"),
    [
        ("row_length", 7, 2),
        ("row_length", "long", 2),
        ("validation", 0, 2),
        ("validation", 1, 2),
        ("validation", -0.1, 2),
        ("validation", "nan", 2),
        ("validation", 0.0001, 1),  # no document falls in it
        ("fill", 1, 2),
        ("shard_size", "big", 2),
        ("shard_size", "5gb", 2),
        ("on_error", "ignore", 2),
        ("nonsense", 3, 2),
        ("tokenizer", "no/such/folder", 1),
        ("out", "nothing://bucket/rows", 2),
        ("out", "https://host/rows", 2),
        ("workers", 0, 2),
        ("part", "3/2", 2),
        ("part", "half", 2),
        ("unit_size", "1", 2),
        ("group_field", "patient", 2),  # without a split
        ("template", "{title", 2),
        ("template", "no field", 2),
        ("encoding", "latin-99", 2),
        ("delimiter", ";;", 2),
        ("add_prefix_space", "yes", 1),  # a word-level tokenizer has no such setting
    ],
)
def test_options(build: Callable[..., Result], tmp_path: Path, option: str, value: object, code: int) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6"])
    assert build(source, **{option: value}).code == code


def test_output_is_never_overwritten(build: Callable[..., Result], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6"])
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    (tmp_path / "empty").mkdir()
    assert build(source, out=tmp_path / "file").code == 1
    result = build(source, out=tmp_path / "full")
    assert result.code == 1
    assert "not empty" in result.err
    assert build(source, out=tmp_path / "empty").code == 0
    assert build(source, out=tmp_path / "empty").code == 1  # a second time


@pytest.mark.parametrize("role", ["cls", "sep", "mask", "pad"])
def test_a_tokenizer_without_a_token_an_encoder_needs(build: Callable[..., Result], tmp_path: Path, role: str) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6"])
    folder = save_word_tokenizer(tmp_path / "tok", 20)
    data = (folder / "tokenizer.json").read_text().replace(f"[{role.upper()}]", f"[X{role.upper()}]")
    (folder / "tokenizer.json").write_text(data)
    result = build(source, tokenizer=folder)
    assert result.code == 1
    assert f"no {role} token" in result.err
    (folder / "tokenizer_config.json").write_text(json.dumps({f"{role}_token": {"content": f"[X{role.upper()}]"}}))
    assert build(source, tokenizer=folder).code == 0


def test_broken_tokenizers(build: Callable[..., Result], tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6"])
    (tmp_path / "tok").mkdir()
    assert "no tokenizer.json" in build(source, tokenizer=tmp_path / "tok").err
    for content, reason in (("{", "not JSON"), ('{"model": {}}', "cannot be used"), ("[]", "")):
        (tmp_path / "tok" / "tokenizer.json").write_text(content)
        result = build(source, tokenizer=tmp_path / "tok")
        assert result.code == 1
        assert reason in result.err


def test_canaries_stand_nowhere_but_in_the_rows(
    cli: Cli, build: Callable[..., Result], tmp_path: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trial 19: text, id, field and the name of a file found in a folder or by a pattern, in builds that succeed or fail."""
    notes = tmp_path / "notes" / f"{CANARY}folder"
    notes.mkdir(parents=True)
    (tmp_path / "notes" / "a.txt").write_text("w5")
    good = json.dumps({"id": CANARY, CANARY: CANARY, "text": f"w5 {CANARY} w6"}).encode() + b"\n"
    path = notes / f"{CANARY}.jsonl"
    said = []
    bad_lines = [
        good[:-4],
        b'"',
        b'{"id": "Canary7731", "text": "Canary7731 \xff"}',
        b'{"Canary7731": "Canary7731"}',
    ]
    bad_lines += [b'{"text": ["Canary7731"]}', b'{"text": {"Canary7731": 1}}', b'["Canary7731"]', b"Canary7731"]
    for line in bad_lines:
        path.write_bytes(good + line)
        for given in (tmp_path / "notes", tmp_path / "notes" / "**" / "*"):
            for more in ({}, {"validation": 0.5}):
                result = build(given, **more)
                assert result.code == 1
                assert f"file 1 of 2 in '{given}', record 2" in result.err
                said.append(result)
        said += [
            cli("tokenizer", tmp_path / "notes", "--vocab-size", 300, "--out", tmp_path / "tok", *flag)
            for flag in ([], ["--traceback"])
        ]
        said.append(build(tmp_path / "notes", on_error="skip", out=tmp_path / f"rows{len(said)}"))
        assert said[-1].code == 0
    for ending, content in ((".gz", gzip.compress(good * 50)[:-20]), (".zst", zstandard.compress(good * 50)[:-20])):
        (notes / f"{CANARY}.jsonl{ending}").write_bytes(content)
        said.append(build(tmp_path / "notes", on_error="skip"))
        assert said[-1].code == 1
        (notes / f"{CANARY}.jsonl{ending}").unlink()
    path.write_bytes(good)
    said += [
        build(tmp_path / "notes"),
        build(tmp_path / "notes"),
        cli("verify", tmp_path / "rows"),
        cli("inspect", tmp_path / "rows"),
    ]
    assert [result.code for result in said[-4:]] == [0, 1, 0, 0]

    def explode(*_: object) -> None:
        raise ValueError(CANARY) from KeyError(CANARY)

    for target in (
        "data_prep.building.tokenised_unit.split_of",
        "data_prep.tokenizer.document_tokenizer.DocumentTokenizer.encode",
        "data_prep.building.rows_writer.rows_digest",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(target, explode)
            for flag in ([], ["--traceback"]):
                said.append(
                    cli(
                        "build",
                        tmp_path / "notes",
                        "--tokenizer",
                        words,
                        "--out",
                        tmp_path / "x",
                        "--row-length",
                        16,
                        *flag,
                    )
                )
                assert said[-1].code == 1
                assert "unexpected ValueError" in said[-1].err
                assert ("in build" in said[-1].err) == bool(flag)
    assert len(said) > 50
    for result in said:
        assert CANARY not in result.out + result.err
    for file in tmp_path.rglob("*"):
        if file.is_file() and notes not in file.parents:
            assert CANARY.encode() not in file.read_bytes(), file
    assert not [name for name in tree(tmp_path) if ".rows" in name or ".x" in name]


def test_a_build_that_cannot_write_does_not_blame_the_input(
    build: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "/secret/path")

    monkeypatch.setattr("data_prep.rows.atomic_files.os.fsync", full)
    result = build(write_jsonl(tmp_path / "a.jsonl", ["w5"]))
    assert result.code == 1
    assert "No space left on device" in result.err
    assert "a.jsonl" not in result.err
    assert "secret" not in result.err


def test_help_answers_at_once_and_names_every_command() -> None:
    start = time.perf_counter()
    code = "import sys; from data_prep.__main__ import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    folder = Path(__file__).resolve().parents[2]
    told = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True).stdout
    for command in ("build", "finish", "verify", "repair", "inspect", "tokenizer"):
        assert f"    {command}" in told
    for module in ("streaming", "torch", "transformers", "numpy", "pydantic"):
        assert f"'{module}'" not in told
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("command", ["build", "finish", "verify", "repair", "inspect", "tokenizer"])
def test_help_of_a_command(cli: Cli, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli(command, "--help")
    assert stopped.value.code == 0
    assert len(capfd.readouterr().out.splitlines()) > 8


def test_wrong_usage(cli: Cli) -> None:
    for arguments in (
        [],
        ["bild"],
        ["build"],
        ["build", "a.jsonl", "--row-length", "16"],
        ["verify"],
        ["verify", "a", "b"],
    ):
        result = cli(*arguments)
        assert result.code == 2
        assert len(result.err.splitlines()) == 1
        assert "--help" in result.err


def test_tokenizer_settings_of_a_call_do_not_leak_into_the_rows(build: Callable[..., Result], tmp_path: Path) -> None:
    """A tokenizer saved with truncation and padding switched on must neither cut nor pad documents."""
    folder = save_word_tokenizer(tmp_path / "tok", 100)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["w5 w6 w7 w8 w9 w10"])
    assert "1 documents, 8 tokens, 1 rows" in build(source, tokenizer=folder).out
