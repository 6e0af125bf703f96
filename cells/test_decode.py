"""Decode cells over the packaged corpus: one, two and three requests at a time."""

from __future__ import annotations

from pytest_dsv41 import Cell, for_cells
from pytest_dsv41.fixtures import Measure


@for_cells(
    Cell(
        "decode-b1",
        prompts=("demo-1",),
        max_tokens=96,
        estimated_s=1.5,
        description="one short answer at a time",
    ),
    Cell(
        "decode-b2",
        prompts=("demo-2", "demo-3"),
        max_tokens=96,
        estimated_s=2.0,
        description="two short answers side by side",
    ),
    Cell(
        "decode-b3",
        prompts=("demo-1", "demo-2", "demo-3"),
        max_tokens=96,
        estimated_s=2.5,
        description="three short answers side by side",
    ),
    Cell(
        "short-b1",
        prompts=("short",),
        max_tokens=512,
        estimated_s=6.0,
        description="a short prompt, 512 tokens of answer",
    ),
)
def test_decode(measure: Measure) -> None:
    """Decode speed: ms per round, accepted per round, tokens a second."""
    measure()
