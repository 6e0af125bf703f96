"""Every flow is broken at every act, and everything is built again from what lies on the disks.

Whatever was broken: the observer never calls a production that is down by us clean (I1), following
its commands brings production back, nothing is left, and the finished rows are archived once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import FLOWS, Breaker, Stage, breaking, keeper_acts, settle
from pair import HOSTS, Pair, make_pair, simulated

from pytest_dsv41.errors import Dsv41Error
from pytest_dsv41.lifecycle.intent import read_intent
from pytest_dsv41.lifecycle.journal import Journal, StepHook
from pytest_dsv41.lifecycle.marker import read_marker
from pytest_dsv41.lifecycle.recover import look
from pytest_dsv41.window.summary import read_summary

SAMPLE = {"single": 29, "chained-end": 17, "chained-start": 31, "last": 37}
"""How many acts lie between two breaks of the default run; every one is broken under `slow`."""
DISK = {"chained-start": 37}
FAULTS = [
    *(("partition", host) for host in HOSTS),
    *(("reboot", host) for host in (*HOSTS, "")),
    ("power-loss", "beta"),
    *(("full-disk", host) for host in HOSTS),
    *((clock, "") for clock in ("clock-forward", "clock-back")),
]
"""Fault and host; no host: both at once."""


@pytest.fixture
def breaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Breaker, Pair]]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    root = tmp_path / "root"
    root.mkdir()
    with simulated(monkeypatch):
        pair = make_pair(root)
        pair.small = True
        with breaking(pair.world.folder, monkeypatch) as found:
            yield found, pair


@pytest.fixture
def every_journal(breaker: tuple[Breaker, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of recoveries and of ends by hand tell the test of their steps."""
    _, pair = breaker
    real = Journal.__init__

    def tell(step: str, event: str) -> None:
        if pair.on_step is not None:
            pair.on_step(step, event)

    def told(self: Journal, folder: Path, on_step: StepHook | None = None) -> None:
        real(self, folder, on_step or tell)

    monkeypatch.setattr(Journal, "__init__", told)


def acts_of(breaker: Breaker, stage: Stage) -> list[str]:
    """The names of the flow's acts when nothing breaks; it must end well."""
    breaker.arm("count", 0)
    stage.run()
    names = breaker.names
    breaker.disarm()
    breaker.process_exit()
    settle(stage.pair)
    return names


def break_everywhere(breaker: Breaker, stage: Stage, how: str, stride: int, *, keeper: bool) -> int:
    """Break the flow at each act (of a stride) and settle; how many breaks there were."""
    names = acts_of(breaker, stage)
    assert len(names) > 20, names
    broken = 0
    for at in range(1, len(names) + 1, stride):
        stage.reset()
        breaker.arm(how, at)
        stage.run()
        struck = breaker.broken
        breaker.disarm()
        breaker.process_exit()
        try:
            status = look(stage.pair.campaign)
            if keeper:
                keeper_acts(stage.pair)
            settle(stage.pair)
        except BaseException as error:
            error.add_note(f"{how} at act {at} of {len(names)}: {names[at - 1]}; then {status}")
            raise
        broken += struck
    return broken


def _cases(sample: dict[str, int]) -> list[object]:
    return [
        *(pytest.param(flow, stride, id=flow) for flow, stride in sample.items()),
        *(pytest.param(flow, 1, id=f"{flow}-everywhere", marks=pytest.mark.slow) for flow in FLOWS),
    ]


@pytest.mark.parametrize(("flow", "stride"), _cases(SAMPLE))
def test_a_kill_whose_keeper_lives(flow: str, stride: int, breaker: tuple[Breaker, Pair]) -> None:
    found, pair = breaker
    stage = Stage(pair, flow)
    assert break_everywhere(found, stage, "kill", stride, keeper=True) > 1


@pytest.mark.slow
@pytest.mark.parametrize("flow", FLOWS)
def test_a_kill_of_window_and_keeper(flow: str, breaker: tuple[Breaker, Pair]) -> None:
    found, pair = breaker
    # Every third act: with a keeper every act is broken, and the facts are the same.
    assert break_everywhere(found, Stage(pair, flow), "kill", 3, keeper=False) > 5


@pytest.mark.parametrize("how", ["enospc", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("flow", "stride"), _cases(DISK))
def test_a_durable_write_that_finds_no_space(
    flow: str, stride: int, how: str, breaker: tuple[Breaker, Pair]
) -> None:
    found, pair = breaker
    stage = Stage(pair, flow)
    # A disk that stays full fails as its first full write does: every third act says as much.
    stride = max(stride, 3) if how == "full" else stride
    assert break_everywhere(found, stage, how, stride, keeper=True) > 1


def steps_of(stage: Stage) -> list[tuple[str, str]]:
    """The journalled events of a flow, in order."""
    seen: list[tuple[str, str]] = []
    stage.pair.on_step = lambda step, event: seen.append((step, event))
    stage.run()
    stage.pair.on_step = None
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "host"), FAULTS)
@pytest.mark.parametrize("flow", FLOWS)
def test_a_fault_of_a_host_at_every_journalled_step(
    flow: str, fault: str, host: str, breaker: tuple[Breaker, Pair], every_journal: None
) -> None:
    found, pair = breaker
    stage = Stage(pair, flow)
    events = steps_of(stage)
    found.process_exit()
    settle(pair)
    begun = [number for number, (_, event) in enumerate(events) if event == "begin"]
    assert len(begun) > 5, events
    for number in begun:
        stage.reset()
        seen = 0

        def strike(_step: str, _event: str, number: int = number) -> None:
            nonlocal seen
            if seen == number:
                pair.world.inject(fault, host)
            seen += 1

        pair.on_step = strike
        stage.run()
        pair.on_step = None
        found.process_exit()
        try:
            assert seen > number, "the step never came"
            # The facts are looked at while the fault lasts: whatever is seen is never "clean".
            status = look(pair.campaign)
            assert status.exit_code != 0 or all(pair.serving().values()), status
            pair.world.heal()
            keeper_acts(pair)
            settle(pair)
        except (AssertionError, Dsv41Error) as error:
            error.add_note(f"{fault} of {host or 'both'} at {events[number]}")
            raise


def test_placeholders_that_are_up_before_the_marker_are_known_by_the_intent(
    breaker: tuple[Breaker, Pair],
) -> None:
    """Killed between the two: both are ours by the intent's record, and the restore ends them."""
    found, pair = breaker

    def killed(step: str, event: str) -> None:
        if (step, event) == ("placeholders-up", "end"):
            found.arm("kill", 1)

    pair.on_step = killed
    stage = Stage(pair, "chained-end")
    stage.run()
    pair.on_step = None
    found.disarm()
    found.process_exit()
    assert read_marker(pair.campaign) is None
    intent = read_intent(pair.campaign)
    assert intent is not None
    assert intent.chain.startswith("chain-")
    assert pair.owners() == {host: [intent.chain] for host in HOSTS}
    assert look(pair.campaign).command.startswith("dsv41 recover")
    keeper_acts(pair)
    assert pair.current is not None
    summary = read_summary(pair.current.folder)
    assert (summary.restore.status, summary.watch.status) == ("RESTORED", "PASS")
    assert summary.chain == "ENDED"
    pair.nothing_is_left()
