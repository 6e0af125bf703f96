"""How long items took before: the campaign's own windows, for a plan's minutes."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..durable import read_json_lines
from .record import window_folder, windows

__all__ = ["known_seconds"]

_NEWEST: Final = 20
"""Windows that are looked at: machines change, and a plan must not take long."""


def known_seconds(campaign: Path, max_tokens: Mapping[str, int]) -> dict[str, float]:
    """The median seconds of a measured item by cell; a cell nobody measured is left out.

    `max_tokens` maps each cell to its own: items of another length say nothing.
    """
    took: dict[str, list[float]] = {}
    for name in windows(campaign)[-_NEWEST:]:
        folder = window_folder(campaign, name)
        if folder is None:
            continue
        rows = []
        with contextlib.suppress(OSError):
            rows = read_json_lines(folder / "values.jsonl")
        for row in rows:
            cell, seconds = row.get("cell"), row.get("duration_s")
            if (
                row.get("outcome") == "measured"
                and isinstance(cell, str)
                and cell in max_tokens
                and row.get("max_tokens") == max_tokens[cell]
                and isinstance(seconds, (int, float))
                and seconds > 0
            ):
                took.setdefault(cell, []).append(float(seconds))
    return {cell: statistics.median(some) for cell, some in took.items()}
