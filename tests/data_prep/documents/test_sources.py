"""Every kind of source gives the same documents; slices and units neither lose nor double a record."""

import csv
import functools
import importlib.util
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from command_line import Failure, UsageError
from data_prep.documents import (
    Document,
    Fields,
    Reading,
    corpus,
    documents,
    find_files,
    ignore,
    in_words,
    slices,
    units,
)
from tests.data_prep.data_prep_helpers import Result, encoded, manifest, pieces, write_jsonl

Cli = Callable[..., Result]
TEXTS = [f"w{5 + n % 900} w{6 + n}" + ' "quoted", and\na second line' * (n % 3) for n in range(60)]


def texts_of(given: list[Any], reading: Reading) -> list[str]:
    found = corpus(find_files([str(name) for name in given]).files, reading, "fail", ignore)
    return [document.text for document in found if isinstance(document, Document)]


def by_slices(given: Path, reading: Reading) -> list[str]:
    """The texts when the file is read slice by slice, and unit by unit, backwards."""
    files = find_files([str(given)]).files
    found: list[list[str]] = []
    for members in reversed(slices(files, reading.unit_bytes)):
        texts = []
        for unit in units(files, members, reading, ignore, {}):
            texts += [
                d.text for chunk in unit for d in documents(chunk, reading.fields, "skip") if isinstance(d, Document)
            ]
        found.append(texts)
    return [text for texts in reversed(found) for text in texts]


def save(folder: Path, format: str, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"a.{format}"
    if format in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]), delimiter="," if format == "csv" else "\t")
            writer.writeheader()
            writer.writerows(records)
    elif format == "csv.zst":
        plain = save(folder / "plain", "csv", records)
        path.write_bytes(zstandard.compress(plain.read_bytes()))
    elif format == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=7)
    elif format == "arrow":
        from datasets import Dataset

        path = folder / "saved"
        Dataset.from_list(records).save_to_disk(str(path), num_shards=3)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


FORMATS = ["jsonl", "csv", "tsv", "csv.zst", "parquet", "arrow"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path: Path, format: str) -> None:
    path = save(tmp_path / "a", format, [{"id": str(n), "text": text, "more": "x"} for n, text in enumerate(TEXTS)])
    for unit_bytes in (64, 1000, 1 << 20):
        reading = Reading(unit_bytes=unit_bytes)
        assert texts_of([path], reading) == TEXTS
        assert by_slices(path, reading) == TEXTS


@pytest.mark.parametrize("format", FORMATS)
def test_templates_and_groups(tmp_path: Path, format: str) -> None:
    records = [{"title": f"t{n}", "body": f"b{n}", "year": str(n), "patient": f"p{n % 3}"} for n in range(9)]
    path = save(tmp_path / "a", format, records)
    reading = Reading(Fields(template="{title} ({year}): {body}{{}}", group="patient"))
    found = list(corpus(find_files([str(path)]).files, reading, "fail", ignore))
    assert [d.text for d in found if isinstance(d, Document)] == [f"t{n} ({n}): b{n}{{}}" for n in range(9)]
    assert [d.group for d in found if isinstance(d, Document)] == [f"p{n % 3}" for n in range(9)]


@pytest.mark.parametrize("format", ["jsonl", "parquet", "arrow"])
def test_nested_fields(tmp_path: Path, format: str) -> None:
    records = [{"a": {"b": {"c": f"w{n}"}, "other": 3}, "id": n} for n in range(5)]
    path = save(tmp_path / "a", format, records)
    assert texts_of([path], Reading(Fields("a.b.c"))) == [f"w{n}" for n in range(5)]
    with pytest.raises(Failure, match="no field 'a.b.d'"):
        texts_of([path], Reading(Fields("a.b.d")))


def test_a_field_whose_name_has_a_dot(tmp_path: Path) -> None:
    path = save(tmp_path / "a", "jsonl", [{"a.b": "whole", "a": {"b": "nested"}}])
    assert texts_of([path], Reading(Fields("a.b"))) == ["whole"]


def test_mixed_formats_in_one_call(cli: Cli, tmp_path: Path, words: Path) -> None:
    shares = [TEXTS[n::6] for n in range(6)]
    given = [
        save(tmp_path / format, format, [{"text": text} for text in share])
        for format, share in zip(FORMATS, shares, strict=True)
    ]
    (tmp_path / "note.txt").write_text("w5 w6 w7")
    options = (
        "--tokenizer",
        words,
        "--row-length",
        64,
        "--out",
        tmp_path / "rows",
        "--workers",
        2,
        "--unit-size",
        "1kb",
    )
    result = cli("build", *given, tmp_path / "note.txt", *options)
    assert result.code == 0, result.err
    expected = encoded(words, [*TEXTS, "w5 w6 w7"])
    assert Counter(token for piece in pieces(tmp_path / "rows") for token in piece) == Counter(
        token for ids in expected for token in ids
    )
    said = manifest(tmp_path / "rows")
    assert [s["documents"] for s in said["sources"]] == [10, 10, 10, 10, 10, 4, 3, 3, 1]  # three files of the data set
    assert all(len(source["digest"]) == 64 for source in said["sources"])


@pytest.mark.parametrize("unit_bytes", [16, 50, 333, 5000])
def test_byte_ranges_of_jsonl_take_every_line_once(tmp_path: Path, unit_bytes: int) -> None:
    source = random.Random(unit_bytes)
    texts = [f"{n} " + "x" * source.choice([1, 3, 30, 300]) for n in range(300)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    for data in (path.read_bytes(), path.read_bytes().rstrip(), path.read_bytes().replace(b"\n", b"\r\n\n")):
        path.write_bytes(data)
        reading = Reading(unit_bytes=unit_bytes)
        assert by_slices(path, reading) == texts
        cut = slices(find_files([str(path)]).files, unit_bytes)
        assert (len(cut) > 1) == (len(data) > 32 * unit_bytes)


def test_the_number_of_a_record_is_that_of_its_line_in_any_slice(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"w{n} " * 5}) for n in range(200)]
    lines[150] = "broken"
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    files = find_files([str(path)]).files
    reading = Reading(unit_bytes=64)
    cut = slices(files, 64)
    assert len(cut) > 3
    said = []
    for members in cut:
        for unit in units(files, members, reading, ignore, {}):
            for chunk in unit:
                try:
                    list(documents(chunk, reading.fields, "fail"))
                except Failure as broken:
                    said.append(str(in_words(broken, files, reading.fields)))  # type: ignore[arg-type]
    assert len(said) == 1
    assert said[0].startswith(f"'{path}', record 151: it is not valid JSON")


def test_small_files_share_a_slice(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("x" * 50)
    files = find_files([str(tmp_path)]).files
    cut = slices(files, 200)
    assert [len(members) for members in cut] == [4] * 10
    assert [m.source for members in cut for m in members] == list(range(40))


def test_text_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\n---\ntwo\n---\n\n---\nthree")
    assert texts_of([path], Reading()) == [path.read_text("utf-8-sig")]
    assert texts_of([path], Reading(separator="\n---\n")) == ["one", "two", "three"]
    long = ["y" * 400_000, "z" * 900_000, "ab", "c" * 1_500_000]
    path.write_text("<end>".join(long))
    assert texts_of([path], Reading(separator="<end>", unit_bytes=1000)) == long
    path.write_bytes("fièvre\nœdème".encode("cp1252"))
    assert texts_of([path], Reading(encoding="cp1252")) == ["fièvre\nœdème"]
    assert texts_of([path], Reading(encoding="cp1252", separator="\n")) == ["fièvre", "œdème"]
    with pytest.raises(Failure, match="record 1: it is not valid UTF-8"):
        texts_of([path], Reading(encoding="utf-16"))


def test_broken_records_of_tables(cli: Cli, tmp_path: Path, words: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"w5 w6"\n2,w\xff7\n3\n4,\n5,"w8\nw9"\n\n')
    table = pa.table({"text": pa.array([b"w5", b"\xff", None, b" "]).cast(pa.binary())})
    pq.write_table(table.cast(pa.schema([("text", pa.string())]), safe=False), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "c.parquet")
    options = ("--tokenizer", words, "--row-length", 16)
    for name, reason in (
        ("a.csv", "record 2: it is not valid UTF-8"),
        ("b.parquet", "record 2: it is not valid UTF-8"),
        ("c.parquet", "record 1: its field 'text' is not a string"),
    ):
        result = cli("build", tmp_path / name, *options, "--out", tmp_path / "no")
        assert (result.code, reason in result.err) == (1, True), result.err
    given = [tmp_path / name for name in ("a.csv", "b.parquet", "c.parquet")]
    assert cli("build", *given, *options, "--on-error", "skip", "--out", tmp_path / "rows").code == 0
    assert manifest(tmp_path / "rows")["counts"]["dropped"] == {
        "empty": 3,
        "no_field": 1,
        "not_text": 2,
        "undecodable": 2,
    }
    assert sorted(pieces(tmp_path / "rows")) == sorted(encoded(words, ["w5 w6", "w8 w9", "w5"]))


def test_damaged_and_odd_files(tmp_path: Path) -> None:
    path = save(tmp_path / "a", "parquet", [{"text": text} for text in TEXTS])
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], b"PAR1" + data[900:], b""):
        path.write_bytes(broken)
        with pytest.raises(Failure, match=r"a\.parquet' is damaged"):
            texts_of([path], Reading())
    saved = save(tmp_path / "b", "arrow", [{"text": text} for text in TEXTS])
    shard = next(saved.glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:300])
    with pytest.raises(Failure, match=f"file 1 of 3 in '{saved}' is damaged"):
        texts_of([saved], Reading())
    table = save(tmp_path / "c", "csv", [{"body": "w5"}])
    with pytest.raises(Failure, match="names no column 'text'"):
        texts_of([table], Reading())
    with pytest.raises(Failure, match="names no column"):
        texts_of([table], Reading(delimiter=";"))
    (tmp_path / "d.csv").write_text("text;n\nw5, w6;1\n")
    assert texts_of([tmp_path / "d.csv"], Reading(delimiter=";")) == ["w5, w6"]


def test_saved_data_sets(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list([{"text": text} for text in TEXTS])
    DatasetDict(train=made, test=made.select(range(3))).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(Failure, match="several splits.*both/train"):
        find_files([str(tmp_path / "both")])
    assert texts_of([tmp_path / "both" / "train"], Reading()) == TEXTS
    assert texts_of([tmp_path / "both" / "test"], Reading()) == TEXTS[:3]
    made.shuffle(seed=1).select(range(10)).save_to_disk(str(tmp_path / "shuffled"))
    assert texts_of([tmp_path / "shuffled"], Reading()) == made.shuffle(seed=1)["text"][:10]
    (tmp_path / "both" / "test" / "state.json").write_text('{"_data_files": [{"filename": "../train/x.arrow"}]}')
    with pytest.raises(Failure, match="outside the folder"):
        find_files([str(tmp_path / "both" / "test")])


def test_a_web_server(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(path.read_bytes()))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        assert texts_of([f"{place}/a.jsonl", f"{place}/a.jsonl.zst"], Reading(unit_bytes=50)) == [*TEXTS, *TEXTS]
        with pytest.raises(Failure, match="nothing is at"):
            find_files([f"{place}/b.jsonl"])
        server.shutdown()


def test_places_that_cannot_be_read_say_so(tmp_path: Path) -> None:
    for scheme, library in (("gs", "gcsfs"), ("oci", "ocifs"), ("azure", "adlfs")):
        if importlib.util.find_spec(library) is None:
            with pytest.raises(UsageError, match=f"pip install {library}"):
                find_files([f"{scheme}://bucket/a.jsonl"])
    with pytest.raises(UsageError, match="cannot be used here"):
        find_files(["nowhere://bucket/a.jsonl"])
    with pytest.raises(Failure, match="cannot be loaded from the Hugging Face hub"):
        find_files(["hub:../nothing"])
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    assert texts_of([f"file://{path}"], Reading()) == TEXTS  # any file system of fsspec
    assert texts_of([f"file://{tmp_path}"], Reading()) == TEXTS
    assert texts_of([f"file://{tmp_path}/*.jsonl"], Reading()) == TEXTS
    with pytest.raises(Failure, match="nothing is at"):
        find_files([f"file://{tmp_path}/b.jsonl"])
