"""The old file that a migration keeps: its names, and the heads it once had.

Summaries written before a migration remember heads of the old chain. The migrated file does not
have them, so they are looked up in the kept copy before anybody cries rollback.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["OWN_HASHES", "kept_copies", "kept_name", "old_heads"]

OWN_HASHES = ("sha256", "row_sha256", "sha", "hash")
"""Names under which an old row may carry its own hash; the sources fix none."""

_SUFFIX = "-before-v4"


def kept_name(archive: Path, version: str, number: int) -> Path:
    """Return the name of the n-th kept copy of an archive of `version` (v1, v3)."""
    return archive.with_name(f"{archive.name}.{version}{_SUFFIX}" + f"-{number}" * bool(number))


def kept_copies(archive: Path) -> list[Path]:
    """Return the copies that migrations of this archive kept."""
    return sorted(archive.parent.glob(f"{archive.name}.v*{_SUFFIX}*"))


def old_heads(archive: Path) -> set[tuple[int, str]]:
    """Return (rows, sha256) of every head that the archive had before it was migrated."""
    heads: set[tuple[int, str]] = set()
    for copy in kept_copies(archive):
        with copy.open("rb") as file:
            for rows, line in enumerate(file, start=1):
                try:
                    row: Any = json.loads(line)
                except (ValueError, RecursionError):
                    break
                own = next((row[name] for name in OWN_HASHES if name in row), None)
                if isinstance(own, str):
                    heads.add((rows, own))
    return heads
