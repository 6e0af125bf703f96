"""Windows back to back: when one may begin while production is down, and how the chain ends.

The names are WIN2's ("Back-to-back mode"). What a chained window does at its own end stands in
`closing` (`finish_chained`, `chained_close`, `end_chain`), where the order of SAFETY decides: the
marker is written before the HOLD goes.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..durable import dump_json, remove
from ..errors import Dsv41Error, RefusedByWorld, UsageError
from ..hosts import Placeholder, Probe
from ..targets import Target
from ..text import one_line
from .closing import end_chain
from .hold import Hold, HoldState
from .intent import read_intent
from .marker import (
    Marker,
    abort_record,
    marker_path,
    new_owner,
    read_marker,
    refused_record,
    remove_marker,
)
from .production import read_rollback
from .record import read_record, window_folder, windows

__all__ = [
    "ChainUse",
    "Mode",
    "Refusal",
    "allow_unreachable",
    "chain_owner",
    "chain_refusals",
    "changed_hosts",
    "clear",
    "end_action",
    "end_chain",
    "placeholders_present",
    "preflight",
    "production_snapshot",
    "refuse_overrides",
    "refuse_overrides_over",
    "remove_marker",
    "restore_required",
]

_OVERRIDES: Final = "DSV41_CHAIN_"


@dataclasses.dataclass(frozen=True)
class ChainUse:
    """What WINDOW_CHAIN and WINDOW_CHAIN_LAST, or their options, ask for."""

    requested: bool = False
    last: bool = False


class Mode(enum.Enum):
    """How a window finds production: serving, or down by the chain it belongs to."""

    SINGLE = "single"
    CHAINED = "chained"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why no window may begin: one of WIN2's four names, and the reason in one line."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


def preflight(
    production_serving: bool,
    hold_exists: bool,
    placeholders_present: bool | None = None,
    *,
    marker: bool,
) -> Mode:
    """How a window may begin, from what was probed. `placeholders_present` is needed in a chain.

    Raises:
        RefusedByWorld: it may not.
    """
    if hold_exists:
        raise RefusedByWorld("a HOLD lies there")
    if not marker:
        if not production_serving:
            raise RefusedByWorld("production does not serve, and no chain has left it down")
        return Mode.SINGLE
    if production_serving:
        raise RefusedByWorld("production serves under a chain marker")
    if placeholders_present is None:
        raise RefusedByWorld("the chain's placeholders were not looked at")
    if not placeholders_present:
        raise RefusedByWorld("the chain's placeholders are not up on every host")
    return Mode.CHAINED


def allow_unreachable(mode: Mode) -> bool:
    """Whether the admission may find production silent: only where the chain left it down."""
    return mode is Mode.CHAINED


def end_action(*, stopped: bool, hold_written: bool, marker: bool, use: ChainUse) -> str:
    """What a window's end has to do: `chained`, `restore`, `abort` or `none`.

    `stopped` is any stop; `hold_written` that this window's own HOLD was written; `marker` that a
    chain left production down.
    """
    if hold_written:
        return "chained" if use.requested and not use.last and not stopped else "restore"
    return "abort" if marker and use.requested else "none"


def restore_required(*, stopped: bool, hold_written: bool, marker: bool, use: ChainUse) -> bool:
    """Whether production has to be brought back at this window's end."""
    action = end_action(stopped=stopped, hold_written=hold_written, marker=marker, use=use)
    return action in ("restore", "abort")


def chain_owner(campaign: Path) -> str:
    """The owner of the chain: the marker's while production is down by it, else a new one.

    Raises:
        UsageError: the marker is unreadable.
    """
    marker = read_marker(campaign)
    return marker.placeholder_owner if marker else new_owner()


def placeholders_present(target: Target, owner: str) -> bool:
    """Whether every host that needs one has this owner's placeholder; UNKNOWN is not present."""
    return all(seen is Placeholder.UP for seen in target.placeholders(owner).values())


def production_snapshot(marker: Marker) -> tuple[Path, dict[str, Any]]:
    """The capture of the chain's first window: the path and what it says, checked by its sha256.

    Raises:
        UsageError: it is missing or was changed.
    """
    path = Path(marker.snapshot)
    return path, read_rollback(path, marker.snapshot_sha256)


def clear(campaign: Path) -> None:
    """Remove a marker that records no owner.

    Raises:
        RefusedByWorld: it records one: only the chain's end may remove it.
    """
    try:
        marker = read_marker(campaign)
    except UsageError:
        remove(marker_path(campaign))
        return
    if marker is not None:
        raise RefusedByWorld(
            f"the marker records {marker.placeholder_owner}: dsv41 chain end, after production "
            "was verified"
        )


def chain_refusals(target: Target, campaign: Path) -> tuple[Mode, list[Refusal]]:
    """Look at everything that may forbid the next window, reading only; none: it may begin.

    The names are WIN2's: `gate`, `HOLD` and `stale container` (the previous summary is the gate
    command's own). A machine that does not answer forbids it as well (SAFETY I9).
    """
    found: list[Refusal] = []
    marker, unreadable = None, False
    try:
        marker = read_marker(campaign)
    except UsageError as error:
        unreadable = True
        found.append(Refusal("gate", one_line(str(error))))
    hold = Hold(target.hold_sites())
    if hold.owner()[0] is not HoldState.NONE:
        found.append(Refusal("HOLD", hold.refusal()))
    seen = target.probe()
    if seen.state is Probe.UNKNOWN:
        found.append(Refusal("gate", f"cannot tell whether production serves: {seen.detail}"))
    present = None
    if marker is not None:
        placeholders = target.placeholders(marker.placeholder_owner)
        present = all(one is Placeholder.UP for one in placeholders.values())
        found += [
            Refusal("gate", f"the chain's placeholder on {host} is {one.value}")
            for host, one in placeholders.items()
            if one is not Placeholder.UP
        ]
        found += [Refusal("gate", why) for why in _stopped(target, campaign, marker)]
    mode = Mode.CHAINED if marker is not None or unreadable else Mode.SINGLE
    if not found:
        try:
            mode = preflight(seen.state is Probe.UP, False, present, marker=marker is not None)
        except RefusedByWorld as error:
            found.append(Refusal("gate", f"{error}: {seen.detail}"))
    try:
        live = target.live_experiments()
    except Dsv41Error as error:
        live = [f"cannot tell what runs: {error}"]
    return mode, found + [Refusal("stale container", one_line(problem)) for problem in live]


def _stopped(target: Target, campaign: Path, marker: Marker) -> list[str]:
    """What has stopped a chain whose machines look as they should."""
    found = []
    refused = refused_record(campaign, marker)
    if refused is not None:
        found.append(f"the chain is stopped: {refused}")
    if abort_record(campaign, marker):
        found.append("the chain is stopped: its one automatic recovery did not end it")
    if marker.overdue:
        found.append("the chain is stopped: its next window did not begin in time")
    found += changed_hosts(target, marker)
    try:
        found += _other_production(target, production_snapshot(marker)[1])
        intent = read_intent(campaign)
    except Dsv41Error as error:
        return [*found, str(error)]
    if intent is not None and intent.window != marker.window:
        found.append(f"production is down by {one_line(intent.window)}, which has not ended")
    return found


def _other_production(target: Target, captured: Mapping[str, Any]) -> list[str]:
    """Whether the target would bring back another production than the chain took down."""
    now = dump_json(target.describe())
    then = dump_json(captured.get("configuration", {}).get("definition", target.describe()))
    if captured["production_commit"] == target.commit() and then == now:
        return []
    return [
        "this target's production is not the one that the chain took down "
        f"(commit {target.commit()[:12]}, the chain's {captured['production_commit'][:12]})"
    ]


def changed_hosts(target: Target, marker: Marker) -> list[str]:
    """The hosts that were restarted since the marker was written, or cannot be asked."""
    try:
        now = target.identities()
    except Dsv41Error as error:
        return [f"cannot tell whether a host was restarted: {one_line(str(error))}"]
    return [
        f"the chain is stopped: {host} was restarted"
        for host, boot in sorted(marker.hosts.items())
        if now.get(host) != boot
    ]


def refuse_overrides(table: Mapping[str, Any] | None) -> None:
    """Refuse the test-only variables `DSV41_CHAIN_…` over real machines (SAFETY).

    `table` is the target's; without one nobody knows that its hosts are simulated.

    Raises:
        UsageError: one of them is set, and the target's hosts are not simulated.
    """
    found = sorted(name for name in os.environ if name.startswith(_OVERRIDES))
    if not found or (table and table.get("world")):
        return
    kind = f"with target {one_line(str(table['kind']))}" if table else "where no window has run"
    raise UsageError(f"{found[0]} is for tests alone and is refused {kind}")


def refuse_overrides_over(campaign: Path | None) -> None:
    """As `refuse_overrides`, over the machines of the campaign's newest window; None: not known.

    Raises:
        UsageError: as there, or that window's record is damaged.
    """
    names = windows(campaign) if campaign else []
    folders = (window_folder(campaign, name) for name in reversed(names) if campaign)
    newest = next((folder for folder in folders if folder), None)
    refuse_overrides(read_record(newest).table if newest else None)
