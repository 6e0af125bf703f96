"""A chain of real sessions on one machine: production stays down between them, and returns."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_dsv41.hosts import CommandLog, LocalHost
from pytest_dsv41.targets import TargetContext, local_target

from .running import Ended, keepers, leftovers, run, status

pytestmark = pytest.mark.slow

WINDOW = """
[window]
lane = "LOCAL"
name = "chain"
hypothesis = "A shorter round is faster."
schedule = "K/I/K/I"
repeats = 2

[arms.slow]
role = "control"
args = ["--round-ms", "2.0"]

[arms.fast]
role = "candidate"
args = ["--round-ms", "1.6"]

[[cells]]
name = "decode-b1"
decision = true
primary = "ms_per_round"
estimated_s = 0.3

[limits]
start_s = 20
stop_s = 10
watch_s = 0.5
quiet_s = 10

[target]
kind = "local"
engine = "vllm"
model = "stub"
hold = "HOLD"
command = ["{python}", "-m", "pytest_dsv41", "stub", "--port", "{port}", "--seed", "{seed}"]

[target.production]
serve = "always"
port = PORT
args = ["--round-ms", "2.0"]
"""


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Path, str, int]]:
    """A campaign over a production that serves by default; every server is ended afterwards."""
    host = LocalHost(CommandLog(tmp_path / "cmd"))
    port = host.free_port()
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    (campaign / "campaign.toml").write_text('coordinator = "night-shift"\n')
    window = campaign / "chain.toml"
    window.write_text(WINDOW.replace("PORT", str(port)))
    scope = f"dsv41-production-{port}"
    # Started by the target itself: the capture compares the command lines.
    context = TargetContext(
        window_id="production", folder=campaign, campaign=campaign, base=campaign, seed=7,
        limits={"start_s": 20.0}, state={"production_port": port}, variables={},
        log=CommandLog(tmp_path / "cmd"), pause=lambda _s: None,
    )  # fmt: skip
    target = local_target(tomllib.loads(window.read_text())["target"], context)
    target.start_production()
    yield campaign, str(window), port
    host.end(lambda: host.scope_processes(scope), name="end", grace_s=5.0)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def chain(campaign: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "chain", *words, "--campaign", str(campaign)],
        env={**os.environ, "WINDOW_COORDINATOR": "night-shift"},
        capture_output=True,
        text=True,
        check=False,
    )


def session(campaign: Path, window: str, *words: str, **fault: str) -> Ended:
    return run(campaign, *words, "--window-seed=7", window=window, **fault)


def test_three_windows_back_to_back(serving: tuple[Path, str, int]) -> None:
    campaign, window, port = serving
    first = session(campaign, window, "--window-chain")
    assert first.summary["chain"] == "CHAINED", first.output
    assert not listens(port)
    assert status(campaign)[1]["answer"] == "CHAIN WAITING"
    gate = f"dsv41 chain gate --prev {first.folder} --campaign {campaign}"
    assert f"for the chain's next window; before it: {gate}" in " ".join(first.output.split())
    assert status(campaign)[1]["command"] == gate
    gated = chain(campaign, "gate", "--prev", str(first.folder))
    assert (gated.returncode, gated.stdout) == (0, "ADMIT: chained\n")
    second = session(campaign, window, "--window-chain")
    assert second.summary["chain"] == "CHAINED", second.output
    assert chain(campaign, "gate", "--prev", str(second.folder)).returncode == 0
    last = session(campaign, window, "--window-chain", "--window-chain-last")
    assert (last.summary["chain"], last.summary["alerts"]) == ("ENDED", []), last.output
    assert last.summary["restore"]["answers_identical"] == 6
    assert listens(port)
    assert status(campaign)[0] == 0
    assert leftovers(campaign) == []
    assert keepers(campaign) == []


@pytest.mark.parametrize("at", ["hold:begin", "hold:end", "intent:begin", "start:I1:begin"])
def test_a_killed_chained_window_is_brought_back_by_its_keeper(
    at: str, serving: tuple[Path, str, int]
) -> None:
    campaign, window, port = serving
    session(campaign, window, "--window-chain")
    killed = session(campaign, window, "--window-chain", at=at, do="SIGKILL")
    assert killed.returncode == -9
    assert killed.summary["restore"]["status"] == "RESTORED", killed.summary
    assert killed.summary["chain"] == "ENDED"
    assert listens(port)
    code, facts = status(campaign)
    assert (code, facts["unfinished"]) == (0, [])
    assert not (campaign / "marker.json").exists()
    assert leftovers(campaign) == []


def test_a_refused_gate_brings_production_back(serving: tuple[Path, str, int]) -> None:
    campaign, window, port = serving
    session(campaign, window, "--window-chain")
    gated = chain(campaign, "gate", "--prev", str(campaign / "nothing"), "--wait", "0")
    assert gated.returncode == 3, gated.stdout + gated.stderr
    assert "chain abort: RESTORED, watch PASS" in gated.stdout
    assert listens(port)
    assert status(campaign)[0] == 0


def test_a_chain_needs_a_production_that_is_served_by_default(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--window=demo-tiny", "--window-chain"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 4
    assert "production must be served by default" in ended.stderr
