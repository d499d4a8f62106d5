"""From documents to packed rows, by any number of workers, in a state that a killed build resumes from.

It may import `command_line`, `data_prep.rows`, `data_prep.documents` and `data_prep.tokenizer`.
It offers the parts that `data_prep/build.py` puts together: options, plan and state, units and workers, packing, the report.
"""

from data_prep.building.build_state import BuildState, Plan, SliceRecord, make_plan
from data_prep.building.options import BuildOptions
from data_prep.building.packing import BestFit, OnePerRow
from data_prep.building.report import BuildReport, build_summary
from data_prep.building.rows_writer import RowsWriter
from data_prep.building.tokenised_unit import HASHES, Done, Settings, TokeniseUnit, Unit
from data_prep.building.worker_processes import in_processes

__all__ = [
    "HASHES",
    "BestFit",
    "BuildOptions",
    "BuildReport",
    "BuildState",
    "Done",
    "OnePerRow",
    "Plan",
    "RowsWriter",
    "Settings",
    "SliceRecord",
    "TokeniseUnit",
    "Unit",
    "build_summary",
    "in_processes",
    "make_plan",
]
