"""What the starts of a window were proved to run, from the records that its target kept."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..durable import read_json_lines

__all__ = ["STARTS", "read_served"]

STARTS: Final = "unit.jsonl"
"""What each start wrote and what it was proved to be, in the window's folder."""


def read_served(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return each arm's command line as its first proved start had it; secrets are masked in it.

    Empty for a target that proves none, and where the records cannot be read.
    """
    try:
        lines = read_json_lines(folder / STARTS)
    except (OSError, ValueError):
        return {}
    served: dict[str, tuple[str, ...]] = {}
    for line in lines:
        argv = line.get("argv")
        if line.get("event") == "proved" and not line.get("faults") and isinstance(argv, list):
            served.setdefault(str(line.get("arm")), tuple(str(word) for word in argv))
    return served
