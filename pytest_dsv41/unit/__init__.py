"""One host's unit: what must hold before its server may start."""

from __future__ import annotations

from pytest_dsv41.unit.knob_gate import UNITS, Knob, KnobReport, check_knobs

__all__ = ["UNITS", "Knob", "KnobReport", "check_knobs"]
