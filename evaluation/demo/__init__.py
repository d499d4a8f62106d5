"""The demo: a generated sample corpus, and the whole detour on it, command by command.

It imports `command_line` only; it runs the commands of `data_prep` and `pipeline` as processes, as a user does.
It offers `demo`, the walkthrough, and `write_sample`, the corpus.
"""

from evaluation.demo.corpus import write_sample
from evaluation.demo.walkthrough import demo

__all__ = ["demo", "write_sample"]
