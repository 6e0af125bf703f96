"""The durable facts of a chain: its marker, what was recorded beside it, and what it left behind.

The marker says that production is down on purpose between two windows (SAFETY, "Durable facts").
It is written before the HOLD goes and removed by the chain's end alone. Beside it lie the record of
the one automatic recovery, the note that a gate refused, and the list of placeholders that could
not be taken down. Deadlines are seconds since boot: no decision reads the wall clock (I10).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
from pathlib import Path
from typing import Any, Final

from ..durable import create_exclusive, dump_json, from_record, parse_json, remove, write_atomic
from ..errors import RefusedByWorld, UsageError
from ..hosts import CommandLog, LocalHost
from ..hosts.local import boottime
from ..text import one_line
from .journal import utc_now

__all__ = [
    "OWNER",
    "Leftover",
    "Marker",
    "abort_path",
    "abort_record",
    "add_leftovers",
    "clear_beside",
    "create_abort_record",
    "forget_abort",
    "here",
    "marker_path",
    "new_owner",
    "read_leftovers",
    "read_marker",
    "refused_record",
    "remove_leftovers",
    "remove_marker",
    "write_marker",
    "write_refused",
]

OWNER: Final = re.compile(r"chain-\d{8}T\d{6}Z-[0-9a-f]{8}")
"""The form of a chain's owner; whatever has another form is never this project's."""


@dataclasses.dataclass(frozen=True)
class Marker:
    """Production is down for the chain `placeholder_owner`, by `window`, until `deadline`.

    `deadline` is seconds since boot on the coordinator whose boot `host` names; on another boot it
    has passed. `hosts` maps each of the target's hosts to the boot it was in.
    """

    placeholder_owner: str
    window: str
    folder: str
    epoch: int
    host: str
    deadline: float
    snapshot: str
    snapshot_sha256: str
    hosts: dict[str, str]

    @property
    def stop_id(self) -> str:
        """What one automatic recovery is allowed for: the chain, and who wrote the marker."""
        return f"{self.placeholder_owner}/{self.epoch}"

    @property
    def overdue(self) -> bool:
        """Whether the next window should have begun long ago."""
        return self.host != here() or boottime() > self.deadline


@dataclasses.dataclass(frozen=True)
class Leftover:
    """A placeholder of an ended chain that could not be taken down, and why."""

    owner: str
    host: str
    why: str


def here() -> str:
    """The boot that this process, the coordinator's, lives in."""
    return LocalHost(CommandLog(Path())).identity()


def new_owner() -> str:
    """The name of a new chain: `chain-<UTC>-<8 hex>`."""
    stamp = re.sub(r"[-:]", "", utc_now())
    return f"chain-{stamp}-{secrets.token_hex(4)}"


def marker_path(campaign: Path) -> Path:
    """Where the campaign's marker lies; in tests DSV41_CHAIN_MARKER names another place (WIN2)."""
    return Path(os.environ.get("DSV41_CHAIN_MARKER") or campaign / "marker.json")


def _beside(campaign: Path, ending: str) -> Path:
    marker = marker_path(campaign)
    return marker.with_name(f"{marker.name}.{ending}")


def read_marker(campaign: Path) -> Marker | None:
    """Return the marker, or None when there is none.

    Raises:
        UsageError: it is unreadable or names no owner; it counts as present.
    """
    path = marker_path(campaign)
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        record.pop("schema")
        record.pop("utc")
        marker = from_record(Marker, record)
        if not OWNER.fullmatch(marker.placeholder_owner):
            raise ValueError("it names no owner of a chain")
        return marker
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path}: the chain marker is unreadable ({one_line(str(error))}); it counts as "
            "present: production may be down"
        ) from error


def write_marker(campaign: Path, marker: Marker) -> None:
    """Write or replace the marker, durably."""
    record = {"schema": "dsv41-marker-v1", "utc": utc_now(), **dataclasses.asdict(marker)}
    write_atomic(marker_path(campaign), dump_json(record) + "\n")


def remove_marker(campaign: Path, owner: str) -> None:
    """Remove the marker of the chain `owner`; a missing one is fine.

    Raises:
        RefusedByWorld: the marker is another chain's.
        UsageError: it cannot be read.
    """
    marker = read_marker(campaign)
    if marker is not None and marker.placeholder_owner != owner:
        raise RefusedByWorld(
            f"the marker belongs to {marker.placeholder_owner}, not to {owner}; it is not touched"
        )
    remove(marker_path(campaign))


# -- beside the marker -----------------------------------------------------------------------------


def abort_path(campaign: Path) -> Path:
    """Where the record of the chain's one automatic recovery lies."""
    return _beside(campaign, "abort")


def _refused_path(campaign: Path) -> Path:
    return _beside(campaign, "refused")


def _record(path: Path) -> dict[str, Any] | None:
    """A record beside the marker; a damaged one counts as there, for whatever chain there is."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}


def abort_record(campaign: Path, marker: Marker) -> bool:
    """Whether the one automatic recovery of this stop was begun and did not end the chain."""
    record = _record(abort_path(campaign))
    return record is not None and record.get("stop", marker.stop_id) == marker.stop_id


def create_abort_record(campaign: Path, marker: Marker, folder: Path) -> None:
    """Take the one automatic recovery of this stop; the record of another stop goes first.

    Raises:
        RefusedByWorld: it was taken before.
    """
    if not abort_record(campaign, marker):
        remove(abort_path(campaign))
    record = {
        "schema": "dsv41-chain-abort-v1",
        "chain": marker.placeholder_owner,
        "stop": marker.stop_id,
        "folder": str(folder),
        "utc": utc_now(),
    }
    try:
        create_exclusive(abort_path(campaign), dump_json(record) + "\n")
    except FileExistsError:
        raise RefusedByWorld(
            f"the one automatic recovery of {marker.stop_id} was begun before and did not end the "
            "chain"
        ) from None


def forget_abort(campaign: Path) -> None:
    """Remove the record: at the chain's end, or because a person asks for one attempt more."""
    remove(abort_path(campaign))


def refused_record(campaign: Path, marker: Marker) -> str | None:
    """Why a gate refused this chain's next window, or None; a refused chain is stopped."""
    record = _record(_refused_path(campaign))
    if record is None or record.get("chain", marker.placeholder_owner) != marker.placeholder_owner:
        return None
    return one_line(str(record.get("why", "the record is damaged")))


def write_refused(campaign: Path, marker: Marker, why: str) -> None:
    """Note that a gate refused: the chain is stopped, and this makes no new stop of it."""
    if refused_record(campaign, marker) is not None:
        return
    record = {
        "schema": "dsv41-chain-refused-v1",
        "chain": marker.placeholder_owner,
        "why": one_line(why),
        "utc": utc_now(),
    }
    write_atomic(_refused_path(campaign), dump_json(record) + "\n")


def clear_beside(campaign: Path) -> None:
    """Remove what lies beside an ended chain's marker."""
    remove(abort_path(campaign))
    remove(_refused_path(campaign))


# -- what a chain left -----------------------------------------------------------------------------


def _leftovers_path(campaign: Path) -> Path:
    return campaign / "leftovers.json"


def read_leftovers(campaign: Path) -> tuple[Leftover, ...]:
    """The placeholders that are still to be taken down, the oldest first."""
    found = []
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        for row in parse_json(_leftovers_path(campaign).read_text(encoding="utf-8"))["left"]:
            found.append(Leftover(str(row["owner"]), str(row["host"]), str(row["why"])))
    return tuple(found)


def add_leftovers(campaign: Path, owner: str, left: list[str]) -> None:
    """Keep `host: why` lines of what `placeholders_down(owner)` left, before the marker goes."""
    kept = [x for x in read_leftovers(campaign) if x.owner != owner]
    for line in left:
        host, _, why = line.partition(":")
        kept.append(Leftover(owner, host.strip(), one_line(why.strip())))
    _write_leftovers(campaign, kept)


def remove_leftovers(campaign: Path, owner: str) -> None:
    """Forget the leftovers of a chain whose placeholders are down."""
    _write_leftovers(campaign, [x for x in read_leftovers(campaign) if x.owner != owner])


def _write_leftovers(campaign: Path, left: list[Leftover]) -> None:
    path = _leftovers_path(campaign)
    if left:
        rows = [dataclasses.asdict(one) for one in left]
        write_atomic(path, dump_json({"schema": "dsv41-leftovers-v1", "left": rows}) + "\n")
    elif path.exists():
        remove(path)
