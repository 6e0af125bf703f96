"""The recovery of a stopped chain: production back by the strict restore, once a stop (SAFETY I3).

It works as a window of its own, without starts: a folder with a journal, an own HOLD, an intent,
and the same close. So a kill at any point leaves what `dsv41 status` and `dsv41 recover` know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..errors import Dsv41Error
from ..hosts import Probe
from ..text import one_line
from ..window.summary import RESTORE_NOT_NEEDED, RESTORE_RESTORED
from .closing import CHAIN_ENDED, CHAIN_ENDED_WITH_ALERT, FAILED, CloseResult, close_window
from .finish import finish_abort
from .hold import Hold, HoldState
from .journal import Journal, StepHook, utc_now
from .lease import Lease
from .marker import (
    Marker,
    abort_record,
    create_abort_record,
    forget_abort,
    read_marker,
    write_refused,
)
from .record import TargetRecord, read_record, register_window, window_folder

__all__ = ["ABORTED", "ALERT_ONLY", "NOT_RESTORED", "Aborted", "abort", "new_abort_folder"]

_NAME: Final = re.compile(r"CHAIN-ABORT-[A-Za-z0-9._-]{1,48}")

ABORTED = 0
"""Restored and watched, placeholders down, marker gone; or there was no marker."""
NOT_RESTORED = 3
"""Production is down; marker and placeholders are kept."""
ALERT_ONLY = 4
"""Nothing was touched: a HOLD, a serving or unseen production, or the one attempt was used up."""


@dataclasses.dataclass(frozen=True)
class Aborted:
    """How a recovery ended. `code` is 0, 3 or 4; `closed` holds restore, watch and alerts."""

    code: int
    closed: CloseResult
    folder: Path | None = None

    @property
    def line(self) -> str:
        """The ending in one line."""
        closed = self.closed
        watch = (closed.watch or {}).get("status", "NOT RUN")
        reason = closed.restore.get("reason") or "; ".join(closed.alerts)
        return f"{closed.restore['status']}, watch {watch}" + (f": {reason}" if reason else "")


def new_abort_folder(campaign: Path) -> Path:
    """The folder of the next recovery: `CHAIN-ABORT-<UTC>`, with a suffix if taken."""
    stamp = utc_now().replace("-", "").replace(":", "")
    name, number = f"CHAIN-ABORT-{stamp}", 1
    while (campaign / name).exists() or (campaign / "windows" / f"{name}.json").exists():
        number += 1
        name = f"CHAIN-ABORT-{stamp}-{number}"
    return campaign / name


def abort(
    campaign: Path,
    out: Path,
    *,
    lease: Lease,
    again: bool = False,
    on_step: StepHook | None = None,
    progress: Callable[[str, float], None] = lambda _what, _left: None,
) -> Aborted:
    """Bring production back and end the chain; `lease` is held by the caller, signals deferred.

    `again` forgets an attempt that did not succeed (by hand only). `out` is made, and gets
    summary.json, which the next gate accepts as a previous summary. Never raises.
    """
    try:
        marker = read_marker(campaign)
        if marker is None:
            why = "no chain marker lies here"
            if (campaign / "intent.json").exists():
                # Not a chain's, and so not this command's to bring back.
                why += ", but a down-intent: dsv41 status --campaign " + shlex.quote(str(campaign))
            return Aborted(ABORTED, CloseResult(restore=_untouched(why)))
        lease.check()
        record, seen = _look(campaign, marker, lease, again=again)
    except Exception as error:  # noqa: BLE001 - a target of the user's own
        return _alert(one_line(str(error) or type(error).__name__), down=True)
    if seen is not None:
        return _alert(seen[0], down=seen[1])
    try:
        return _recover(campaign, marker, record, out, lease, again, on_step, progress)
    except Exception as error:  # noqa: BLE001 - a target of the user's own
        refused = _alert(one_line(str(error) or type(error).__name__), down=True)
        with contextlib.suppress(Dsv41Error, OSError):
            finish_abort(out, refused.closed)
        return refused


def _untouched(reason: str) -> dict[str, Any]:
    return {"status": RESTORE_NOT_NEEDED, "reason": reason}


def _alert(why: str, *, down: bool) -> Aborted:
    """Nothing was touched and nothing used up."""
    restore = {"status": FAILED if down else RESTORE_NOT_NEEDED, "reason": why}
    return Aborted(ALERT_ONLY, CloseResult(restore=restore, alerts=[why], production_down=down))


def _look(
    campaign: Path, marker: Marker, lease: Lease, *, again: bool
) -> tuple[TargetRecord, tuple[str, bool] | None]:
    """What the recovery would work on, and why it must not: the reason, and whether it is down."""
    folder = Path(marker.folder)
    record = read_record(folder)
    target, _ = record.build(folder, epoch=lease.epoch)
    hold = Hold(target.hold_sites())
    seen = target.probe()
    down = seen.state is not Probe.UP
    if hold.owner()[0] is not HoldState.NONE:
        return record, (hold.refusal(), down)
    if seen.state is Probe.UP:
        return record, (
            f"production serves ({seen.detail}): verify it and end the chain: dsv41 chain end",
            False,
        )
    if seen.state is Probe.UNKNOWN:
        return record, (f"cannot tell whether production serves: {seen.detail}", True)
    # Every host must answer before the one attempt is used up.
    target.identities()
    if abort_record(campaign, marker) and not again:
        return record, (
            f"the one automatic recovery of {marker.stop_id} has already run and did not end the "
            "chain: dsv41 chain abort --again",
            True,
        )
    return record, None


def _recover(
    campaign: Path,
    marker: Marker,
    record: TargetRecord,
    out: Path,
    lease: Lease,
    again: bool,
    on_step: StepHook | None,
    progress: Callable[[str, float], None],
) -> Aborted:
    # Restore and watch take longer than a look: whoever sees this lease must not call it overdue.
    lease.renew("chain abort", record.close_budget_s)
    out.mkdir(parents=True, exist_ok=True)
    # Nothing is measured in a recovery: no time is planned for a seam.
    limits = {key: value for key, value in record.limits.items() if key != "seam_s"}
    name = out.name
    if not _NAME.fullmatch(name) or window_folder(campaign, name) is not None:
        name = new_abort_folder(campaign).name
    record = dataclasses.replace(record, window=name, limits=limits)
    record.write(out)
    register_window(campaign, name, out, lease.epoch)
    journal = Journal(out, on_step)
    journal.note(
        "window",
        "begin",
        id=name,
        epoch=lease.epoch,
        mode="abort",
        chain=marker.placeholder_owner,
    )
    target, _ = record.build(out, epoch=lease.epoch)
    hold = Hold(target.hold_sites())
    # A stopped chain is never taken for the healthy gap between two windows.
    write_refused(campaign, marker, "a recovery was begun")
    with journal.step("hold"):
        hold.create(name, lease.epoch)
    try:
        with journal.step("abort-record"):
            if again:
                forget_abort(campaign)
            create_abort_record(campaign, marker, out)
    except (Dsv41Error, OSError):
        with contextlib.suppress(Dsv41Error, OSError):
            hold.close(name)
        raise
    journal.tolerant = True
    closed = close_window(
        target,
        window_id=name,
        folder=out,
        campaign=campaign,
        journal=journal,
        lease=lease,
        limits=record.limits,
        progress=progress,
    )
    finish_abort(out, closed)
    ended = closed.chain in (CHAIN_ENDED, CHAIN_ENDED_WITH_ALERT)
    passed = (closed.watch or {}).get("status") == "PASS"
    restored = closed.restore["status"] == RESTORE_RESTORED and passed and ended
    return Aborted(ABORTED if restored else NOT_RESTORED, closed, out)
