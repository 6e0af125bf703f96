"""What the archive refuses. Every message is one line: what, where, and what would be valid.

ArchiveError (a Dsv41Error and a ValueError)
├── RowRefused          a row breaks a rule of its field; nothing was written
├── KeyConflict         the same (window, cell, metric, start, repeat) with other contents
├── WrongSchema         the file is of another archive version: migrate it, or use its own writer
├── ChainBroken         a line was changed, removed or moved; `line` is the first broken one
├── RolledBack          the file is older than a checkpoint that is known
├── MixedDefinitions    a spread over rows of different definitions; `differ` names the fields
├── MigrationRefused    an old archive cannot be rebuilt without losing or guessing something
└── HistoryUnknown      a window folder does not prove the fact that was asked for
"""

from __future__ import annotations

from pytest_dsv41.errors import Dsv41Error

__all__ = [
    "ArchiveError",
    "ChainBroken",
    "HistoryUnknown",
    "KeyConflict",
    "MigrationRefused",
    "MixedDefinitions",
    "RolledBack",
    "RowRefused",
    "WrongSchema",
]


class ArchiveError(Dsv41Error, ValueError):
    """Base of everything the archive refuses."""


class RowRefused(ArchiveError):
    """A row breaks a rule. The message names the row, the field, the value and the rule."""


class KeyConflict(ArchiveError):
    """A row with this key exists and says something else; an archive row never changes."""


class WrongSchema(ArchiveError):
    """The file holds rows of another archive version."""


class ChainBroken(ArchiveError):
    """The chain does not hold. `line` counts from 1, `change` is a short, stable name."""

    def __init__(self, message: str, *, line: int, change: str) -> None:
        super().__init__(message)
        self.line = line
        self.change = change


class RolledBack(ArchiveError):
    """The file lacks rows that a known checkpoint vouches for."""


class MixedDefinitions(ArchiveError):
    """Rows of several definitions are never pooled. `differ` maps a field to its values."""

    def __init__(self, message: str, *, differ: dict[str, list[object]]) -> None:
        super().__init__(message)
        self.differ = differ


class MigrationRefused(ArchiveError):
    """The old archive cannot be rebuilt as it is. The message names the rows that stop it."""


class HistoryUnknown(ArchiveError):
    """The folder does not prove what was asked (commit, clock cap, date, prompt)."""
