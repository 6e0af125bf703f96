"""The one close: what gives production back, whoever calls it and whatever died before.

It reads the durable facts (HOLD, intent, journal) and never what a process remembered, so that the
end of the pytest session, the keeper and `dsv41 recover` do the same thing. Each step is
idempotent, is journalled, and is tried whatever the former raised; a step runs only when the facts
allow it: production is not started beside a live experiment, the HOLD goes only after the answers
were proved, the intent only after the watch has passed. Between the answers and the end of the
HOLD lies the seam: what the session measures on production there can keep nothing from going on.

A chained window that nothing stopped leaves production down for the chain's next one: the owner of
the placeholders is recorded, they go up, the experiment goes down, the marker is written, and only
then the HOLD goes. Whatever of this fails, the own HOLD still lies, and production is restored; a
restored production that proved itself ends the chain: placeholders, marker, its records, intent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..durable import dump_json, write_atomic
from ..errors import Dsv41Error, RefusedByWorld, TransportError, UsageError
from ..hosts import Placeholder, Probe
from ..hosts.local import boottime
from ..targets import Target
from ..text import one_line
from ..window.summary import CHAINED, RESTORE_CHAINED
from .dropped import forget_dropped
from .hold import Hold, HoldState
from .intent import Intent, clear_intent, read_intent, write_intent
from .journal import Journal
from .lease import Lease
from .marker import (
    Marker,
    add_leftovers,
    clear_beside,
    here,
    marker_path,
    new_owner,
    read_leftovers,
    read_marker,
    remove_leftovers,
    remove_marker,
    write_marker,
)
from .production import check, read_rollback, watch
from .record import read_record
from .seam import Seam, run_seam

__all__ = [
    "CHAIN_ENDED",
    "CHAIN_ENDED_WITH_ALERT",
    "CloseResult",
    "close_window",
    "end_chain",
    "write_quiet_proof",
]

NOT_NEEDED = "NOT NEEDED: production untouched"
RESTORED = "RESTORED"
FAILED = "FAILED"
ALERT = "ALERT"
SEAM_STEP = "restore-seam"
CHAIN_S = 3600.0
"""Seconds from one window's end within which the chain's next has to write its own marker."""
CHAIN_ENDED = "ENDED"
CHAIN_ENDED_WITH_ALERT = "ENDED WITH ALERT"


@dataclasses.dataclass
class CloseResult:
    """How the end of a window went; the fields are those of the summary."""

    restore: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"status": NOT_NEEDED, "reason": ""}
    )
    watch: dict[str, Any] | None = None
    alerts: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    production_down: bool = False
    """Production is down, or not known to be up."""
    open: bool = False
    """Whether the intent is left, or production down: there is something to do next."""
    next_command: str = "recover"
    seam: str | None = None
    """What became of the planned work in the seam: DONE, FAILED or SKIPPED, and why; None: none."""
    chain: str | None = None
    """CHAINED, ENDED or ENDED WITH ALERT; None outside a chain, or when its end was not reached."""
    abort_due: bool = False
    """A chained window ended before its HOLD: production is down by the chain, which must end."""

    @classmethod
    def of_chain(cls) -> CloseResult:
        """Production stays down for the chain's next window."""
        return cls(restore={"status": RESTORE_CHAINED, "reason": ""}, chain=CHAINED)

    @property
    def clean(self) -> bool:
        """Whether production is as it was found and nothing is left."""
        return not self.alerts and not self.errors and not self.production_down


class _Closer:
    def __init__(
        self,
        target: Target,
        window_id: str,
        folder: Path,
        campaign: Path,
        journal: Journal,
        lease: Lease,
        limits: dict[str, float],
        progress: Callable[[str, float], None],
        seam: Seam | None,
        no_seam: str,
        leave_down: bool,
    ) -> None:
        self.target = target
        self.window_id = window_id
        self.folder = folder
        self.campaign = campaign
        self.journal = journal
        self.lease = lease
        self.limits = limits
        self.progress = progress
        self.seam = seam
        self.no_seam = no_seam
        self.leave_down = leave_down
        self.result = CloseResult()
        self.hold = Hold(target.hold_sites())

    def attempt(
        self, step: str, act: Callable[[], Any], result: dict[str, Any] | None = None
    ) -> bool:
        """Run one step; its failure is kept, and the steps after it are still asked.

        What `act` puts into `result` stands in the step's end line.
        """
        try:
            with self.journal.step(step) as detail:
                self.lease.check()
                act()
                detail.update(result or {})
        except BaseException as error:  # noqa: BLE001 - the close never stops half way
            reason = one_line(str(error) or type(error).__name__)
            self.result.errors.append(f"{step}: {reason}")
            return False
        return True

    def run(self) -> CloseResult:
        self.journal.tolerant = True
        if self.limits.get("seam_s"):
            before = self.seam_before()
            self.result.seam = before or "SKIPPED: production was not restored and checked"
        if not (self.leave_down and self.chained_down()):
            stopped = self.attempt("experiment-stop", self.stop_experiments)
            self.give_back(stopped)
        if self.target.ephemeral:
            self.attempt("production-end", self.target.end_production)
        self.attempt("leftovers", self.none_left)
        return self.result

    def stop_experiments(self) -> None:
        """End what this window has started; a recovery, what its chain's last window has left."""
        self.target.stop_all()
        if self.journal.mode() == "abort":
            marker = read_marker(self.campaign)
            if marker is not None:
                before, _ = read_record(Path(marker.folder)).build(
                    Path(marker.folder), epoch=self.lease.epoch
                )
                before.stop_all()

    def give_back(self, stopped: bool) -> None:
        """Bring production back, unless it was never touched or belongs to the chain's next."""
        intent, unreadable = None, ""
        try:
            intent = self.intent()
        except Dsv41Error as error:
            unreadable = str(error)
        # In a chain the marker says the same: whose production is down, and its capture.
        if unreadable and not (self.in_chain() and marker_path(self.campaign).exists()):
            self.result.alerts.append(unreadable)
            self.result.restore = {"status": ALERT, "reason": unreadable}
            self.result.production_down = True
            return
        mine = intent is not None and intent.window == self.window_id
        marker = None
        try:
            marker = read_marker(self.campaign)
        except UsageError as error:
            # What is this window's comes back all the same; the marker stays for a person to see.
            self.result.alerts.append(str(error))
            if not mine and self.in_chain():
                self.fail(ALERT, str(error))
                return
        state, owner = self.hold.state_for_window(self.window_id)
        if self.handed_over(marker, state, mine):
            self.chained()
            return
        if not mine and marker is not None and self.in_chain():
            if state is HoldState.OWN:
                self.restore(self.adopted(marker), stopped)
            elif state is HoldState.NONE:
                self.result.abort_due = True
                self.fail(FAILED, "the window ended before its HOLD; production is the chain's")
            else:
                self.fail(ALERT, f"HOLD {self.hold} is {state.value} ({one_line(owner)})")
                self.result.alerts.append(self.result.restore["reason"])
                self.result.next_command = "status"
            return
        if intent is not None and not mine:
            owner = one_line(intent.window)
            self.result.alerts.append(f"the down-intent belongs to {owner}; not touched")
            if self.journal.left_down():
                self.fail(ALERT, self.result.alerts[-1])
            return
        if intent is None:
            if self.journal.took_down() or self.journal.begun("intent-clear"):
                self.given_back()
            else:
                self.untouched()
        else:
            self.restore(intent, stopped)

    # -- a chain -------------------------------------------------------------------------------

    def in_chain(self) -> bool:
        """Whether this window found production down by its chain."""
        return self.journal.mode() in ("chained", "abort")

    def handed_over(self, marker: Marker | None, state: HoldState, mine: bool) -> bool:
        """Whether a chained end of this window came to its end, in this process or another.

        An intent of this window without a marker is what a chain's end by hand was killed in.
        """
        if marker is not None and marker.window == self.window_id:
            gone = state in (HoldState.NONE, HoldState.FOREIGN)
            return gone or (state is HoldState.UNREADABLE and self.journal.handed_over())
        return self.journal.handed_over() and not mine

    def chained(self) -> None:
        """Production stays down for the chain's next window."""
        self.result.restore = {"status": RESTORE_CHAINED, "reason": ""}
        self.result.chain = CHAINED

    def chained_down(self) -> bool:
        """Leave production down (SAFETY, "→ CHAINED-DOWN"); False: restore it instead."""
        try:
            intent, marker = read_intent(self.campaign), read_marker(self.campaign)
        except Dsv41Error as error:
            self.result.errors.append(str(error))
            return False
        if intent is None or intent.window != self.window_id:
            return False
        owner = intent.chain or (marker.placeholder_owner if marker else new_owner())
        intent = dataclasses.replace(intent, phase="CHAIN_CLOSING", chain=owner)
        self.progress("chain: production stays down for the next window", 0.0)
        steps: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("chain-intent", lambda: write_intent(self.campaign, intent)),
            ("placeholders-up", lambda: self.target.placeholders_up(owner)),
            ("experiment-stop", self.target.stop_all),
            ("chain-quiet", lambda: self.prove_quiet(intent)),
            ("marker", lambda: self.finish_chained(intent)),
            ("hold-close", lambda: self.chained_close(owner)),
        )
        # The journal names the owner too: an intent that somebody deletes is made again from it.
        told = {"chain-intent": {"chain": owner}}
        if not all(self.attempt(step, act, told.get(step)) for step, act in steps):
            return False
        self.chained()
        return True

    def prove_quiet(self, intent: Intent) -> None:
        """Nothing runs on any host, each in the boot it was in when production went down."""
        limit = boottime() + self.limits.get("quiet_s", 60.0)
        while problems := self.target.quiet_problems():
            if boottime() > limit:
                raise TransportError(f"not quiet: {problems[0]}")
            time.sleep(0.05)
        now = write_quiet_proof(self.folder, self.target)
        for host in sorted(intent.hosts):
            if now.get(host) != intent.hosts[host]:
                raise TransportError(f"{host} was restarted during the window")

    def chained_close(self, owner: str) -> None:
        """Remove the own HOLD, and nothing else, where the placeholders keep others off."""
        for host, seen in self.target.placeholders(owner).items():
            if seen is not Placeholder.UP:
                raise TransportError(f"the chain's placeholder on {host} is {seen.value}")
        self.hold.close(self.window_id)

    def finish_chained(self, intent: Intent) -> None:
        """Write the marker: the owner, and the capture of the chain's first window."""
        write_marker(
            self.campaign,
            Marker(
                placeholder_owner=intent.chain,
                window=self.window_id,
                folder=str(self.folder),
                epoch=self.lease.epoch,
                host=here(),
                deadline=boottime() + CHAIN_S,
                snapshot=intent.rollback,
                snapshot_sha256=intent.rollback_sha256,
                hosts=self.target.identities(),
            ),
        )

    def adopted(self, marker: Marker) -> Intent:
        """Take production over from the chain: this window's HOLD lies, its intent not yet."""
        intent = Intent(
            window=self.window_id,
            folder=str(self.folder),
            phase="RESTORING",
            epoch=self.lease.epoch,
            host=here(),
            deadline=boottime(),
            rollback=marker.snapshot,
            rollback_sha256=marker.snapshot_sha256,
            keeper_pid=0,
            keeper_started=0.0,
            chain=marker.placeholder_owner,
            hosts=marker.hosts,
        )
        self.attempt("intent-again", lambda: write_intent(self.campaign, intent))
        return intent

    # -- a window ------------------------------------------------------------------------------

    def intent(self) -> Intent | None:
        """The down-intent; where it was damaged or deleted, the same again from the journal.

        Raises:
            UsageError: it cannot be read, and the journal does not tell what it said.
        """
        try:
            intent = read_intent(self.campaign)
        except UsageError:
            again = self.rebuilt(HoldState.OWN, HoldState.NONE)
            if again is None:
                raise
            return again
        # A deleted one is made again only under the own HOLD, which a person would have removed.
        return self.rebuilt(HoldState.OWN) if intent is None else intent

    def rebuilt(self, *allowed: HoldState) -> Intent | None:
        captured = self.journal.ended("capture") or self.journal.ended("snapshot")
        sealed = captured.get("rollback_sha256")
        state, _ = self.hold.state_for_window(self.window_id)
        if not sealed or not self.journal.left_down() or state not in allowed:
            return None
        intent = Intent(
            window=self.window_id,
            folder=str(self.folder),
            phase="DOWN",
            epoch=self.lease.epoch,
            host="",
            deadline=boottime(),
            rollback=str(captured.get("rollback", self.folder / "rollback.json")),
            rollback_sha256=str(sealed),
            keeper_pid=0,
            keeper_started=0.0,
            chain=self.chain_owner(),
        )
        self.attempt("intent-again", lambda: write_intent(self.campaign, intent))
        return intent

    def chain_owner(self) -> str:
        """Whose placeholders may be up: the marker's, else the newest that the journal names."""
        with contextlib.suppress(UsageError):
            marker = read_marker(self.campaign)
            if marker is not None:
                return marker.placeholder_owner
        return self.journal.chain()

    def none_left(self) -> None:
        """Nothing of the window may live on."""
        left = self.target.leftovers()
        if left:
            raise TransportError(f"still alive: {', '.join(left)}")

    def untouched(self) -> None:
        """Production is not down by this window: only the own HOLD has to go."""
        state, owner = self.hold.state_for_window(self.window_id)
        if state is HoldState.OWN:
            self.attempt("hold-close", lambda: self.hold.close(self.window_id))
        elif state is not HoldState.NONE and self.journal.begun("hold"):
            self.result.alerts.append(f"HOLD {self.hold} is {state.value}: {owner}")
        if self.journal.mode() != "single":
            # It was down when this began; whoever has ended the chain since has to be seen.
            self.result.production_down = self.down()

    def given_back(self) -> None:
        """Production was taken down and no intent is left: an earlier close did it, or a person.

        The intent goes last, so the journal of a close that removed it holds what was proved.
        """
        if self.journal.begun("intent-clear"):
            self.untouched()
            checked, watched = self.journal.ended("restore-check"), self.journal.ended("watch")
            self.result.restore = {
                "status": RESTORED,
                "answers_identical": checked.get("identical"),
                "answers_asked": checked.get("asked"),
                "reason": "",
            }
            seen = ("passed", "samples", "largest_gap_s", "reason")
            self.result.watch = {
                "status": "PASS",
                "seconds": watched.get("watched_s"),
                **{key: watched[key] for key in seen if key in watched},
            }
            if self.journal.ended("marker-clear"):
                owners = {one.owner for one in read_leftovers(self.campaign)}
                left = self.journal.chain() in owners
                self.result.chain = CHAIN_ENDED_WITH_ALERT if left else CHAIN_ENDED
            return
        # The HOLD stays where it lies: nothing proves that production is itself.
        self.fail(ALERT, "production was stopped, and no down-intent says how it came back")
        self.result.production_down = not self.target.ephemeral and self.down()
        self.result.alerts.append(self.result.restore["reason"])

    def restore(self, intent: Intent, stopped: bool) -> None:
        """Start, check, close the HOLD, watch, and only then forget that it was down."""
        state, owner = self.hold.state_for_window(self.window_id)
        if state in (HoldState.FOREIGN, HoldState.UNREADABLE):
            self.fail(
                ALERT,
                f"HOLD {self.hold} is {state.value} ({one_line(owner)}): "
                "production is not started over somebody else's window",
            )
            self.result.alerts.append(self.result.restore["reason"])
            self.result.next_command = "status"
            return
        if self.hold.missing(self.window_id) and not self.retake():
            return
        if not stopped:
            self.fail(
                FAILED,
                f"production is not started beside an experiment: {self.result.errors[0]}",
            )
            return
        if not self.quiet():
            return
        with contextlib.suppress(OSError):
            write_intent(self.campaign, dataclasses.replace(intent, phase="RESTORING"))
        self.progress("restore: production starts", 0.0)
        if not self.attempt("restore-start", self.target.start_production):
            self.fail(FAILED, self.result.errors[-1])
            return
        self.progress("restore: six answers are compared", 0.0)
        if not self.verified(intent):
            return
        self.between()
        released = self.attempt("hold-close", lambda: self.hold.close(self.window_id))
        if not released:
            self.result.alerts.append(self.result.errors[-1])
        # A HOLD that is left needs the intent beside it: who finds it must know what it covers.
        if not (self.watched() and released):
            return
        if intent.chain:
            self.result.chain, alerts = end_chain(
                self.target, self.campaign, intent.chain, self.attempt
            )
            self.result.alerts += alerts
        # What stands for the chain goes first: without its end there is still something to do.
        if not intent.chain or self.result.chain is not None:
            self.attempt("intent-clear", lambda: clear_intent(self.campaign))

    def retake(self) -> bool:
        """Somebody deleted our HOLD while production is down: take it again before acting."""
        ok = self.attempt("hold-retake", lambda: self.hold.create(self.window_id, self.lease.epoch))
        if not ok:
            self.fail(ALERT, self.result.errors[-1])
            self.result.alerts.append(self.result.errors[-1])
        return ok

    def quiet(self) -> bool:
        """No start of ours may live when production starts (SAFETY I7).

        A recovery comes into a gap in which nothing at all may run, and proves that (WIN2
        "Back-to-back mode", abort); once its own production has begun to start, it cannot.
        """
        try:
            fresh = self.journal.mode() == "abort" and not self.journal.begun("restore-start")
            if fresh and self.target.probe().state is Probe.DOWN:
                # Half a production is none, and would stand in the way of the proof.
                self.attempt("half-production-stop", self.target.stop_production)
                problems = self.target.quiet_problems()
            else:
                problems = self.target.live_experiments()
        except Exception as error:  # noqa: BLE001 - a target of the user's own; unseen is not quiet
            problems = [one_line(f"cannot tell: {error}")]
        if problems:
            self.fail(FAILED, f"production is not started beside an experiment: {problems[0]}")
            return False
        return True

    def down(self) -> bool:
        """Whether production is down, or cannot be seen."""
        try:
            return self.target.probe().state is not Probe.UP
        except Exception:  # noqa: BLE001 - a target of the user's own; unseen is not up
            return True

    def verified(self, intent: Intent) -> bool:
        """The six answers, strictly."""
        outcome: dict[str, Any] = {}

        def act() -> None:
            rollback = read_rollback(Path(intent.rollback), intent.rollback_sha256)
            found = check(self.target, rollback, deadline_s=self.limits.get("start_s", 600.0))
            outcome.update(dataclasses.asdict(found))
            if not found.passed:
                raise RefusedByWorld(found.reason)

        ok = self.attempt("restore-check", act, outcome)
        self.result.restore = {
            "status": RESTORED if ok else FAILED,
            "answers_identical": outcome.get("identical", 0),
            "answers_asked": outcome.get("asked", 0),
            "reason": "" if ok else self.result.errors[-1],
        }
        if not ok:
            self.result.production_down = self.down()
            self.result.alerts.append(
                f"production is started but not verified: {self.result.errors[-1]}; "
                "the HOLD and the intent stay"
            )
        return ok

    def between(self) -> None:
        """The seam: whatever becomes of its work, the HOLD closes and the watch runs."""
        if not self.limits.get("seam_s") or self.seam_before():
            return
        seam = self.seam
        if seam is None:
            self.journal.note(SEAM_STEP, "skip", reason=self.no_seam)
            self.result.seam = f"SKIPPED: {self.no_seam}"
            return
        try:
            with self.journal.step(SEAM_STEP, work=seam.name, deadline_s=seam.deadline_s):
                self.lease.check()
                run_seam(seam, lambda left: self.progress(f"restore: {seam.doing()}", left))
        except BaseException as error:  # noqa: BLE001 - production is back, and stays back
            self.result.seam = f"FAILED: {one_line(str(error) or type(error).__name__)}"
        else:
            self.result.seam = "DONE"

    def seam_before(self) -> str | None:
        """What an earlier close made of the seam; it is not tried twice."""
        last: dict[str, Any] = next(
            (x for x in reversed(self.journal.lines()) if x.get("step") == SEAM_STEP), {}
        )
        heads = {"end": "DONE", "fail": "FAILED", "skip": "SKIPPED", "begin": "FAILED"}
        head = heads.get(last.get("event", ""))
        reason = "its process died" if last.get("event") == "begin" else last.get("reason")
        return f"{head}: {reason}" if head and reason else head

    def watched(self) -> bool:
        """The post-close watch."""
        seconds = self.limits.get("watch_s", 900.0)
        seen: dict[str, Any] = {}
        kept: dict[str, Any] = {}

        def act() -> None:
            found = watch(
                self.target,
                seconds=seconds,
                tick=lambda left: self.progress("watch: production is back and observed", left),
            )
            seen.update(dataclasses.asdict(found))
            # A journal line's own `seconds` are the step's.
            kept.update({"watched_s" if k == "seconds" else k: v for k, v in seen.items()})
            if not found.passed:
                raise RefusedByWorld(found.reason)

        ok = self.attempt("watch", act, kept)
        self.result.watch = {"status": "PASS" if ok else "FAIL", **seen}
        if not ok:
            self.result.production_down = self.down()
            self.result.alerts.append(
                f"the watch failed: {self.result.errors[-1]}; the intent stays"
            )
        return ok

    def fail(self, status: str, reason: str) -> None:
        self.result.restore = {"status": status, "reason": reason}
        self.result.production_down = self.down()
        if reason not in self.result.errors:
            self.result.errors.append(reason)


def write_quiet_proof(folder: Path, target: Target) -> dict[str, str]:
    """Write `quiet.json`: nothing runs on any host, and which boot each is in, which is returned.

    Called once `quiet_problems` is empty; a later proof takes the place of an earlier one.
    """
    hosts = target.identities()
    proof = {"schema": "dsv41-quiet-v1", "problems": [], "hosts": hosts, "boottime": boottime()}
    write_atomic(folder / "quiet.json", dump_json(proof) + "\n")
    return hosts


def end_chain(
    target: Target,
    campaign: Path,
    owner: str,
    attempt: Callable[[str, Callable[[], Any]], bool],
) -> tuple[str | None, list[str]]:
    """End the chain `owner`: placeholders, marker, its records (WIN2 "Back-to-back mode", Stop).

    Only after RESTORED and watch PASS. Returns how the chain ended (None: its marker is still
    there) and alerts. What is foreign or does not answer is left alone, and listed until it is
    taken down.
    """
    left: list[str] = []

    def down() -> None:
        left.extend(target.placeholders_down(owner))

    if not attempt("placeholders-down", down):
        left.append("every host: the placeholders could not be looked at")

    def keep() -> None:
        # Before the marker goes: no placeholder without a record of its owner (I6).
        if left:
            add_leftovers(campaign, owner, left)
        else:
            remove_leftovers(campaign, owner)

    alerts = [f"the chain's placeholder is left: {one_line(line)}" for line in left]
    if not attempt("leftovers-kept", keep):
        return None, [*alerts, "what the chain left could not be recorded; its marker stays"]
    if not attempt("marker-clear", lambda: remove_marker(campaign, owner)):
        return None, [*alerts, "the chain's marker could not be removed"]

    def forget() -> None:
        clear_beside(campaign)
        forget_dropped(campaign)

    attempt("chain-records-clear", forget)
    return (CHAIN_ENDED_WITH_ALERT if left else CHAIN_ENDED), alerts


def close_window(
    target: Target,
    *,
    window_id: str,
    folder: Path,
    campaign: Path,
    journal: Journal,
    lease: Lease,
    limits: dict[str, float],
    progress: Callable[[str, float], None] = lambda _what, _left: None,
    seam: Seam | None = None,
    no_seam: str = "only the window's own session runs it",
    leave_down: bool = False,
) -> CloseResult:
    """End a window from its durable facts. Idempotent: a second call finds nothing to do.

    `seam` runs on production once it is proved itself and before the HOLD goes, where the window
    planned one (`limits["seam_s"]`, seconds); a caller that has none (the keeper, `recover`) skips
    it and says why: `no_seam`. With `leave_down` production stays down for the chain's next window;
    whatever keeps that from being safe restores it. `progress` gets what is being done and the
    seconds left where they are known. Signals must be deferred by the caller. Never raises; what
    went wrong is in the result.
    """
    closer = _Closer(
        target,
        window_id,
        folder,
        campaign,
        journal,
        lease,
        limits,
        progress,
        seam,
        no_seam,
        leave_down,
    )
    result = closer.run()
    result.open = result.production_down or (
        result.chain != CHAINED and (campaign / "intent.json").exists()
    )
    return result
