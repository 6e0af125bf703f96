"""Rolling back one window by its folder alone: prove what is needed, then let the close do it.

Nothing but the folder is asked for: its record of the target, its capture, its journal. Everything
that the way back needs is proved to be there and to hash before production is touched. The way back
itself is the window's own close (`closing`), so it ends as every window does: six answers, the HOLD
off, the watch, the intent off. A unit that is as captured already is left running, and only asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

from ..errors import Dsv41Error, RefusedByWorld, UsageError
from ..hosts.local import boottime
from ..targets.systemd_unit import SystemdUnitTarget
from ..text import one_line
from ..window.summary import Summary
from .hold import Hold, HoldState
from .intent import Intent, read_intent, write_intent
from .journal import Journal
from .lease import Lease
from .marker import here
from .production import Check, check, read_rollback
from .record import read_record, register_window
from .recover import recover_window

__all__ = ["RolledBack", "rollback_window"]


@dataclasses.dataclass(frozen=True)
class RolledBack:
    """What was proved, in lines, and then the window's new end or the six answers alone."""

    proved: tuple[str, ...]
    summary: Summary | None = None
    answers: Check | None = None


def rollback_window(folder: Path, *, say: Callable[[str], None] = lambda _line: None) -> RolledBack:
    """Bring the unit of the window in `folder` back to what it was before the window.

    Raises:
        UsageError: the folder is no window's on a unit, its capture was changed, or the campaign's
            intent cannot be read.
        RefusedByWorld: somebody works on it, a HOLD of others lies there, or something that the
            way back needs is missing; nothing was touched.
        TransportError: the host does not answer; nothing was touched.
    """
    record = read_record(folder)
    if record.table.get("kind") != "systemd-unit":
        raise UsageError(f"{folder}: a window of target {record.table.get('kind')}: dsv41 recover")
    journal, path = Journal(folder), folder / "rollback.json"
    sealed = str(journal.ended("capture").get("rollback_sha256", ""))
    if not sealed:
        raise RefusedByWorld(f"{folder}: the window captured nothing, so it touched nothing")
    rollback = read_rollback(path, sealed)
    campaign = Path(record.campaign)
    campaign.mkdir(parents=True, exist_ok=True)
    lease = Lease(campaign)
    used = max((int(line.get("epoch", 0)) for line in journal.lines()), default=0)
    lease.acquire(f"unit rollback {record.window}", record.close_budget_s, above=used)
    try:
        target, _ = record.build(folder, epoch=lease.epoch)
        assert isinstance(target, SystemdUnitTarget)
        proved = tuple(target.prove_rollback())
        for line in proved:
            say(line)
        # One that cannot be read counts as somebody's, and is not written over.
        intent = read_intent(campaign)
        if intent is not None and intent.window != record.window:
            raise RefusedByWorld(
                f"production is down by {one_line(intent.window)}: its own rollback goes first"
            )
        hold = Hold(target.hold_sites())
        state, _ = hold.state_for_window(record.window)
        if state not in (HoldState.NONE, HoldState.OWN):
            raise RefusedByWorld(hold.refusal())
        apart = target.apart()
        if intent is None and state is HoldState.NONE and not apart:
            say(f"{record.table['unit']} is as captured; it is only asked")
            asked = check(target, rollback, deadline_s=record.limits["start_s"])
            return RolledBack(proved, answers=asked)
        for line in apart:
            say(f"to be undone: {line}")
        # A campaign that was lost: its facts are made again from the folder.
        register_window(campaign, record.window, folder, lease.epoch)
        if state is HoldState.NONE:
            hold.create(record.window, lease.epoch)
        if intent is None:
            write_intent(
                campaign,
                Intent(
                    window=record.window,
                    folder=str(folder),
                    phase="RESTORING",
                    epoch=lease.epoch,
                    host=here(),
                    deadline=boottime() + record.close_budget_s,
                    rollback=str(path),
                    rollback_sha256=sealed,
                    keeper_pid=0,
                    keeper_started=0.0,
                    chain="",
                ),
            )
        say("the window's close: stop, start, compare, six answers, watch")
        return RolledBack(
            proved, summary=recover_window(folder, stopped="rolled back by hand", lease=lease)
        )
    finally:
        with contextlib.suppress(Dsv41Error, OSError):
            lease.release()
