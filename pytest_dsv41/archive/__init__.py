"""What is kept: the control archive (schema v4), and the rules that read it.

    from pytest_dsv41.archive import archive_append, archive_rows, archive_spread

The archive is one file of JSON lines, append-only and chained by sha256. See `rows` for a row's
fields, `store` for how an append survives a kill, `verify` for what a change looks like.
Needs the standard library only; nothing here imports pytest, numpy or scipy.
"""

from __future__ import annotations

from pytest_dsv41.archive.errors import (
    ArchiveError,
    ChainBroken,
    HistoryUnknown,
    KeyConflict,
    MigrationRefused,
    MixedDefinitions,
    RolledBack,
    RowRefused,
    WrongSchema,
)
from pytest_dsv41.archive.rows import SCHEMA
from pytest_dsv41.archive.spread import Spread, WindowSpread, archive_spread, archive_spreads
from pytest_dsv41.archive.store import Head, archive_append, archive_head, archive_rows, iter_rows
from pytest_dsv41.identity import prompt_identity

__all__ = [
    "SCHEMA",
    "ArchiveError",
    "ChainBroken",
    "Head",
    "HistoryUnknown",
    "KeyConflict",
    "MigrationRefused",
    "MixedDefinitions",
    "RolledBack",
    "RowRefused",
    "Spread",
    "WindowSpread",
    "WrongSchema",
    "archive_append",
    "archive_head",
    "archive_rows",
    "archive_spread",
    "archive_spreads",
    "iter_rows",
    "prompt_identity",
]
