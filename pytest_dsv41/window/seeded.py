"""Seeded decision cells: which windows they can decide, checked when the plan is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .spec import WindowSpec

__all__ = ["check_deciding", "is_seeded"]


def is_seeded(definition: Mapping[str, Any]) -> bool:
    """Whether a cell's repeats are registered seeds."""
    return "seed_base" in definition


def check_deciding(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a seeded decision cell: its pairs need a rule of their own.

    Raises:
        SpecError: one line with file, line and key.
    """
    for position, use in enumerate(spec.cells):
        if use.decision and is_seeded(cells[use.name]):
            raise spec.error(
                ("cells", position, "decision"),
                f"cell '{use.name}' is seeded, and a window cannot decide by seeded pairs",
            )
