"""A state machine of windows, chains, gates, recoveries, kills, faults and foreign actors.

After every step the invariants of SAFETY hold, and after healing everything the facts lead to a
production that serves with nothing left, or to an alert. Runs of 60 steps: 20 by default, 200 under
`slow`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from crash import Breaker, breaking, follow, keeper_acts, settle
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pair import (
    EXPERIMENT,
    FIRST,
    HOSTS,
    LAST,
    PRODUCTION,
    TITLE,
    Killed,
    Pair,
    make_pair,
    simulated,
)

from pytest_dsv41.errors import Dsv41Error
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.hosts.fake import FakeHost
from pytest_dsv41.lifecycle import abort as abort_module
from pytest_dsv41.lifecycle.abort import abort, new_abort_folder
from pytest_dsv41.lifecycle.gate import end_by_hand, gate
from pytest_dsv41.lifecycle.intent import read_intent
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.marker import Marker, read_leftovers, read_marker
from pytest_dsv41.lifecycle.observer import Answer
from pytest_dsv41.lifecycle.recover import look, recover_campaign
from pytest_dsv41.lifecycle.session import SINGLE
from pytest_dsv41.lifecycle.watchdog import pass_once

COMMON = {
    "deadline": None,
    "derandomize": True,
    "phases": (Phase.generate,),
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
MEMORY = next((folder for folder in ("/dev/shm",) if os.access(folder, os.W_OK)), None)
"""What these runs write need not reach a disk: its order is looked at, not its speed."""
USES = st.sampled_from([SINGLE, FIRST, FIRST, LAST])
MOSTLY = st.sampled_from([True, True, True, False])
ONE_HOST = st.sampled_from(HOSTS)
FOREIGN = json.dumps({"owner": "somebody-else", "epoch": 1}).encode()
FOREIGN_OWNER = "chain-20260101T000000Z-00000000"


class Campaign(RuleBasedStateMachine):
    """One campaign over two simulated hosts, and everything that can happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = contextlib.ExitStack()
        root = Path(tempfile.mkdtemp(prefix="dsv41-", dir=MEMORY))
        self.stack.callback(shutil.rmtree, root, ignore_errors=True)
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        self.stack.enter_context(simulated(patch))
        (root / "root").mkdir()
        self.pair: Pair = make_pair(root / "root")
        self.pair.small = True
        self.breaker: Breaker = self.stack.enter_context(breaking(self.pair.world.folder, patch))
        # Before its first window a campaign knows no machines, and says nothing of them.
        self.pair.run()
        self.recoveries: dict[str, int] = {}
        self.foreign_holds: set[str] = set()
        self.foreign_placeholders: set[str] = set()
        self.had_marker = False
        real = abort_module.create_abort_record

        def counted(campaign: Path, marker: Marker, folder: Path) -> None:
            real(campaign, marker, folder)
            if not self.by_hand:
                stop = marker.stop_id
                self.recoveries[stop] = self.recoveries.get(stop, 0) + 1

        self.by_hand = False
        patch.setattr(abort_module, "create_abort_record", counted)
        patch.setattr("syslog.syslog", lambda *_: None)

    def teardown(self) -> None:
        try:
            self.all_heals()
            status = look(self.pair.campaign)
            if status.observation.answer is not Answer.ALERT or status.command.startswith("dsv41"):
                settle_or_alert(self.pair)
        finally:
            self.stack.close()

    def all_heals(self) -> None:
        self.breaker.disarm()
        self.breaker.process_exit()
        self.pair.world.heal()
        for name in list(self.foreign_holds):
            self.foreign_hold_goes(name)
        for name in list(self.foreign_placeholders):
            self.foreign_placeholder_goes(name)

    def host(self, name: str) -> FakeHost:
        return FakeHost(self.pair.world, name, CommandLog(self.pair.root / "cmd"))

    def free(self) -> None:
        """Whoever worked has ended: what it locked is free."""
        self.breaker.disarm()
        self.breaker.process_exit()

    def in_order(self) -> None:
        """A person has put everything in order: else nearly every window would be refused."""
        self.all_heals()
        for _ in range(4):
            status = look(self.pair.campaign)
            if status.observation.answer in (Answer.CLEAN, Answer.CHAIN_WAITING):
                break
            self.by_hand = status.observation.answer is not Answer.RECOVER
            with contextlib.suppress(Dsv41Error, OSError):
                follow(self.pair, status)
            self.by_hand = False
        # Before a window may rightly take production down again.
        self.a_marker_goes_only_where_production_serves()

    # -- what a coordinator does -------------------------------------------------------------------

    @rule(use=USES, items=st.sampled_from([None, None, 1]), in_order=MOSTLY)
    def window(self, use: Any, items: int | None, in_order: bool) -> None:
        if in_order:
            self.in_order()
        run = self.pair.window(use)
        self.pair.current = run
        with contextlib.suppress(Dsv41Error, OSError):
            self.pair.drive(run, items=items)
        self.free()
        keeper_acts(self.pair)

    @rule(use=USES, at=st.integers(1, 90), keeper=st.booleans(), in_order=MOSTLY)
    def killed_window(self, use: Any, at: int, keeper: bool, in_order: bool) -> None:
        if in_order:
            self.in_order()
        run = self.pair.window(use)
        self.pair.current = run
        self.breaker.arm("kill", at)
        with contextlib.suppress(Killed, Dsv41Error, OSError):
            self.pair.drive(run)
        self.free()
        if keeper:
            keeper_acts(self.pair)

    @rule(at=st.integers(0, 60))
    def gate(self, at: int) -> None:
        summaries = sorted(
            self.pair.root.glob("w*/summary.json"), key=lambda path: int(path.parent.name[1:])
        )
        previous = summaries[-1] if summaries else self.pair.root / "none"
        if at:
            self.breaker.arm("kill", at)
        with contextlib.suppress(Killed, Dsv41Error, OSError):
            gate(self.pair.campaign, previous, wait_s=0.0)
        self.free()

    @rule(again=st.booleans())
    def recovery_by_hand(self, again: bool) -> None:
        lease = Lease(self.pair.campaign)
        lease.acquire("by hand", 60.0)
        self.by_hand = again
        abort(self.pair.campaign, new_abort_folder(self.pair.campaign), lease=lease, again=again)
        self.by_hand = False
        lease.release()

    @rule()
    def watchdog(self) -> None:
        pass_once(self.pair.campaign)

    @rule()
    def recover(self) -> None:
        with contextlib.suppress(Dsv41Error):
            recover_campaign(self.pair.campaign)

    @rule()
    def end(self) -> None:
        with contextlib.suppress(Dsv41Error):
            end_by_hand(self.pair.campaign)

    @rule(use=USES)
    def second_coordinator(self, use: Any) -> None:
        """While somebody holds the lease, nobody else changes a machine or a fact."""
        first = Lease(self.pair.campaign)
        first.acquire("first", 60.0)
        before = self.frozen()
        run = self.pair.window(use)
        with contextlib.suppress(Dsv41Error):
            run.open()
        assert run.abort_chain() is None
        gate(self.pair.campaign, self.pair.root / "none", wait_s=0.0)
        with contextlib.suppress(Dsv41Error):
            recover_campaign(self.pair.campaign)
        pass_once(self.pair.campaign)
        assert self.frozen() == before
        first.release()

    def frozen(self) -> list[Any]:
        machines = [self.pair.world.machine(name).to_json() for name in HOSTS]
        facts = ("marker.json", "marker.json.abort", "intent.json", "leftovers.json")
        return [
            [(m["processes"], m["files"]) for m in machines],
            [
                path.read_bytes() if (path := self.pair.campaign / fact).exists() else None
                for fact in facts
            ],
        ]

    # -- what happens to the machines --------------------------------------------------------------

    @rule(name=ONE_HOST, fault=st.sampled_from(["reboot", "power-loss", "clock-back"]))
    def host_breaks(self, name: str, fault: str) -> None:
        self.pair.world.inject(fault, name)
        self.pair.world.heal()
        self.foreign_placeholders.discard(name) if fault != "clock-back" else None

    @rule(name=ONE_HOST, fault=st.sampled_from(["partition", "full-disk"]))
    def host_is_cut(self, name: str, fault: str) -> None:
        self.pair.world.inject(fault, name)

    @rule()
    def hosts_heal(self) -> None:
        self.pair.world.heal()

    @precondition(lambda self: self.reachable())
    @rule()
    def production_by_hand(self) -> None:
        """A person starts production where nothing of ours forbids it."""
        if any(self.pair.holds().values()) or any(
            self.pair.world.machine(name).listening(EXPERIMENT) for name in HOSTS
        ):
            return
        with contextlib.suppress(Dsv41Error):
            self.pair.target().start_production()

    # -- somebody else -----------------------------------------------------------------------------

    @precondition(lambda self: self.reachable())
    @rule(name=ONE_HOST)
    def foreign_hold_comes(self, name: str) -> None:
        with contextlib.suppress(FileExistsError, Dsv41Error):
            self.host(name).create("/hold/HOLD", FOREIGN)
            self.foreign_holds.add(name)

    @rule(name=ONE_HOST)
    def foreign_hold_goes(self, name: str) -> None:
        if name in self.foreign_holds and self.reachable():
            self.host(name).remove("/hold/HOLD")
            self.foreign_holds.discard(name)

    @precondition(lambda self: self.reachable())
    @rule(name=ONE_HOST)
    def foreign_placeholder_comes(self, name: str) -> None:
        if self.pair.owners()[name]:
            return
        title = ["bash", "-c", 'exec -a "$1" cat', "hold", TITLE + FOREIGN_OWNER]
        words = ["/usr/bin/tmux", "-L", "default", "new-session", "-d", "-s", "dsv41-hold", "--"]
        self.host(name).run([*words, *title], name="foreign", deadline_s=5)
        self.foreign_placeholders.add(name)

    @rule(name=ONE_HOST)
    def foreign_placeholder_goes(self, name: str) -> None:
        if name in self.foreign_placeholders and self.reachable():
            words = ["/usr/bin/tmux", "-L", "default", "kill-session", "-t", "=dsv41-hold"]
            self.host(name).run(words, name="foreign", deadline_s=5)
            self.foreign_placeholders.discard(name)

    def reachable(self) -> bool:
        return all(
            m.up and m.linked and not m.full
            for m in (self.pair.world.machine(name) for name in HOSTS)
        )

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def down_is_never_clean(self) -> None:
        if not all(self.pair.serving().values()):
            seen = look(self.pair.campaign)
            assert seen.observation.answer is not Answer.CLEAN, seen.to_json()  # I1

    @invariant()
    def what_is_foreign_is_untouched(self) -> None:
        for name in self.foreign_holds:
            assert self.pair.holds()[name] == FOREIGN  # I2
        for name in self.foreign_placeholders:
            assert self.pair.owners()[name] == [FOREIGN_OWNER]

    @invariant()
    def a_stop_has_one_automatic_recovery(self) -> None:
        assert all(count <= 1 for count in self.recoveries.values()), self.recoveries  # I3

    @invariant()
    def every_placeholder_has_a_record(self) -> None:
        marker = read_marker(self.pair.campaign)
        intent = read_intent(self.pair.campaign)
        known = {left.owner for left in read_leftovers(self.pair.campaign)}
        known |= {marker.placeholder_owner} if marker else set()
        known |= {intent.chain} if intent else set()
        for name, owners in self.pair.owners().items():
            if name not in self.foreign_placeholders:
                assert set(owners) <= known, (owners, known)  # I6

    @invariant()
    def production_never_runs_beside_an_experiment(self) -> None:
        for name in HOSTS:
            machine = self.pair.world.machine(name)
            assert not (machine.listening(PRODUCTION) and machine.listening(EXPERIMENT))  # I7

    @invariant()
    def a_marker_goes_only_where_production_serves(self) -> None:
        marker = read_marker(self.pair.campaign) is not None
        if self.had_marker and not marker:
            assert all(self.pair.serving().values())  # I5
        self.had_marker = marker


class Chains(Campaign):
    """As `Campaign`, with more windows that follow each other."""

    @rule(last=st.booleans(), at=st.integers(0, 60))
    def chain_goes_on(self, last: bool, at: int) -> None:
        """Two windows of a chain with the gate between them, which may be killed."""
        self.window(FIRST, None, True)
        self.a_marker_goes_only_where_production_serves()
        self.gate(at)
        self.a_marker_goes_only_where_production_serves()
        self.window(LAST if last else FIRST, None, False)


def settle_or_alert(pair: Pair) -> None:
    """Follow the commands to the end; an alert that names no command of ours is an end too."""
    try:
        settle(pair)
    except AssertionError as error:
        seen = look(pair.campaign).observation
        if seen.answer is Answer.ALERT and "nobody can follow" in str(error):
            return
        raise
    except Dsv41Error:
        assert look(pair.campaign).observation.answer is Answer.ALERT


def run_sequences(count: int, machine: type[Campaign] = Campaign) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=count, stateful_step_count=60, **COMMON)
    )


def test_no_sequence_of_sixty_steps_breaks_an_invariant() -> None:
    run_sequences(20)


@pytest.mark.slow
def test_none_of_two_hundred_sequences_breaks_an_invariant() -> None:
    run_sequences(200)


@pytest.mark.slow
def test_no_sequence_of_many_chains_breaks_an_invariant() -> None:
    run_sequences(40, Chains)
