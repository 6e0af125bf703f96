"""One unit of one host: what must hold before it starts, what it is by its files, what it runs."""

from __future__ import annotations

from pytest_dsv41.unit.knob_gate import UNITS, Knob, KnobReport, check_knobs

__all__ = ["UNITS", "Knob", "KnobReport", "check_knobs"]
