"""Recovering: finish a window whose process died, and say what the facts are (`dsv41 status`)."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..errors import Dsv41Error, RefusedByWorld, UsageError
from ..hosts import CommandLog, LocalHost, Probe
from ..hosts.local import boottime
from ..targets import HoldSite, Target
from ..text import one_line
from ..window.names import summary_path
from .hold import Hold, HoldState
from .intent import Intent, read_intent
from .journal import Journal
from .lease import Lease
from .marker import (
    Leftover,
    Marker,
    abort_path,
    abort_record,
    marker_path,
    read_leftovers,
    read_marker,
    refused_record,
    write_refused,
)
from .observer import Answer, Facts, Observation, Presence, observe
from .record import read_record, window_folder, windows

if TYPE_CHECKING:
    from ..window.summary import Summary

_KEEPER_GRACE_S = 120.0

__all__ = ["Status", "look", "recover_campaign", "recover_window"]


def recover_window(
    folder: Path, *, stopped: str, wait_s: float = 0.25, lease: Lease | None = None
) -> Summary:
    """Close the window in `folder` from its facts and write its summary.

    Raises:
        RefusedByWorld: another process holds the campaign's lease.
        UsageError: the folder is not a window's.
    """
    # The rules and the archive are loaded by who recovers; a look has to answer at once.
    from ..window.summary import read_summary
    from .abort import abort
    from .closing import close_window
    from .finish import finish_abort, finish_window

    record = read_record(folder)
    campaign = Path(record.campaign)
    limits = record.limits
    own = lease is None
    lease = lease or Lease(campaign)
    if own:
        lease.acquire(f"recover {record.window}", record.close_budget_s, wait_s=wait_s)
    else:
        # Restore and watch take their time: whoever sees this lease must not call it overdue.
        lease.renew(f"recover {record.window}", record.close_budget_s)
    try:
        intent = None
        with contextlib.suppress(UsageError):
            intent = read_intent(campaign)
        target, _ = record.build(folder, epoch=lease.epoch)
        journal = Journal(folder)
        if summary_path(folder).exists():
            before = read_summary(folder)
            mine = intent is not None and intent.window == record.window
            if not mine and not journal.left_down() and not _own_hold(target, record.window):
                return before
            if mine and journal.handed_over() and marker_path(campaign).exists():
                # The window ended as it was meant to: production is the chain's.
                return before
            # The session has ended and said why; what is missing is production.
            stopped = before.stopped or ""
        journal.tolerant = True
        journal.note("recover", "begin", reason=stopped, epoch=lease.epoch)
        closed = close_window(
            target,
            window_id=record.window,
            folder=folder,
            campaign=campaign,
            journal=journal,
            lease=lease,
            limits=limits,
        )
        if closed.abort_due:
            with contextlib.suppress(Dsv41Error, OSError):
                marker = read_marker(campaign)
                if marker is not None:
                    write_refused(campaign, marker, f"{record.window} ended before its HOLD")
            closed = abort(campaign, folder / "chain-abort", lease=lease).closed
        if not (folder / "plan.json").exists():
            # A recovery, or an end by hand: it has measured nothing.
            return finish_abort(folder, closed)
        return finish_window(folder, journal, closed, stopped=stopped or None)
    finally:
        if own:
            lease.release()


def recover_campaign(campaign: Path) -> tuple[Path, Summary] | None:
    """Recover whatever window of the campaign needs it: its folder and summary, None if none does.

    Raises:
        RefusedByWorld: somebody is at work, or something foreign or unknown forbids it.
    """
    lease = Lease(campaign)
    lease.acquire("recover", 3600.0)
    try:
        status = look(campaign, lease_is_mine=True)
        if status.observation.answer in (Answer.NOT_OURS, Answer.UNKNOWN) or (
            status.observation.row in (2, 3, 4)
        ):
            raise RefusedByWorld(f"{status.observation.answer.value}: {status.observation.why}")
        if status.observation.answer is Answer.RECOVER or (
            status.observation.row == 6
            and status.marker is not None
            and not _taken_over(status)
            and status.observation.answer is Answer.ALERT
        ):
            raise RefusedByWorld(f"{status.observation.why}: {status.command}")
        folder = _unfinished(campaign, status)
        if folder is None:
            return None
        return folder, recover_window(folder, stopped="recovered by hand", lease=lease)
    finally:
        lease.release()


def _unfinished(campaign: Path, status: Status) -> Path | None:
    if status.hold_state is HoldState.OWN:
        return window_folder(campaign, status.hold_owner)
    waiting = status.observation.answer is Answer.CHAIN_WAITING
    if status.intent is not None and not (
        waiting and summary_path(Path(status.intent.folder)).exists()
    ):
        return Path(status.intent.folder)
    lost = status.facts.intent is Presence.UNREADABLE
    for name in reversed(windows(campaign)):
        folder = window_folder(campaign, name)
        if folder is None:
            continue
        if not summary_path(folder).exists() or (lost and Journal(folder).left_down()):
            return folder
    return None


def _own_hold(target: Target, window_id: str) -> bool:
    if not target.holds:
        return False
    state, _ = Hold(target.hold_sites()).state_for_window(window_id)
    return state is HoldState.OWN


@dataclasses.dataclass(frozen=True)
class Status:
    """The facts as they were read, and what the observer says of them."""

    campaign: Path
    facts: Facts
    observation: Observation
    intent: Intent | None
    hold: str
    """Where the HOLD lies or would lie; empty when nothing is held."""
    hold_state: HoldState
    hold_owner: str
    lease: str
    production: str
    production_url: str
    """Where production is asked; empty where a target does not say."""
    window: str
    unfinished: tuple[str, ...]
    marker: Marker | None = None
    stopped: str = ""
    """Why the chain cannot go on, or nothing."""
    leftovers: tuple[Leftover, ...] = ()
    stray: tuple[str, ...] = ()
    """Files of ours that belong to no chain any more, one line each; they change no answer."""

    @property
    def command(self) -> str:
        """The exact next command, or nothing to do."""
        command = self.observation.command
        if self.observation.row == 4:
            # Nothing can be read from it; the other facts still say what to do.
            path = shlex.quote(str(marker_path(self.campaign)))
            look_again = f"dsv41 status --campaign {shlex.quote(str(self.campaign))}"
            return f"mv {path} {path}.unreadable && {look_again}"
        if command.startswith("dsv41 ") and "(" not in command:
            return f"{command} --campaign {shlex.quote(str(self.campaign))}"
        if self.observation.answer is Answer.CHAIN_WAITING and self.marker is not None:
            previous = shlex.quote(self.marker.folder)
            campaign = shlex.quote(str(self.campaign))
            return f"dsv41 chain gate --prev {previous} --campaign {campaign}"
        if not command and self.leftovers and self.observation.answer is Answer.CLEAN:
            owner = shlex.quote(self.leftovers[0].owner)
            return f"dsv41 chain end --owner {owner} --campaign {shlex.quote(str(self.campaign))}"
        if not command and self.unfinished and self.observation.answer is Answer.CLEAN:
            return f"dsv41 recover --campaign {shlex.quote(str(self.campaign))}"
        return command

    @property
    def exit_code(self) -> int:
        """0 CLEAN; 20 production down and nobody at work on it; 21 every other ALERT; 1 at work."""
        answer = self.observation.answer
        if answer is Answer.CLEAN:
            return 0
        if answer in (Answer.IN_PROGRESS, Answer.RECOVERING, Answer.CHAIN_WAITING):
            return 1
        return 20 if self.observation.down else 21

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        facts = {
            name: value if isinstance(value, bool) else value.value
            for name, value in dataclasses.asdict(self.facts).items()
        }
        return {
            "schema": "dsv41-status-v1",
            "campaign": str(self.campaign),
            "answer": self.observation.answer.value,
            "why": self.observation.why,
            "row": self.observation.row,
            "command": self.command,
            "exit_code": self.exit_code,
            "facts": facts,
            "lease": self.lease,
            "hold": {
                "path": self.hold or None,
                "state": self.hold_state.value,
                "owner": self.hold_owner,
            },
            "intent": self.intent.to_json() if self.intent else None,
            "chain": {
                "path": str(marker_path(self.campaign)),
                "marker": dataclasses.asdict(self.marker) if self.marker else None,
                "stopped": self.stopped or None,
                "leftovers": [dataclasses.asdict(one) for one in self.leftovers],
                "stray": list(self.stray),
            },
            "production": self.production,
            "production_url": self.production_url or None,
            "window": self.window,
            "unfinished": list(self.unfinished),
        }


def look(campaign: Path, *, lease_is_mine: bool = False) -> Status:
    """Read every durable fact of the campaign and ask the observer. Changes nothing."""
    held = None if lease_is_mine else Lease(campaign).held_by()
    intent, presence = None, Presence.NONE
    try:
        intent = read_intent(campaign)
        presence = Presence.PRESENT if intent else Presence.NONE
    except UsageError:
        presence = Presence.UNREADABLE
    marker, marked, stopped, aborted = None, Presence.NONE, "", False
    try:
        marker = read_marker(campaign)
    except UsageError:
        marked = Presence.UNREADABLE
    if marker is not None:
        marked = Presence.PRESENT
        aborted = abort_record(campaign, marker)
        stopped = refused_record(campaign, marker) or ""
        if intent is not None and intent.window != marker.window and not stopped:
            stopped = f"{intent.window} took production over and has not ended"
    names = windows(campaign)
    # Whoever has production down knows the machines; else the newest window does.
    down_by = intent or marker
    newest = down_by.window if down_by else (names[-1] if names else "")
    folder = _told_by(campaign, intent, marker, names)
    gone = f"the folder of {one_line(newest)} is gone" if names else "no window has run here"
    production, detail, url = Probe.UNKNOWN, f"not looked at: {gone}", ""
    ephemeral, leftovers = False, False
    hold = Hold(())
    hold_state, hold_owner = HoldState.NONE, ""
    if folder is not None:
        try:
            record = read_record(folder)
            target, _ = record.build(folder)
            seen = target.probe()
            production, detail, url = seen.state, seen.detail, seen.url
            ephemeral = target.ephemeral
            leftovers = bool(target.leftovers())
            if marker is not None and not stopped:
                stopped = _restarted(target, marker)
            if target.holds:
                hold = Hold(target.hold_sites())
        except Exception as error:  # noqa: BLE001 - a target of the user's own; unseen is unknown
            production, detail = Probe.UNKNOWN, one_line(str(error) or type(error).__name__)
    elif (campaign / "HOLD").exists():
        here = LocalHost(CommandLog(campaign / "cmd"))
        hold = Hold((HoldSite(here, str(campaign / "HOLD")),))
    if hold.sites:
        answering, silent = hold.answering()
        hold_state, hold_owner = answering.state_for_campaign(campaign)
        if silent:
            # A HOLD that cannot be looked at is nobody's yet: what runs there is not known either.
            production, detail = Probe.UNKNOWN, silent[0]
    left = read_leftovers(campaign)
    stray: tuple[str, ...] = ()
    if not aborted and abort_path(campaign).exists():
        stray = (f"{abort_path(campaign)}: the record of another chain's recovery",)
    keeper = _alive(intent.keeper_pid, intent.keeper_started) if intent else False
    overdue = bool(intent and keeper and boottime() > intent.deadline + _KEEPER_GRACE_S)
    facts = Facts(
        lease_held=held is not None,
        lease_overdue=held is not None and held.overdue_s > 0,
        hold=hold_state,
        production=production,
        intent=presence,
        keeper_alive=keeper,
        keeper_overdue=overdue,
        marker=marked,
        marker_overdue=marker is not None and marker.overdue,
        gate_refused=bool(stopped),
        abort_record=aborted,
        served_by_default=not ephemeral,
        leftovers=leftovers or bool(left or stray),
        machines_known=folder is not None or bool(names),
    )
    unfinished = tuple(
        name
        for name in names
        if (found := window_folder(campaign, name)) and not summary_path(found).exists()
    )
    return Status(
        campaign=campaign,
        facts=facts,
        observation=observe(facts),
        intent=intent,
        hold=str(hold) if hold.sites else "",
        hold_state=hold_state,
        hold_owner=one_line(hold_owner),
        lease=str(held) if held else "free",
        production=detail if folder is None else f"{production.value}: {detail}",
        production_url=url,
        window=newest,
        unfinished=unfinished if held is None else (),
        marker=marker,
        stopped=one_line(stopped),
        leftovers=left,
        stray=stray,
    )


def _told_by(
    campaign: Path, intent: Intent | None, marker: Marker | None, names: list[str]
) -> Path | None:
    """The folder that tells the machines: the intent's, the marker's, or the newest window's."""
    facts = [Path(fact.folder) for fact in (intent, marker) if fact is not None]
    if facts:
        return next((one for one in facts if (one / "target.json").is_file()), facts[0])
    found = (window_folder(campaign, name) for name in reversed(names))
    return next((folder for folder in found if folder is not None), None)


def _restarted(target: Target, marker: Marker) -> str:
    """Which host was restarted since the marker was written; one that does not answer is none."""
    try:
        now = target.identities()
    except Dsv41Error:
        return ""
    changed = [host for host, boot in sorted(marker.hosts.items()) if now.get(host) != boot]
    return f"{changed[0]} was restarted" if changed else ""


def _taken_over(status: Status) -> bool:
    """Whether a window after the one that wrote the marker has production's intent."""
    marker, intent = status.marker, status.intent
    return marker is not None and intent is not None and intent.window != marker.window


def _alive(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        # One that is halted brings nothing back, however long it is waited for.
        idle = (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return process.create_time() == started and process.status() not in idle
    except (psutil.Error, ValueError):
        return False
