"""How many ranks a job runs, decided without a cluster."""

import re

import pytest

from command_line import Failure, UsageError
from pipeline.slurm.ranks_per_gpu import main, planned, srun_options


@pytest.mark.parametrize(
    ("options", "ranks", "missing"),
    [
        ("", 1, []),
        ("--nodes=2", 2, []),
        ("--nodes=1 --nodes 3 -p gpu --account me", 3, []),  # the last counts
        ("-N2 --ntasks-per-node=2", 4, []),
        ("-N 1-2 -n 2", 2, []),
        ("--nodes=2 --gpus-per-node=4", 8, ["--ntasks-per-node=4"]),
        ("--nodes=2 --gpus-per-node=h100:4 --ntasks-per-node=4", 8, []),
        ("--gres=nvme:1,gpu:a100:2", 2, ["--ntasks-per-node=2"]),
        ("-G 8 -N2", 8, ["--ntasks=8"]),
        ("--nodes=1-2 --ntasks=8 --gpus-per-task=1", 8, []),
        ("--gpus=8 --gpus-per-task=1", 8, []),
        ("--nodes=1-2 --ntasks=4 --gpus-per-node=4", 4, []),  # the job itself knows which it got
    ],
)
def test_ranks_of_sbatch_options(options: str, ranks: int, missing: list[str]) -> None:
    assert planned(options.split()) == (ranks, missing)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--gpus-per-node=4 --ntasks-per-node=1",
            "1 tasks for 4 GPUs: submit with --gpus-per-node=4 --ntasks-per-node=4",
        ),
        ("--gpus-per-node=1 --ntasks-per-node=4", "4 tasks for 1 GPUs"),
        ("--nodes=two", "--nodes=two is not a number"),
        ("--gpus-per-node=all", "--gpus-per-node"),
    ],
)
def test_options_that_disagree(options: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        planned(options.split())


TWO = {"SLURM_JOB_NUM_NODES": "2"}
EIGHT = {**TWO, "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_NODE": "h100:4"}


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        (TWO, []),  # CPUs
        ({**TWO, "SLURM_NTASKS": "4"}, []),
        ({**EIGHT, "SLURM_CPUS_ON_NODE": "32"}, ["--ntasks=8", "--ntasks-per-node=4"]),
        ({**TWO, "SLURM_GPUS_PER_NODE": "h100:4"}, ["--ntasks=8", "--ntasks-per-node=4"]),
        ({**TWO, "SLURM_JOB_GPUS": "0,3"}, ["--ntasks=4", "--ntasks-per-node=2"]),
        ({**EIGHT, "SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "4(x2)"}, []),
        ({**EIGHT, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, []),
        ({**EIGHT, "SLURM_GPUS_PER_TASK": "1"}, []),
        ({**EIGHT, "SLURM_GPUS": "8", "SLURM_CPUS_ON_NODE": "4"}, ["--ntasks=8", "--ntasks-per-node=4"]),
    ],
)
def test_srun_starts_one_task_a_gpu(environment: dict[str, str], options: list[str]) -> None:
    assert srun_options(environment) == options


@pytest.mark.parametrize(
    "environment",
    [
        {**EIGHT, "SLURM_NTASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1(x2)"},
        {**EIGHT, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "5,3"},
        {**EIGHT, "SLURM_CPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "8"},
        {**TWO, "SLURM_GPUS_ON_NODE": "5", "SLURM_GPUS": "8"},
    ],
)
def test_gpus_that_would_idle_end_the_job(environment: dict[str, str]) -> None:
    with pytest.raises(Failure, match=r"submit with --gpus-per-node=4 --ntasks-per-node=4, one task a GPU"):
        srun_options(environment)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["submit", "--nodes=2", "--gpus-per-node=4"]) == 0
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    assert main(["srun"]) == 0
    assert capsys.readouterr().out == "ranks 8\noption --ntasks-per-node=4\n--ntasks=1\n--ntasks-per-node=1\n"
