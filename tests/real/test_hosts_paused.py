"""SIGSTOP, takeover, SIGCONT: a coordinator that was overtaken changes nothing on a real host."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_dsv41.hosts import CommandLog, Fence, Placeholder
from pytest_dsv41.hosts.scopes import end_scopes, live_scopes
from pytest_dsv41.hosts.tmux import placeholder_down, placeholder_state
from tests.lab import paused
from tests.lab.lab import Lab

pytestmark = pytest.mark.slow


def test_a_paused_and_overtaken_coordinator_changes_nothing(lab: Lab, tmp_path: Path) -> None:
    words = [lab.address("alpha"), str(lab.key), str(lab.known_hosts), str(tmp_path / "late")]
    with subprocess.Popen(
        [sys.executable, paused.__file__, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        host = lab.ssh("alpha", CommandLog(tmp_path / "cmd"))
        new = Fence.beside(paused.HOLD, 6)
        host.write(paused.HOLD, "the new owner's", fence=new)
        before = host.processes()
        process.stdin.write("go on\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        found = json.loads(process.stdout.readline())
    left = found.pop("placeholder-down")
    # It reports what it could not take down, and why, in place of raising.
    assert left.startswith("done: alpha: ")
    assert "has seen epoch 6, this is 5" in left
    # Another owner's placeholder would be refused for that alone.
    assert found.pop("placeholder") in ("StaleEpoch", "RefusedByWorld")
    assert found == dict.fromkeys(
        ("run", "create", "write", "remove", "start", "stop"), "StaleEpoch"
    )
    assert host.read(paused.HOLD) == b"the new owner's"
    listed = host.run(["ls", "-A", paused.FOLDER], name="ls", deadline_s=10.0).stdout.split()
    assert sorted(listed) == ["HOLD", "HOLD.epoch", "HOLD.epoch.lock"]
    assert len(live_scopes(host)) == 1
    assert placeholder_state(host, paused.OWNER) is Placeholder.UP
    alive = {(p.pid, p.started) for p in host.processes()}
    kept = [p for p in before if "sleep" in p.argv or "DSV41-OFFLOAD hold" in " ".join(p.argv)]
    assert len(kept) >= 2
    assert {(p.pid, p.started) for p in kept} <= alive
    end_scopes(host, live_scopes(host), name="clean", fence=new)
    assert placeholder_down(host, paused.OWNER, fence=new) is None
    host.run(["rm", "-r", paused.FOLDER], name="clean", deadline_s=10.0)
