"""A sample of the fault matrix on real hosts: what breaks, where, and production comes back.

The whole matrix runs on simulated hosts (tests/rehearsal); a chain's share of this sample is in
test_hosts_chain. Here a kill is SIGKILL, a partition is a
link that is down, a reboot is a machine that boots, a full disk has no byte left.
"""

from __future__ import annotations

import json

import pytest

from tests.lab.pair import Pair, break_it

pytestmark = pytest.mark.slow

KILLED_AT = [
    "hold:begin",
    "hold:end",
    "intent:end",
    "production-stop:begin",
    "production-stop:end",
    "start:X:end",
    "stop:C:end",
    "restore-start:end",
    "hold-close:begin",
    "watch:begin",
]
BROKEN_AT = [
    ("partition", "alpha", "hold:begin"),
    ("partition", "beta", "hold:end"),
    ("partition", "alpha", "production-stop:begin"),
    ("partition", "beta", "start:X:end"),
    ("partition", "beta", "hold-close:begin"),
    ("reboot", "beta", "production-stop:end"),
    ("reboot", "alpha", "start:C:end"),
    ("reboot", "both", "start:X:end"),
    ("reboot", "alpha", "watch:begin"),
    ("full disk", "alpha", "hold:begin"),
    ("full disk", "alpha", "restore-start:begin"),
    ("full disk", "beta", "hold-close:begin"),
]


def finished_starts(pair: Pair) -> set[str]:
    """The control start, if its one item was measured."""
    folder = next(path for path in pair.campaign.iterdir() if "-W-" in path.name)
    values = folder / "values.jsonl"
    rows = [json.loads(line) for line in values.read_text().splitlines()] if values.exists() else []
    done = [row["start"] for row in rows if row["outcome"] == "measured"]
    return {"C"} & set(done)


def assert_archived_once(pair: Pair) -> None:
    """The rows of the finished starts are in the archive, each once."""
    path = pair.campaign / "control-archive.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    keys = [(r["cell"], r["metric"], r["start"], r["repeat"]) for r in rows if "cell" in r]
    assert len(keys) == len(set(keys))
    assert {key[2] for key in keys} == finished_starts(pair)


@pytest.mark.parametrize("at", KILLED_AT)
def test_the_coordinator_is_killed(pair: Pair, at: str) -> None:
    with pair.start(at=at) as process:
        pair.reached(process)
        process.kill()
        process.communicate()
    pair.keepers_end()
    pair.settle()
    assert_archived_once(pair)
    pair.assert_serving_and_nothing_left()


@pytest.mark.parametrize(("fault", "host", "at"), BROKEN_AT)
def test_a_host_breaks(pair: Pair, fault: str, host: str, at: str) -> None:
    with pair.start(at=at) as process:
        pair.reached(process)
        break_it(pair, fault, host)
        pair.go()
        # Within two minutes it has ended, with production back or with an alert.
        output, _ = process.communicate(timeout=120.0)
    pair.keepers_end()
    facts = pair.status()
    # Where nothing of ours is open, a host that cannot be seen is UNKNOWN, and nothing is to do.
    nothing_open = facts["answer"] in ("CLEAN", "UNKNOWN") and not facts["intent"]
    assert nothing_open or facts["command"], facts
    pair.lab.mend()
    pair.settle()
    assert process.returncode in (0, 12, 13, 20, 21), output
    assert_archived_once(pair)
    pair.assert_serving_and_nothing_left()
