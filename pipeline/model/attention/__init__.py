"""Attention over packed documents: one function with a contract, and a file for each back end.

Its back ends import nothing but torch and their kernel.
It offers `attend`, its checks, and the table `BACKENDS`.
"""

from pipeline.model.attention.dense_reference import reference
from pipeline.model.attention.packed import BACKENDS, attend, available, check_boundaries, describe

__all__ = ["BACKENDS", "attend", "available", "check_boundaries", "describe", "reference"]
