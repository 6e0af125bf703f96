"""Who won: the decision rules (win2-v1, win2-paired-v1), the resolution filter, and their words.

Pure arithmetic on numbers that somebody else measured: numpy and scipy, no input or output.
"""

from __future__ import annotations

from .repeats import decide_cell, decide_window, report_window
from .resolution import Resolution, half_width, least_design, parse_design, pooled_cv, queue
from .result import Advice, CellResult, Decision, Group, SeriesResult
from .series import ORIENTATION, Refused, Series, metric_label, prompt_identity

__all__ = [
    "ORIENTATION",
    "Advice",
    "CellResult",
    "Decision",
    "Group",
    "Refused",
    "Resolution",
    "Series",
    "SeriesResult",
    "decide_cell",
    "decide_window",
    "half_width",
    "least_design",
    "metric_label",
    "parse_design",
    "pooled_cv",
    "prompt_identity",
    "queue",
    "report_window",
]
