"""Rows at a URL, on a real S3 server: caches shared and limited, outages waited out, refusals said."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from command_line import Failure, Passing, UsageError
from data_prep.rows import Rows, downloads
from pipeline.recipe import load
from pipeline.run import JobCache
from pipeline.slurm.next_attempt import end
from tests.conftest import lines, metrics
from tests.ranks import Ranks, start, train
from tests.services import ObjectStore, object_store

Write = Callable[..., Path]
BUCKET = "private-bucket"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("store")) as server:
        server.client().create_bucket(Bucket=BUCKET)
        yield server


def upload(store: ObjectStore, folder: Path, prefix: str) -> str:
    client = store.client()
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            client.upload_file(str(file), BUCKET, f"{prefix}/{file.relative_to(folder)}")
    return f"s3://{BUCKET}/{prefix}"


@pytest.fixture(scope="module")
def remote(store: ObjectStore, small_shards: Path) -> str:
    return upload(store, small_shards, "rows")


@pytest.fixture(autouse=True)
def credentials(store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture
def streamed(recipe: Write, remote: str) -> Write:
    def write(**changes: object) -> Path:
        return recipe(**{"data__rows": f"{remote}/train", "data__validation": f"{remote}/validation", **changes})

    return write


def everything(rows: Rows) -> list[list[int]]:
    return [row.tokens.tolist() for row in rows]


def _read(
    environment: dict[str, str], location: str, cache: str, limit: int | None, counted: str, expected: list[list[int]]
) -> None:
    """In a process of its own: read all rows from both ends and count the downloads."""
    os.environ.update(environment)  # the server that forks may have started before the store did
    original = downloads.Remote.download

    def counting(self: downloads.Remote, name: str, to: Path, begin: float | None = None) -> None:
        with open(counted, "a") as file:
            file.write(name + "\n")
        original(self, name, to, begin)

    downloads.Remote.download = counting  # type: ignore[method-assign]
    rows = Rows(location, cache, limit)
    threads = [threading.Thread(target=lambda: rows[0].tokens) for _ in range(3)]
    for thread in threads:
        thread.start()
    rows.prefetch(range(len(rows)))
    order = range(len(rows)) if os.getpid() % 2 else range(len(rows) - 1, -1, -1)
    assert all(rows[n].tokens.tolist() == expected[n] for n in order)


def in_processes(count: int, *arguments: object) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=_read, args=(dict(os.environ), *arguments)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def test_processes_share_one_download_of_each_shard(remote: str, small_shards: Path, tmp_path: Path) -> None:
    expected = everything(Rows(small_shards / "train"))
    cache, counted = tmp_path / "cache", tmp_path / "counted"
    in_processes(4, f"{remote}/train", str(cache), None, str(counted), expected)
    names = counted.read_text().split()
    shards = [name for name in names if ".mds" in name]
    assert len(shards) == len(set(shards)) == len(Rows(small_shards / "train").shard_rows) > 20
    assert names.count("index.json") == 1
    modes = {path.stat().st_mode & 0o777 for path in (cache, *cache.iterdir()) if path.is_dir()}
    assert modes == {0o700}
    assert not [path for path in cache.rglob("*") if path.name.endswith((".tmp", ".room", ".zstd"))]


def test_a_limit_holds_while_processes_read(remote: str, small_shards: Path, tmp_path: Path) -> None:
    expected = everything(Rows(small_shards / "train"))
    limit = 10 * int(Rows(small_shards / "train").shard_bytes.max())
    cache, largest, done = tmp_path / "cache", 0, threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.005):
            sizes = []
            for path in cache.glob("*/*.mds"):
                try:
                    sizes.append(path.stat().st_size)
                except OSError:
                    continue
            largest = max(largest, sum(sizes))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        in_processes(3, f"{remote}/train", str(cache), limit, str(tmp_path / "counted"), expected)
    finally:
        done.set()
        watcher.join()
    assert 0 < largest <= limit
    assert len(list(cache.glob("*/*.mds"))) < len(Rows(small_shards / "train").shard_rows)


def test_the_least_recently_used_shard_goes_first(remote: str, small_shards: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("data_prep.rows.reader.TOUCH_EVERY", 0.0)
    sizes = Rows(small_shards / "train").shard_bytes
    rows = Rows(f"{remote}/train", tmp_path / "cache", int(sizes[:3].sum() + 2 * sizes.max()))
    first = [int(n) for n in (0, *rows.shard_rows.cumsum())]  # row of each shard
    for shard in (0, 1, 2, 0, 3, 0, 4, 0, 5):
        rows[first[shard]]
        time.sleep(0.02)
    held = {path.name for path in rows.folder.glob("*.mds")}
    assert "shard.00000.mds" in held
    assert "shard.00005.mds" in held
    assert "shard.00001.mds" not in held


def test_training_from_a_bucket_is_training_from_a_folder(
    streamed: Write, recipe: Write, small_shards: Path, tmp_path: Path
) -> None:
    here = {"data__rows": str(small_shards / "train"), "data__validation": str(small_shards / "validation")}
    train(2, tmp_path / "log", recipe("local.yaml", **here), "--run-dir", tmp_path / "local")
    train(2, tmp_path / "log", streamed(), "--run-dir", tmp_path / "remote")
    for phase in ("clm", "mlm_decay"):
        assert metrics(tmp_path / "local", phase) == metrics(tmp_path / "remote", phase)
        assert lines(tmp_path / "local" / phase / "rows.jsonl") == lines(tmp_path / "remote" / phase / "rows.jsonl")
    roots = list((tmp_path / "tmp").glob("clm-detour-rows-*"))
    assert len(roots) == 1
    assert roots[0].stat().st_mode & 0o777 == 0o700
    assert not list(roots[0].iterdir())  # the job's own cache is gone


def test_a_stop_in_the_middle_of_an_outage(streamed: Write, store: ObjectStore, tmp_path: Path) -> None:
    """The server is gone; a request to stop is heard at once, and nothing that was trained is lost."""
    limit = "300kb"  # of 0.7 MB, so that shards are fetched all the time
    path = streamed(data__cache_limit=limit, phases__0__tokens=20_000, batch={"rows": 4, "rows_per_device": 2})
    running = start(2, tmp_path / "log", path, "--run-dir", tmp_path / "run")
    log = tmp_path / "run" / "clm" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) > 5) and time.monotonic() < deadline:
        time.sleep(0.02)
    store.stop()
    try:
        trained = -1
        while trained != (trained := len(log.read_text().splitlines())):
            time.sleep(2)
        (tmp_path / "run" / "STOP").touch()
        begin = time.monotonic()
        assert [result.code for result in running.wait()] == [75, 75]
        assert time.monotonic() - begin < 30
    finally:
        store.start()
    steps = [m["step"] for m in metrics(tmp_path / "run", "clm") if not m.get("validation")]
    assert steps == list(range(1, len(steps) + 1))
    checkpoints = tmp_path / "run" / "clm" / "checkpoints"
    assert (checkpoints / "latest").read_text().strip() == f"step-{len(steps):08d}"


def test_refusals_are_said_at_once(
    remote: str, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = time.monotonic()
    with pytest.raises(Failure, match="s3://no-such-bucket/rows: there is no such bucket"):
        Rows("s3://no-such-bucket/rows", tmp_path / "1")
    with pytest.raises(Failure, match=r"has no manifest.json: it is not a finished build"):
        Rows(f"{remote}/elsewhere", tmp_path / "2")
    client = store.client()
    client.copy_object(Bucket=BUCKET, Key="half/manifest.json", CopySource=f"{BUCKET}/rows/train/manifest.json")
    with pytest.raises(Failure, match=r"has no index.json: it is not a finished build"):
        Rows(f"s3://{BUCKET}/half", tmp_path / "3")
    with pytest.raises(Failure, match="this kind of URL is not supported"):
        Rows("ftp://somewhere/rows", tmp_path / "4")
    for name, value in (("AWS_SECRET_ACCESS_KEY", "wrong-one"), ("AWS_ACCESS_KEY_ID", "nobody")):
        monkeypatch.setenv(name, value)
        with pytest.raises(Failure, match="refuses these credentials") as refused:
            Rows(f"{remote}/train", tmp_path / "5")
        assert value not in str(refused.value)
    assert time.monotonic() - begin < 30


def test_a_refusal_ends_the_run(streamed: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    path = streamed()
    (result,) = train(1, tmp_path / "log", path, "--run-dir", tmp_path / "run", code=1)
    assert result.err.count("\n") == 1
    assert "the object store refuses these credentials" in result.err
    written = [f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()]
    assert not any(b"canary-secret" in content for content in written)


def test_a_missing_bucket_and_a_truncated_shard_end_the_run(
    store: ObjectStore, streamed: Write, small_shards: Path, tmp_path: Path
) -> None:
    cut = shutil.copytree(small_shards / "train", tmp_path / "cut")
    for shard in cut.glob("*.zstd"):  # whichever the first step takes
        shard.write_bytes(shard.read_bytes()[:-9])
    for rows, says in (
        ("s3://no-such-bucket/rows", "error: s3://no-such-bucket/rows: there is no such bucket"),
        (upload(store, cut, "cut"), r"is truncated"),
    ):
        path = streamed(data__rows=rows, data__validation=None, validation=None)
        (result,) = train(1, tmp_path / "log", path, "--run-dir", tmp_path / "run", code=1)
        assert result.err.count("\n") == 1
        assert says in result.err
        assert json.loads((tmp_path / "run" / "logs" / "error.json").read_text())["passing"] is False
        shutil.rmtree(tmp_path / "run")


def test_an_unreachable_store_is_said_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(downloads, "FIRST_PATIENCE", 0.5)
    begin = time.monotonic()
    with pytest.raises(Failure, match=r"could not be reached for \d+ s .*S3_ENDPOINT_URL") as unreachable:
        Rows(f"s3://{BUCKET}/rows", tmp_path / "cache")
    assert not isinstance(unreachable.value, Passing)  # the address may be wrong
    assert time.monotonic() - begin < 15
    monkeypatch.setattr(downloads, "PATIENCE", 2.0)
    begin = time.monotonic()
    with pytest.raises(Passing):
        Rows(f"s3://{BUCKET}/rows", tmp_path / "cache", opened_before=True)
    assert 2 < time.monotonic() - begin < 15


def _impatient(first: float, later: float, argv: list[str]) -> int:
    """Train with little patience."""
    from command_line import run
    from pipeline.train import main

    downloads.FIRST_PATIENCE, downloads.PATIENCE = first, later
    return run(main, argv)


def test_a_silent_store_is_an_outage_to_a_run_that_has_begun(
    streamed: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "S3_ENDPOINT_URL": "http://127.0.0.1:9"}
    path = streamed(phases__0__tokens=4000, data__validation=None, validation=None)
    train(1, tmp_path / "log", path, "--run-dir", tmp_path / "begun", "--phase", "clm")
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "new" / "logs").mkdir(parents=True)
    for name, phase, verdict in (("new", "clm", "failed"), ("begun", "mlm_decay", "again")):
        argv = [str(path), "--run-dir", str(tmp_path / name), "--phase", phase]
        first, later = (0.0, 100.0) if name == "new" else (100.0, 0.0)  # the wrong one would take too long
        (result,) = Ranks(_impatient, (first, later, argv), 1, tmp_path / "log").wait(60)
        assert result.code == 1
        assert "could not be reached" in result.err
        assert end(tmp_path / name, phase, 1, job) == verdict


def test_a_store_that_accepts_and_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a firewall; the clients' own patience and attempts must not multiply ours."""
    monkeypatch.setattr(downloads, "FIRST_PATIENCE", 2.0)
    monkeypatch.setattr(downloads, "SILENCE", 1.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("S3_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        with pytest.raises(Failure, match="could not be reached"):
            Rows(f"s3://{BUCKET}/rows", tmp_path / "cache")
    assert time.monotonic() - begin < 10


def test_those_who_wait_for_one_shard_lose_patience_together(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "PATIENCE", 2.0)
    readers = [Rows(f"{remote}/train", tmp_path / "cache") for _ in range(4)]
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    said: list[BaseException] = []

    def read(rows: Rows) -> None:
        assert rows._files.remote is not None
        rows._files.remote._idle.clear()  # the next client goes where nobody answers
        try:
            rows[0]
        except Failure as error:
            said.append(error)

    threads = [threading.Thread(target=read, args=(rows,)) for rows in readers]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < 7  # one after the other would take 8 s and more
    assert [type(error) for error in said] == [Passing] * 4
    assert all("could not be reached" in str(error) for error in said)


def _without_room(location: str, cache: str, environment: dict[str, str], said: str) -> None:
    """In a process of its own, in which no file may grow beyond a few kB, as on a full disk."""
    os.environ.update(environment)
    rows = Rows(location, cache)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        rows[0]
    except Failure as error:
        Path(said).write_text(f"{type(error).__name__} {error}")


def test_a_full_cache_disk_is_no_outage(remote: str, tmp_path: Path) -> None:
    cache, said = tmp_path / "cache", tmp_path / "said"
    begin = time.monotonic()
    process = multiprocessing.get_context("forkserver").Process(
        target=_without_room, args=(f"{remote}/train", str(cache), dict(os.environ), str(said))
    )
    process.start()
    process.join(60)
    assert time.monotonic() - begin < 30
    kind, _, line = said.read_text().partition(" ")
    assert kind == "Failure"
    assert f"the cache folder {cache}" in line
    assert "File too large" in line
    assert "data.cache_limit" in line


def test_trouble_with_the_cache_is_told_from_trouble_with_the_network(tmp_path: Path) -> None:
    inside = str(tmp_path / "shard.tmp")
    local = [
        OSError(errno.ENOSPC, "no space"),  # a write names no file
        OSError(errno.EDQUOT, "quota"),
        PermissionError(errno.EACCES, "denied", inside),
        OSError(errno.EROFS, "read-only", inside),
    ]
    remote = [
        PermissionError(errno.EACCES, "denied"),  # a firewall's answer to a connection
        PermissionError(errno.EACCES, "denied", "/elsewhere/certificate"),
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        OSError(errno.EHOSTUNREACH, "no route"),
        TimeoutError("timed out"),
    ]
    for error in local:
        says = f"the cache folder {tmp_path} cannot be written: .*data.cache"
        with pytest.raises(Failure, match=says), downloads.writing(tmp_path):
            raise error
    for error in remote:
        with pytest.raises(type(error)), downloads.writing(tmp_path):
            raise error


def test_a_download_that_brings_nothing_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """streaming's downloader for gs:// reports success where the store answered with an error."""

    class Swallows:
        def download(self, remote: str, local: str, timeout: float) -> None:
            pass

    monkeypatch.setattr(downloads, "FIRST_PATIENCE", 0.0)
    monkeypatch.setattr(downloads.Remote, "_downloader", lambda self: Swallows())
    with pytest.raises(Failure, match="could not be reached"):
        downloads.Remote("gs://bucket/rows").download("index.json", tmp_path / "index.json")


def test_damaged_shards_are_named(store: ObjectStore, small_shards: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(downloads, "ODD_ANSWERS", 0.0)
    damaged = shutil.copytree(small_shards / "train", tmp_path / "damaged", ignore=shutil.ignore_patterns("*.mds"))
    cut, flipped, lost = (damaged / f"shard.{n:05d}.mds.zstd" for n in (3, 5, 7))
    cut.write_bytes(cut.read_bytes()[:-9])
    flipped.write_bytes(bytes([flipped.read_bytes()[0] ^ 1]) + flipped.read_bytes()[1:])
    lost.unlink()
    location = upload(store, damaged, "damaged")
    for rows in (Rows(location, tmp_path / "cache"), Rows(damaged)):
        first = [0, *rows.shard_rows.cumsum()]
        for shard, what in ((3, r"is truncated: [\d,]+ of [\d,]+ bytes"), (5, "its hash is not"), (7, "is missing")):
            with pytest.raises(Failure, match=rf"shard.0000{shard}.mds\S* (is damaged: )?{what}.*verify"):
                rows[int(first[shard])]
        rows[int(first[4])]


def test_a_file_cut_short_in_the_cache_is_fetched_again(remote: str, tmp_path: Path) -> None:
    rows = Rows(f"{remote}/train", tmp_path / "cache")
    rows[0]
    held = rows.folder / "shard.00000.mds"
    whole = held.read_bytes()
    held.write_bytes(whole[:100])  # as a power cut would leave it
    (rows.folder / ".shard.00000.mds.zstd.1.1.tmp").write_bytes(b"left")
    Rows(f"{remote}/train", tmp_path / "cache")[0]
    assert held.read_bytes() == whole
    assert not list(rows.folder.glob(".*.tmp"))


def test_rows_built_again_are_other_rows(store: ObjectStore, rows: Path, small_shards: Path, tmp_path: Path) -> None:
    location = upload(store, rows / "validation", "changing")
    old = everything(Rows(location, tmp_path / "cache"))
    assert upload(store, small_shards / "validation", "changing") == location
    assert sorted(everything(Rows(location, tmp_path / "cache"))) == sorted(old)  # the same corpus, in other shards
    assert len(list((tmp_path / "cache").glob("*-*"))) == 2


def test_too_small_a_limit_is_refused(streamed: Write, tmp_path: Path) -> None:
    (result,) = train(1, tmp_path / "log", streamed(data__cache_limit="20kb"), "--run-dir", tmp_path / "run", code=2)
    assert "data.cache_limit 0.02 MB is too small" in result.err
    assert "--shard-size" in result.err
    from pipeline.plan import main

    with pytest.raises(UsageError, match="is too small"):
        main([str(streamed(data__cache_limit="20kb"))])


def test_caches_of_dead_jobs_are_removed_and_no_other(streamed: Write) -> None:
    recipe = load(streamed())
    mine, again, live = (JobCache(recipe, {"SLURM_JOB_ID": job, "SLURM_NODEID": "0"}) for job in ("1", "1", "2"))
    first, same, other = mine.open(), again.open(), live.open()
    assert first is not None
    assert other is not None
    assert first == same != other
    assert first.stat().st_mode & 0o777 == 0o700
    dead = first.with_name("3-n0")  # its processes were killed: no lock is held
    dead.mkdir()
    (dead / ".alive").touch()
    (dead / "text.mds").touch()
    strange = first.with_name("no-cache")
    strange.mkdir()
    mine.release()
    assert first.exists()  # another process of the job is still there
    again.release()
    assert not first.exists()
    newest = JobCache(recipe, {"SLURM_JOB_ID": "4"})
    newest.open()
    assert not dead.exists()
    assert other.exists()
    assert strange.exists()
    live.release()
    newest.release()


def test_a_cache_folder_of_another_user_is_refused(streamed: Write, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can give a folder to another user")
    root = tmp_path / "tmp" / "clm-detour-rows-0"
    root.mkdir()
    os.chown(root, 12345, 12345)
    with pytest.raises(Failure, match="belongs to another user"):
        JobCache(load(streamed()), {"SLURM_JOB_ID": "1"}).open()


def _as_user(user: int, recipe: Path, environment: dict[str, str], opened: str, go: str) -> None:
    """In a process of its own: open a job's cache as `user`, and hold it until told to go."""
    os.environ.update(environment)
    tempfile.tempdir = None
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    cache = JobCache(load(recipe), {"SLURM_JOB_ID": "7"})
    folder = cache.open()
    assert folder is not None
    (folder / "shard").write_text("text")
    with open(opened, "a") as file:
        file.write(f"{folder}\n")
    while not Path(go).exists():
        time.sleep(0.05)
    assert (folder / "shard").read_text() == "text"
    cache.release()
    assert not folder.exists()


def test_two_users_on_one_node(streamed: Write, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root can become two users")
    shared = tempfile.mkdtemp(dir="/tmp")  # a node's /tmp, on the way to which nothing is closed to others
    os.chmod(shared, 0o1777)
    try:
        recipe, opened, go = (Path(shared) / name for name in ("recipe.yaml", "opened", "go"))
        shutil.copy(streamed(), recipe)
        opened.touch()
        opened.chmod(0o666)
        environment = {**os.environ, "TMPDIR": shared}
        context = multiprocessing.get_context("forkserver")
        arguments = (recipe, environment, str(opened), str(go))
        users = [context.Process(target=_as_user, args=(user, *arguments)) for user in (12345, 12346)]
        for process in users:
            process.start()
        deadline = time.monotonic() + 60
        while len(opened.read_text().splitlines()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        folders = [Path(line) for line in opened.read_text().splitlines()]
        assert len({folder.parent for folder in folders}) == 2
        assert {folder.parent.stat().st_mode & 0o777 for folder in folders} == {0o700}
        go.touch()
        for process in users:
            process.join(60)
        assert [process.exitcode for process in users] == [0, 0]
    finally:
        shutil.rmtree(shared)
