"""The families of encoders that we train: a file for each, and its line in `FAMILIES`, by config.model_type.

A family knows attention, packed batches, rotary positions and dropout; the encoder and the folders know the families.
It offers `FAMILIES`, `Family` and `family_of`.
"""

from pipeline.model.families import modernbert
from pipeline.model.families.family import Config, Family

FAMILIES: dict[str, Family] = {
    "modernbert": modernbert.FAMILY,
}


def family_of(config: Config) -> Family:
    """KeyError for a model type that is not in FAMILIES, which `hugging_face.read_config` refuses."""
    return FAMILIES[config.model_type]


__all__ = ["FAMILIES", "Config", "Family", "family_of"]
