"""The resolution filter's published half widths, computed."""

from __future__ import annotations

from pytest_dsv41.decision_v2 import half_width, least_design

from . import published
from .table import Row, free_row

__all__ = ["rows"]

TITLE = "Resolution: half widths in per cent"


def rows() -> list[Row]:
    """±3.785, ±1.588, ±1.399 and ±1.265 %, and the least pairs for +3 % on 32k-b1 (7)."""
    out = [
        free_row(
            TITLE,
            f"{cell} at {100 * cv:.2f} %, {design}",
            100 * half_width(design, cv=cv),
            number,
            decimals=3,
        )
        for (cell, cv, design), number in published.RESOLUTION.items()
    ]
    least = least_design("seeded", 0.03, cv=0.0107)
    assert least is not None
    pairs = float(least.partition(":")[2])
    out.append(free_row(TITLE, "32k-b1, pairs that queue for +3 %", pairs, 7.0, decimals=0))
    return out
