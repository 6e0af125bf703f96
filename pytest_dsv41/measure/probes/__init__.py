"""Probes of a server as it stands: its shape, prefill, full slots, decode by depth, long answers.

Each takes its sizes from what the server says of itself, sends what the laws of `laws` allow, and
refuses by a law's name what cannot be told from such a measurement. FRANK-ARCHON "Verification",
"Capacity probe", "The decode ladder", "Gates".
"""

from __future__ import annotations

from pytest_dsv41.measure.probes.audit import Audit, audit_answer
from pytest_dsv41.measure.probes.capacity import Capacity, judge_capacity, measure_capacity
from pytest_dsv41.measure.probes.cell import ProbeCell
from pytest_dsv41.measure.probes.ladder import Rung, rung_of
from pytest_dsv41.measure.probes.laws import LAWS, obey
from pytest_dsv41.measure.probes.prompts import Fitted, PromptMaker
from pytest_dsv41.measure.probes.run import run_cell
from pytest_dsv41.measure.probes.shape import read_shape

__all__ = [
    "LAWS",
    "Audit",
    "Capacity",
    "Fitted",
    "ProbeCell",
    "PromptMaker",
    "Rung",
    "audit_answer",
    "judge_capacity",
    "measure_capacity",
    "obey",
    "read_shape",
    "run_cell",
    "rung_of",
]
