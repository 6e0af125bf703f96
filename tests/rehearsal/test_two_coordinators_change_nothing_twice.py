"""Two at once: racing gates recover once, and who was paused and overtaken changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair import FIRST, HOSTS, Pair, make_pair, simulated

from pytest_dsv41.lifecycle.gate import gate
from pytest_dsv41.lifecycle.hold import Hold
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.recover import look

HERE = Path(__file__).parent

PAUSED = """
import sys
sys.path.insert(0, {here!r})
import pytest
from pair import Pair, simulated
from pathlib import Path
from pytest_dsv41.errors import Dsv41Error
from pytest_dsv41.hosts.fake import FakeWorld
root = Path(sys.argv[1])
with pytest.MonkeyPatch.context() as patch, simulated(patch):
    pair = Pair(root, FakeWorld(root / "world"), number=7)
    run = pair.window()
    run.open()
    print("down", flush=True)
    sys.stdin.readline()
    # Whatever it tries now comes too late; the lease's own check is taken out of the way, so that
    # the hosts alone have to refuse.
    run.lease.check = lambda: None
    for act in (
        run.target.start_production,
        lambda: run.target.start_arm("late", run._arms["control"]),
        lambda: run.hold.close(run.plan.window_id),
        lambda: run.target.placeholders_up("chain-20260101T000000Z-00000000"),
        run.target.stop_production,
    ):
        try:
            act()
            print("done", flush=True)
        except (Dsv41Error, OSError) as error:
            print(type(error).__name__, flush=True)
"""


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with simulated(monkeypatch):
        monkeypatch.syspath_prepend(str(HERE))
        yield make_pair(tmp_path)


def python(script: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script.format(here=str(HERE)), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def race(pair: Pair) -> list[str]:
    """Two gates on one stopped chain, each a process, let go together; what they answered."""
    reader, writer = os.pipe()
    answers = [pair.root / f"gate{number}" for number in range(2)]
    children = []
    for answer in answers:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.close(writer)
                # The end of the pipe lets both go at the same moment.
                os.read(reader, 1)
                found = gate(pair.campaign, pair.root / "none", wait_s=60.0)
                aborted = found.aborted.code if found.aborted else "-"
                answer.write_text(f"{found.code} {aborted}")
                code = 0
            os._exit(code)
        children.append(pid)
    os.close(reader)
    os.close(writer)
    for pid in children:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return [answer.read_text() for answer in answers]


def stopped_chain(pair: Pair) -> None:
    pair.run(FIRST)
    pair.world.inject("reboot", "beta")


def one_round(pair: Pair) -> None:
    stopped_chain(pair)
    # A summary that fits nothing: the gates need not wait for one.
    (pair.root / "none").mkdir(exist_ok=True)
    (pair.root / "none" / "summary.json").write_text("{}")
    before = len(list(pair.campaign.glob("CHAIN-ABORT-*")))
    told = race(pair)
    after = list(pair.campaign.glob("CHAIN-ABORT-*"))
    assert len(after) == before + 1, told
    # One has recovered; the other found no marker any more, or was not let to work beside it.
    assert sorted(told) in (["2 -", "3 0"], ["3 -", "3 0"]), told
    pair.nothing_is_left()


def test_two_racing_gates_recover_once(pair: Pair) -> None:
    pair.small = True
    one_round(pair)


@pytest.mark.slow
def test_two_racing_gates_recover_once_in_a_hundred_rounds(pair: Pair) -> None:
    pair.small = True
    for _ in range(100):
        one_round(pair)


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="there is no SIGSTOP here")
def test_a_coordinator_that_was_paused_and_overtaken_changes_nothing(pair: Pair) -> None:
    paused = python(PAUSED, str(pair.root))
    assert paused.stdout is not None
    assert paused.stdin is not None
    assert paused.stdout.readline() == "down\n", paused.communicate()
    paused.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, paused.pid, os.WSTOPPED | os.WNOWAIT)
    # A person takes over: the lock's file is replaced, since a paused process never lets it go.
    (pair.campaign / "lease.lock").unlink()
    taker = Lease(pair.campaign)
    taker.acquire("taker", 60.0)
    record = pair.record("L-w-W-0008", pair.root / "w8")
    target, _ = record.build(pair.root / "w8", epoch=taker.epoch)
    # Taking over is the first act of the newer epoch on each host.
    for site in target.hold_sites():
        site.host.write("/hold/taken", "by the newer epoch", fence=site.fence)
    before = [pair.world.machine(name).to_json() for name in HOSTS]
    paused.send_signal(signal.SIGCONT)
    paused.stdin.write("go\n")
    paused.stdin.flush()
    out, error = paused.communicate(timeout=60)
    assert out.split() == ["StaleEpoch", "StartFailed", "StaleEpoch", "StaleEpoch", "done"], error
    after = [pair.world.machine(name).to_json() for name in HOSTS]
    for was, now in zip(before, after, strict=True):
        assert (was["processes"], was["files"]) == (now["processes"], now["files"])
    assert Hold(target.hold_sites()).owner()[1] == "L-w-W-0008"
    taker.release()
    assert look(pair.campaign).observation.command == "dsv41 recover"
