"""The down-intent: the durable trace that production is down by us, and what to do about it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from ..durable import dump_json, from_record, parse_json, remove, write_atomic
from ..errors import UsageError
from ..text import one_line

__all__ = ["Intent", "clear_intent", "read_intent", "write_intent"]

_NAME = "intent.json"


@dataclasses.dataclass(frozen=True)
class Intent:
    """Who took production down, until when, and where the capture lies.

    `deadline` is seconds since boot on the host that `host` identifies; on another boot it has
    passed. `phase` is DOWN, RESTORING, CHAIN_CLOSING (the placeholders of `chain` may be up, the
    marker not yet) or CHAINED (the marker lies; the chain's next window takes the intent over).
    `hosts` maps each of the target's hosts to the boot it was in when production went down.
    """

    window: str
    folder: str
    phase: str
    epoch: int
    host: str
    deadline: float
    rollback: str
    rollback_sha256: str
    keeper_pid: int
    keeper_started: float
    chain: str = ""
    """Owner of the chain's placeholders, recorded before the first of them is started (I6)."""
    hosts: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record as it is written."""
        return {"schema": "dsv41-intent-v1", **dataclasses.asdict(self)}


def write_intent(campaign: Path, intent: Intent) -> None:
    """Write or replace the intent, durably."""
    write_atomic(campaign / _NAME, dump_json(intent.to_json()) + "\n")


def read_intent(campaign: Path) -> Intent | None:
    """Return the intent, or None when there is none.

    Raises:
        UsageError: it is there and cannot be read; it counts as present.
    """
    path = campaign / _NAME
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        record.pop("schema")
        return from_record(Intent, record)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path}: unreadable ({one_line(str(error))}); production may be down: "
            f"dsv41 recover --campaign {shlex.quote(str(campaign))}"
        ) from error


def clear_intent(campaign: Path) -> None:
    """Remove the intent: the last act of a window, after RESTORED and watch PASS."""
    remove(campaign / _NAME)
