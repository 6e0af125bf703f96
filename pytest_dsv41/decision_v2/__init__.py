"""Who won: the decision rules (win2-v1, win2-paired-v1), the resolution filter, and their words.

Pure arithmetic on numbers that somebody else measured: numpy and scipy, no input or output.
"""

from __future__ import annotations

from ..identity import prompt_identity
from .excess import excess_p, least_losing_count, mean_ceiling
from .moderated import Prior, fit_prior, moderated_advice, widened_aa_advice
from .pairs import decide_paired_cell, decide_paired_window, report_paired_window
from .repeats import decide_cell, decide_window, report_window
from .resolution import (
    Resolution,
    half_width,
    least_design,
    parse_design,
    pooled_cv,
    queue,
    spread_metric,
)
from .result import Advice, CellResult, Decision, Group, SeriesResult
from .seeded import SeededSeries, seeded_series
from .series import ORIENTATION, Refused, Series, metric_label
from .signflip import SignFlip, sign_flip

__all__ = [
    "ORIENTATION",
    "Advice",
    "CellResult",
    "Decision",
    "Group",
    "Prior",
    "Refused",
    "Resolution",
    "SeededSeries",
    "Series",
    "SeriesResult",
    "SignFlip",
    "decide_cell",
    "decide_paired_cell",
    "decide_paired_window",
    "decide_window",
    "excess_p",
    "fit_prior",
    "half_width",
    "least_design",
    "least_losing_count",
    "mean_ceiling",
    "metric_label",
    "moderated_advice",
    "parse_design",
    "pooled_cv",
    "prompt_identity",
    "queue",
    "report_paired_window",
    "report_window",
    "seeded_series",
    "sign_flip",
    "spread_metric",
    "widened_aa_advice",
]
