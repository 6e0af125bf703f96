"""The arms that failed their smoke at a chain's head: their windows are not started."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..durable import dump_json, parse_json, remove, write_atomic
from ..errors import UsageError
from ..text import one_line
from .journal import utc_now

__all__ = ["drop", "dropped_arms", "forget_dropped", "taken_back"]

_NAME: Final = "dropped.json"


def dropped_arms(campaign: Path) -> dict[tuple[str, str], str]:
    """(window `<lane>-<name>`, arm) to why it was dropped.

    Raises:
        UsageError: the record is there and cannot be read.
    """
    path = campaign / _NAME
    try:
        rows = parse_json(path.read_text(encoding="utf-8"))["dropped"]
        return {(row["window"], row["arm"]): one_line(row["why"]) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: unreadable ({one_line(str(error))}); smoke the arms again, then remove it"
        ) from error


def drop(campaign: Path, window: str, arm: str, why: str) -> None:
    """Record that the arm's window is not to be started in this chain."""
    _write(campaign, {**dropped_arms(campaign), (window, arm): why})


def taken_back(campaign: Path, window: str, arm: str) -> None:
    """The arm has passed a smoke since."""
    known = dropped_arms(campaign)
    if known.pop((window, arm), None) is not None:
        _write(campaign, known)


def forget_dropped(campaign: Path) -> None:
    """The chain is over, and with it what was dropped from it."""
    remove(campaign / _NAME)


def _write(campaign: Path, known: dict[tuple[str, str], str]) -> None:
    rows = [
        {"window": window, "arm": arm, "why": why, "utc": utc_now()}
        for (window, arm), why in sorted(known.items())
    ]
    text = dump_json({"schema": "dsv41-dropped-v1", "dropped": rows})
    write_atomic(campaign / _NAME, text + "\n")
