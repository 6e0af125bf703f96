"""A running window: opened once, switched from start to start, closed by whoever gets there first.

Open, in this order: lease, journal, keeper, (an ephemeral production starts), HOLD, capture,
down-intent, production down, quiet proof. In a chain that has left production down the capture is
the chain's and nothing is stopped. Every act is journalled before it is done, and its undo
follows from the journal and the durable facts alone (`closing`), so no fixture holds the only undo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..durable import append_json_line, dump_json, write_atomic
from ..errors import (
    Dsv41Error,
    MeasurementFailed,
    RefusedByWorld,
    StartFailed,
    TransportError,
    UsageError,
    WindowStopped,
)
from ..hosts import Probe
from ..hosts.local import boottime
from ..measure import Endpoint, greedy_answers
from ..targets import Arm, Started, Target, TargetFactory, name_factory
from ..text import one_line
from ..window.advice import freeze_prior
from ..window.plan import Plan, PlannedItem
from ..window.process_rules import archived, ask, refusal
from ..window.summary import CHAINED, ProcessRules, Summary
from .abort import Aborted, abort
from .campaign import read_campaign
from .chain import (
    ChainUse,
    Mode,
    allow_unreachable,
    chain_refusals,
    end_action,
    production_snapshot,
)
from .closing import CloseResult, close_window, write_quiet_proof
from .dropped import dropped_arms
from .finish import ARCHIVE_NAME, Rule, finish_window
from .hold import Hold, HoldState
from .intent import Intent, read_intent, write_intent
from .journal import Journal, StepHook
from .keeper import KeeperHandle, spawn_keeper
from .lease import Lease
from .marker import here, marker_path, read_marker, write_refused
from .production import capture
from .record import TargetRecord, register_window
from .seam import Seam
from .smoke_start import TargetBackend, x_first

__all__ = ["SINGLE", "State", "WindowRun", "as_arm"]

SINGLE = ChainUse()
"""A window outside a chain."""


@dataclasses.dataclass
class State:
    """What a progress line shows: the phase, the start, and production's state in one word."""

    phase: str = "opening"
    start: str = ""
    production: str = "serving"
    seconds_left: float | None = None


def as_arm(table: Mapping[str, Any]) -> Arm:
    """The arm of a window's resolved spec as a target takes it."""
    return Arm(
        name=table["name"],
        role=table["role"],
        args=tuple(table["args"]),
        env=table["env"],
        settings=table["settings"],
    )


class WindowRun:
    """One window from HOLD to summary. `request_stop` is safe to call from a signal handler."""

    def __init__(
        self,
        plan: Plan,
        record: TargetRecord,
        folder: Path,
        factory: TargetFactory,
        *,
        on_step: StepHook | None = None,
        on_state: Callable[[State], None] = lambda _state: None,
        rules: Mapping[str, Rule] | None = None,
        report_only: bool = False,
        prompts: Mapping[str, str] | None = None,
        chain: ChainUse = SINGLE,
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.campaign = Path(record.campaign)
        self.journal = Journal(folder, on_step)
        self.lease = Lease(self.campaign)
        self.state = State()
        self.stop_event = threading.Event()
        self.stop_reason: str | None = None
        self.summary: Summary | None = None
        self.started: Started | None = None
        self.opened = False
        self.refused: str | None = None
        self.process_rules: ProcessRules | None = None
        self.chain = chain
        self.mode = Mode.SINGLE
        self.aborted: Aborted | None = None
        self.passed_over = False
        """Whether the chain goes on without this window, which was not started."""
        self.broken: dict[str, str] = {}
        self.seam: Seam | None = None
        """What the session does in the restore's seam; it counts only where one was planned."""
        self._factory = factory
        self._record = record
        self._target: Target | None = None
        self._on_state = on_state
        self._rules = rules
        self._report_only = report_only
        self._prompts = prompts
        self._current: str | None = None
        self._keeper: KeeperHandle | None = None
        self._keeper_units = False
        self._closing = False
        self._closed: CloseResult | None = None
        self._deadline = 0.0
        self._boots: dict[str, str] = {}
        self._arms = {arm["name"]: as_arm(arm) for arm in plan.spec["arms"]}

    # -- asked from outside ------------------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """Ask the window to end; the first reason stays.

        A window that closes is over already: only the work in the restore's seam ends early.
        """
        if self._closing:
            if self.seam is not None:
                self.seam.stop.set()
            return
        if self.stop_reason is None:
            self.stop_reason = reason
        self.stop_event.set()

    def pause(self, seconds: float) -> None:
        """Sleep, unless the window is asked to stop; the close itself is never stopped.

        Raises:
            WindowStopped: it is.
        """
        if self._closing:
            time.sleep(seconds)
        elif self.stop_event.wait(seconds):
            raise WindowStopped(self.stop_reason or "stopped")

    @property
    def commit(self) -> str:
        """Production's commit; empty until the target was built."""
        return self._record.commit

    def seconds_left(self) -> float:
        """Seconds until the window's deadline."""
        return self._deadline - boottime()

    @property
    def target(self) -> Target:
        """The target; built when the window is opened."""
        if self._target is None:
            raise UsageError("the window is not open")
        return self._target

    @property
    def seam_s(self) -> float:
        """The longest that work in the restore's seam may take, in seconds; 0 where none is."""
        return self._record.limits.get("seam_s", 0.0)

    @property
    def hold(self) -> Hold:
        """The HOLD over the target's hosts."""
        return Hold(self.target.hold_sites())

    @property
    def production_is_back(self) -> bool:
        """Whether the close has given production back, whatever failed after it."""
        return self._closed is not None and not self._closed.production_down

    # -- open --------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take production down, or refuse with nothing touched.

        Raises:
            RefusedByWorld: lease, HOLD, intent, marker or an unknown state forbid it.
            WindowStopped, Dsv41Error: it ended on the way; `close` gives everything back.
        """
        limits = self._record.limits
        seconds = limits["window_s"]
        self.campaign.mkdir(parents=True, exist_ok=True)
        self._deadline = boottime() + seconds
        self.lease.acquire(self.plan.window_id, seconds + self._record.close_budget_s)
        try:
            self._admit()
        except BaseException as error:
            self.refused = one_line(str(error) or type(error).__name__, 2000)
            if not self._abort_is_due():
                self.lease.release()
            raise
        self.opened = True
        target = self.target
        if target.holds:
            with self.journal.step("keeper") as detail:
                self._keeper = self._spawn_keeper()
                detail["pid"] = self._keeper.pid
            self._take_down()
        self._show(phase="measuring", production="down" if target.holds else "")

    def _abort_is_due(self) -> bool:
        """Whether the chain that this window belongs to has to be brought to its end."""
        marker = marker_path(self.campaign).exists()
        action = end_action(stopped=True, hold_written=False, marker=marker, use=self.chain)
        return action == "abort" and not self.passed_over

    def abort_chain(self) -> Aborted | None:
        """After a refused opening: end the chain that left production down; None without one.

        Signals must be deferred by the caller.
        """
        if self.opened or not self.lease.epoch or not self._abort_is_due():
            return None
        self._closing = True
        self._show(phase="chain abort", production="down")
        with contextlib.suppress(Dsv41Error, OSError):
            self.lease.renew(self.plan.window_id, self._record.close_budget_s)
        self.aborted = self._abort()
        self.lease.release()
        return self.aborted

    def _abort(self) -> Aborted:
        with contextlib.suppress(Dsv41Error, OSError):
            marker = read_marker(self.campaign)
            if marker is not None:
                # Should this process die now, the watchdog need not wait for the deadline.
                write_refused(self.campaign, marker, f"{self.plan.window_id} ended before its HOLD")
        return abort(
            self.campaign, self.folder / "chain-abort", lease=self.lease, progress=self._progress
        )

    def refusals(self) -> list[str]:
        """What would refuse the window now; runs the read-only probes and changes nothing."""
        held = Lease(self.campaign).held_by()
        found = [f"another command works on this campaign: {held}"] if held else []
        self._build()
        refused = self._ask()
        return found + ([refused] if refused else []) + self._world_refusals()

    def _ask(self) -> str | None:
        """Ask the window cap and the resolution filter: why they refuse. Reads files only."""
        archive = self.campaign / ARCHIVE_NAME
        commit = self._record.commit
        spreads = archived(self.plan, archive, commit=commit, prompts=self._prompts)
        self.process_rules = ask(self.plan, spreads, campaign=self.campaign)
        return refusal(self.process_rules, self.plan, campaign=self.campaign)

    def _build(self) -> None:
        """Build the target with what it chooses once a window."""
        target, _ = self._record.build(self.folder, self.pause, self.lease.epoch)
        self._record = dataclasses.replace(self._record, state=target.prepare())
        self._target, _ = self._record.build(self.folder, self.pause, self.lease.epoch)
        # This one too: what production needs beside an arm is proved before production is touched.
        self._target.check(tuple(self._arms.values()))
        self._record = dataclasses.replace(
            self._record, commit=self._target.commit(), factory=name_factory(self._factory)
        )

    def _admit(self) -> None:
        """Read the facts and refuse; writes nothing outside the window's own folder."""
        self._keeper_units = read_campaign(self.campaign).keeper_units
        self._build()
        self._not_dropped()
        refused = self._ask()
        if refused is not None:
            raise RefusedByWorld(refused)
        for reason in self._world_refusals():
            raise RefusedByWorld(reason)
        self._write_facts()

    def _not_dropped(self) -> None:
        """Refuse a window whose candidate failed its smoke at the chain's head.

        The chain goes on without this window, unless it was to be the last.
        """
        window = f"{self.plan.window.lane}-{self.plan.window.name}"
        known = dropped_arms(self.campaign)
        for arm in self.plan.window.candidates:
            why = known.get((window, arm.name))
            if why is not None:
                self.passed_over = not self.chain.last
                raise RefusedByWorld(f"{arm.name} was dropped at the chain's head: {why}")

    def _world_refusals(self) -> list[str]:
        target = self.target
        if not target.holds:
            return []
        found = []
        if self.chain.requested and marker_path(self.campaign).exists():
            self.mode, refusals = chain_refusals(target, self.campaign)
            return [str(refusal) for refusal in refusals]
        hold, _ = self.hold.owner()
        if hold is not HoldState.NONE:
            found.append(self.hold.refusal())
        if marker_path(self.campaign).exists():
            found.append(
                f"a chain marker lies in {self.campaign}: its chain goes first (a window of the "
                "chain is opened with WINDOW_CHAIN=1)"
            )
        try:
            intent = read_intent(self.campaign)
        except UsageError as error:
            found.append(str(error))
        else:
            if intent is not None:
                found.append(
                    f"production is down by {intent.window}, which has not ended: "
                    f"dsv41 status --campaign {shlex.quote(str(self.campaign))}"
                )
        seen = target.probe()
        if seen.state is Probe.UNKNOWN:
            found.append(f"cannot tell whether production serves: {seen.detail}")
        elif seen.state is Probe.DOWN and not target.ephemeral:
            found.append(f"production is down, and not by a window of this campaign: {seen.detail}")
        elif seen.state is Probe.UP:
            try:
                target.capture()
            except RefusedByWorld as error:
                found.append(str(error))
        return found

    def _write_facts(self) -> None:
        write_atomic(self.folder / "plan.json", dump_json(self.plan.to_json()) + "\n")
        self._record.write(self.folder)
        register_window(self.campaign, self.plan.window_id, self.folder, self.lease.epoch)
        sealed = freeze_prior(
            self.folder,
            self.plan,
            archive=self.campaign / ARCHIVE_NAME,
            commit=self._record.commit,
        )
        rules = self.process_rules
        marker = read_marker(self.campaign) if self.mode is Mode.CHAINED else None
        self.journal.note(
            "window",
            "begin",
            id=self.plan.window_id,
            epoch=self.lease.epoch,
            process_rules=rules.model_dump(mode="json") if rules else None,
            mode=self.mode.value,
            chain=marker.placeholder_owner if marker else "",
            **sealed,
        )

    def _take_down(self) -> None:
        target, journal = self.target, self.journal
        if target.ephemeral and target.probe().state is not Probe.UP:
            self._show(phase="starting the window's own production")
            with journal.step("production-first"):
                target.start_production()
        # Asked to stop, the window ends before the next act, and here still with nothing touched.
        self.pause(0)
        self._show(phase="HOLD")
        with journal.step("hold"):
            self.hold.create(self.plan.window_id, self.lease.epoch)
            target.hold_opened()
            self._admit_again()
        self.pause(0)
        self._show(phase="capture")
        intent = self._captured() if self.mode is Mode.SINGLE else self._inherited()
        self.pause(0)
        self._still_ours()
        with journal.step("intent"):
            write_intent(self.campaign, intent)
        self._boots = intent.hosts
        self.pause(0)
        if self.mode is Mode.SINGLE:
            self._show(phase="production stops", production="going down")
            with journal.step("production-stop"):
                target.stop_production()
        self._show(production="down")
        self._quiet("quiet")
        write_quiet_proof(self.folder, target)
        if self.plan.spec.get("smoke") == "x-first":
            self._smoke()

    def _smoke(self) -> None:
        """Smoke every candidate as the window's first start; one that fails ends the window.

        Raises:
            WindowStopped: an arm failed.
            Dsv41Error: an arm could not be stopped; the HOLD stays until the close restores.
        """
        backend = TargetBackend(self.target, self._arms)
        for arm in self.plan.spec["arms"]:
            if arm["role"] != "candidate":
                continue
            self._still_ours()
            self.pause(0)
            with self.journal.step(f"smoke:{arm['name']}") as detail:
                found = x_first(
                    backend,
                    arm["name"],
                    progress=lambda what, left: self._show(phase=what, seconds_left=left or None),
                )
                detail.update(passed=found.passed, failed=found.failed, why=found.reason)
            append_json_line(self.folder / "smoke.jsonl", found.to_json())
            self._quiet(f"quiet:smoke:{arm['name']}")
            if not found.passed:
                raise WindowStopped(found.line)
        self._show(seconds_left=None)

    def _admit_again(self) -> None:
        """Under the HOLD, production must be as it was found; silent only in a chain.

        Raises:
            RefusedByWorld: it is not; the HOLD goes again in the close.
        """
        seen = self.target.probe()
        wanted = Probe.DOWN if allow_unreachable(self.mode) else Probe.UP
        if seen.state is not wanted:
            raise RefusedByWorld(
                f"under the HOLD production is {seen.state.value}, not {wanted.value}: "
                f"{seen.detail}"
            )

    def _captured(self) -> Intent:
        """Capture the serving production; the intent that its restore will go by."""
        with self.journal.step("capture") as detail:
            rollback, sha256 = capture(
                self.target, self.folder, deadline_s=self._record.limits["start_s"]
            )
            detail["rollback_sha256"] = sha256
        return self._intent(str(rollback), sha256, "")

    def _inherited(self) -> Intent:
        """Take the chain's capture over: production is down, and there is nothing to ask."""
        marker = read_marker(self.campaign)
        if marker is None:
            raise WindowStopped("the chain's marker is gone")
        with self.journal.step("snapshot") as detail:
            path, record = production_snapshot(marker)
            sha256 = marker.snapshot_sha256
            own = {**record, "chained_from": str(path), "chained_from_sha256": sha256}
            write_atomic(self.folder / "rollback.json", dump_json(own) + "\n")
            detail.update(rollback=str(path), rollback_sha256=sha256)
        return self._intent(str(path), sha256, marker.placeholder_owner)

    def _intent(self, rollback: str, sha256: str, chain: str) -> Intent:
        keeper = self._keeper
        return Intent(
            window=self.plan.window_id,
            folder=str(self.folder),
            phase="DOWN",
            epoch=self.lease.epoch,
            host=here(),
            deadline=self._deadline,
            rollback=rollback,
            rollback_sha256=sha256,
            keeper_pid=keeper.pid if keeper else 0,
            keeper_started=keeper.started if keeper else 0.0,
            chain=chain,
            hosts=self.target.identities(),
        )

    def _still_ours(self) -> None:
        """Before each act: the lease's epoch and the HOLD must still be this window's."""
        self.lease.check()
        if self._target is None or not self._target.holds:
            return
        state, owner = self.hold.state_for_window(self.plan.window_id)
        if state is not HoldState.OWN or self.hold.missing(self.plan.window_id):
            raise WindowStopped(f"the HOLD is no longer this window's ({state.value} {owner})")
        now = self._target.identities() if self._boots else {}
        for host, boot in self._boots.items():
            if now.get(host) != boot:
                raise WindowStopped(f"{host} was restarted during the window")

    def _quiet(self, step: str) -> None:
        limit = boottime() + self._record.limits["quiet_s"]
        with self.journal.step(step):
            while problems := self.target.quiet_problems():
                if boottime() > limit:
                    raise TransportError(f"not quiet: {problems[0]}")
                self.pause(0.05)

    # -- starts and items --------------------------------------------------------------------------

    def before_item(self, item: PlannedItem) -> None:
        """Bring the item's start up, ending the one before it.

        Raises:
            WindowStopped: the window is asked to stop.
            StartFailed: the start did not come up, now or earlier.
        """
        self.pause(0)
        if item.start in self.broken:
            raise StartFailed(self.broken[item.start])
        if self._current == item.start:
            dead = self.target.check_arm(item.start)
            if dead is not None:
                self.broken[item.start] = dead
                raise StartFailed(dead)
            return
        self._revive_keeper()
        self._end_start()
        self._still_ours()
        self._begin_start(item.start, self._arms[item.arm])

    def _begin_start(self, start: str, arm: Arm) -> None:
        self._show(phase="starting", start=start)
        try:
            with self.journal.step(f"start:{start}", arm=arm.name) as detail:
                started = self.target.start_arm(start, arm)
                # The first request of a server is slow: it is sent, named, and counted nowhere.
                greedy_answers(
                    started.endpoint,
                    ("Say a word to warm up.",),
                    max_tokens=8,
                    deadline_s=self._record.limits["start_s"],
                )
                detail.update(
                    clock_cap_mhz=started.clock_cap.mhz,
                    clock_source=started.clock_cap.source,
                    url=started.endpoint.url,
                    model=one_line(started.endpoint.model),
                )
                if started.detail:
                    detail["detail"] = one_line(started.detail)
        except (StartFailed, MeasurementFailed, TransportError) as error:
            self.broken[start] = one_line(f"{start} did not start: {error}")
            self._current = start
            raise StartFailed(self.broken[start]) from error
        self.started = started
        self._current = start
        self._show(phase="measuring", start=start)

    def _end_start(self) -> None:
        """End the current start and prove the machines quiet; a refused cell never skips this."""
        if self._current is None:
            return
        start, self._current, self.started = self._current, None, None
        self._show(phase="stopping", start=start)
        with self.journal.step(f"stop:{start}"):
            self.target.stop_arm(start)
        self._quiet(f"quiet:{start}")

    def _spawn_keeper(self) -> KeeperHandle:
        budget = self._record.close_budget_s
        return spawn_keeper(self.folder, self._deadline, budget, as_unit=self._keeper_units)

    def _revive_keeper(self) -> None:
        if self._keeper is not None and not self._keeper.alive():
            with self.journal.step("keeper-again") as detail:
                self._keeper = self._spawn_keeper()
                detail["pid"] = self._keeper.pid
            intent = read_intent(self.campaign)
            if intent is not None:
                write_intent(
                    self.campaign,
                    dataclasses.replace(
                        intent,
                        keeper_pid=self._keeper.pid,
                        keeper_started=self._keeper.started,
                    ),
                )

    @property
    def endpoint(self) -> Endpoint:
        """Where the current start answers."""
        if self.started is None:
            raise UsageError("no start is up")
        return self.started.endpoint

    def record(self, row: dict[str, Any]) -> None:
        """Append one item's row to `values.jsonl`, durably."""
        append_json_line(self.folder / "values.jsonl", row)

    # -- close -------------------------------------------------------------------------------------

    def close(self) -> Summary | None:
        """Give everything back and write the summary; safe to call again and from anywhere.

        Signals must be deferred by the caller. Returns None when the window never opened.

        Raises:
            RefusedByWorld: the lease is lost. Whoever has it finishes the window; this process
                touches nothing more, and its keeper stays (SAFETY I8).
        """
        if not self.opened:
            return None
        if self.summary is not None:
            return self.summary
        self._closing = True
        self.lease.check()
        if self._closed is None:
            self._show(phase="closing", start="")
            with contextlib.suppress(Dsv41Error, OSError):
                self.lease.renew(self.plan.window_id, self._record.close_budget_s)
            self._closed = close_window(
                self.target,
                window_id=self.plan.window_id,
                folder=self.folder,
                campaign=self.campaign,
                journal=self.journal,
                lease=self.lease,
                limits=self._record.limits,
                progress=self._progress,
                seam=self.seam if self.stop_reason is None else None,
                no_seam="the window was stopped" if self.stop_reason else "nothing was handed over",
                leave_down=self._leaves_down(),
            )
            if self._closed.abort_due:
                self.aborted = self._abort()
                self._closed = self.aborted.closed
        self.lease.check()
        self.summary = finish_window(
            self.folder,
            self.journal,
            self._closed,
            stopped=self.stop_reason,
            report_only=self._report_only,
            rules=self._rules,
        )
        if self._keeper is not None:
            self._keeper.dismiss()
        self.lease.release()
        production = "UNKNOWN" if self._closed.production_down else "serving"
        if self._closed.chain == CHAINED:
            production = "down, the chain's"
        self._show(phase="done", production=production if self.target.holds else "")
        return self.summary

    def _leaves_down(self) -> bool:
        """Whether production stays down for the chain's next window."""
        stopped = self.stop_reason is not None
        marker = marker_path(self.campaign).exists()
        action = end_action(stopped=stopped, hold_written=True, marker=marker, use=self.chain)
        return self.target.holds and action == "chained"

    def _progress(self, what: str, left: float) -> None:
        self.state.seconds_left = left or None
        back = {"watch": "serving, watched", "restore": "coming back"}
        known = back.get(what.partition(":")[0])
        self._show(phase=what, **({"production": known} if known else {}))

    def _show(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.state, name, value)
        # A lost terminal must never keep production down.
        with contextlib.suppress(Exception):
            self._on_state(self.state)
