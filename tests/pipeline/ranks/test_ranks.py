import pytest

from command_line import Failure, UsageError
from pipeline.ranks import Agreement, Ranks, from_environment
from pipeline.ranks.meeting_place import PORTS, first_node, meeting_place
from tests.ranks import Ranks as Processes


def test_ranks_from_the_environment() -> None:
    assert from_environment({}) == Ranks(0, 1, 0, 1)
    launcher = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert from_environment(launcher) == Ranks(5, 8, 1, 4)
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}
    assert from_environment(slurm) == Ranks(3, 4, 1, 2)
    assert from_environment({**slurm, **launcher}).rank == 5
    for broken in ({"RANK": "0", "WORLD_SIZE": "2"}, {**launcher, "RANK": "8"}, {**launcher, "LOCAL_RANK": "x"}):
        with pytest.raises(UsageError):
            from_environment(broken)


# What Slurm 22.05 sets in a task of 3 nodes x (2, 2, 1) tasks.
STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-08,12]",
}


def test_ranks_of_a_slurm_step() -> None:
    assert from_environment(STEP) == Ranks(4, 5, 0, 1)
    assert from_environment(STEP | {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}) == Ranks(
        1, 5, 1, 2
    )
    batch_shell = {name: value for name, value in STEP.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    assert (
        from_environment(batch_shell) == Ranks()
    )  # python in a batch script or salloc is one process, not rank 0 of 5


def test_the_meeting_place_of_a_slurm_step() -> None:
    host, port = meeting_place(STEP, lambda node: None)
    assert host == "gpu07"
    assert port in PORTS
    assert meeting_place(STEP, {"gpu07": "10.0.0.7"}.get) == ("10.0.0.7", port)
    ports = {meeting_place(STEP | {"SLURM_JOB_ID": str(job)}, lambda node: None)[1] for job in range(1000, 3000)}
    assert len(ports) == 2000  # jobs that run at the same time have ids close to each other
    assert meeting_place(STEP | {"SLURM_STEP_ID": "1"}, lambda node: None)[1] != port
    assert meeting_place(STEP | {"SLURM_RESTART_COUNT": "1"}, lambda node: None)[1] not in (port, *ports)
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        meeting_place({})
    lists = {"n1": "n1", "n[1-2]": "n1", "a-b[001,007-9]-ib,c": "a-b001-ib", "login,n[1-2]": "login", "n12,n13": "n12"}
    assert {nodes: first_node(nodes) for nodes in lists} == lists


def _agree() -> int:
    """Runs on each of 3 ranks; an assertion that fails ends the rank with another exit code."""
    import os

    from pipeline.engine import start_processes
    from pipeline.ranks import device_of

    ranks = from_environment(os.environ)
    start_processes(ranks, device_of(ranks))
    agreement = Agreement(ranks)
    assert agreement.sum([1, ranks.rank, 1 << 60]) == [3, 3, 3 << 60]
    assert agreement.sum_real([0.5]) == [1.5]
    assert agreement.together(lambda: ranks.rank) == ranks.rank

    def one_fails() -> None:
        if ranks.rank == 1:
            raise Failure("the disk of rank 1 is full")

    for _ in range(2):
        with pytest.raises(Failure, match="^the disk of rank 1 is full$"):
            agreement.together(one_fails)
    agreement.barrier()
    return 0


def test_all_ranks_agree_and_fail_together(tmp_path) -> None:
    results = Processes(_agree, (), 3, tmp_path).wait()
    assert [result.code for result in results] == [0, 0, 0], results


def _meet_at_a_taken_port() -> int:
    import os
    import socket

    from pipeline.engine import start_processes
    from pipeline.ranks import device_of

    ranks = from_environment(os.environ)
    if ranks.leads:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            os.environ["MASTER_PORT"] = str(taken.getsockname()[1])
            with pytest.raises(Failure, match="the port is taken"):
                start_processes(ranks, device_of(ranks))
    return 0


def test_a_port_that_is_taken_is_said(tmp_path) -> None:
    results = Processes(_meet_at_a_taken_port, (), 2, tmp_path).wait()
    assert [result.code for result in results] == [0, 0], results
