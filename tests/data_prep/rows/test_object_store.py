"""From and to s3://, on a real S3 server: the same rows as in a folder, resumed, verified, inspected, read by training."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import Failure
from data_prep.rows import Rows
from tests.data_prep.data_prep_helpers import Result, command, tree, write_jsonl
from tests.services import ObjectStore, object_store

Cli = Callable[..., Result]
CANARY = "Canary7731"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("s3")) as running:
        running.client().create_bucket(Bucket="corpora")
        yield running


@pytest.fixture(autouse=True)
def _environment(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def corpus(server: ObjectStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files, also in the bucket; the name of one is a secret."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    folder = tmp_path_factory.mktemp("corpus")
    texts = [" ".join(f"w{5 + (n * k) % 900}" for k in range(1 + n % 40)) for n in range(600)]
    write_jsonl(folder / f"{CANARY}.jsonl", texts[:300])
    packed = write_jsonl(folder / "b.jsonl", texts[300:400])
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(packed.read_bytes()))
    packed.unlink()
    (folder / "sub").mkdir()
    pq.write_table(pa.table({"text": texts[400:500]}), folder / "sub" / "c.parquet", row_group_size=30)
    (folder / "sub" / "d.csv").write_text("text\n" + "\n".join(texts[500:]) + "\n")
    for name, data in tree(folder).items():
        server.client().put_object(Bucket="corpora", Key=f"in/{name}", Body=data)
    return folder


@pytest.fixture(scope="module")
def options(words: Path) -> list[object]:
    split = ("--validation", 0.2, "--shard-size", "4kb", "--unit-size", "2kb")
    return ["--tokenizer", words, "--row-length", 64, *split]


@pytest.fixture(scope="module")
def reference(corpus: Path, options: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    from data_prep.__main__ import main

    out = tmp_path_factory.mktemp("reference") / "rows"
    assert main([str(part) for part in ["build", corpus, *options, "--workers", 1, "--out", out]]) == 0
    return out


def objects(server: ObjectStore, prefix: str) -> dict[str, bytes]:
    client = server.client()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket="corpora", Prefix=f"{prefix}/")
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {key.removeprefix(f"{prefix}/"): client.get_object(Bucket="corpora", Key=key)["Body"].read() for key in keys}


def test_from_bucket_to_bucket(
    cli: Cli, server: ObjectStore, corpus: Path, options: list[object], reference: Path, tmp_path: Path
) -> None:
    result = cli("build", "s3://corpora/in", *options, "--workers", 2, "--out", "s3://corpora/rows")
    assert result.code == 0, result.err
    assert objects(server, "rows") == tree(reference)
    pattern = cli("build", "s3://corpora/in/**", *options, "--workers", 1, "--out", tmp_path / "local")
    assert pattern.code == 0, pattern.err
    assert tree(tmp_path / "local") == tree(reference)

    refused = cli("build", "s3://corpora/in", *options, "--out", "s3://corpora/rows")
    assert (refused.code, "not empty" in refused.err) == (1, True)
    assert "complete already" in cli("build", "s3://corpora/in", *options, "--resume", "--out", "s3://corpora/rows").out
    assert "all well" in cli("verify", "s3://corpora/rows").out
    for place in ("s3://corpora/rows", "s3://corpora/rows/train"):
        assert "fill of a row" in cli("inspect", place).out
    assert "[CLS] w" in cli("inspect", "s3://corpora/rows/train", "--show-text").out

    for split in ("train", "validation"):
        remote = Rows(f"s3://corpora/rows/{split}", tmp_path / "cache")
        local = Rows(reference / split)
        assert remote.manifest == local.manifest
        assert [row.tokens.tolist() for row in remote] == [row.tokens.tolist() for row in local]
        assert remote.tokenizer_folder().joinpath("tokenizer.json").is_file()


def test_damage_in_a_bucket_is_found(cli: Cli, server: ObjectStore, reference: Path) -> None:
    client = server.client()
    damaged = tree(reference)
    damaged["train/shard.00001.mds"] = damaged["train/shard.00001.mds"][:-1]
    del damaged["validation/shard.00000.mds"]
    for name, data in damaged.items():
        client.put_object(Bucket="corpora", Key=f"damaged/{name}", Body=data)
    result = cli("verify", "s3://corpora/damaged")
    assert result.code == 1
    lines = result.out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("train/shard.00001.mds: it has ")
    assert lines[1] == "validation/shard.00000.mds: it is missing"


def test_parts_in_a_bucket(cli: Cli, server: ObjectStore, corpus: Path, options: list[object], reference: Path) -> None:
    run = ["build", "s3://corpora/in", *options, "--workers", 1, "--out", "s3://corpora/parts"]
    assert cli(*run, "--part", "2/2").code == 0
    assert "not done" in cli("finish", "s3://corpora/parts").err
    assert cli(*run, "--part", "1/2").code == 0
    assert cli("finish", "s3://corpora/parts").code == 0
    assert objects(server, "parts") == tree(reference)


def test_killed_and_resumed_in_a_bucket(
    cli: Cli, server: ObjectStore, corpus: Path, options: list[object], reference: Path
) -> None:
    run = ["build", "s3://corpora/in", *options, "--workers", 2, "--out", "s3://corpora/killed"]
    process = command(*run)
    while process.poll() is None and not any("units/" in name for name in objects(server, "killed")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    with pytest.raises(Failure, match="not a finished build"):
        Rows("s3://corpora/killed/train", server.folder / "cache")
    refused = cli(*run)
    assert (refused.code, "interrupted" in refused.err) == (1, True)
    server.client().put_object(Bucket="corpora", Key="killed/train/shard.09999.mds", Body=b"of an attempt before")
    assert cli(*run, "--resume").code == 0
    assert objects(server, "killed") == tree(reference)


def test_what_cannot_be_reached_says_so(
    cli: Cli, server: ObjectStore, corpus: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[tuple[Any, ...], str]] = [
        (("build", "s3://missing-bucket/in", *options, "--out", "s3://corpora/no"), "no such bucket"),
        (("build", "s3://corpora/nothing", *options, "--out", "s3://corpora/no"), "nothing is at"),
        (("build", corpus, *options, "--out", "s3://missing-bucket/no"), "no such bucket"),
        (("verify", "s3://missing-bucket/rows"), "no such bucket"),
        (("verify", "s3://corpora/nothing"), "no rows at"),
    ]
    for arguments, reason in cases:
        result = cli(*arguments)
        assert (result.code, len(result.err.splitlines()), reason in result.err) == (1, 1, True), result.err
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for arguments in (cases[0][0], cases[2][0], ("verify", "s3://corpora/rows")):
        result = cli(*arguments)
        assert (result.code, "refuses these credentials" in result.err) == (1, True), result.err
        assert "wrong" not in result.err
        assert server.environment["AWS_ACCESS_KEY_ID"] not in result.err
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    result = cli("verify", "s3://corpora/rows")
    assert (result.code, "cannot be reached" in result.err) == (1, True), result.err


def test_names_of_objects_are_never_shown(
    cli: Cli, server: ObjectStore, corpus: Path, options: list[object], reference: Path
) -> None:
    """Trial 19 with a bucket: a broken record, a damaged file, and what is written."""
    client = server.client()
    said = []
    good = (corpus / f"{CANARY}.jsonl").read_bytes()
    for body in (good + b'{"text": "' + CANARY.encode(), good + b'{"' + CANARY.encode() + b'": 1}\n'):
        client.put_object(Bucket="corpora", Key=f"bad/{CANARY}.jsonl", Body=body)
        for flag in ([], ["--traceback"]):
            said.append(
                cli("build", "s3://corpora/bad", *options, "--workers", 1, "--out", "s3://corpora/canary", *flag)
            )
            assert "file 1 of 1 in 's3://corpora/bad', record 301" in said[-1].err
    client.put_object(Bucket="corpora", Key=f"bad/{CANARY}.jsonl.zst", Body=b"no such thing")
    client.delete_object(Bucket="corpora", Key=f"bad/{CANARY}.jsonl")
    said.append(cli("build", "s3://corpora/bad", *options, "--out", "s3://corpora/canary"))
    assert "is damaged" in said[-1].err
    assert objects(server, "canary") == {}  # nothing is left behind
    assert cli("build", "s3://corpora/in", *options, "--part", "1/1", "--out", "s3://corpora/canary").code == 0
    left = objects(server, "canary")
    assert json.loads(left["_build/plan.json"])["options"]["row-length"] == 64
    assert not any(CANARY.encode() in data or CANARY in name for name, data in left.items())
    assert not any(CANARY in result.out + result.err for result in said)
