"""The watchdog: an alert is told, told again, and never lost; one recovery; nothing in the gap."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair import FIRST, Pair, make_pair, simulated

from pytest_dsv41.cli import main
from pytest_dsv41.lifecycle import watchdog
from pytest_dsv41.lifecycle.campaign import read_campaign
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.watchdog import pass_once, unit_files


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with simulated(monkeypatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        yield make_pair(tmp_path)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(watchdog.syslog, "syslog", lambda _level, line: lines.append(line))
    return lines


def told_by_command(pair: Pair, code: str = "") -> Path:
    """A campaign.toml whose alert command appends to a file, and that file."""
    told = pair.root / "told.jsonl"
    script = f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read()); {code}"
    words = json.dumps([sys.executable, "-c", script])
    (pair.campaign / "campaign.toml").write_text(
        f"alert_command = {words}\nalert_repeat_hours = 2\n"
    )
    return told


def production_dies(pair: Pair) -> None:
    pair.run()
    pair.target().stop_production()


def test_an_alert_goes_to_a_file_the_journal_and_the_users_command(
    pair: Pair, journal: list[str]
) -> None:
    told = told_by_command(pair)
    production_dies(pair)
    seen = pass_once(pair.campaign)
    assert (seen.answer, seen.exit_code, seen.told) == ("ALERT", 20, True)
    record = json.loads((pair.campaign / "alert.json").read_text())
    assert record["why"] == "production is down, not by us"
    assert record["command"] == "start production by hand"
    assert [json.loads(line)["key"] for line in told.read_text().splitlines()] == [record["key"]]
    assert len(journal) == 1
    assert "production is down, not by us; next: start production by hand" in journal[0]


def test_a_standing_alert_is_told_once_and_again_after_the_hours(
    pair: Pair, journal: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = told_by_command(pair)
    production_dies(pair)
    now = 1000.0
    clock = {"now": now}
    monkeypatch.setattr(watchdog, "boottime", lambda: clock["now"])
    for seconds, times in ((0, 1), (60, 1), (7199, 1), (7200, 2), (7260, 2), (14400, 3)):
        clock["now"] = now + seconds
        pass_once(pair.campaign)
        assert len(told.read_text().splitlines()) == times, seconds
    assert len(journal) == 3
    pair.target().start_production()
    assert pass_once(pair.campaign).answer == "CLEAN"
    assert not (pair.campaign / "alert.json").exists()
    pair.target().stop_production()
    assert pass_once(pair.campaign).told
    assert len(told.read_text().splitlines()) == 4


def test_a_command_that_failed_is_tried_again_at_the_next_pass(
    pair: Pair, journal: list[str]
) -> None:
    told = told_by_command(pair, "sys.exit('no route to the mail')")
    production_dies(pair)
    first = pass_once(pair.campaign)
    assert first.alert is not None
    assert first.alert["problems"] == ["alert_command: exit 1: no route to the mail"]
    assert pass_once(pair.campaign).told
    assert len(told.read_text().splitlines()) == 2
    assert len(journal) == 2


def test_the_healthy_gap_between_two_windows_starts_nothing(pair: Pair, journal: list[str]) -> None:
    pair.run(FIRST)
    events = len(pair.world.events())
    seen = pass_once(pair.campaign)
    assert (seen.answer, seen.exit_code, seen.recovered) == ("CHAIN WAITING", 1, None)
    done = [e["what"] for e in pair.world.events()[events:]]
    reads = ("read /hold/HOLD", "port 8000", "port 8001", "identity")
    assert set(done) <= set(reads), done
    assert not list(pair.campaign.glob("CHAIN-ABORT-*"))
    assert journal == []


def test_a_stopped_chain_is_recovered_once_and_by_nobody_beside_somebody_at_work(
    pair: Pair, journal: list[str]
) -> None:
    pair.run(FIRST)
    pair.world.inject("reboot", "alpha")
    lease = Lease(pair.campaign)
    lease.acquire("somebody", 60.0)
    assert pass_once(pair.campaign).answer == "IN PROGRESS"
    lease.release()
    seen = pass_once(pair.campaign)
    assert seen.recovered is not None
    assert (seen.recovered.code, seen.answer, seen.exit_code) == (0, "CLEAN", 0)
    pair.nothing_is_left()
    assert journal == []


def test_a_recovery_that_failed_is_an_alert_with_the_next_command(
    pair: Pair, journal: list[str]
) -> None:
    pair.run(FIRST)
    pair.world.inject("reboot", "alpha")
    pair.world.arm("hang", "start-production")
    seen = pass_once(pair.campaign)
    assert seen.recovered is not None
    assert (seen.recovered.code, seen.answer, seen.exit_code) == (3, "ALERT", 20)
    assert "next: dsv41 recover --campaign" in journal[0]
    again = pass_once(pair.campaign)
    assert (again.recovered, again.told) == (None, False)


def test_facts_that_cannot_be_read_are_an_alert_too(pair: Pair, journal: list[str]) -> None:
    (pair.campaign / "campaign.toml").write_text("coordinator = 7\n")
    seen = pass_once(pair.campaign)
    assert (seen.answer, seen.exit_code) == ("ALERT", 21)
    assert "coordinator: Input should be a valid string" in journal[0]


@pytest.mark.parametrize("name", ["plain", 'a "b" $HOME %h \\x', "-rf", "naïve 🦊"])
def test_the_units_carry_the_campaigns_path_as_it_is(name: str, tmp_path: Path) -> None:
    campaign = tmp_path / name
    (service, timer) = unit_files(campaign).values()
    line = next(x for x in service.splitlines() if x.startswith("ExecStart="))
    last = line.rpartition(' "--campaign" ')[2]
    # systemd's own rules: quotes, backslashes, %% and $$ (systemd.service, "Command lines").
    text = last[1:-1].replace("%%", "%").replace("$$", "$")
    assert text.replace('\\"', '"').replace("\\\\", "\\") == str(campaign)
    assert "OnUnitInactiveSec=60" in timer
    # A production that a pass has started on this machine does not end with the pass.
    assert "KillMode=process" in service.splitlines()


def test_install_writes_the_units_and_a_pass_runs_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    words = ["watchdog", "--campaign", str(campaign)]
    assert main([*words, "install", "--dir", str(tmp_path / "units")]) == 0
    assert "systemctl --user enable --now dsv41-watchdog-" in capsys.readouterr().out
    assert len(list((tmp_path / "units").iterdir())) == 2
    # Before the first window nothing of ours is open, and no machine is known.
    assert main(words) == 0
    assert capsys.readouterr().out == "CLEAN\n"
    assert main(["status", "--campaign", str(campaign)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("CLEAN: no window has run here: nothing of ours is open")
    assert "production  not looked at: no window has run here" in told
    assert "serves" not in told


def test_install_with_keepers_has_the_campaign_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    settings = campaign / "campaign.toml"
    words = ["watchdog", "--campaign", str(campaign), "--dir", str(tmp_path / "units")]
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert main([*words, "install", "--keepers"]) == 4
    assert "systemd-run is not installed here" in capsys.readouterr().err
    assert not settings.exists()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    settings.write_text('coordinator = "night"')
    settings.chmod(0o640)
    for _ in range(2):
        assert main([*words, "install", "--keepers"]) == 0
        assert settings.read_text() == 'coordinator = "night"\nkeeper_units = true\n'
    assert settings.stat().st_mode & 0o777 == 0o640
    assert read_campaign(campaign).keeper_units
    settings.write_text("keeper_units = false\n")
    assert main([*words, "install", "--keepers"]) == 4
    assert "it says keeper_units = false" in capsys.readouterr().err
    assert main([*words, "--keepers"]) == 4
    assert "goes with install" in capsys.readouterr().err
