"""Chains on two simulated hosts: what each end leaves, what each start finds, what each stop does.

The cases of the adoption checklist (WIN2, item 5) with the real lifecycle over simulated machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair import EXPERIMENT, FIRST, HOSTS, LAST, TITLE, Pair, PairTarget, make_pair, simulated

from pytest_dsv41.archive import archive_rows
from pytest_dsv41.errors import RefusedByWorld
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.hosts.fake import FakeHost
from pytest_dsv41.lifecycle import closing
from pytest_dsv41.lifecycle.abort import abort, new_abort_folder
from pytest_dsv41.lifecycle.chain import ChainUse
from pytest_dsv41.lifecycle.finish import ARCHIVE_NAME
from pytest_dsv41.lifecycle.gate import ADMIT, CHAIN_STOPPED, REFUSED, end_by_hand, gate
from pytest_dsv41.lifecycle.hold import Hold
from pytest_dsv41.lifecycle.intent import read_intent
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.marker import read_leftovers, read_marker
from pytest_dsv41.lifecycle.observer import Answer
from pytest_dsv41.lifecycle.recover import look, recover_campaign
from pytest_dsv41.window.summary import read_summary


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with simulated(monkeypatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        yield make_pair(tmp_path)


def steps(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] == "end"]


def test_a_single_window_gives_production_back(pair: Pair) -> None:
    summary = pair.run()
    assert (summary.status, summary.exit_code, summary.chain) == ("CANDIDATE", 0, None)
    assert (summary.restore.status, summary.watch.status) == ("RESTORED", "PASS")
    pair.nothing_is_left()
    assert look(pair.campaign).observation.answer is Answer.CLEAN


def test_a_chained_end_leaves_production_down_in_safetys_order(pair: Pair) -> None:
    summary = pair.run(FIRST)
    assert (summary.status, summary.exit_code) == ("CANDIDATE", 0)
    assert (summary.chain, summary.restore.status) == ("CHAINED", "CHAINED: production left down")
    assert summary.watch.status == "NOT RUN"
    order = ["chain-intent", "placeholders-up", "experiment-stop", "chain-quiet", "marker"]
    folder = pair.root / "w1"
    done = steps(folder)
    assert done[done.index("chain-intent") :][: len(order) + 1] == [*order, "hold-close"]
    assert pair.holds() == {"alpha": None, "beta": None}
    assert pair.serving() == {"alpha": False, "beta": False}
    marker = read_marker(pair.campaign)
    assert marker is not None
    owner = marker.placeholder_owner
    assert pair.owners() == {"alpha": [owner], "beta": [owner]}
    assert marker.window == "L-w-W-0001"
    assert Path(marker.snapshot) == folder / "rollback.json"
    intent = read_intent(pair.campaign)
    assert intent is not None
    assert (intent.chain, intent.phase) == (owner, "CHAIN_CLOSING")
    seen = look(pair.campaign)
    assert (seen.observation.answer, seen.exit_code) == (Answer.CHAIN_WAITING, 1)


def test_a_chain_of_three_windows_keeps_one_owner_and_one_capture(pair: Pair) -> None:
    pair.run(FIRST)
    first = read_marker(pair.campaign)
    assert first is not None
    pids = {
        host: [p.pid for p in pair.world.machine(host).processes.values() if TITLE in p.argv[0]]
        for host in HOSTS
    }
    assert gate(pair.campaign, pair.root / "w1", wait_s=0.0).code == ADMIT
    assert pair.run(FIRST).chain == "CHAINED"
    second = read_marker(pair.campaign)
    assert second is not None
    assert second.placeholder_owner == first.placeholder_owner
    assert (second.window, second.snapshot) == ("L-w-W-0002", first.snapshot)
    assert second.stop_id != first.stop_id
    own = json.loads((pair.root / "w2" / "rollback.json").read_text())
    assert own["chained_from"] == first.snapshot
    assert own["chained_from_sha256"] == first.snapshot_sha256
    # The processes are the same: a chained window starts no second placeholder.
    assert pids == {
        host: [p.pid for p in pair.world.machine(host).processes.values() if TITLE in p.argv[0]]
        for host in HOSTS
    }
    assert "production-stop" not in steps(pair.root / "w2")
    assert gate(pair.campaign, pair.root / "w2", wait_s=0.0).code == ADMIT
    summary = pair.run(LAST)
    assert (summary.chain, summary.restore.status) == ("ENDED", "RESTORED")
    assert summary.watch.status == "PASS"
    ended = steps(pair.root / "w3")
    tail = ended[ended.index("watch") :]
    assert tail[:6] == [
        "watch",
        "placeholders-down",
        "leftovers-kept",
        "marker-clear",
        "chain-records-clear",
        "intent-clear",
    ]
    pair.nothing_is_left()
    windows = {row["window"] for row in archive_rows(pair.campaign / ARCHIVE_NAME)}
    assert windows == {"L-w-W-0001", "L-w-W-0002", "L-w-W-0003"}
    assert look(pair.campaign).observation.answer is Answer.CLEAN


@pytest.mark.parametrize("at", [1, 2])
def test_a_window_stopped_in_a_chain_restores_and_ends_it(at: int, pair: Pair) -> None:
    for _ in range(at - 1):
        pair.run(FIRST)
    summary = pair.run(FIRST, items=4)
    assert (summary.status, summary.exit_code) == ("INCOMPLETE", 12)
    assert summary.restore.status == "RESTORED"
    assert summary.watch.status == "PASS"
    assert summary.chain == (None if at == 1 else "ENDED")
    pair.nothing_is_left()


def test_a_failure_before_the_hold_in_a_chain_restores(pair: Pair) -> None:
    pair.run(FIRST)
    # One placeholder died: the next window may not begin, and production is down.
    host = FakeHost(pair.world, "beta", CommandLog(pair.root / "cmd"))
    kill = ["/usr/bin/tmux", "-L", "default", "kill-session", "-t", "=dsv41-hold"]
    host.run(kill, name="kill", deadline_s=5)
    summary = pair.run(FIRST)
    assert summary.status == "REFUSED"
    assert summary.stopped == "gate: the chain's placeholder on beta is DOWN"
    assert (summary.restore.status, summary.watch.status) == ("RESTORED", "PASS")
    assert (summary.chain, summary.exit_code) == ("ENDED", 13)
    pair.nothing_is_left()
    assert (pair.root / "w2" / "chain-abort" / "summary.json").is_file()


@pytest.mark.parametrize("what", ["commit", "describe"])
def test_a_window_that_would_bring_another_production_back_restores_the_chains(
    what: str, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has edited the target between two windows: its restore would start the edit."""
    pair.run(FIRST)
    other = {"commit": "d" * 40, "describe": {"kind": "pair", "port": 1}}[what]
    monkeypatch.setattr(PairTarget, what, lambda _self: other)
    summary = pair.run(FIRST)
    assert summary.status == "REFUSED"
    assert str(summary.stopped).startswith("gate: this target's production is not the one")
    assert (summary.restore.status, summary.watch.status) == ("RESTORED", "PASS")
    assert (summary.chain, summary.exit_code) == ("ENDED", 13)
    pair.nothing_is_left()


def test_a_window_of_no_chain_is_refused_in_the_gap_and_touches_nothing(pair: Pair) -> None:
    pair.run(FIRST)
    before = (pair.campaign / "marker.json").read_bytes()
    run = pair.window()
    with pytest.raises(RefusedByWorld, match="its chain goes first"):
        run.open()
    assert run.abort_chain() is None
    assert (pair.campaign / "marker.json").read_bytes() == before
    assert look(pair.campaign).observation.answer is Answer.CHAIN_WAITING


def test_a_refused_gate_in_a_chain_is_3_and_brings_production_back(pair: Pair) -> None:
    pair.run(FIRST)
    foreign = pair.root / "other"
    foreign.mkdir()
    found = gate(pair.campaign, foreign, wait_s=0.0)
    assert found.code == CHAIN_STOPPED
    assert [r.name for r in found.refusals] == ["previous summary"]
    assert found.aborted is not None
    assert (found.aborted.code, found.aborted.closed.chain) == (0, "ENDED")
    assert found.aborted.folder is not None
    # Restore and a watch of 15 minutes are inside the lease's deadline: nobody calls it overdue.
    held = json.loads((pair.campaign / "lease.json").read_text())
    budget = pair.record("x", pair.root).close_budget_s
    assert held["owner"] == "chain abort"
    assert held["deadline"] - held["since"] == pytest.approx(budget, abs=1.0)
    pair.nothing_is_left()
    # The recovery's own summary is a previous summary for the next gate.
    summary = read_summary(found.aborted.folder)
    assert (summary.window.kind, summary.restore.status) == ("abort", "RESTORED")
    assert gate(pair.campaign, found.aborted.folder, wait_s=0.0).code == ADMIT


def test_the_gates_refusals_without_a_marker_are_2_and_touch_nothing(pair: Pair) -> None:
    pair.run()
    assert gate(pair.campaign, pair.root / "w1", wait_s=0.0).code == ADMIT
    other = Hold(pair.target().hold_sites())
    other.create("somebody", 1)
    found = gate(pair.campaign, pair.root / "w1", wait_s=0.0)
    assert found.code == REFUSED
    assert "HOLD" in {r.name for r in found.refusals}
    other.close("somebody")
    for host in HOSTS:
        FakeHost(pair.world, host, CommandLog(pair.root / "cmd")).run(
            ["tmux", "new-session", "-d", "-s", "x", "--", "vllm", "--port", str(EXPERIMENT)],
            name="stale",
            deadline_s=5,
        )
    found = gate(pair.campaign, pair.root / "w1", wait_s=0.0)
    assert (found.code, {r.name for r in found.refusals}) == (REFUSED, {"stale container"})
    assert found.aborted is None


def test_one_automatic_recovery_for_a_stop_and_one_more_by_hand(pair: Pair) -> None:
    pair.run(FIRST)
    # The restart of production fails: the recovery cannot succeed.
    pair.world.arm("hang", "start-production", host="beta")
    found = gate(pair.campaign, pair.root / "nothing", wait_s=0.0)
    assert found.aborted is not None
    assert (found.code, found.aborted.code) == (CHAIN_STOPPED, 3)
    assert look(pair.campaign).observation.down
    # Its HOLD lies there: nothing more is touched by anybody but a person.
    again = gate(pair.campaign, pair.root / "nothing", wait_s=0.0)
    assert again.aborted is not None
    assert again.aborted.code == 4
    assert "belongs to CHAIN-ABORT-" in again.aborted.line


def test_a_recovery_proves_the_hosts_quiet_before_it_starts_production(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.run(FIRST)
    with monkeypatch.context() as patch:
        # Nothing of the recovery's own lives, and still the GPU is somebody's.
        patch.setattr(PairTarget, "quiet_problems", lambda _self: ["beta: on the GPU: pid 7"])
        found = gate(pair.campaign, pair.root / "nothing", wait_s=0.0)
        assert found.aborted is not None
        assert (found.code, found.aborted.code) == (CHAIN_STOPPED, 3)
        assert "beside an experiment: beta: on the GPU: pid 7" in found.aborted.line
        assert pair.serving() == {"alpha": False, "beta": False}
        assert look(pair.campaign).command.startswith("dsv41 recover")
    recovered = recover_campaign(pair.campaign)
    assert recovered is not None
    assert (recovered[1].exit_code, recovered[1].chain) == (0, "ENDED")
    pair.nothing_is_left()


def test_a_recovery_ends_what_the_chains_last_window_has_left(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.run(FIRST)
    stopped: list[str] = []
    real = PairTarget.stop_all

    def stop_all(self: PairTarget) -> None:
        stopped.append(self._context.window_id)
        real(self)

    monkeypatch.setattr(PairTarget, "stop_all", stop_all)
    found = gate(pair.campaign, pair.root / "nothing", wait_s=0.0)
    assert found.aborted is not None
    assert found.aborted.code == 0
    assert [name.startswith("CHAIN-ABORT-") for name in stopped] == [True, False]
    assert stopped[1] == "L-w-W-0001"


def test_half_a_production_is_no_obstacle_to_a_recovery(pair: Pair) -> None:
    pair.run(FIRST)
    # Somebody's start of production came half way: it answers nobody.
    FakeHost(pair.world, "alpha", CommandLog(pair.root / "cmd")).run(
        ["/usr/bin/tmux", "-L", "servers", "new-session", "-d", "-s", "production",
         "--", "vllm", "serve", "--port", "8000"],
        name="half", deadline_s=5,
    )  # fmt: skip
    found = gate(pair.campaign, pair.root / "nothing", wait_s=0.0)
    assert found.aborted is not None
    assert (found.aborted.code, found.aborted.closed.chain) == (0, "ENDED")
    pair.nothing_is_left()


def test_an_attempt_that_left_no_hold_is_remembered(pair: Pair) -> None:
    pair.run(FIRST)
    lease = Lease(pair.campaign)
    lease.acquire("test", 60.0)
    marker = read_marker(pair.campaign)
    assert marker is not None
    record = pair.campaign / "marker.json.abort"
    record.write_text(json.dumps({"chain": marker.placeholder_owner, "stop": marker.stop_id}))
    told = abort(pair.campaign, new_abort_folder(pair.campaign), lease=lease)
    assert told.code == 4
    assert "has already run" in told.line
    assert pair.serving() == {"alpha": False, "beta": False}
    done = abort(pair.campaign, new_abort_folder(pair.campaign), lease=lease, again=True)
    assert (done.code, done.closed.chain) == (0, "ENDED")
    lease.release()
    pair.nothing_is_left()


def test_a_recovery_while_production_serves_only_alerts(pair: Pair) -> None:
    pair.run(FIRST)
    pair.target().start_production()
    lease = Lease(pair.campaign)
    lease.acquire("test", 60.0)
    told = abort(pair.campaign, new_abort_folder(pair.campaign), lease=lease)
    lease.release()
    assert (told.code, told.closed.production_down) == (4, False)
    assert not (pair.campaign / "marker.json.abort").exists()
    # By hand: verified, watched, ended; no HOLD is needed for that.
    assert end_by_hand(pair.campaign) == ("ENDED", [])
    pair.nothing_is_left()


def test_no_marker_is_nothing_to_recover(pair: Pair) -> None:
    lease = Lease(pair.campaign)
    lease.acquire("test", 60.0)
    told = abort(pair.campaign, new_abort_folder(pair.campaign), lease=lease)
    assert (told.code, told.closed.restore["status"][:10]) == (0, "NOT NEEDED")
    assert not list(pair.campaign.glob("CHAIN-ABORT-*"))


def test_a_foreign_placeholder_at_the_end_is_left_and_listed(pair: Pair) -> None:
    pair.run(FIRST)
    host = FakeHost(pair.world, "beta", CommandLog(pair.root / "cmd"))
    words = ["/usr/bin/tmux", "-L", "default"]
    host.run([*words, "kill-session", "-t", "=dsv41-hold"], name="kill", deadline_s=5)
    marker = read_marker(pair.campaign)
    assert marker is not None
    # chain-1… is not chain-10…: an owner that only begins like ours is another's.
    foreign = marker.placeholder_owner + "0"
    title = ["bash", "-c", 'exec -a "$1" cat', "hold", TITLE + foreign]
    host.run([*words, "new-session", "-d", "-s", "dsv41-hold", "--", *title],
             name="foreign", deadline_s=5)  # fmt: skip
    summary = pair.run(LAST)
    assert summary.status == "REFUSED"
    assert "beta is FOREIGN" in str(summary.stopped)
    assert (summary.chain, summary.exit_code) == ("ENDED WITH ALERT", 21)
    assert pair.serving() == {"alpha": True, "beta": True}
    assert pair.owners() == {"alpha": [], "beta": [foreign]}
    assert [(x.owner, x.host) for x in read_leftovers(pair.campaign)] == [
        (marker.placeholder_owner, "beta")
    ]
    assert not (pair.campaign / "marker.json").exists()
    seen = look(pair.campaign)
    assert seen.observation.answer is Answer.CLEAN
    assert "leftover" in seen.observation.why
    host.run([*words, "kill-session", "-t", "=dsv41-hold"], name="kill", deadline_s=5)
    assert end_by_hand(pair.campaign, owner=marker.placeholder_owner) == ("ENDED", [])
    assert read_leftovers(pair.campaign) == ()


def test_an_intent_that_is_deleted_after_the_placeholders_started_still_has_their_owner(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def deleted(step: str, event: str) -> None:
        if (step, event) == ("marker", "begin"):
            assert all(pair.owners().values())
            (pair.campaign / "intent.json").unlink()

    monkeypatch.setattr(closing, "write_marker", full)
    pair.on_step = deleted
    summary = pair.run(FIRST)
    assert (summary.chain, summary.restore.status) == ("ENDED", "RESTORED")
    assert summary.alerts == ("marker: [Errno 28] No space left on device",)
    pair.nothing_is_left()


def test_a_host_that_was_restarted_in_the_gap_stops_the_chain(pair: Pair) -> None:
    pair.run(FIRST)
    pair.world.inject("reboot", "beta")
    seen = look(pair.campaign)
    assert (seen.observation.answer, seen.stopped) == (Answer.RECOVER, "beta was restarted")
    found = gate(pair.campaign, pair.root / "w1", wait_s=0.0)
    assert found.code == CHAIN_STOPPED
    assert any("beta was restarted" in r.why for r in found.refusals)
    pair.nothing_is_left()


def test_the_record_of_another_chains_recovery_is_mentioned(pair: Pair) -> None:
    pair.run()
    record = pair.campaign / "marker.json.abort"
    record.write_text(json.dumps({"chain": "chain-20260101T000000Z-00000000", "stop": "x"}))
    seen = look(pair.campaign)
    assert (seen.observation.answer, seen.exit_code) == (Answer.CLEAN, 0)
    assert seen.stray == (f"{record}: the record of another chain's recovery",)
    assert "listed" in seen.observation.why
    # It is another stop's: this chain still has its one recovery, and takes the record's place.
    pair.run(FIRST)
    found = gate(pair.campaign, pair.root / "nothing", wait_s=0.0)
    assert found.aborted is not None
    assert found.aborted.code == 0
    pair.nothing_is_left()


def test_unknown_uses_nothing_up_and_touches_nothing(pair: Pair) -> None:
    pair.run(FIRST)
    files = {p.name: p.read_bytes() for p in pair.campaign.glob("marker.json*")}
    machines = {name: pair.world.machine(name).to_json() for name in HOSTS}
    pair.world.inject("partition", "beta")
    assert look(pair.campaign).observation.row == 3
    lease = Lease(pair.campaign)
    lease.acquire("test", 60.0)
    told = abort(pair.campaign, new_abort_folder(pair.campaign), lease=lease)
    lease.release()
    assert (told.code, told.closed.production_down) == (4, True)
    pair.world.heal()
    assert {p.name: p.read_bytes() for p in pair.campaign.glob("marker.json*")} == files
    for name in HOSTS:
        assert pair.world.machine(name).to_json()["processes"] == machines[name]["processes"]
        assert pair.world.machine(name).to_json()["files"] == machines[name]["files"]


@pytest.mark.parametrize("use", [ChainUse(), FIRST])
def test_the_same_world_gives_the_same_trace(
    use: ChainUse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = []
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    with simulated(monkeypatch):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            one = make_pair(tmp_path / name, seed=5)
            one.run(use)
            traces.append([(e["host"], e["what"], e["outcome"]) for e in one.world.events()])
    assert traces[0] == traces[1]
