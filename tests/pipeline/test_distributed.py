import pytest

from data_prep.errors import Failure, UsageError
from pipeline.distributed import Agreement, Ranks, from_environment
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


def _agree() -> int:
    """On each of 3 ranks; an assertion that fails ends the rank with another exit code."""
    import os

    from pipeline.distributed import device_of
    from pipeline.engine import start_processes

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
