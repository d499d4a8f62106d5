"""From packed rows to batches with labels: the order of rows, the objectives, the loader.

It may import `data_prep.rows`, `pipeline.model` (the packed batch) and `pipeline.ranks`.
It offers the row stream, the table of objectives, the loader, and a wait for rows that a request to stop can end.
"""

from pipeline.data.background import in_background, result_unless
from pipeline.data.loader import AHEAD_ROWS, Loader, Step
from pipeline.data.objectives import OBJECTIVES, LabelledRow, Objective, Vocabulary, label, pack
from pipeline.data.row_order import MixedRows, RowStream

__all__ = [
    "AHEAD_ROWS",
    "OBJECTIVES",
    "LabelledRow",
    "Loader",
    "MixedRows",
    "Objective",
    "RowStream",
    "Step",
    "Vocabulary",
    "in_background",
    "label",
    "pack",
    "result_unless",
]
