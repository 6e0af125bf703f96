"""Smoke starts: five steps, always stopped, counted nowhere; a dropped arm has no window."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from pair import FIRST, LAST, SMALL, Pair, make_pair, simulated

from pytest_dsv41.archive import archive_rows
from pytest_dsv41.cli import main
from pytest_dsv41.errors import StartFailed, TransportError, UsageError
from pytest_dsv41.lifecycle import smoke_start
from pytest_dsv41.lifecycle.dropped import drop, dropped_arms, taken_back
from pytest_dsv41.lifecycle.finish import ARCHIVE_NAME
from pytest_dsv41.lifecycle.gate import ADMIT, gate
from pytest_dsv41.lifecycle.marker import read_marker
from pytest_dsv41.lifecycle.smoke_start import BOUND_S, STEPS, chain_head, smoke


class Arms:
    """A backend that fails at one step."""

    def __init__(self, fails: str = "", rounds: float = 41.0) -> None:
        self.fails = fails
        self.moved = rounds
        self.done: list[str] = []

    def _do(self, step: str, arm: str) -> None:
        self.done.append(f"{arm}:{step}")
        if step == self.fails:
            raise TransportError(f"{step} broke")

    def start(self, arm: str, deadline_s: float) -> None:
        assert 0 < deadline_s <= BOUND_S
        self._do("start", arm)

    def models(self, arm: str) -> Sequence[str]:
        self._do("models", arm)
        return ["m"]

    def greedy(self, arm: str, prompt: str, deadline_s: float) -> str:
        assert prompt
        assert deadline_s > 0
        self._do("greedy", arm)
        return "the Rhine"

    def rounds(self, arm: str, prompt: str, tokens: int, seed: int, deadline_s: float) -> float:
        assert (tokens, seed > 0, deadline_s > 0, prompt) == (64, True, True, prompt)
        self._do("rounds", arm)
        return self.moved

    def stop(self, arm: str) -> None:
        self._do("stop", arm)


def test_the_five_steps_in_order() -> None:
    live = Arms()
    found = smoke(live, "x")
    assert (found.passed, found.failed) == (True, "")
    assert live.done == ["x:start", "x:models", "x:greedy", "x:rounds", "x:stop"]
    assert tuple(found.seconds) == STEPS


@pytest.mark.parametrize(
    ("fails", "step"),
    [("start", 0), ("models", 1), ("greedy", 2), ("rounds", 3)],
)
def test_a_failure_ends_the_steps_and_the_arm_is_stopped(fails: str, step: int) -> None:
    live = Arms(fails)
    found = smoke(live, "x")
    assert (found.passed, found.failed, found.reason) == (False, STEPS[step], f"{fails} broke")
    assert live.done[-1] == "x:stop"
    assert len(live.done) == step + 2


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError(), TypeError("a\nb")], ids=repr)
def test_whatever_a_backend_raises_is_a_failure_in_one_line(error: Exception) -> None:
    class Foreign(Arms):
        def models(self, arm: str) -> Sequence[str]:
            raise error

    live = Foreign()
    found = smoke(live, "x")
    assert (found.failed, live.done) == (STEPS[1], ["x:start", "x:stop"])
    assert found.reason
    assert "\n" not in found.line


def test_rounds_that_do_not_move_fail() -> None:
    found = smoke(Arms(rounds=0.0), "x")
    assert (found.failed, found.passed) == ("seeded request", False)
    assert "no round was counted" in found.reason


@pytest.mark.parametrize("fails", ["", "start"])
def test_an_arm_that_does_not_stop_goes_up(fails: str) -> None:
    class Stuck(Arms):
        def stop(self, arm: str) -> None:
            raise TransportError(f"{arm} is still there")

    with pytest.raises(TransportError, match="x is still there"):
        smoke(Stuck(fails), "x")


def test_the_bound_fails_an_arm_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"s": 0.0}
    monkeypatch.setattr(smoke_start, "boottime", lambda: now["s"])

    class Slow(Arms):
        def start(self, arm: str, deadline_s: float) -> None:
            super().start(arm, deadline_s)
            now["s"] += 901.0

    live = Slow()
    found = smoke(live, "x")
    assert (found.failed, found.reason) == ("start", "the bound of 900 s has passed")
    assert live.done == ["x:start", "x:stop"]


def test_the_chains_head_smokes_every_candidate() -> None:
    class Second(Arms):
        def start(self, arm: str, deadline_s: float) -> None:
            super().start(arm, deadline_s)
            if arm == "b":
                raise StartFailed("b has no memory")

    found = chain_head(Second(), ["a", "b", "c"])
    assert [result.passed for result in found] == [True, False, True]


# -- in a window -----------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with simulated(monkeypatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        made = make_pair(tmp_path)
        made.text = SMALL.replace("[window]", '[window]\nsmoke = "x-first"')
        yield made


def let_smokes_answer(monkeypatch: pytest.MonkeyPatch, *, rounds: float) -> None:
    monkeypatch.setattr(smoke_start.TargetBackend, "models", lambda _self, _arm: ["stub"])
    monkeypatch.setattr(smoke_start.TargetBackend, "greedy", lambda *_: "the Rhine")
    monkeypatch.setattr(smoke_start.TargetBackend, "rounds", lambda *_: rounds)


def test_a_window_smokes_its_candidate_before_the_first_control_start(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_smokes_answer(monkeypatch, rounds=9.0)
    order: list[str] = []
    pair.on_step = lambda step, event: order.append(step) if event == "begin" else None
    summary = pair.run()
    assert (summary.status, summary.exit_code) == ("COMPLETE", 0)
    assert [s for s in order if s.startswith(("smoke:", "start:"))] == [
        "smoke:c1",
        "start:K",
        "start:I",
    ]
    pair.nothing_is_left()


def test_a_smoke_that_fails_ends_the_window_and_production_comes_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_smokes_answer(monkeypatch, rounds=0.0)
    summary = pair.run()
    assert (summary.status, summary.exit_code) == ("INCOMPLETE", 12)
    assert "smoke c1: FAIL at seeded request" in str(summary.stopped)
    assert (summary.restore.status, summary.watch.status) == ("RESTORED", "PASS")
    assert summary.starts == ()
    assert not (pair.campaign / ARCHIVE_NAME).exists()
    pair.nothing_is_left()


def test_a_smoke_that_fails_in_a_chain_ends_the_chain(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_smokes_answer(monkeypatch, rounds=9.0)
    assert pair.run(FIRST).chain == "CHAINED"
    let_smokes_answer(monkeypatch, rounds=0.0)
    summary = pair.run(FIRST)
    assert (summary.chain, summary.restore.status) == ("ENDED", "RESTORED")
    pair.nothing_is_left()
    assert {row["window"] for row in archive_rows(pair.campaign / ARCHIVE_NAME)} == {"L-w-W-0001"}


def test_a_dropped_arms_window_is_not_started_and_its_chain_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_smokes_answer(monkeypatch, rounds=9.0)
    pair.run(FIRST)
    drop(pair.campaign, "L-w", "c1", "start: no memory")
    before = read_marker(pair.campaign)
    summary = pair.run(FIRST)
    assert (summary.status, summary.exit_code) == ("REFUSED", 13)
    assert summary.stopped == "c1 was dropped at the chain's head: start: no memory"
    assert (summary.chain, summary.restore.status) == ("CHAINED", "CHAINED: production left down")
    assert read_marker(pair.campaign) == before
    assert gate(pair.campaign, pair.root / "w2", wait_s=0.0).code == ADMIT
    # The last window cannot be passed over: the chain has to end.
    last = pair.run(LAST)
    assert (last.status, last.chain, last.restore.status) == ("REFUSED", "ENDED", "RESTORED")
    assert dropped_arms(pair.campaign) == {}
    pair.nothing_is_left()


def test_the_record_of_dropped_arms(tmp_path: Path) -> None:
    drop(tmp_path, "L-a", "x", "start: no\nmemory")
    drop(tmp_path, "L-b", "y", "stop")
    assert dropped_arms(tmp_path) == {("L-a", "x"): "start: no memory", ("L-b", "y"): "stop"}
    taken_back(tmp_path, "L-a", "x")
    taken_back(tmp_path, "L-a", "x")
    assert dropped_arms(tmp_path) == {("L-b", "y"): "stop"}
    (tmp_path / "dropped.json").write_text("{")
    with pytest.raises(UsageError, match="unreadable"):
        dropped_arms(tmp_path)


# -- the command -----------------------------------------------------------------------------------

BACKEND = """
class Backend:
    def __init__(self, fails):
        self.fails = fails
    def start(self, arm, deadline_s):
        if arm == self.fails:
            raise OSError("no memory")
    def models(self, arm):
        return ["m"]
    def greedy(self, arm, prompt, deadline_s):
        return "text"
    def rounds(self, arm, prompt, tokens, seed, deadline_s):
        return 1.0
    def stop(self, arm):
        if self.fails == "stuck":
            raise OSError("it is still there")

def good(experiment, out):
    assert out.is_dir() and experiment.is_file()
    return Backend("")

def bad(experiment, out):
    return Backend("c1")

def stuck(experiment, out):
    return Backend("stuck")

def broken(experiment, out):
    raise RuntimeError("no such machine")
"""


def test_the_command_prints_the_plan_and_runs_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "w.toml").write_text(SMALL)
    (tmp_path / "my_backend.py").write_text(BACKEND)
    campaign = tmp_path / "dsv41-windows"
    campaign.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WINDOW_COORDINATOR", "me")

    def command(*words: str) -> tuple[int, str]:
        code = main(["smoke", "w.toml", *words])
        told = capsys.readouterr()
        return code, told.out + told.err

    code, plan = command("c1")
    assert code == 0
    assert [line for line in plan.splitlines() if "c1: " in line] == [
        f"  c1: {number}. {step}" for number, step in enumerate(STEPS, start=1)
    ]
    execute = ("c1", "--execute", "--mode", "chain-head", "--out", "out", "--backend")
    code, refused = command(*execute, "my_backend:good")
    assert code == 2
    assert "names no coordinator" in refused
    (campaign / "campaign.toml").write_text('coordinator = "you"\n')
    assert command(*execute, "my_backend:good")[0] == 2
    (campaign / "campaign.toml").write_text('coordinator = "me"\n')
    assert command(*execute, "my_backend:bad")[0] == 1
    assert dropped_arms(campaign) == {("L-w", "c1"): "start: no memory"}
    record = json.loads((tmp_path / "out" / "smoke-c1.json").read_text())
    assert (record["passed"], record["failed"]) == (False, "start")
    code, stuck = command(*execute, "my_backend:stuck")
    assert code == 20
    assert "it is still there" in stuck
    assert command(*execute, "my_backend:good")[0] == 0
    assert dropped_arms(campaign) == {}
    assert command("nobody")[0] == 4
    assert command(*execute, "my_backend:nothing")[0] == 4
    code, told = command(*execute, "my_backend:broken")
    assert (code, told.strip().splitlines()[-1]) == (
        4,
        "dsv41 smoke: smoke backend my_backend:broken: no such machine",
    )
