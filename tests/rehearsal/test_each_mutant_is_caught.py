"""Each durable step that is moved or dropped is noticed: the crash tests are no decoration.

A mutant is the lifecycle's own source with one passage changed, run by the same sweep of breaks
that the real code passes. It is caught when an invariant fails at some break.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crash import Breaker, Stage, breaking, keeper_acts, settle
from pair import FIRST, Pair, make_pair, simulated

from pytest_dsv41.hosts import Probe
from pytest_dsv41.lifecycle import closing
from pytest_dsv41.lifecycle.gate import gate
from pytest_dsv41.lifecycle.hold import Hold
from pytest_dsv41.lifecycle.intent import read_intent
from pytest_dsv41.lifecycle.marker import read_leftovers, read_marker
from pytest_dsv41.lifecycle.observer import Answer
from pytest_dsv41.lifecycle.recover import look
from pytest_dsv41.targets import ProbeResult


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One passage of one function, changed; `flow` is the flow whose breaks notice it."""

    name: str
    where: str
    """`module:function` or `module:Class.method`, below pytest_dsv41.lifecycle."""
    passage: str
    instead: str
    flow: str
    how: str = "kill"


MUTANTS = (
    Mutant(
        "the marker is written after the HOLD is gone",
        "closing:_Closer.chained_down",
        '("marker", lambda: self.finish_chained(intent)),\n'
        '            ("hold-close", lambda: self.chained_close(owner)),',
        '("hold-close", lambda: self.chained_close(owner)),\n'
        '            ("marker", lambda: self.finish_chained(intent)),',
        "chained-end",
        "order",
    ),
    Mutant(
        "the placeholders' owner is not recorded before they start",
        "closing:_Closer.chained_down",
        '("chain-intent", lambda: write_intent(self.campaign, intent)),',
        '("chain-intent", lambda: None),',
        "chained-end",
        "owner",
    ),
    Mutant(
        "production stops before the down-intent is written",
        "session:WindowRun._take_down",
        "write_intent(self.campaign, intent)",
        "target.stop_production(); write_intent(self.campaign, intent)",
        "single",
        "trace",
    ),
    Mutant(
        "no down-intent is written",
        "session:WindowRun._take_down",
        "write_intent(self.campaign, intent)",
        "pass",
        "single",
        "trace",
    ),
    Mutant(
        "the intent goes before the watch",
        "closing:_Closer.restore",
        "if not (self.watched() and released):",
        "clear_intent(self.campaign)\n    if not (self.watched() and released):",
        "single",
        "watch",
    ),
    Mutant(
        "the intent goes though the chain's end failed",
        "closing:_Closer.restore",
        "if not intent.chain or self.result.chain is not None:",
        "if True:",
        "last",
        "unrecorded",
    ),
    Mutant(
        "what a chain leaves is not recorded",
        "closing:end_chain",
        "add_leftovers(campaign, owner, left)",
        "pass",
        "last",
        "leftover",
    ),
    Mutant(
        "the one recovery is not recorded",
        "abort:_recover",
        "create_abort_record(campaign, marker, out)",
        "pass",
        "recovery",
        "twice",
    ),
    Mutant(
        "a production that cannot be seen counts as down",
        "abort:_look",
        "if seen.state is Probe.UNKNOWN:",
        "if False:",
        "recovery",
        "unknown",
    ),
    Mutant(
        "the HOLD is left where the next host refused",
        "hold:Hold.create",
        "_close_at(site, window_id)",
        "pass",
        "single",
        "foreign",
    ),
    Mutant(
        "any HOLD is removed, whoever's it is",
        "hold:_close_at",
        "if (state, owner) != (HoldState.FOREIGN, window_id):",
        "if False:",
        "single",
        "theirs",
    ),
    Mutant(
        "the HOLD of a killed chained start is not taken for the chain's",
        "closing:_Closer.give_back",
        "if not mine and marker is not None and self.in_chain():",
        "if False:",
        "chained-start",
    ),
)


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


def mutate(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the changed function in the place of the real one."""
    module_name, _, path = mutant.where.partition(":")
    module = importlib.import_module(f"pytest_dsv41.lifecycle.{module_name}")
    owner: Any = module
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    passage = mutant.passage if mutant.passage in source else textwrap.dedent(mutant.passage)
    lines = [line.strip() for line in passage.splitlines()]
    assert source.count(lines[0]) >= 1, f"{mutant.name}: the passage has moved"
    if len(lines) == 1:
        changed = source.replace(passage, mutant.instead, 1)
    else:
        first, second = lines
        assert first in source
        assert second in source
        changed = source.replace(first, "@@").replace(second, first).replace("@@", second)
    assert changed != source
    scope = dict(vars(module))
    exec(compile(changed, f"<mutant of {mutant.where}>", "exec"), scope)
    monkeypatch.setattr(owner, name, scope[name])


def sweep(how: str) -> Callable[[Breaker, Pair, str], None]:
    """Break the flow at every act, as the real code's own tests do."""

    def check(breaker: Breaker, pair: Pair, flow: str) -> None:
        stage = Stage(pair, flow)
        breaker.arm("count", 0)
        stage.run()
        acts = len(breaker.names)
        breaker.disarm()
        breaker.process_exit()
        settle(pair)
        for at in range(1, acts + 1):
            stage.reset()
            breaker.arm(how, at)
            stage.run()
            breaker.disarm()
            breaker.process_exit()
            keeper_acts(pair)
            settle(pair)

    return check


def at_every_step(pair: Pair, look_at: Callable[[str, str], None], flow: str) -> None:
    """Run the flow once and look at the facts after every journalled event."""
    seen: list[AssertionError] = []

    def hook(step: str, event: str) -> None:
        # Inside a close an exception of a hook is only noted.
        try:
            look_at(step, event)
        except AssertionError as error:
            seen.append(error)

    stage = Stage(pair, flow)
    pair.on_step = hook
    stage.run()
    pair.on_step = None
    if seen:
        raise seen[0]


def order(_breaker: Breaker, pair: Pair, flow: str) -> None:
    """While production is down there is a HOLD or a marker at every moment (hole 1 of SAFETY)."""

    def look_at(_step: str, _event: str) -> None:
        if not any(pair.serving().values()):
            held = any(pair.holds().values())
            assert held or read_marker(pair.campaign) is not None

    at_every_step(pair, look_at, flow)


def owner(_breaker: Breaker, pair: Pair, flow: str) -> None:
    """No placeholder runs without a record of its owner (I6)."""

    def look_at(_step: str, _event: str) -> None:
        intent, marker = read_intent(pair.campaign), read_marker(pair.campaign)
        known = {intent.chain if intent else "", marker.placeholder_owner if marker else ""}
        for owners in pair.owners().values():
            assert set(owners) <= known

    at_every_step(pair, look_at, flow)


def trace(breaker: Breaker, pair: Pair, flow: str) -> None:
    """Production never stops before the intent is there."""
    real = pair.target().__class__.stop_production

    def look_at(_step: str, _event: str) -> None: ...

    with pytest.MonkeyPatch.context() as patch:

        def stop(self: Any) -> None:
            assert read_intent(pair.campaign) is not None
            real(self)

        patch.setattr(pair.target().__class__, "stop_production", stop)
        stage = Stage(pair, flow)
        # The assertion must reach the test, not only the window's report.
        stage.flow(pair)
    breaker.process_exit()


def watch(_breaker: Breaker, pair: Pair, flow: str) -> None:
    """The intent is there until the watch has passed (I5)."""

    def look_at(step: str, event: str) -> None:
        if (step, event) in (("watch", "begin"), ("watch", "end")):
            assert read_intent(pair.campaign) is not None

    at_every_step(pair, look_at, flow)


def leftover(_breaker: Breaker, pair: Pair, flow: str) -> None:
    """An unreachable host's placeholder stands in the list."""

    def cut(step: str, event: str) -> None:
        if (step, event) == ("placeholders-down", "begin"):
            pair.world.inject("partition", "beta")

    stage = Stage(pair, flow)
    pair.on_step = cut
    stage.run()
    pair.on_step = None
    assert [left.host for left in read_leftovers(pair.campaign)] == ["beta"]


def unrecorded(_breaker: Breaker, pair: Pair, flow: str) -> None:
    """While what is left cannot be recorded, marker and intent stay for it (I6)."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(closing, "add_leftovers", full)
        with pytest.raises(AssertionError):
            leftover(_breaker, pair, flow)
    assert read_intent(pair.campaign) is not None
    assert read_marker(pair.campaign) is not None


def twice(breaker: Breaker, pair: Pair, flow: str) -> None:
    """A recovery that failed after its HOLD was closed is not begun again by itself (I3)."""
    stage = Stage(pair, flow)

    def dies(step: str, event: str) -> None:
        if (step, event) == ("watch", "begin"):
            pair.target().stop_production()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "pytest_dsv41.lifecycle.closing._Closer.watched",
            lambda self: dies("watch", "begin") or False,
        )
        stage.run()
    breaker.process_exit()
    assert look(pair.campaign).observation.answer is not Answer.RECOVER
    found = gate(pair.campaign, pair.root / "none", wait_s=0.0)
    assert found.aborted is not None
    assert found.aborted.code == 4


def unknown(_breaker: Breaker, pair: Pair, _flow: str) -> None:
    """A production that cannot be seen uses nothing up and is not touched (I9)."""
    pair.run(FIRST)
    with pytest.MonkeyPatch.context() as patch:
        kind = pair.target().__class__
        patch.setattr(kind, "probe", lambda _self: ProbeResult(Probe.UNKNOWN, "no answer"))
        found = gate(pair.campaign, pair.root / "none", wait_s=0.0)
    assert found.aborted is not None
    assert found.aborted.code == 4
    assert not (pair.campaign / "marker.json.abort").exists()


def foreign(_breaker: Breaker, pair: Pair, _flow: str) -> None:
    """All or nothing: where the second host refuses, nothing is left on the first."""
    sites = pair.target().hold_sites()
    Hold(sites[1:]).create("somebody", 1)
    run = pair.window()
    with pytest.MonkeyPatch.context() as patch:
        # The other's HOLD comes between the look and the act.
        patch.setattr(run, "_world_refusals", list)
        with pytest.raises(Exception, match="belongs to somebody"):
            run.open()
    assert pair.holds()["alpha"] is None
    run.close()


def theirs(_breaker: Breaker, pair: Pair, flow: str) -> None:
    """A HOLD that is somebody else's by now is not removed (I2)."""
    stage = Stage(pair, flow)

    def swap(step: str, event: str) -> None:
        if (step, event) == ("hold-close", "begin"):
            for site in pair.target().hold_sites():
                site.host.write(site.path, b'{"owner": "somebody"}')

    pair.on_step = swap
    stage.run()
    pair.on_step = None
    assert pair.holds() == dict.fromkeys(("alpha", "beta"), b'{"owner": "somebody"}')


CHECKS: dict[str, Callable[[Breaker, Pair, str], None]] = {
    "kill": sweep("kill"),
    "enospc": sweep("enospc"),
    **{
        check.__name__: check
        for check in (
            order,
            owner,
            trace,
            watch,
            leftover,
            unrecorded,
            twice,
            unknown,
            foreign,
            theirs,
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(
    mutant: Mutant, breaker: tuple[Breaker, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, pair = breaker
    mutate(mutant, monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        CHECKS[mutant.how](found, pair, mutant.flow)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "flow"),
    sorted({(m.how, m.flow) for m in MUTANTS if m.how not in ("kill", "enospc")}),
)
def test_the_real_code_passes_what_catches_the_mutants(
    how: str, flow: str, breaker: tuple[Breaker, Pair]
) -> None:
    found, pair = breaker
    CHECKS[how](found, pair, flow)
