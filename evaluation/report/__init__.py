"""The report: one self-contained HTML page that compares the curves and losses of run folders.

It imports `command_line` only; it reads run folders as files, so that a report needs neither torch nor the recipe's schema.
It offers `write_report`.
"""

from evaluation.report.run_report import write_report

__all__ = ["write_report"]
