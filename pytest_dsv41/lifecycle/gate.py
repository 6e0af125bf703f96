"""The gate before a chain's next window, and the chain's end by hand (WIN2 "Back-to-back mode").

The gate waits for the previous window's summary, then looks at everything that may forbid the next
window. A refusal while a marker lies there is a stopped chain with production down: the gate itself
then runs the one automatic recovery, so that a stopped chain is never left unattended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import Dsv41Error, RefusedByWorld, UsageError
from ..hosts import Probe
from ..hosts.local import boottime
from ..targets import Target
from ..text import one_line
from ..window.summary import (
    CHAINED,
    RESTORE_FAILED,
    RESTORE_RESTORED,
    WATCH_FAILED,
    Summary,
    read_summary,
    summary_path,
)
from .abort import Aborted, abort, new_abort_folder
from .chain import Mode, Refusal, chain_refusals, production_snapshot
from .closing import CloseResult, end_chain
from .finish import finish_abort
from .hold import Hold, HoldState
from .intent import clear_intent
from .journal import Journal
from .lease import Lease
from .marker import (
    Marker,
    marker_path,
    read_leftovers,
    read_marker,
    remove_leftovers,
    write_refused,
)
from .production import check, watch
from .record import TargetRecord, read_record, register_window, window_folder, windows

__all__ = ["ADMIT", "CHAIN_STOPPED", "REFUSED", "Gate", "end_by_hand", "gate", "look_target"]

ADMIT = 0
REFUSED = 2
"""Refused, and no chain marker lies there."""
CHAIN_STOPPED = 3
"""CHAIN STOPPED: PRODUCTION DOWN."""
_LOOK_S = 0.5
Say = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True)
class Gate:
    """The gate's answer: `code` 0, 2 or 3, the mode of an admitted window, and why it was not."""

    code: int
    mode: Mode | None
    refusals: tuple[Refusal, ...] = ()
    aborted: Aborted | None = None


def gate(
    campaign: Path,
    previous: Path,
    *,
    wait_s: float,
    progress: Say = lambda _what, _left: None,
    pause: Callable[[float], None] = time.sleep,
    recovery: Callable[..., Aborted] = abort,
) -> Gate:
    """Wait up to `wait_s` seconds for `previous`, then admit or refuse the next window.

    `previous` is the previous window's summary.json or folder; a recovery's counts too. Signals
    must be deferred by the caller from the moment that `progress` first says "abort". `recovery`
    is called as `abort` is.
    """
    limit = boottime() + wait_s
    while not summary_path(previous).is_file() and boottime() < limit:
        progress(f"gate: waiting for {summary_path(previous)}", limit - boottime())
        pause(min(_LOOK_S, max(0.0, limit - boottime())))
    lease = Lease(campaign)
    while True:
        try:
            lease.acquire("chain gate", 600.0)
            break
        except RefusedByWorld as error:
            if boottime() >= limit:
                # Whoever holds it is at work on this chain: nothing is stopped by a look.
                stopped = marker_path(campaign).exists()
                why = (Refusal("gate", str(error)),)
                return Gate(CHAIN_STOPPED if stopped else REFUSED, None, why)
            progress(f"gate: {error}", limit - boottime())
            pause(_LOOK_S)
    try:
        mode, refusals = _look(campaign, previous, lease)
        if not refusals:
            return Gate(ADMIT, mode)
        if not marker_path(campaign).exists():
            return Gate(REFUSED, None, tuple(refusals))
        with contextlib.suppress(Dsv41Error, OSError):
            marker = read_marker(campaign)
            if marker is not None:
                write_refused(campaign, marker, str(refusals[0]))
        progress("abort", 0.0)
        aborted = recovery(campaign, new_abort_folder(campaign), lease=lease, progress=progress)
        return Gate(CHAIN_STOPPED, None, tuple(refusals), aborted)
    finally:
        lease.release()


def _look(campaign: Path, previous: Path, lease: Lease) -> tuple[Mode, list[Refusal]]:
    refusals = []
    summary = None
    try:
        summary = read_summary(previous)
    except UsageError as error:
        refusals.append(Refusal("previous summary", str(error)))
    try:
        target = look_target(campaign, previous, lease.epoch)
    except Dsv41Error as error:
        return Mode.SINGLE, [*refusals, Refusal("gate", one_line(str(error)))]
    mode, found = chain_refusals(target, campaign)
    if summary is not None:
        refusals += [Refusal("previous summary", why) for why in _unfit(summary, campaign)]
    return mode, refusals + found


def _unfit(summary: Summary, campaign: Path) -> list[str]:
    """Why nothing may follow the previous window."""
    identity = one_line(summary.window.id)
    marker = None
    with contextlib.suppress(UsageError):
        marker = read_marker(campaign)
    if summary.chain == CHAINED:
        if marker is None:
            return [f"{identity} left production to its chain, and no marker lies here"]
        if marker.window != summary.window.id and summary.status != "REFUSED":
            return [f"the marker is {one_line(marker.window)}'s, not {identity}'s"]
        return []
    if marker is not None:
        return [f"{identity} did not end chained, and a marker of {one_line(marker.window)} lies"]
    if not summary.restore.production_up:
        return [f"{identity}: restore {one_line(summary.restore.status)}"]
    if summary.watch.status == WATCH_FAILED or summary.exit_code in (20, 21):
        return [f"{identity} ended with exit code {summary.exit_code}; look at its alerts"]
    return []


def look_target(campaign: Path, previous: Path | None = None, epoch: int = 0) -> Target:
    """The campaign's machines: as the marker's window had them, the previous one, or the newest.

    Raises:
        UsageError: no window of this campaign tells.
    """
    folders = []
    with contextlib.suppress(UsageError):
        marker = read_marker(campaign)
        if marker is not None:
            folders.append(Path(marker.folder))
    if previous is not None:
        folders.append(summary_path(previous).parent)
    folders += [f for name in reversed(windows(campaign)) if (f := window_folder(campaign, name))]
    for folder in folders:
        if (folder / "target.json").is_file():
            target, _ = read_record(folder).build(folder, epoch=epoch)
            return target
    raise UsageError(f"{campaign}: no window of this campaign tells what its machines are")


def end_by_hand(
    campaign: Path,
    *,
    owner: str | None = None,
    progress: Say = lambda _what, _left: None,
) -> tuple[str | None, list[str]]:
    """Verify production against the chain's capture, watch it, and end the chain (I5).

    Without a marker only this owner's leftover placeholders are taken down. Returns how the chain
    ended and its alerts. Signals must be deferred by the caller.

    Raises:
        RefusedByWorld: production is not up, not itself, or not well; or a HOLD lies there.
        UsageError: there is nothing to end, or the marker is another chain's or unreadable.
    """
    marker = read_marker(campaign)
    if marker is not None and owner not in (None, marker.placeholder_owner):
        raise UsageError(f"--owner {owner}: the marker records {marker.placeholder_owner}")
    lease = Lease(campaign)
    if marker is None:
        return _take_leftovers_down(campaign, owner, lease)
    record = read_record(Path(marker.folder))
    lease.acquire("chain end", record.close_budget_s)
    try:
        target, _ = record.build(Path(marker.folder), epoch=lease.epoch)
        hold = Hold(target.hold_sites())
        if hold.owner()[0] is not HoldState.NONE:
            raise RefusedByWorld(hold.refusal())
        seen = target.probe()
        if seen.state is not Probe.UP:
            raise RefusedByWorld(f"production is {seen.state.value}: {seen.detail}")
        journal = _end_journal(campaign, marker, record, lease)
        closed = _end(campaign, target, marker, record, journal, lease, progress)
        finish_abort(journal.path.parent, closed)
        if closed.restore["status"] != RESTORE_RESTORED:
            raise RefusedByWorld(closed.restore["reason"])
        return closed.chain, [*closed.alerts, *closed.errors]
    finally:
        lease.release()


def _end(
    campaign: Path,
    target: Target,
    marker: Marker,
    record: TargetRecord,
    journal: Journal,
    lease: Lease,
    progress: Say,
) -> CloseResult:
    closed = CloseResult(restore={"status": RESTORE_FAILED, "reason": ""}, production_down=False)

    def attempt(step: str, act: Callable[[], Any]) -> bool:
        try:
            with journal.step(step):
                lease.check()
                act()
        except Exception as error:  # noqa: BLE001 - a target of the user's own
            closed.errors.append(one_line(f"{step}: {error}"))
            return False
        return True

    try:
        _verify(target, marker, record, journal, progress, closed)
    except (Dsv41Error, OSError) as error:
        closed.restore["reason"] = one_line(str(error))
        closed.restore["status"] = RESTORE_FAILED
        closed.alerts.append(closed.restore["reason"])
        return closed
    closed.chain, alerts = end_chain(target, campaign, marker.placeholder_owner, attempt)
    closed.alerts += alerts
    if closed.chain is not None:
        attempt("intent-clear", lambda: clear_intent(campaign))
    return closed


def _end_journal(campaign: Path, marker: Marker, record: TargetRecord, lease: Lease) -> Journal:
    """A folder of its own keeps what was proved, and the commands that were run."""
    folder = new_abort_folder(campaign)
    folder = folder.with_name(folder.name.replace("CHAIN-ABORT", "CHAIN-END"))
    folder.mkdir(parents=True, exist_ok=True)
    dataclasses.replace(record, window=folder.name).write(folder)
    register_window(campaign, folder.name, folder, lease.epoch)
    journal = Journal(folder)
    journal.note("window", "begin", id=folder.name, mode="end", chain=marker.placeholder_owner)
    return journal


def _verify(
    target: Target,
    marker: Marker,
    record: TargetRecord,
    journal: Journal,
    progress: Say,
    closed: CloseResult,
) -> None:
    limits = record.limits
    _, rollback = production_snapshot(marker)
    progress("chain end: six answers are compared", 0.0)
    with journal.step("restore-check") as detail:
        found = check(target, rollback, deadline_s=limits.get("start_s", 600.0))
        detail.update(dataclasses.asdict(found))
    closed.restore.update(answers_identical=found.identical)
    if not found.passed:
        raise RefusedByWorld(f"production is not the captured one: {found.reason}")
    with journal.step("watch") as detail:
        seen = watch(
            target,
            seconds=limits.get("watch_s", 900.0),
            tick=lambda left: progress("chain end: production is watched", left),
        )
        detail.update(passed=seen.passed, samples=seen.samples, reason=seen.reason)
    closed.watch = {"status": "PASS" if seen.passed else "FAIL", **dataclasses.asdict(seen)}
    if not seen.passed:
        raise RefusedByWorld(f"the watch failed: {seen.reason}")
    closed.restore["status"] = RESTORE_RESTORED


def _take_leftovers_down(
    campaign: Path, owner: str | None, lease: Lease
) -> tuple[str | None, list[str]]:
    left = read_leftovers(campaign)
    owners = {one.owner for one in left}
    if owner is None and len(owners) == 1:
        (owner,) = owners
    if owner is None:
        names = ", ".join(sorted(owners)) or "none"
        raise UsageError(f"{campaign}: no chain marker lies here; owners of leftovers: {names}")
    if not _known(campaign, owner, owners):
        names = ", ".join(sorted(owners)) or "none"
        raise UsageError(
            f"--owner {one_line(owner)}: no chain of this campaign; owners of leftovers: {names}"
        )
    lease.acquire("chain end", 600.0)
    try:
        target = look_target(campaign, epoch=lease.epoch)
        still = target.placeholders_down(owner)
        if still:
            return None, [f"the chain's placeholder is left: {one_line(line)}" for line in still]
        remove_leftovers(campaign, owner)
        return "ENDED", []
    finally:
        lease.release()


def _known(campaign: Path, owner: str, left: set[str]) -> bool:
    """Whether the chain was ever this campaign's: another's placeholder is never touched (I2)."""
    folders = (window_folder(campaign, name) for name in reversed(windows(campaign)))
    return owner in left or any(f is not None and owner in Journal(f).chains() for f in folders)
