"""Both phases on a real two-node Slurm, rows in a real bucket: undisturbed, preempted in every way, failing."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import lines, metrics, tiny_recipe
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
        tree["data"] = {"rows": "s3://rows/train", "validation": "s3://rows/validation"}
        tree["engine"] = {"deepspeed": "ds_configs/zero2.json"}
        tree["phases"][0]["tokens"] = 120_000  # some 120 steps: time to be interrupted
        tree["validation"] = {"every_steps": 60, "rows": 5}
        tree["checkpoints"] = {"every_steps": 20}
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(tree))
        self.environment = store.environment | {
            "PYTHON": sys.executable,
            "CLM_DETOUR_SCRATCH": str(folder / "scratch"),
            "OMP_NUM_THREADS": "1",
        }

    def submit(self, run: str, *options: str, code: int = 0, **environment: str) -> list[int]:
        out = self.cluster(
            SUBMIT,
            self.recipe,
            self.folder / run,
            *options,
            cwd=self.folder,
            code=code,
            **self.environment,
            **environment,
        )
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
        assert not self.cluster.ended(job), self.logs(run)

    def restarted(self, run: str, job: int, count: int) -> None:
        """Wait until SLURM has queued the job again, and do not wait the 8 s that it would."""
        self.wait(lambda: self.cluster.ended(job) or self.restarts(job) >= count, run)
        assert not self.cluster.ended(job), self.logs(run)
        self.cluster.hasten(job)

    def wait(self, condition: Callable[[], bool], run: str, seconds: float = 120) -> None:
        self.cluster.wait_for(condition, seconds, lambda: self.logs(run))

    def same(self, a: str, b: str) -> None:
        """The same rows, and the same final validation losses."""
        for phase in ("clm", "mlm_decay"):
            one, two = (lines(self.folder / run / phase / "rows.jsonl") for run in (a, b))
            assert one == two
            last = [[m for m in metrics(self.folder / run, phase) if m.get("validation")][-1] for run in (a, b)]
            for key in ("mlm_loss", "clm_loss"):
                assert last[0][key] == pytest.approx(last[1][key], abs=1e-5)


@pytest.fixture(scope="module")
def site(cluster: Cluster, store: ObjectStore, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(cluster, store, tmp_path_factory.mktemp("site"), rows)


def test_both_phases_through_preemption_requeue_and_a_node_that_fails(site: Site) -> None:
    """Three chains at once on the same two nodes: one undisturbed, one through everything, one that may shrink."""
    cluster = site.cluster
    # SLURM's own --signal, some seconds after the start: while Python imports. END_TIME far off, so that it alone counts.
    rough, rough_decay = site.submit("rough", "--nodes=2", "--time=1", "--signal=USR2@55", CLM_DETOUR_END_TIME=FAR)
    calm, calm_decay = site.submit("calm", "--nodes=2")
    assert f"afterok:{calm}" in cluster.job(calm_decay)["Dependency"]
    site.restarted("rough", rough, 1)
    cluster("scontrol", "update", f"JobId={rough}", "TimeLimit=60")
    cluster("scontrol", "update", f"JobId={rough_decay}", "TimeLimit=60")
    assert "phase clm: job" in site.logs("rough")

    site.trains("rough", rough)
    assert "clm (clm): running or stopped  step" in site.status("rough")
    cluster("scancel", "--signal=USR2", rough)  # in the middle of training
    site.restarted("rough", rough, 2)
    site.trains("rough", rough, 1)
    cluster("scontrol", "requeue", rough)  # by an administrator, without any signal
    site.restarted("rough", rough, 3)

    assert cluster.wait(calm, calm_decay) == ["COMPLETED", "COMPLETED"], site.logs("calm")
    environment = site.environment | {"RECIPE": str(site.recipe), "RUN_DIR": str(site.folder / "shrinking")}
    shrinking = int(
        cluster(
            "sbatch",
            "--parsable",
            "--nodes=1-2",
            "--ntasks=2",
            "launch/clm_phase.sbatch",
            f"--output={site.folder}/x.out",
            cwd=ROOT,
            **environment,
        )
    )
    site.trains("rough", rough, 1)
    cluster("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    try:
        site.restarted("rough", rough, 4)
        cluster.hasten(shrinking)
        site.wait(lambda: cluster.job(shrinking).get("NodeList") == "n1", "rough")
    finally:
        cluster("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert cluster.wait(rough, rough_decay, shrinking) == ["COMPLETED"] * 3, site.logs("rough")
    site.same("calm", "rough")
    assert site.restarts(rough) == 4
