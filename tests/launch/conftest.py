import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import Cluster, slurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One Slurm for all tests of the session; its folder has a short path of its own."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with slurm(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)
