"""Facts that somebody damaged, forged or swapped: one answer, no traceback, nothing lost."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from hold_sites import sites_of

from pytest_dsv41.cli import main
from pytest_dsv41.durable import dump_json, from_record
from pytest_dsv41.errors import CommandFailed, StaleEpoch, UsageError
from pytest_dsv41.hosts import CommandLog, Fence, LocalHost, Probe
from pytest_dsv41.lifecycle.hold import Hold, HoldState
from pytest_dsv41.lifecycle.intent import Intent, read_intent, write_intent
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.marker import Marker, here, read_marker, write_marker
from pytest_dsv41.lifecycle.observer import Facts, Presence, observe
from pytest_dsv41.lifecycle.record import (
    TargetRecord,
    register_window,
    window_folder,
    windows,
)
from pytest_dsv41.lifecycle.recover import look
from pytest_dsv41.lifecycle.smoke_start import load_backend, smoke
from pytest_dsv41.lifecycle.watchdog import pass_once

OWNER = "chain-20260101T000000Z-0000abcd"
DEEP = "[" * 100_000
HUGE = 10**400


def intent(folder: Path, **changes: Any) -> Intent:
    values: dict[str, Any] = {
        "window": "L-w-W-1",
        "folder": str(folder),
        "phase": "DOWN",
        "epoch": 7,
        "host": here(),
        "deadline": 1.0,
        "rollback": "/r",
        "rollback_sha256": "0" * 64,
        "keeper_pid": 1,
        "keeper_started": 1.0,
    }
    return Intent(**{**values, **changes})


def marker(folder: Path) -> Marker:
    return Marker(
        placeholder_owner=OWNER,
        window="L-w-W-1",
        folder=str(folder),
        epoch=7,
        host=here(),
        deadline=1e12,
        snapshot="/r",
        snapshot_sha256="0" * 64,
        hosts={},
    )


def record(window: str, campaign: Path) -> TargetRecord:
    return TargetRecord(
        window=window,
        factory="pytest_dsv41.targets:local_target",
        table={},
        base=str(campaign),
        campaign=str(campaign),
        seed=1,
        limits={},
        variables={},
        state={},
        commit="c" * 40,
        date="20260101",
    )


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", ["intent.json", "marker.json"])
@pytest.mark.parametrize("raw", [DEEP, "", "null", "[]", '{"schema": 1}', "\xff"])
def test_a_fact_that_cannot_be_read_is_there_and_says_so(
    name: str, raw: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(raw, encoding="latin-1")
    read: Callable[[Path], object] = read_intent if name == "intent.json" else read_marker
    with pytest.raises(UsageError, match=f"{name}: .*unreadable"):
        read(tmp_path)
    # No window tells what the machines are: production is not seen, and never called served.
    assert look(tmp_path).exit_code == 20


@pytest.mark.parametrize(
    "change", [{"deadline": HUGE}, {"keeper_pid": 1.5}, {"hosts": {"a": 1}}, {"epoch": True}]
)
def test_a_number_or_text_of_another_kind_makes_the_intent_unreadable(
    change: dict[str, Any], tmp_path: Path
) -> None:
    write_intent(tmp_path, intent(tmp_path))
    edit(tmp_path / "intent.json", **change)
    with pytest.raises(UsageError, match=next(iter(change))):
        read_intent(tmp_path)


def test_a_keeper_with_an_absurd_pid_does_not_live(tmp_path: Path) -> None:
    write_intent(tmp_path, intent(tmp_path, keeper_pid=-1))
    assert not look(tmp_path).facts.keeper_alive


def test_a_halted_keeper_brings_nothing_back_and_counts_as_none(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            started = psutil.Process(child.pid).create_time()
            write_intent(tmp_path, intent(tmp_path, keeper_pid=child.pid, keeper_started=started))
            assert look(tmp_path).facts.keeper_alive
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            assert not look(tmp_path).facts.keeper_alive
        finally:
            child.kill()


def test_a_record_is_built_from_its_own_fields_alone() -> None:
    good = dataclasses.asdict(intent(Path("/f")))
    assert from_record(Intent, good) == intent(Path("/f"))
    for bad in ([], {**good, "more": 1}, {k: v for k, v in good.items() if k != "window"}):
        with pytest.raises(ValueError, match=r"object|more|window"):
            from_record(Intent, bad)


@pytest.mark.parametrize(
    "lose", [lambda path: path.unlink(), lambda path: path.write_text(DEEP), "epoch"]
)
@pytest.mark.parametrize("where", ["intent", "marker", "windows", "journal"])
def test_a_lost_lease_never_begins_again_at_an_epoch_that_hosts_refuse(
    lose: Any, where: str, tmp_path: Path
) -> None:
    folder = tmp_path / "L-w-W-1"
    folder.mkdir()
    lease = Lease(tmp_path)
    lease.acquire("somebody", 60.0)
    lease.release()
    seen = 7
    if where == "intent":
        write_intent(tmp_path, intent(folder))
    elif where == "marker":
        write_marker(tmp_path, marker(folder))
    elif where == "windows":
        register_window(tmp_path, "L-w-W-1", folder, seen)
    else:
        register_window(tmp_path, "L-w-W-1", folder, 2)
        line = {"step": "recover", "event": "begin", "epoch": seen}
        (folder / "journal.jsonl").write_text(json.dumps(line) + "\n")
    if lose == "epoch":
        edit(tmp_path / "lease.json", epoch=HUGE)
    else:
        lose(tmp_path / "lease.json")
    host = LocalHost(CommandLog(tmp_path / "cmd"))
    hold = str(tmp_path / "HOLD")
    host.write(hold, "x", fence=Fence.beside(hold, seen))
    with pytest.raises(StaleEpoch):
        host.remove(hold, fence=Fence.beside(hold, 1))
    again = Lease(tmp_path)
    again.acquire("recover", 60.0)
    host.remove(hold, fence=Fence.beside(hold, again.epoch))
    again.check()
    again.release()


def test_who_takes_the_lease_removes_what_a_killed_writer_left_and_nothing_else(
    tmp_path: Path,
) -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    torn = tmp_path / f".intent.json.{gone.pid}.0123abcd.tmp"
    kept = [
        tmp_path / f".intent.json.{os.getpid()}.0123abcd.tmp",
        tmp_path / ".somebody.tmp",
        tmp_path / f".x.{gone.pid}.tmp",
    ]
    for path in (torn, *kept):
        path.write_text("")
    lease = Lease(tmp_path)
    lease.acquire("window", 60.0)
    lease.release()
    assert not torn.exists()
    assert all(path.exists() for path in kept)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "put",
    [pipe, endless, dangling, Path.mkdir, lambda p: p.write_text(DEEP)],
    ids=["pipe", "endless", "dangling", "folder", "deep"],
)
def test_whatever_lies_at_the_holds_place_is_a_hold_and_stays(
    put: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "HOLD"
    put(path)
    hold = Hold(sites_of(path))
    assert hold.owner()[0] is HoldState.UNREADABLE
    assert "it is not touched" in hold.refusal()
    assert os.path.lexists(path)


def test_a_hold_whose_owner_no_file_can_be_named_after_is_foreign(tmp_path: Path) -> None:
    path = tmp_path / "HOLD"
    for owner in ("x" * 100_000, "../..", "\ud800\n-rf", "a\0b"):
        path.write_text(json.dumps({"owner": owner}))
        assert Hold(sites_of(path)).state_for_campaign(tmp_path)[0] is HoldState.FOREIGN


def test_a_read_of_what_is_no_file_is_the_hosts_answer(tmp_path: Path) -> None:
    host = LocalHost(CommandLog(tmp_path / "cmd"))
    pipe(tmp_path / "pipe")
    with pytest.raises(CommandFailed, match="not a file"):
        host.read(str(tmp_path / "pipe"))
    assert host.read(f"/proc/{os.getpid()}/cgroup") is not None


def test_a_lost_registration_hides_no_window_of_this_campaign(tmp_path: Path) -> None:
    for name, campaign in (("L-w-W-1", tmp_path), ("L-moved-W-1", tmp_path / "another")):
        folder = tmp_path / name
        folder.mkdir()
        record(name, campaign).write(folder)
        (folder / "journal.jsonl").write_text("")
    assert windows(tmp_path) == ["L-w-W-1"]
    register_window(tmp_path, "L-w-W-2", tmp_path / "L-w-W-2", 3)
    (tmp_path / "windows" / "odd.json").write_text('{"epoch": Infinity}')
    assert windows(tmp_path)[0] == "L-w-W-1"
    assert windows(tmp_path)[-1] == "L-w-W-2"
    assert window_folder(tmp_path, "L-w-W-1") == tmp_path / "L-w-W-1"


def test_without_a_window_that_tells_its_machines_production_is_not_seen(tmp_path: Path) -> None:
    register_window(tmp_path, "L-w-W-1", tmp_path / "gone", 1)
    assert look(tmp_path).exit_code == 20
    write_marker(tmp_path, marker(tmp_path / "gone"))
    assert look(tmp_path).exit_code == 20


@pytest.mark.parametrize("raw", [DEEP, '{"schema": 1}', '{"schema": 1, "limits": []}', "[]"])
def test_a_damaged_target_record_is_an_answer_of_every_command(
    raw: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "L-w-W-1"
    folder.mkdir()
    (folder / "target.json").write_text(raw)
    (folder / "journal.jsonl").write_text("")
    write_marker(tmp_path, marker(folder))
    (tmp_path / "campaign.toml").write_text('coordinator = "me"\n')
    monkeypatch.setenv("WINDOW_COORDINATOR", "me")
    campaign = ("--campaign", str(tmp_path))
    assert main(["status", *campaign]) == 20
    assert main(["chain", "status", *campaign]) == 20
    assert "placeholder  cannot tell: " in capsys.readouterr().out
    assert main(["chain", "gate", "--prev", str(folder), "--wait", "0", *campaign]) == 3
    assert main(["chain", "abort", *campaign]) == 4
    assert main(["watchdog", *campaign]) == 20
    assert read_marker(tmp_path) is not None


def test_an_unreadable_marker_names_the_command_that_goes_on(tmp_path: Path) -> None:
    facts = Facts(marker=Presence.UNREADABLE, production=Probe.DOWN)
    status = dataclasses.replace(look(tmp_path), observation=observe(facts))
    path = tmp_path / "marker.json"
    assert status.command.startswith(f"mv {path} {path}.unreadable && dsv41 status --campaign ")


def alert(campaign: Path, *words: str) -> dict[str, Any]:
    """The alert of a pass over a campaign whose marker is overdue, told by `words`."""
    write_marker(campaign, marker(campaign / "gone"))
    (campaign / "campaign.toml").write_text(f"alert_command = {json.dumps(words)}\n")
    found = pass_once(campaign).alert
    assert found is not None
    return found


def test_an_alert_command_may_leave_a_child_and_say_too_much(tmp_path: Path) -> None:
    # The child keeps the command's output open, longer than a command may take.
    said = tmp_path / "child"
    flood = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"pathlib.Path({str(said)!r}).write_text(str(child.pid))\n"
        "sys.stdout.write('x' * 10**6); sys.stderr.write('y' * 10**6); sys.exit(3)"
    )
    found = alert(tmp_path, sys.executable, "-c", flood)
    os.kill(int(said.read_text()), signal.SIGKILL)
    (problem,) = found["problems"]
    assert problem.startswith("alert_command: exit 3: yyy")
    assert len(problem) < 400


@pytest.mark.parametrize("word", ["a\0b", "", "/nowhere/mail"])
def test_an_alert_command_that_cannot_be_run_is_told_at_the_next_pass(
    word: str, tmp_path: Path
) -> None:
    found = alert(tmp_path, word)
    assert found["told"] is False
    assert found["problems"][0].startswith("alert_command: ")


@pytest.mark.parametrize(
    "raw", [DEEP, "[]", '{"told_at": [], "times": "x"}', '{"key": 1, "told": true}']
)
def test_a_damaged_alert_is_told_again(raw: str, tmp_path: Path) -> None:
    (tmp_path / "alert.json").write_text(raw)
    assert alert(tmp_path, "true")["told"] is True
    assert json.loads((tmp_path / "alert.json").read_text())["times"] == 1


class Broken:
    """A backend of the user's own, full of faults."""

    def __init__(self) -> None:
        self.stopped = 0

    def start(self, _arm: str, _deadline_s: float) -> None:
        raise KeyError("arm")

    def models(self, _arm: str) -> tuple[str, ...]:
        return ()

    def greedy(self, _arm: str, _prompt: str, _deadline_s: float) -> str:
        return ""

    def rounds(self, *_: object) -> float:
        return 0.0

    def stop(self, _arm: str) -> None:
        self.stopped += 1


def test_any_fault_of_a_smokes_backend_is_a_failed_step_and_the_arm_is_stopped() -> None:
    backend = Broken()
    found = smoke(backend, "x")
    assert (found.passed, found.failed) == (False, "start")
    assert backend.stopped == 1


def leave(*_: object) -> None:
    sys.exit(3)


def nothing(*_: object) -> None:
    return None


@pytest.mark.parametrize(("factory", "why"), [("leave", "leave: 3"), ("nothing", "lacks one")])
def test_a_backend_that_is_none_is_refused_before_anything_is_started(
    factory: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=why):
        load_backend(f"{__name__}:{factory}", tmp_path, tmp_path)


@pytest.mark.parametrize("text", ['coordinator = "me', "wrong = 1", "alert_repeat_hours = -1"])
def test_a_slip_in_the_settings_hides_nothing_from_the_watchdog(text: str, tmp_path: Path) -> None:
    (tmp_path / "campaign.toml").write_text(text)
    found = pass_once(tmp_path)
    assert found.exit_code == 21
    assert found.alert is not None
    assert "the settings count as not written" in found.alert["why"]
    write_marker(tmp_path, marker(tmp_path / "gone"))
    found = pass_once(tmp_path)
    assert found.exit_code == 20
    assert found.alert is not None
    assert found.alert["why"].startswith("cannot see production, and a window of ours is open")


@pytest.mark.parametrize("wait", ["nan", "inf", "-1"])
def test_a_wait_is_a_number_of_seconds(
    wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "campaign.toml").write_text('coordinator = "me"\n')
    monkeypatch.setenv("WINDOW_COORDINATOR", "me")
    words = ["chain", "gate", "--campaign", str(tmp_path), "--prev", "x", f"--wait={wait}"]
    assert main(words) == 4
    assert "--wait" in capsys.readouterr().err


def test_a_recovery_never_writes_into_a_folder_that_holds_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "campaign.toml").write_text('coordinator = "me"\n')
    monkeypatch.setenv("WINDOW_COORDINATOR", "me")
    taken = tmp_path / "L-w-W-1"
    taken.mkdir()
    (taken / "summary.json").write_text("{}")
    assert main(["chain", "abort", "--campaign", str(tmp_path), "--out", str(taken)]) == 4
    assert "something lies there" in capsys.readouterr().err
    assert (taken / "summary.json").read_text() == dump_json({})


def test_the_end_of_a_chain_that_was_never_this_campaigns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "campaign.toml").write_text('coordinator = "me"\n')
    monkeypatch.setenv("WINDOW_COORDINATOR", "me")
    assert main(["chain", "end", "--campaign", str(tmp_path), "--owner", OWNER]) == 4
    assert "no chain of this campaign" in capsys.readouterr().err
