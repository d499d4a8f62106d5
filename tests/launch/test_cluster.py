"""Both phases on a real two-node Slurm, rows in a real bucket: preempted in every way, cut off, failing."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import lines, metrics, tiny_recipe
from tests.ranks import start
from tests.services import ObjectStore, object_store
from tests.slurm import Cluster

ROOT = Path(__file__).resolve().parents[2]
SUBMIT, STATUS = ROOT / "launch" / "submit", ROOT / "launch" / "status"
FAR = str(int(time.time()) + 10**6)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with object_store(tmp_path_factory.mktemp("store")) as server:
        yield server


class Site:
    """A user's account on the cluster: recipes, runs, environment."""

    def __init__(self, cluster: Cluster, store: ObjectStore, folder: Path, rows: Path) -> None:
        self.cluster, self.folder = cluster, folder
        client = store.client()
        client.create_bucket(Bucket="rows")
        for file in sorted(rows.rglob("*")):
            if file.is_file():
                client.upload_file(str(file), "rows", str(file.relative_to(rows)))
        tree: dict[str, Any] = tiny_recipe(rows)
        tree["engine"] = {"deepspeed": "ds_configs/zero2.json"}
        tree["phases"][0]["tokens"] = 25_000  # some 50 steps: time to be interrupted
        tree["batch"] = {"rows": 4, "rows_per_device": 2}
        tree["validation"] = {"every_steps": 50, "rows": 5}
        tree["checkpoints"] = {"every_steps": 20}
        self.local = folder / "local.yaml"
        self.local.write_text(yaml.safe_dump(tree))
        # A limit below the size of the rows, so that shards are fetched all the time.
        tree["data"] = {"rows": "s3://rows/train", "validation": "s3://rows/validation", "cache_limit": "300kb"}
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(tree))
        self.environment = store.environment | {
            "PYTHON": sys.executable,
            "CLM_DETOUR_SCRATCH": str(folder / "scratch"),
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, run: str, *options: str, code: int = 0, **environment: str) -> list[int]:
        words = (SUBMIT, self.recipe, self.folder / run, *options)
        out = self.cluster(*words, cwd=self.folder, code=code, **(self.environment | environment))
        return [int(line.split()[-1]) for line in out.splitlines() if line.startswith("phase ") and ": job " in line]

    def status(self, run: str, code: int = 0) -> str:
        return self.cluster(STATUS, self.folder / run, code=code, **self.environment)

    def steps(self, run: str, phase: str = "clm") -> int:
        file = self.folder / run / phase / "metrics.jsonl"
        return sum('"loss"' in line for line in file.read_text().splitlines()) if file.exists() else 0

    def restarts(self, job: int) -> int:
        return int(self.cluster.job(job)["Restarts"])

    def logs(self, run: str) -> str:
        return "\n".join(file.read_text() for file in (self.folder / run / "logs").glob("*.out"))

    def trains(self, run: str, job: int, more: int = 5) -> None:
        """Wait until the run has done some steps more than it had."""
        before = self.steps(run)
        self.wait(lambda: self.cluster.ended(job) or self.steps(run) >= before + more or self.steps(run) < before, run)
        assert not self.cluster.ended(job), f"{self.cluster.job(job)}\n{self.logs(run)}"

    def restarted(self, run: str, job: int, count: int) -> None:
        """Wait until SLURM has queued the job again, and do not wait the 8 s that it would."""
        self.wait(lambda: self.cluster.ended(job) or self.restarts(job) >= count, run)
        assert not self.cluster.ended(job), f"{self.cluster.job(job)}\n{self.logs(run)}"
        self.cluster.hasten(job)

    def wait(self, condition: Callable[[], bool], run: str, seconds: float = 120) -> None:
        self.cluster.wait_for(condition, seconds, lambda: self.logs(run))

    def ranks(self, run: str, node: str = "") -> list[Path]:
        """/proc/PID of the run's ranks, on all nodes or one."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words, environment = ((entry / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            except OSError:
                continue  # it has ended
            of_node = any(value.startswith(f"SLURMD_NODENAME={node}".encode()) for value in environment)
            if of_node and os.fsencode(self.folder / run) in words and words[0] == os.fsencode(sys.executable):
                found.append(entry)
        return found

    def signal(self, run: str, number: int, node: str = "") -> None:
        """To the ranks themselves: SIGSTOP freezes them, so that no machine's speed outruns the test."""
        for entry in self.ranks(run, node):
            os.kill(int(entry.name), number)

    def has_pending(self, run: str, number: int) -> bool:
        """Whether the signal waits in each of the run's ranks."""
        masks = [re.findall(r"(?:SigPnd|ShdPnd):\t(\w+)", (entry / "status").read_text()) for entry in self.ranks(run)]
        return bool(masks) and all(any(int(mask, 16) >> (number - 1) & 1 for mask in both) for both in masks)

    def same(self, a: str, b: str, phases: Sequence[str] = ("clm", "mlm_decay")) -> None:
        """The same rows, and the same final validation losses."""
        for phase in phases:
            one, two = (lines(self.folder / run / phase / "rows.jsonl") for run in (a, b))
            assert one == two
            last = [[m for m in metrics(self.folder / run, phase) if m.get("validation")][-1] for run in (a, b)]
            for key in ("mlm_loss", "clm_loss"):
                assert last[0][key] == pytest.approx(last[1][key], abs=1e-5)


@pytest.fixture(scope="module")
def site(cluster: Cluster, store: ObjectStore, small_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(cluster, store, tmp_path_factory.mktemp("site"), small_shards)


def test_two_chains_through_preemption_requeue_an_outage_and_a_node_that_fails(site: Site, store: ObjectStore) -> None:
    """`rough` needs two nodes, `shrinking` takes what there is; both end as a run that nothing disturbed."""
    cluster = site.cluster
    # END_TIME far off, so that SLURM's own --signal alone counts; it comes 5 to 40 s after the start.
    rough, rough_decay = site.submit("rough", "--nodes=2", "--time=1", "--signal=USR2@55", CLM_DETOUR_END_TIME=FAR)
    assert f"afterok:{rough}" in cluster.job(rough_decay)["Dependency"]
    site.wait(lambda: cluster.state(rough) == "RUNNING", "rough")
    cluster("scontrol", "hold", rough)  # after that signal it shall wait for us
    environment = site.environment | {"RECIPE": str(site.recipe), "RUN_DIR": str(site.folder / "shrinking")}
    options = ("--nodes=1-2", "--ntasks=2", "--cpus-per-task=2", f"--output={site.folder}/shrinking.out")
    shrinking = int(cluster("sbatch", "--parsable", *options, "launch/clm_phase.sbatch", cwd=ROOT, **environment))
    # On a slow machine the signal may come before the first step.
    site.wait(lambda: site.steps("rough") >= 1 or site.restarts(rough) == 1, "rough")
    site.signal("rough", signal.SIGSTOP)
    site.trains("shrinking", shrinking, 3)
    assert cluster.job(shrinking)["NodeList"] == "n[1-2]"  # the other chain holds a core of each

    site.signal("shrinking", signal.SIGSTOP)
    store.stop()  # for 20 s and more
    try:
        site.signal("shrinking", signal.SIGCONT)
        calm = start(2, site.folder / "log", site.local, "--run-dir", site.folder / "calm")
        time.sleep(10)
        before = site.steps("shrinking")
        time.sleep(10)
        assert site.steps("shrinking") == before
    finally:
        store.start()
    site.trains("shrinking", shrinking, 1)
    site.signal("shrinking", signal.SIGSTOP)

    # SLURM's signal comes with a SIGCONT, in the versions that we know.
    site.wait(lambda: site.restarts(rough) == 1 or site.has_pending("rough", signal.SIGUSR2), "rough")
    site.signal("rough", signal.SIGCONT)
    site.wait(lambda: site.restarts(rough) == 1, "rough")
    cluster("scontrol", "update", f"JobId={rough}", "TimeLimit=60")
    cluster("scontrol", "update", f"JobId={rough_decay}", "TimeLimit=60")
    cluster("scontrol", "release", rough)
    cluster.hasten(rough)
    site.wait(lambda: len(site.ranks("rough")) == 2, "rough")
    cluster("scancel", "--signal=USR2", rough)  # while Python imports
    site.restarted("rough", rough, 2)
    site.trains("rough", rough, 1)
    assert "clm (clm): running or stopped  step" in site.status("rough")
    cluster("scontrol", "requeue", rough)  # by an administrator, without any signal
    site.restarted("rough", rough, 3)
    site.trains("rough", rough, 1)
    site.signal("rough", signal.SIGSTOP)

    cluster("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        for run in ("rough", "shrinking"):
            site.signal(run, signal.SIGKILL, "n2")
        site.wait(lambda: site.restarts(rough) == 4, "rough")
        cluster("scontrol", "hold", rough)  # it needs both nodes; this scheduler would let no other job past it
        site.restarted("shrinking", shrinking, 1)
        site.wait(lambda: cluster.job(shrinking)["NodeList"] == "n1", "rough")
        assert cluster.wait(shrinking) == ["COMPLETED"]
    finally:
        cluster("scontrol", "update", "NodeName=n2", "State=RESUME")
    cluster("scontrol", "release", rough)
    assert cluster.wait(rough) == ["COMPLETED"], site.logs("rough")
    site.wait(lambda: len(site.ranks("rough")) == 2, "rough")
    cluster("scancel", "--signal=USR2", rough_decay)  # the second phase is preempted as well
    site.restarted("rough", rough_decay, 1)
    assert cluster.wait(rough_decay) == ["COMPLETED"], site.logs("rough")
    assert [result.code for result in calm.wait()] == [0, 0]
    site.same("calm", "rough")
    site.same("calm", "shrinking", ["clm"])
    assert (site.restarts(rough), site.restarts(shrinking)) == (4, 1)

    status = site.status("rough")
    assert "clm (clm): done" in status
    assert f"job {rough_decay} (mlm_decay): COMPLETED" in status
    assert "last error" not in status
    export = site.folder / "rough" / "mlm_decay" / "export"
    assert (export / "model.safetensors").exists()
    assert site.submit("rough", "--nodes=2") == []  # nothing is missing
    left = [path for path in (site.folder / "scratch").rglob("*") if path.is_file()]
    assert not left, left  # the jobs' own folders, with their caches
    secret = site.environment["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [f for f in site.folder.rglob("*") if f.is_file() and secret in f.read_bytes()]


def test_stops_failures_and_a_cluster_that_forbids_requeueing(site: Site) -> None:
    cluster = site.cluster
    # Straight to sbatch, past the checks of launch/submit: the job itself meets the wrong key.
    wrong = site.environment | {"AWS_SECRET_ACCESS_KEY": "wrong", "RECIPE": str(site.recipe)}
    wrong |= {"RUN_DIR": str(site.folder / "failing")}
    (site.folder / "failing" / "logs").mkdir(parents=True)
    out = f"--output={site.folder}/failing/logs/%x-%j.out"
    failing = int(cluster("sbatch", "--parsable", out, "launch/clm_phase.sbatch", cwd=ROOT, **wrong))
    behind = ("--parsable", f"--dependency=afterok:{failing}", "--kill-on-invalid-dep=yes", out)
    cancelled = int(cluster("sbatch", *behind, "launch/mlm_decay.sbatch", cwd=ROOT, **wrong))

    clm, decay = site.submit("strict", "--nodes=2", "--no-requeue")
    site.submit("strict", "--nodes=2", code=1)
    assert f"job {clm} (clm) of {site.folder}/strict is still in the queue" in cluster.errors
    site.trains("strict", clm)
    cluster("scancel", "--signal=USR2", clm)
    assert cluster.wait(clm) == ["COMPLETED"]  # it has handed over
    moved = cluster.job(decay)["Dependency"]
    successor = int(moved.removeprefix("afterok:").partition("(")[0])
    assert successor > decay
    site.trains("strict", successor)
    (site.folder / "strict" / "STOP").touch()
    assert cluster.wait(successor, decay) == ["FAILED", "CANCELLED"]
    assert cluster.job(successor)["ExitCode"] == "75:0"
    again, behind_again = site.submit("strict", "--nodes=2")  # goes on with what is missing
    cluster("scancel", again, behind_again)

    assert cluster.wait(failing, cancelled) == ["FAILED", "CANCELLED"]
    assert cluster.job(failing)["ExitCode"] == "1:0"
    said = site.status("failing")
    assert "s3://rows/train: the object store refuses these credentials" in said
    assert "wrong" not in said
    site.submit(
        "failing2", code=1, AWS_SECRET_ACCESS_KEY="wrong"
    )  # and launch/submit says it before anything is queued
    assert "refuses these credentials" in cluster.errors
    assert not (site.folder / "failing2").exists()
    site.submit("nowhere", "--partition=night", code=1)
    assert "error: SLURM would refuse the job: " in cluster.errors
    assert "invalid partition" in cluster.errors
    assert not list((site.folder / "nowhere" / "logs").iterdir())


# In place of Python: ranks that stop at once, and a run that is done when a successor begins.
RANKS = """#!/usr/bin/env bash
case "$*" in
*slurm\\ begin*) if [ -n "${CLM_DETOUR_CHAIN:-}" ]; then echo done; else echo go; fi ;;
*slurm\\ end*) echo again ;;
*train.py*) echo "rank $SLURM_PROCID of $SLURM_NTASKS"; exit 75 ;;
*) exec %s "$@" ;;
esac
"""


def test_one_rank_a_gpu_and_a_successor_that_asks_for_the_same(cluster: Cluster, tmp_path: Path) -> None:
    ranks = tmp_path / "python"
    ranks.write_text(RANKS % sys.executable)
    ranks.chmod(0o755)
    environment = {
        "PYTHON": str(ranks),
        "RUN_DIR": str(tmp_path / "run"),
        "CLM_DETOUR_SCRATCH": str(tmp_path / "scratch"),
    }

    def sbatch(*options: str) -> int:
        words = ("sbatch", "--parsable", "--no-requeue", "--time=30", f"--output={tmp_path}/%j.out", *options)
        return int(cluster(*words, "launch/clm_phase.sbatch", cwd=ROOT, **environment))

    whole = sbatch("--nodes=1", "--gpus-per-node=2", "--exclusive", "--mem=100")
    tied = sbatch("--nodes=1", "--ntasks=2", "--gpus=2", "--gpus-per-task=1")
    alone = sbatch("--gpus-per-node=2")  # one CPU for two ranks
    assert cluster.wait(whole, tied, alone) == ["COMPLETED", "COMPLETED", "FAILED"]
    for job in (whole, tied):
        said = (tmp_path / f"{job}.out").read_text()
        assert sorted(re.findall("rank .*", said)) == ["rank 0 of 2", "rank 1 of 2"]
        successor = int(re.findall(r"job (\d+) goes on", said)[0])
        assert cluster.wait(successor) == ["COMPLETED"]
        one, other = cluster.job(job), cluster.job(successor)
        for key in ("NumNodes", "NumCPUs", "NumTasks", "OverSubscribe", "MinMemoryNode", "TimeLimit"):
            assert one[key] == other[key]
        for key in ("TresPerNode", "TresPerJob", "TresPerTask"):
            assert one.get(key) == other.get(key)
    assert "submit with --gpus-per-node=2 --ntasks-per-node=2" in (tmp_path / f"{alone}.out").read_text()


def test_data_preparation_as_an_array(
    cluster: Cluster, corpus: Path, tokenizer: Path, rows: Path, tmp_path: Path
) -> None:
    environment = {
        "INPUT": str(corpus),
        "TOKENIZER": str(tokenizer),
        "OUT": str(tmp_path / "rows"),
        "PARTS": "2",
        "BUILD_OPTIONS": "--row-length 128 --validation 0.05",
        "PYTHON": sys.executable,
        "CLM_DETOUR_SCRATCH": str(tmp_path / "scratch"),
    }
    out = cluster(ROOT / "launch" / "prepare.sbatch", "--cpus-per-task=1", cwd=tmp_path, **environment)
    assert "2 parts" in out
    finish = int(out.split("; job ")[1].partition(":")[0])
    said = "\n".join(f.read_text() for f in tmp_path.glob("*.out"))
    assert cluster.wait(finish) == ["COMPLETED"], said
    for split in ("train", "validation"):
        ours, theirs = (folder / split / "index.json" for folder in (tmp_path / "rows", rows))
        assert ours.read_bytes() == theirs.read_bytes()
