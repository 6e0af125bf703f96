"""Chains of windows on two real systemd hosts: production stays down between them, then is back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_dsv41.hosts import Placeholder, Probe
from pytest_dsv41.hosts.scopes import live_scopes
from pytest_dsv41.hosts.tmux import HOLD_HEAD, HOLD_SESSION, PLACEHOLDER_TMUX
from tests.lab.pair import HOLD, Pair, break_it

pytestmark = pytest.mark.slow

COORDINATOR = {"WINDOW_COORDINATOR": "night"}
CHAINED = {**COORDINATOR, "WINDOW_CHAIN": "1"}
LAST = {**CHAINED, "WINDOW_CHAIN_LAST": "1"}


@pytest.fixture
def chain(pair: Pair) -> Pair:
    pair.campaign.mkdir()
    (pair.campaign / "campaign.toml").write_text('coordinator = "night"\n')
    return pair


def marker(pair: Pair) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((pair.campaign / "marker.json").read_text())
    return record


def assert_down_in_a_chain(pair: Pair) -> None:
    """Production is down on purpose: no HOLD, no scope; placeholders and marker of one owner."""
    target = pair.target()
    assert target.probe().state is Probe.DOWN
    owner = marker(pair)["placeholder_owner"]
    assert target.placeholders(owner) == dict.fromkeys(pair.hosts, Placeholder.UP)
    for host in pair.hosts.values():
        assert live_scopes(host) == []
        assert host.read(HOLD) is None
        titles = [p.argv for p in host.processes() if p.argv and HOLD_HEAD in p.argv[0]]
        assert titles == [(f"{HOLD_HEAD} owner={owner}",)]


def first_window(chain: Pair) -> None:
    ended = chain.run(env=CHAINED)
    assert ended.returncode == 0, ended.output
    assert ended.summary["chain"] == "CHAINED"
    assert_down_in_a_chain(chain)


def gate(chain: Pair, previous: str) -> Any:
    words = ("chain", "gate", "--prev", previous, "--wait", "5")
    return chain.dsv41(*words, env=COORDINATOR)


def test_a_chain_of_three_windows(chain: Pair) -> None:
    folders = []
    for env in (CHAINED, CHAINED, LAST):
        if folders:
            admitted = gate(chain, str(folders[-1]))
            assert admitted.returncode == 0, admitted.stdout + admitted.stderr
        ended = chain.run(env=env)
        assert ended.returncode == 0, ended.output
        folders.append(ended.folder)
        if env is not LAST:
            assert_down_in_a_chain(chain)
    assert ended.summary["restore"]["status"] == "RESTORED"
    assert ended.summary["restore"]["answers_identical"] == 6
    chain.assert_serving_and_nothing_left()


def test_a_window_stopped_in_a_chain_restores(chain: Pair) -> None:
    first_window(chain)
    with chain.start(env=CHAINED, at="start:X:end") as process:
        chain.reached(process)
        process.terminate()
        chain.go()
        output, _ = process.communicate(timeout=200.0)
    assert process.returncode == 12, output
    chain.assert_serving_and_nothing_left()


def test_a_refused_gate_restores_by_itself(chain: Pair) -> None:
    first_window(chain)
    refused = gate(chain, str(chain.folder / "no-such-window"))
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "CHAIN STOPPED: PRODUCTION DOWN" in refused.stdout + refused.stderr
    chain.assert_serving_and_nothing_left()


def test_a_failure_before_the_hold_restores(chain: Pair) -> None:
    """One placeholder died: the next window may not begin, and production is down."""
    first_window(chain)
    kill = [*PLACEHOLDER_TMUX, "kill-session", "-t", f"={HOLD_SESSION}"]
    chain.hosts["beta"].run(kill, name="kill", deadline_s=10.0)
    ended = chain.run(env=CHAINED)
    assert ended.returncode == 13, ended.output
    assert "the chain's placeholder on beta is DOWN" in ended.output
    assert ended.summary["restore"]["status"] == "RESTORED"
    chain.assert_serving_and_nothing_left()


def test_a_target_that_was_edited_between_two_windows_restores_the_chains(chain: Pair) -> None:
    """Its own restore would start the edit; the chain's knows what it took down."""
    first_window(chain)
    target = chain.folder / "target.toml"
    target.write_text(target.read_text().replace("--noise", "--no-such-noise"))
    ended = chain.run(env=CHAINED)
    assert ended.returncode == 13, ended.output
    assert "production is not the one that the chain took down" in ended.output
    chain.assert_serving_and_nothing_left()


def test_a_failed_smoke_ends_the_window_and_restores(chain: Pair) -> None:
    first_window(chain)
    path = chain.write_window("smoked")
    text = path.read_text().replace('lane = "LAB"\n', 'lane = "LAB"\nsmoke = "x-first"\n')
    path.write_text(text.replace('"1.6"', '"never"'))
    ended = chain.run(env=CHAINED, window=path)
    assert ended.returncode == 12, ended.output
    assert "smoke fast: FAIL at start" in ended.output
    assert not (chain.campaign / "control-archive.jsonl").exists() or all(
        json.loads(row).get("window") != ended.summary["window"]["id"]
        for row in (chain.campaign / "control-archive.jsonl").read_text().splitlines()
    )
    chain.assert_serving_and_nothing_left()


@pytest.mark.parametrize("at", ["placeholders-up:end", "marker:end", "hold-close:end"])
def test_the_coordinator_is_killed_at_a_chained_end(chain: Pair, at: str) -> None:
    """The keeper restores, or finds the chained end whole; then the chain's one recovery does."""
    with chain.start(env=CHAINED, at=at) as process:
        chain.reached(process)
        process.kill()
        process.communicate()
    chain.keepers_end()
    if (chain.campaign / "marker.json").exists():
        assert_down_in_a_chain(chain)
        restored = chain.dsv41("chain", "abort", env=COORDINATOR)
        assert restored.returncode == 0, restored.stdout + restored.stderr
    chain.assert_serving_and_nothing_left()


@pytest.mark.parametrize("at", ["start:X:begin", "restore-start:begin", "placeholders-down:begin"])
def test_the_coordinator_is_killed_in_a_chains_last_window(chain: Pair, at: str) -> None:
    first_window(chain)
    with chain.start(env=LAST, at=at) as process:
        chain.reached(process)
        process.kill()
        process.communicate()
    chain.keepers_end()
    chain.settle()
    chain.assert_serving_and_nothing_left()


@pytest.mark.parametrize(
    ("fault", "host"), [("partition", "beta"), ("reboot", "alpha"), ("reboot", "both")]
)
def test_a_host_breaks_between_two_windows(chain: Pair, fault: str, host: str) -> None:
    first_window(chain)
    break_it(chain, fault, host)
    refused = gate(chain, str(max(chain.campaign.glob("*-W-*"))))
    assert refused.returncode == 3, refused.stdout + refused.stderr
    chain.lab.mend()
    if (chain.campaign / "marker.json").exists():
        restored = chain.dsv41("chain", "abort", "--again", env=COORDINATOR)
        assert restored.returncode == 0, restored.stdout + restored.stderr
    chain.assert_serving_and_nothing_left()
