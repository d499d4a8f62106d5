"""The families of encoders that we train: one file each, and one line each in `FAMILIES`, by config.model_type.

A family may import attention, packed batches, rotary positions and dropout; the encoder and the folders import it.
It offers the table `FAMILIES`, `family_of` a config, and the type of a config.
"""

from pipeline.model.families import modernbert
from pipeline.model.families.family import Config, Family

FAMILIES: dict[str, Family] = {
    "modernbert": modernbert.FAMILY,
}


def family_of(config: Config) -> Family:
    """Returns the family of a config; KeyError for a model type not in FAMILIES, which `read_config` refuses before."""
    return FAMILIES[config.model_type]


__all__ = ["FAMILIES", "Config", "family_of"]
