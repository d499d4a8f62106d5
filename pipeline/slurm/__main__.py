"""The commands of launch/: `python -m pipeline.slurm submit | srun | begin | end`; each rule's file says what it prints."""

import sys

from command_line import UsageError, run
from pipeline.slurm import next_attempt, ranks_per_gpu

RULES = {
    "submit": ranks_per_gpu.main,
    "srun": ranks_per_gpu.main,
    "begin": next_attempt.main,
    "end": next_attempt.main,
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in RULES:
        raise UsageError(f"python -m pipeline.slurm {' | '.join(RULES)}")
    return RULES[argv[0]](argv)


if __name__ == "__main__":
    sys.exit(run(main))
