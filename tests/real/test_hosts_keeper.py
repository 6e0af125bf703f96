"""What outlives the cgroup of a window on a real systemd host: keepers as units, and recoveries.

The whole session runs on one lab host, in a scope that is killed as a container's would be.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.hosts import CommandLog, Probe
from pytest_dsv41.hosts.scopes import end_scopes, live_scopes, run_scoped
from pytest_dsv41.hosts.ssh import SshHost
from tests.lab.lab import Lab
from tests.lifecycle.test_a_chain_of_real_sessions import WINDOW

pytestmark = pytest.mark.slow

FOLDER = "/var/lib/dsv41-keeper"
CAMPAIGN = f"{FOLDER}/campaign"
PORT = 8000
SERVING, SESSION = "dsv41w-keeper-1-serving.scope", "dsv41w-keeper-1-session.scope"
PATIENCE_S = 90.0


class Machine:
    """A lab host on which a campaign with a serving production lies."""

    def __init__(self, host: SshHost) -> None:
        self.host = host

    def sh(self, script: str, *words: str, check: bool = True) -> Any:
        return self.host.run(
            ["sh", "-c", f"cd {FOLDER} && {script}", "sh", *words],
            name="sh",
            deadline_s=PATIENCE_S,
            check=check,
        )

    def python(self, *words: str, check: bool = True) -> Any:
        return self.sh('exec "$@"', sys.executable, "-m", *words, check=check)

    def in_scope(self, unit: str, script: str) -> None:
        """Start it in a pane of the scope's own tmux, and come back."""
        pane = ("tmux", "new-session", "-d", "-s", "it", "--", "sh", "-c")
        words = (*pane, f"cd {FOLDER}; {script}")
        run_scoped(self.host, unit, words, name="scope", deadline_s=20.0, longest_s=600.0)

    def wait_for(self, path: str) -> bytes:
        limit = time.monotonic() + PATIENCE_S
        while (data := self.host.read(path)) is None:
            assert time.monotonic() < limit, f"{path}: {self.output()}"
            time.sleep(0.05)
        return data

    def output(self) -> str:
        said = self.sh(f"cat {FOLDER}/session.log {CAMPAIGN}/*/keeper.log", check=False)
        return str(said.stdout)

    def session(self, *words: str, at: str = "") -> None:
        """Start a window in a scope; with `at`, wait until it stands at that step."""
        argv = [
            *(sys.executable, "-m", "pytest", f"--window={CAMPAIGN}/chain.toml"),
            *(f"--window-out={CAMPAIGN}", f"--rootdir={FOLDER}", "-p", "no:cacheprovider"),
            *("--window-seed=7", *(("-p", "lab_fault") if at else ()), *words),
        ]
        plugins = Path(__file__).parents[1] / "lab"
        self.in_scope(
            SESSION,
            f"LAB_FAULT_AT={at} LAB_FAULT_FOLDER={FOLDER} PYTHONPATH={shlex.quote(str(plugins))} "
            f"WINDOW_COORDINATOR=night {shlex.join(argv)} > session.log 2>&1; echo $? > exit",
        )
        if at:
            self.wait_for(f"{FOLDER}/reached")
        else:
            assert self.wait_for(f"{FOLDER}/exit").strip() == b"0", self.output()

    def window(self) -> str:
        """The newest window's folder."""
        return str(self.sh("ls -d campaign/*-W-* | tail -n 1").stdout).strip()

    def status(self) -> dict[str, Any]:
        told = self.python("pytest_dsv41", "status", "--json", "--campaign", CAMPAIGN, check=False)
        facts: dict[str, Any] = json.loads(told.stdout)
        return facts

    def summary(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self.wait_for(f"{FOLDER}/{self.window()}/summary.json"))
        return facts


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    host = lab.ssh("alpha", CommandLog(tmp_path / "cmd", synced=False))
    host.write(f"{CAMPAIGN}/chain.toml", WINDOW.replace("PORT", str(PORT)))
    host.write(f"{CAMPAIGN}/campaign.toml", 'coordinator = "night"\n')
    found = Machine(host)
    found.in_scope(
        SERVING,
        f"exec {sys.executable} -m pytest_dsv41 stub --port {PORT} --seed 7 --round-ms 2.0",
    )
    limit = time.monotonic() + PATIENCE_S
    while host.port(PORT) is not Probe.UP:
        assert time.monotonic() < limit
        time.sleep(0.05)
    try:
        yield found
    finally:
        end_scopes(host, live_scopes(host), name="clean")
        for process in host.processes():
            if process.argv[1:4] == ("-m", "pytest_dsv41", "stub"):
                kill = ["kill", "-KILL", str(process.pid)]
                host.run(kill, name="clean", deadline_s=10.0, check=False)
        host.run(["systemctl", "--user", "reset-failed"], name="clean", deadline_s=10.0,
                 check=False)  # fmt: skip
        host.run(["rm", "-rf", FOLDER], name="clean", deadline_s=10.0)
        host.close()


def units(machine: Machine) -> list[str]:
    """The keepers' units whose main process runs."""
    listed = machine.sh(
        "systemctl --user list-units --state=running --no-legend --plain 'dsv41-keeper-*'"
    )
    return [line.split()[0] for line in str(listed.stdout).splitlines() if line.strip()]


def test_a_keeper_that_is_a_unit_outlives_the_windows_scope(machine: Machine) -> None:
    told = machine.python(
        "pytest_dsv41", "watchdog", "install", "--keepers", "--campaign", CAMPAIGN
    )
    assert "campaign.toml: keeper_units = true" in told.stdout
    machine.session(at="start:I1:end")
    assert len(units(machine)) == 1
    end_scopes(machine.host, [SESSION], name="kill", patience_s=20.0)
    summary = machine.summary()
    assert summary["stopped"] == "the measuring process died"
    assert summary["restore"] == summary["restore"] | {"status": "RESTORED", "answers_identical": 6}
    assert summary["watch"]["status"] == "PASS"
    limit = time.monotonic() + PATIENCE_S
    while units(machine):
        assert time.monotonic() < limit
        time.sleep(0.05)
    # Production outlives the unit that has started it.
    assert machine.host.port(PORT) is Probe.UP
    assert machine.status()["answer"] == "CLEAN"


def test_a_keeper_that_is_a_unit_goes_when_the_window_has_ended(machine: Machine) -> None:
    machine.host.write(f"{CAMPAIGN}/campaign.toml", "keeper_units = true\n")
    machine.session()
    assert machine.summary()["restore"]["status"] == "RESTORED"
    assert units(machine) == []
    assert machine.status()["answer"] == "CLEAN"


def test_a_keeper_that_dies_with_the_window_is_an_alert_and_recover_brings_it_back(
    machine: Machine,
) -> None:
    machine.session(at="start:I1:end")
    end_scopes(machine.host, [SESSION], name="kill", patience_s=20.0)
    facts = machine.status()
    assert (facts["answer"], facts["row"], facts["exit_code"]) == ("ALERT", 5, 20)
    assert facts["why"] == "a window left production down, and no keeper lives"
    assert facts["command"] == f"dsv41 recover --campaign {CAMPAIGN}"
    alerted = machine.python("pytest_dsv41", "watchdog", "--campaign", CAMPAIGN, check=False)
    assert (alerted.returncode, facts["command"] in alerted.stdout) == (20, True)
    done = machine.python("pytest_dsv41", "recover", "--campaign", CAMPAIGN)
    assert "restore RESTORED, watch PASS" in done.stdout
    assert machine.host.port(PORT) is Probe.UP
    assert machine.status()["answer"] == "CLEAN"


def test_a_production_that_the_watchdogs_unit_has_started_outlives_the_pass(
    machine: Machine,
) -> None:
    machine.session("--window-chain")
    assert machine.host.port(PORT) is Probe.DOWN
    told = machine.python("pytest_dsv41", "watchdog", "install", "--campaign", CAMPAIGN)
    unit = next(Path(x).name for x in told.stdout.splitlines() if x.endswith(".service"))
    machine.sh("systemctl --user daemon-reload")
    # The gap between two windows is healthy: a pass starts nothing.
    machine.sh('systemctl --user start "$1"', unit)
    assert machine.status()["answer"] == "CHAIN WAITING"
    owner = json.loads(machine.wait_for(f"{CAMPAIGN}/marker.json"))["placeholder_owner"]
    refused = {"schema": "dsv41-chain-refused-v1", "why": "the test says so", "chain": owner}
    machine.host.write(f"{CAMPAIGN}/marker.json.refused", json.dumps(refused))
    machine.sh('systemctl --user start "$1"', unit)
    assert machine.status()["answer"] == "CLEAN"
    assert machine.host.port(PORT) is Probe.UP
