"""Lease, HOLD and intent: one at a time, never another's, and unreadable counts as present."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hold_sites import sites_of

from pytest_dsv41.durable import write_atomic
from pytest_dsv41.errors import RefusedByWorld, TransportError, UsageError
from pytest_dsv41.hosts import CommandLog, Fence, LocalHost
from pytest_dsv41.hosts.local import boottime
from pytest_dsv41.lifecycle.hold import Hold, HoldState
from pytest_dsv41.lifecycle.intent import Intent, clear_intent, read_intent, write_intent
from pytest_dsv41.lifecycle.journal import Journal
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.record import register_window, window_folder, windows
from pytest_dsv41.targets import HoldSite


def intent(**changes: object) -> Intent:
    values: dict[str, object] = {
        "window": "L-w-W-20260101T000000Z",
        "folder": "/f",
        "phase": "DOWN",
        "epoch": 1,
        "host": "h",
        "deadline": 1.0,
        "rollback": "/f/rollback.json",
        "rollback_sha256": "0" * 64,
        "keeper_pid": 1,
        "keeper_started": 1.0,
    }
    return Intent(**{**values, **changes})  # type: ignore[arg-type]


class Silent(LocalHost):
    """A host that does not answer."""

    name = "silent"

    def read(self, path: str) -> bytes | None:
        raise TransportError(f"{self.name}: no answer")

    def create(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        raise TransportError(f"{self.name}: no answer")


def test_the_lease_has_one_owner_and_its_epoch_only_grows(tmp_path: Path) -> None:
    first = Lease(tmp_path)
    first.acquire("window-1", 60.0)
    second = Lease(tmp_path)
    with pytest.raises(RefusedByWorld, match=r"window-1 \(pid \d+, for \d+ s\)"):
        second.acquire("window-2", 60.0)
    held = second.held_by()
    assert held is not None
    assert held.pid == os.getpid()
    assert -60.0 <= held.overdue_s < 0
    first.release()
    assert second.held_by() is None
    second.acquire("window-2", 60.0)
    assert second.epoch == first.epoch + 1
    second.release()


def test_a_killed_holder_frees_the_lease(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, os, signal\n"
        "from pytest_dsv41.lifecycle.lease import Lease\n"
        "Lease(pathlib.Path(sys.argv[1])).acquire('killed', 60.0)\n"
        "print('held', flush=True); signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(RefusedByWorld, match="killed"):
            Lease(tmp_path).acquire("next", 60.0, wait_s=0.0)
        child.kill()
    after = Lease(tmp_path)
    after.acquire("next", 60.0)
    assert after.epoch == 2
    after.release()


def test_a_lease_taken_over_lets_the_old_owner_do_nothing(tmp_path: Path) -> None:
    old = Lease(tmp_path)
    old.acquire("old", 60.0)
    record = json.loads((tmp_path / "lease.json").read_text())
    write_atomic(tmp_path / "lease.json", json.dumps({**record, "epoch": old.epoch + 1}))
    with pytest.raises(RefusedByWorld, match="lease lost"):
        old.check()
    with pytest.raises(RefusedByWorld, match="lease lost"):
        old.renew("old", 60.0)
    old.release()


def test_a_hold_is_created_once_and_removed_only_by_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "HOLD"
    hold = Hold(sites_of(path))
    hold.create("chain-1", 1)
    before = path.read_bytes()
    with pytest.raises(RefusedByWorld, match="belongs to chain-1;"):
        hold.create("chain-10", 2)
    with pytest.raises(RefusedByWorld, match="belongs to chain-1;"):
        hold.close("chain-10")
    hold.create("chain-1", 1)
    assert path.read_bytes() == before
    hold.close("chain-1")
    hold.close("chain-1")
    assert hold.owner() == (HoldState.NONE, "")


def test_a_hold_over_two_hosts_is_all_or_nothing(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "HOLD", tmp_path / "b" / "HOLD"
    hold = Hold(sites_of(first, second))
    Hold(sites_of(second)).create("other", 7)
    foreign = second.read_bytes()
    with pytest.raises(RefusedByWorld, match="b/HOLD belongs to other"):
        hold.create("mine", 1)
    assert not first.exists()
    assert second.read_bytes() == foreign
    assert hold.state_for_window("mine") == (HoldState.FOREIGN, "other")
    second.unlink()
    hold.create("mine", 1)
    assert [json.loads(p.read_bytes())["owner"] for p in (first, second)] == ["mine", "mine"]
    assert hold.missing("mine") == []
    # A person took one away: what is left is still ours, and what is missing is known.
    second.unlink()
    assert hold.state_for_window("mine") == (HoldState.OWN, "mine")
    assert [site.path for site in hold.missing("mine")] == [str(second)]
    hold.create("mine", 1)
    hold.close("mine")
    assert not first.exists()
    assert not second.exists()


def test_a_hold_is_undone_where_the_next_host_does_not_answer(tmp_path: Path) -> None:
    first = tmp_path / "HOLD"
    silent = HoldSite(Silent(CommandLog(tmp_path / "cmd")), "/HOLD")
    hold = Hold((*sites_of(first), silent))
    with pytest.raises(TransportError, match="silent: no answer"):
        hold.create("mine", 1)
    assert not first.exists()
    assert hold.state_for_window("mine") == (HoldState.UNREADABLE, "silent: no answer")
    Hold(sites_of(first)).create("mine", 1)
    with pytest.raises(RefusedByWorld, match="silent:/HOLD is unreadable: silent: no answer"):
        hold.close("mine")
    assert not first.exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"owner": 1}', '{"owner": ""}', "\xff"])
def test_an_unreadable_hold_is_never_ours_and_never_touched(content: str, tmp_path: Path) -> None:
    path = tmp_path / "HOLD"
    hold = Hold(sites_of(path))
    path.write_bytes(content.encode("latin-1"))
    assert hold.state_for_window("w")[0] is HoldState.UNREADABLE
    with pytest.raises(RefusedByWorld):
        hold.close("w")
    assert path.read_bytes() == content.encode("latin-1")


def test_a_hold_is_the_campaigns_only_when_its_owner_has_a_journal_there(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "L-w-W-1"
    folder.mkdir(parents=True)
    hold = Hold(sites_of(tmp_path / "HOLD"))
    hold.create("L-w-W-1", 1)
    assert hold.state_for_campaign(tmp_path)[0] is HoldState.FOREIGN
    register_window(tmp_path, "L-w-W-1", folder)
    assert window_folder(tmp_path, "L-w-W-1") is None
    Journal(folder).note("window", "begin")
    assert hold.state_for_campaign(tmp_path)[0] is HoldState.OWN


def test_the_newest_window_is_the_one_of_the_last_epoch_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    for epoch, name in enumerate(("b", "c", "a"), start=1):
        register_window(tmp_path, name, tmp_path / name, epoch)
    # The clock jumped back before the last one was written.
    os.utime(tmp_path / "windows" / "a.json", (1.0, 1.0))
    assert windows(tmp_path) == ["b", "c", "a"]


@pytest.mark.parametrize("content", ["{torn", "[]", "null", '{"epoch": "x", "pid": null}'])
def test_a_damaged_lease_record_is_lost_for_its_holder_and_stops_no_look(
    content: str, tmp_path: Path
) -> None:
    holder = Lease(tmp_path)
    holder.acquire("window-1", 60.0)
    (tmp_path / "lease.json").write_text(content)
    assert Lease(tmp_path).held_by() is not None
    with pytest.raises(RefusedByWorld, match="lease lost"):
        holder.check()
    holder.release()
    Lease(tmp_path).acquire("window-2", 60.0)


@pytest.mark.parametrize("key", ["window", "deadline", "keeper_pid"])
def test_an_intent_with_a_value_of_another_type_counts_as_unreadable(
    key: str, tmp_path: Path
) -> None:
    record = {**intent().to_json(), key: None}
    (tmp_path / "intent.json").write_text(json.dumps(record))
    with pytest.raises(UsageError, match=rf"{key} is None.*dsv41 recover --campaign "):
        read_intent(tmp_path)


@pytest.mark.parametrize("owner", ["../x", "a/b", "", ".", ".."])
def test_an_owner_that_is_a_path_is_foreign(owner: str, tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("{}\n")
    assert window_folder(tmp_path / "campaign", owner) is None


def test_the_intent_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert read_intent(tmp_path) is None
    write_intent(tmp_path, intent())
    assert read_intent(tmp_path) == intent()
    clear_intent(tmp_path)
    clear_intent(tmp_path)
    assert read_intent(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": "dsv41-intent-v9"}', "\xff"])
def test_an_unreadable_intent_counts_as_present(content: str, tmp_path: Path) -> None:
    (tmp_path / "intent.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match="production may be down"):
        read_intent(tmp_path)


def test_a_step_is_journalled_before_and_after_and_its_failure_too(tmp_path: Path) -> None:
    seen: list[str] = []
    journal = Journal(tmp_path, lambda name, event: seen.append(f"{name}:{event}"))
    with journal.step("hold") as detail:
        detail["owner"] = "w"
    with pytest.raises(ValueError, match="no"), journal.step("stop"):
        raise ValueError("no")
    lines = [(x["step"], x["event"]) for x in journal.lines()]
    assert lines == [("hold", "begin"), ("hold", "end"), ("stop", "begin"), ("stop", "fail")]
    assert seen == ["hold:begin", "hold:end", "stop:begin", "stop:fail"]
    assert journal.lines()[3]["reason"] == "ValueError: no"
    assert journal.begun("st") == ["stop"]


def test_a_tolerant_journal_never_stops_an_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path)
    journal.tolerant = True

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    done = []
    with journal.step("restore-start"):
        done.append(True)
    monkeypatch.undo()
    assert done
    assert len(journal.lost) == 2
    assert boottime() > 0
