"""Names inside a window's folder, for whoever only looks whether something lies there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["SUMMARY", "summary_path"]

SUMMARY: Final = "summary.json"


def summary_path(folder: Path) -> Path:
    """Return the summary's path for a window's folder, or `folder` itself if it is a file."""
    return folder if folder.is_file() else folder / SUMMARY
