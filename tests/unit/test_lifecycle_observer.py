"""The observer's table: total, first match wins, and each row as SAFETY gives it."""

from __future__ import annotations

import dataclasses
import itertools
import typing

import pytest

from pytest_dsv41.hosts import Probe
from pytest_dsv41.lifecycle.hold import HoldState
from pytest_dsv41.lifecycle.observer import Answer, Facts, Presence, observe


def every_combination() -> typing.Iterator[Facts]:
    """All facts there are: ten booleans times the four kinds."""
    hints = typing.get_type_hints(Facts)
    kinds = [hints[field.name] for field in dataclasses.fields(Facts)]
    values = [(False, True) if kind is bool else tuple(kind) for kind in kinds]
    for combination in itertools.product(*values):
        yield Facts(*combination)


def safety(f: Facts) -> tuple[Answer, int]:
    """SAFETY's table, row by row, the first that matches; where no window has run: ours."""
    marked, meant = f.marker is not Presence.NONE, f.intent is not Presence.NONE
    up, unknown = f.production is Probe.UP, f.production is Probe.UNKNOWN
    own = f.hold is HoldState.OWN
    any_of_ours = marked or meant or own
    stopped = f.marker_overdue or f.gate_refused
    strange = f.hold in (HoldState.FOREIGN, HoldState.UNREADABLE)
    table: tuple[tuple[bool, Answer, int], ...] = (
        (f.lease_held and not f.lease_overdue, Answer.IN_PROGRESS, 1),
        (f.lease_held, Answer.ALERT, 1),
        (strange and (marked or meant), Answer.ALERT, 2),
        (strange, Answer.NOT_OURS, 2),
        (unknown and any_of_ours, Answer.ALERT, 3),
        (unknown and not f.machines_known, Answer.CLEAN, 8),
        (unknown, Answer.UNKNOWN, 3),
        (f.marker is Presence.UNREADABLE, Answer.ALERT, 4),
        (own and meant and f.keeper_alive and not f.keeper_overdue, Answer.RECOVERING, 5),
        (own, Answer.ALERT, 5),
        (marked and not stopped, Answer.CHAIN_WAITING, 6),
        (marked and not up and not f.abort_record, Answer.RECOVER, 6),
        (marked, Answer.ALERT, 6),
        (meant, Answer.ALERT, 7),
        (up or not f.served_by_default, Answer.CLEAN, 8),
        (True, Answer.ALERT, 8),
    )
    return next((answer, row) for matches, answer, row in table if matches)


def test_every_combination_has_one_answer_and_clean_is_never_said_wrongly() -> None:
    count = 0
    for facts in every_combination():
        seen = observe(facts)
        count += 1
        assert 1 <= seen.row <= 8
        if seen.answer is Answer.CLEAN:
            assert facts.intent is Presence.NONE
            assert facts.marker is Presence.NONE
            assert facts.hold is HoldState.NONE
            assert not facts.lease_held
            assert facts.production is Probe.UP or (
                not facts.machines_known
                if facts.production is Probe.UNKNOWN
                else not facts.served_by_default
            )
        # I1: production down by us, nobody at work, is always said.
        if facts.intent is not Presence.NONE and facts.production is Probe.DOWN:
            assert seen.answer is not Answer.CLEAN
        # I3 and I9: recovery starts by itself in one case only, never on UNKNOWN.
        if seen.answer is Answer.RECOVER:
            assert facts.production is Probe.DOWN
            assert not facts.abort_record
            assert facts.marker is Presence.PRESENT
        assert (seen.answer, seen.row) == safety(facts), facts
    assert count == 2**10 * 4 * 3 * 3 * 3


@pytest.mark.parametrize(
    ("facts", "answer", "row"),
    [
        (Facts(lease_held=True), Answer.IN_PROGRESS, 1),
        (Facts(lease_held=True, lease_overdue=True), Answer.ALERT, 1),
        (Facts(hold=HoldState.FOREIGN), Answer.NOT_OURS, 2),
        (Facts(hold=HoldState.UNREADABLE, intent=Presence.PRESENT), Answer.ALERT, 2),
        (Facts(production=Probe.UNKNOWN), Answer.UNKNOWN, 3),
        (Facts(production=Probe.UNKNOWN, marker=Presence.PRESENT), Answer.ALERT, 3),
        (Facts(marker=Presence.UNREADABLE, production=Probe.DOWN), Answer.ALERT, 4),
        (
            Facts(hold=HoldState.OWN, intent=Presence.PRESENT, keeper_alive=True),
            Answer.RECOVERING,
            5,
        ),
        (Facts(hold=HoldState.OWN, intent=Presence.PRESENT), Answer.ALERT, 5),
        (Facts(hold=HoldState.OWN), Answer.ALERT, 5),
        (Facts(marker=Presence.PRESENT, production=Probe.DOWN), Answer.CHAIN_WAITING, 6),
        (
            Facts(marker=Presence.PRESENT, production=Probe.DOWN, gate_refused=True),
            Answer.RECOVER,
            6,
        ),
        (
            Facts(
                marker=Presence.PRESENT,
                production=Probe.DOWN,
                marker_overdue=True,
                abort_record=True,
            ),
            Answer.ALERT,
            6,
        ),
        (Facts(marker=Presence.PRESENT, marker_overdue=True), Answer.ALERT, 6),
        (Facts(intent=Presence.PRESENT), Answer.ALERT, 7),
        (Facts(intent=Presence.PRESENT, production=Probe.DOWN), Answer.ALERT, 7),
        (Facts(), Answer.CLEAN, 8),
        (Facts(production=Probe.DOWN), Answer.ALERT, 8),
        (Facts(production=Probe.DOWN, served_by_default=False), Answer.CLEAN, 8),
    ],
)
def test_each_row_of_the_table(facts: Facts, answer: Answer, row: int) -> None:
    seen = observe(facts)
    assert (seen.answer, seen.row) == (answer, row)


def test_what_does_not_change_the_answer_is_mentioned() -> None:
    assert observe(Facts()).why == "production serves"
    assert "a leftover of ours is listed" in observe(Facts(leftovers=True)).why
    unseen = Facts(production=Probe.UNKNOWN, machines_known=False)
    assert "no machine is known" in observe(unseen).why


def test_down_is_said_only_when_nobody_is_at_work() -> None:
    assert observe(Facts(intent=Presence.PRESENT, production=Probe.DOWN)).down
    assert not observe(Facts(intent=Presence.PRESENT)).down
    assert not observe(Facts(lease_held=True, production=Probe.DOWN)).down
