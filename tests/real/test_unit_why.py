"""Four causes that look alike from outside, on real units: refusal, crash, loop, configuration."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.hosts import CommandLog
from pytest_dsv41.unit.why import Why, why
from tests.lab.lab import Lab
from tests.lab.units import Units

pytestmark = pytest.mark.slow

REFUSAL = "ERROR: ttm pages cap is 125988 MiB, the pinned ledger needs >= 150000"
FAST = "Restart=always\nRestartSec=20ms\n"
FOR_EVER = "StartLimitIntervalSec=0\n"
LIMIT = "StartLimitIntervalSec=60\nStartLimitBurst=3\n"


@pytest.fixture
def units(lab: Lab, tmp_path: Path) -> Iterator[Units]:
    units = Units(lab, CommandLog(tmp_path / "cmd", synced=False))
    try:
        yield units
    finally:
        units.clean()


@pytest.fixture
def start(units: Units) -> Callable[..., str]:
    """Write a unit of a name of its own, start it, and wait for `until`."""
    count = iter(range(100))

    def start(service: str, *, unit: str = "", until: Callable[[str], bool] | None = None) -> str:
        name = f"why{time.monotonic_ns()}-{next(count)}.service"
        text = f"[Unit]\n{unit}[Service]\nType=exec\n{service}"
        units.write(f"/run/systemd/system/{name}", text)
        units.reload()
        units.start(name, check=False)
        limit = time.monotonic() + 30.0
        while until is not None and not until(name):
            assert time.monotonic() < limit, units.run("systemctl", "status", name, check=False)
            time.sleep(0.02)
        # What a process wrote is in the journal once journald has been asked to take it all in.
        units.run("journalctl", "--sync")
        return name

    return start


def restarted(units: Units, times: int) -> Callable[[str], bool]:
    return lambda name: int(units.show(name, "NRestarts")) >= times


def failed(units: Units) -> Callable[[str], bool]:
    return lambda name: units.show(name, "ActiveState") == "failed"


def test_a_preflight_refusal_in_a_restart_loop(units: Units, start: Callable[..., str]) -> None:
    gate = f"ExecStartPre=/bin/sh -c 'echo \"{REFUSAL}\" >&2; exit 2'\n"
    name = start(
        f"{gate}ExecStart=/bin/sleep 1000\n{FAST}", unit=FOR_EVER, until=restarted(units, 3)
    )
    told = why(units.host, name)
    assert (told.cause, told.looping) == ("PREFLIGHT REFUSAL", True)
    assert told.restarts >= 3
    assert told.lines == (REFUSAL,)
    assert "ExecStartPre ended by exit code 2" in told.said
    units.run("systemctl", "stop", name)
    units.run("systemctl", "reset-failed", name, check=False)
    stopped = why(units.host, name)
    assert stopped.cause == "STOPPED"
    assert "before that, ExecStartPre ended by exit code 2" in stopped.said


def test_a_refusal_by_the_servers_own_script(units: Units, start: Callable[..., str]) -> None:
    """As on the document's machine: the serve script sources the gate and exits at once."""
    script = f"echo '{REFUSAL}' >&2; exit 1"
    name = start(
        f'ExecStart=/bin/sh -c "{script}"\n{FAST}', unit=FOR_EVER, until=restarted(units, 4)
    )
    told = why(units.host, name)
    assert (told.cause, told.looping) == ("PREFLIGHT REFUSAL", True)
    assert told.lines == (REFUSAL,)
    assert "the same words each time" in told.said


@pytest.mark.parametrize("limited", [False, True])
def test_a_refusal_once_and_up_to_the_start_limit(
    limited: bool, units: Units, start: Callable[..., str]
) -> None:
    gate = "ExecStartPre=/bin/sh -c 'echo no room; exit 7'\nExecStart=/bin/sleep 1000\n"
    name = start(gate + (FAST if limited else ""), unit=LIMIT, until=failed(units))
    told = why(units.host, name)
    assert (told.cause, told.looping) == ("PREFLIGHT REFUSAL", limited)
    assert told.lines == ("no room",)
    assert ("start limit" in told.said) == limited
    # systemd counts the restart that it then refuses, or does not: it is its own number.
    assert told.restarts == int(units.show(name, "NRestarts"))


def test_conditions_are_refusals_too(units: Units, start: Callable[..., str]) -> None:
    name = start("ExecStart=/bin/sleep 9\n", unit="ConditionPathExists=/no/such/payload\n")
    told = why(units.host, name)
    assert told.cause == "PREFLIGHT REFUSAL"
    assert "ConditionPathExists=/no/such/payload" in told.said
    # One that a target wants is remembered with its conditions.
    units.link(f"/run/systemd/system/multi-user.target.wants/{name}", f"/run/systemd/system/{name}")
    units.reload()
    units.start(name)
    assert units.show(name, "ConditionResult") == "no"
    assert "ConditionPathExists=/no/such/payload" in why(units.host, name).said
    name = start(
        "ExecCondition=/bin/sh -c 'echo not on this card; exit 1'\nExecStart=/bin/sleep 9\n"
    )
    told = why(units.host, name)
    assert told.cause == "PREFLIGHT REFUSAL"
    assert told.lines == ("not on this card",)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("kill -SEGV $$", "SIGSEGV"),
        ("kill -KILL $$", "SIGKILL"),
        ("sleep 1.2; exit 3", "exit code 3 after 1."),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_crash(ending: str, said: str, units: Units, start: Callable[..., str]) -> None:
    script = f"echo loading; echo out of memory in layer 7; {ending.replace('$$', '$$$$')}"
    name = start(f"ExecStart=/bin/sh -c '{script}'\n", until=failed(units))
    told = why(units.host, name)
    assert (told.cause, told.looping, told.restarts) == ("CRASH", False, 0)
    assert said in told.said
    assert told.lines == ("loading", "out of memory in layer 7")


def test_a_boot_loop_while_it_turns_and_after_the_limit(
    units: Units, start: Callable[..., str]
) -> None:
    crash = "ExecStart=/bin/sh -c 'echo tick; kill -ABRT $$$$'\n"
    name = start(crash + FAST, unit=FOR_EVER, until=restarted(units, 3))
    told = why(units.host, name)
    assert (told.cause, told.looping) == ("BOOT LOOP", True)
    assert told.restarts >= 3
    assert "SIGABRT" in told.said
    units.run("systemctl", "stop", name)

    name = start(crash + FAST, unit=LIMIT, until=failed(units))
    told = why(units.host, name)
    assert (told.cause, told.looping) == ("BOOT LOOP", True)
    assert "start limit" in told.said


def test_a_loop_that_is_up_for_a_moment_and_one_that_ends_without_failing(
    units: Units, start: Callable[..., str]
) -> None:
    name = start(
        "ExecStart=/bin/sh -c 'sleep 0.3; echo gone; exit 5'\nRestart=always\nRestartSec=10ms\n",
        unit=FOR_EVER,
        until=lambda n: restarted(units, 2)(n) and units.show(n, "ActiveState") == "active",
    )
    told = why(units.host, name)
    assert told.looping
    assert told.fault
    units.run("systemctl", "stop", name)
    name = start(f"ExecStart=/bin/true\n{FAST}", unit=FOR_EVER, until=restarted(units, 3))
    told = why(units.host, name)
    assert (told.cause, told.looping) == ("BOOT LOOP", True)


@pytest.mark.parametrize(
    ("service", "line"),
    [
        ("ExecStart=/bin/true\nExecStart=/bin/false\n", "more than one ExecStart"),
        ("ExecStart=/no/such/server --port 1\n", "/no/such/server"),
        ("User=no-such-user\nExecStart=/bin/sleep 9\n", "user"),
        ("WorkingDirectory=/no/such/folder\nExecStart=/bin/sleep 9\n", "CHDIR"),
        ("EnvironmentFile=/no/such/shape.env\nExecStart=/bin/sleep 9\n", "environment files"),
        ("ExecStartPre=/no/such/gate\nExecStart=/bin/sleep 9\n", "/no/such/gate"),
        ("Restart=always\nRestartSec=20ms\nExecStart=/no/such/server\n", "/no/such/server"),
    ],
)
def test_a_wrong_configuration(
    service: str, line: str, units: Units, start: Callable[..., str]
) -> None:
    name = start(service, unit=LIMIT)
    told = why(units.host, name)
    assert told.cause == "WRONG CONFIGURATION", told
    assert any(line in quoted for quoted in told.lines), told
    assert told.fault


def test_units_that_are_not_there_or_masked(units: Units) -> None:
    told = why(units.host, "no-such-unit")
    assert told.cause == "WRONG CONFIGURATION"
    assert "not-found" in told.said
    units.link("/etc/systemd/system/masked.service", "/dev/null")
    units.reload()
    assert "masked" in why(units.host, "masked").said


def test_what_runs_and_what_was_stopped(units: Units, start: Callable[..., str]) -> None:
    name = start("ExecStart=/bin/sleep 1000\n")
    assert why(units.host, name) == Why("RUNNING", False, 0, "active (running)", ())
    units.run("systemctl", "stop", name)
    assert why(units.host, name) == Why("STOPPED", False, 0, "inactive (dead)", ())
    name = start("ExecStart=/bin/sleep 1000\nRestart=on-failure\nRestartSec=10ms\n")
    pid = int(units.show(name, "MainPID"))
    units.run("kill", f"-{signal.SIGKILL.value}", str(pid))
    limit = time.monotonic() + 20.0
    while units.show(name, "MainPID") in ("0", str(pid)):
        assert time.monotonic() < limit
        time.sleep(0.02)
    told = why(units.host, name)
    assert (told.cause, told.restarts) == ("RUNNING", 1)
    assert "1 automatic restart before" in told.said


def test_the_command_quotes_escaped_lines(
    units: Units, lab: Lab, start: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    # systemd halves the backslashes, printf takes the rest: an escape, and a bidi override.
    said = r"\\033[2Jred\\033[0m \\342\\200\\256abc"
    evil = f"ExecStartPre=/usr/bin/printf '{said}'\nExecStartPre=/bin/false"
    name = start(f"{evil}\nExecStart=/bin/sleep 9\n", until=failed(units))
    words = ["unit", "why", name, "--host", f"root@{lab.address('alpha')}"]
    words += ["--key", str(lab.key), "--known-hosts", str(lab.known_hosts)]
    assert main(words) == 2
    shown = capsys.readouterr().out
    assert "PREFLIGHT REFUSAL" in shown
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "red" in shown
    assert main([*words, "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["cause"], report["restarts"]) == ("PREFLIGHT REFUSAL", 0)
    name = start("ExecStart=/bin/sleep 1000\n")
    assert main([*words[:2], name, *words[3:]]) == 0
    assert "RUNNING" in capsys.readouterr().out
