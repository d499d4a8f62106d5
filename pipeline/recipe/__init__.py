"""The recipe: one strict YAML file is one run.

It may import `command_line`, `data_prep.rows`, and from `pipeline.model` and `pipeline.data` the names to choose from.
It offers `Recipe` and `load`, the learning rate as a function of tokens, and what may change when a run resumes.
"""

from pipeline.recipe.changes import first_difference, numbers
from pipeline.recipe.file import deepspeed_file, load, parse
from pipeline.recipe.schedule import learning_rate
from pipeline.recipe.schema import Optimizer, OwnData, Recipe, Sources, frozen_groups, locations

__all__ = [
    "Optimizer",
    "OwnData",
    "Recipe",
    "Sources",
    "deepspeed_file",
    "first_difference",
    "frozen_groups",
    "learning_rate",
    "load",
    "locations",
    "numbers",
    "parse",
]
