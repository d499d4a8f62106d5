"""A real Slurm of two nodes, n1 and n2, on this host: munged, slurmctld and two slurmd, as the user who runs the tests.

Outside CI a missing program skips the tests that need it, with the reason; in CI (the variable CI is set) it fails them.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

READY_WITHIN = 20  # seconds
STOPPED_WITHIN = 10
TERMINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")
FOLDERS = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
# The GPUs are files: SLURM counts and shares them out, and nobody opens them.
# --requeue makes a job wait for cred_expire + a few seconds, by default 120: here 8.
CONFIGURATION = """
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
GresTypes=gpu
ReturnToService=1
SlurmdParameters=config_overrides
KillWait=5
SlurmdTimeout=60
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=4000 Gres=gpu:h100:2
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=4 RealMemory=4000 Gres=gpu:h100:2
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS]))
    if found is None:
        remedy = "`apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge` brings it"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no program {name!r}: {remedy}")
    return str(found)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@dataclass
class Cluster:
    """A running Slurm. Commands run with `environment`, which names its configuration file and nothing of another job's."""

    folder: Path
    daemons: list[Path] = field(default_factory=list)  # pid files, in the order of stopping

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "RANK", "WORLD_SIZE"))}
        return inherited | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        folder = self.folder
        for name, mode in (("key", 0o700), ("munge", 0o755), ("state", 0o700), ("run", 0o755), ("log", 0o755)):
            (folder / name).mkdir(mode=mode)
        folder.chmod(0o755)
        for node in ("n1", "n2"):
            (folder / f"spool.{node}").mkdir(mode=0o755)
        key = folder / "key" / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        host, user = socket.gethostname().split(".")[0], subprocess.check_output(["id", "-un"], text=True).strip()
        text = CONFIGURATION.format(folder=folder, host=host, user=user, ports=_free_ports(4))
        (folder / "slurm.conf").write_text(text)
        for gpu in range(2):
            (folder / f"gpu{gpu}").touch()
        (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu Type=h100 File={folder}/gpu[0-1]\n")
        munge = folder / "munge"
        self._daemon(
            munge / "munged.pid",
            "munged",
            f"--socket={munge}/munge.socket",
            f"--key-file={key}",
            f"--pid-file={munge}/munged.pid",
            f"--log-file={folder}/log/munged.log",
            f"--seed-file={munge}/seed",
        )
        self._daemon(folder / "run" / "slurmctld.pid", "slurmctld", "-c")
        for node in ("n1", "n2"):
            self._daemon(folder / "run" / f"slurmd.{node}.pid", "slurmd", "-N", node)
        self.wait_for(lambda: self("sinfo", "-h", "-N", "-o", "%T").split() == ["idle", "idle"], READY_WITHIN)

    def _daemon(self, pid_file: Path, name: str, *arguments: str) -> None:
        log = self.folder / "log" / f"{pid_file.stem}.out"
        with open(log, "wb") as out:
            ended = subprocess.run(
                [program(name), *arguments], env=self.environment, stdout=out, stderr=out, timeout=20
            )
        assert ended.returncode == 0, f"{name} did not start: {log.read_text()}"
        self.daemons.insert(0, pid_file)

    def stop(self) -> None:
        """Jobs first, then the daemons by their pids: SIGTERM, and after a while SIGKILL."""
        subprocess.run([program("scancel"), "--full", "--state=RUNNING"], env=self.environment, check=False, timeout=10)
        subprocess.run([program("scancel"), "--user", str(os.getuid())], env=self.environment, check=False, timeout=10)
        deadline = time.monotonic() + STOPPED_WITHIN
        while time.monotonic() < deadline and self._running():
            time.sleep(0.1)
        pids = [int(file.read_text()) for file in self.daemons if file.exists()]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in pids:
                if _alive(pid):
                    os.kill(pid, number)
            deadline = time.monotonic() + STOPPED_WITHIN
            while any(map(_alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.05)

    def _running(self) -> bool:
        words = [program("squeue"), "-h", "-t", "RUNNING,COMPLETING"]
        return bool(subprocess.run(words, env=self.environment, capture_output=True, timeout=10).stdout.strip())

    def __call__(self, *words: object, code: int = 0, cwd: Path | None = None, **environment: str) -> str:
        """Run a command against this Slurm and return its stdout; `code` is what it must exit with."""
        arguments = [program(str(words[0])) if "/" not in str(words[0]) else str(words[0]), *map(str, words[1:])]
        result = subprocess.run(
            arguments, env=self.environment | environment, cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert result.returncode == code, f"{words}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        self.errors = result.stderr
        return result.stdout

    # --- jobs ---

    def job(self, job: int) -> dict[str, str]:
        """`scontrol show job` as a mapping; Slurm keeps a job that has ended for 300 s."""
        shown = self("scontrol", "-o", "show", "job", job)
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def state(self, job: int) -> str:
        return self.job(job)["JobState"]

    def ended(self, *jobs: int) -> bool:
        """All have ended, and stay so: a job that is requeued passes through the state of its end."""

        def over() -> bool:
            return all(self.state(job) in TERMINAL for job in jobs)

        if not over():
            return False
        time.sleep(1)
        return over()

    def wait(self, *jobs: int, seconds: float = 120) -> list[str]:
        """Wait until the jobs have ended; their states."""
        self.wait_for(lambda: self.ended(*jobs), seconds, lambda: str([self.job(job) for job in jobs]))
        return [self.state(job) for job in jobs]

    def hasten(self, job: int) -> None:
        """Let a job that was requeued start 3 s later instead of 8 s.

        At once would be too soon: in the second in which its former credential was revoked its new one is refused as well.
        """
        time.sleep(3)
        words = [program("scontrol"), "update", f"JobId={job}", "StartTime=now"]
        subprocess.run(words, env=self.environment, capture_output=True, check=False, timeout=10)

    def wait_for(self, condition, seconds: float = 60, tell=lambda: "") -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s. {tell()}"
            time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """A running cluster whose files lie in `folder` (new, with a short path: munge's socket is limited to 107 bytes)."""
    needed: Sequence[str] = ("munged", "slurmctld", "slurmd", "sbatch")
    for name in needed:
        program(name)
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
