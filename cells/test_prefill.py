"""Prefill cells: how long the first token takes, from a cold prompt."""

from __future__ import annotations

from pytest_dsv41 import Cell, for_cells
from pytest_dsv41.fixtures import Measure


@for_cells(
    Cell(
        "prefill-b1",
        prompts=("demo-1",),
        max_tokens=8,
        kind="prefill",
        estimated_s=1.0,
        description="time to first token of one cold prompt",
    ),
)
def test_prefill(measure: Measure) -> None:
    """Time to first token."""
    measure()
