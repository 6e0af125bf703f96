"""Schedules: names of starts, the pinned order of items, and which values belong together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_values import CELLS, plan_of, window_text

from pytest_dsv41.errors import SpecError
from pytest_dsv41.window.plan import Plan, make_plan
from pytest_dsv41.window.schedule import default_pairing, layout, name_starts, split_schedule
from pytest_dsv41.window.spec import load_spec


def names(schedule: str) -> list[str]:
    tokens = split_schedule(schedule)
    return [start.name for start in name_starts(tokens, dict(zip(tokens, tokens, strict=True)))]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("C/X/C", ["C1", "X", "C2"]),
        ("K/I/K/I", ["K1", "I1", "K2", "I2"]),
        ("C/X/C/X/C", ["C1", "X1", "C2", "X2", "C3"]),
        (" C / X ", ["C", "X"]),
        ("C/X1/C/X2/C", ["C1", "X1", "C2", "X2", "C3"]),
    ],
)
def test_a_start_has_its_token_as_name_numbered_when_it_occurs_again(
    schedule: str, expected: list[str]
) -> None:
    assert names(schedule) == expected


@pytest.mark.parametrize(
    ("schedule", "interleave", "expected"),
    [
        ("C/I/C/I", False, "adjacent"),
        ("C/I/C/I/C/I", False, "adjacent"),
        ("C/I", False, "none"),
        ("C/I", True, "adjacent"),
        ("C/I/C", False, "none"),
        ("C/I/C/I/C", False, "none"),
        ("I/C/I/C", False, "none"),
        ("C/I/I/C", False, "none"),
        ("C/I/C/J", False, "none"),
        ("C/C", False, "none"),
    ],
)
def test_only_control_and_candidate_in_turn_are_paired_by_default(
    schedule: str, interleave: bool, expected: str
) -> None:
    tokens = split_schedule(schedule)
    starts = name_starts(tokens, dict(zip(tokens, tokens, strict=True)))
    assert default_pairing(starts, "C", interleave=interleave) == expected


def ids(plan: Plan) -> list[str]:
    return [item.id for item in plan.items]


def test_items_run_start_by_start_cell_by_cell_repeat_by_repeat(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X/C", repeats="{C1 = 1, X = 3, C2 = 2}"))
    assert ids(plan) == [
        "C1-decode-b1-r0",
        "C1-prefill-b1-r0",
        "X-decode-b1-r0",
        "X-decode-b1-r1",
        "X-decode-b1-r2",
        "X-prefill-b1-r0",
        "X-prefill-b1-r1",
        "X-prefill-b1-r2",
        "C2-decode-b1-r0",
        "C2-decode-b1-r1",
        "C2-prefill-b1-r0",
        "C2-prefill-b1-r1",
    ]
    assert [item.index for item in plan.items] == list(range(12))
    assert [item.decision for item in plan.items[:2]] == [True, False]


def test_interleaved_items_take_the_starts_in_turn(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        window_text(schedule="K/I", more="interleave = true", target='kind = "endpoints"'),
    )
    assert ids(plan)[:7] == [
        "K-decode-b1-r0",
        "I-decode-b1-r0",
        "K-decode-b1-r1",
        "I-decode-b1-r1",
        "K-decode-b1-r2",
        "I-decode-b1-r2",
        "K-prefill-b1-r0",
    ]
    assert layout(plan, "decode-b1", "c1").control == (
        ("K-decode-b1-r0",),
        ("K-decode-b1-r1",),
        ("K-decode-b1-r2",),
    )


def test_an_adjacent_pair_is_the_control_start_right_before(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(repeats="2"))
    places = layout(plan, "decode-b1", "c1")
    assert places.paired
    assert places.control == (
        ("K1-decode-b1-r0",),
        ("K1-decode-b1-r1",),
        ("K2-decode-b1-r0",),
        ("K2-decode-b1-r1",),
    )
    assert places.candidate == (
        "I1-decode-b1-r0",
        "I1-decode-b1-r1",
        "I2-decode-b1-r0",
        "I2-decode-b1-r1",
    )


def test_a_bracket_pairs_a_repeat_with_the_same_repeat_of_both_sides(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X/C", more='pairing = "bracket"'))
    places = layout(plan, "prefill-b1", "c1")
    assert places.paired
    assert places.control == tuple(
        (f"C1-prefill-b1-r{repeat}", f"C2-prefill-b1-r{repeat}") for repeat in range(3)
    )
    assert places.candidate == tuple(f"X-prefill-b1-r{repeat}" for repeat in range(3))


def test_without_pairing_every_control_value_is_pooled(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        window_text(schedule="C/X1/C/X2/C", repeats="{control = 2, c1 = 3, c2 = 4}", candidates=2),
    )
    for arm, start, count in (("c1", "X1", 3), ("c2", "X2", 4)):
        places = layout(plan, "decode-b1", arm)
        assert not places.paired
        assert places.control == tuple(
            (f"C{number}-decode-b1-r{repeat}",) for number in (1, 2, 3) for repeat in range(2)
        )
        assert places.candidate == tuple(f"{start}-decode-b1-r{r}" for r in range(count))


def test_each_candidate_arm_is_paired_with_its_own_neighbours(tmp_path: Path) -> None:
    text = window_text(schedule="K/X1/K/X2", candidates=2, more='pairing = "adjacent"')
    plan = plan_of(tmp_path, text)
    assert layout(plan, "decode-b1", "c2").control[0] == ("K2-decode-b1-r0",)
    with pytest.raises(KeyError, match="no candidate arm 'control'"):
        layout(plan, "decode-b1", "control")
    with pytest.raises(KeyError, match="no cell 'decode-b9'"):
        layout(plan, "decode-b9", "c1")


schedules = st.lists(st.sampled_from("CXY"), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(
    tokens=schedules,
    pairing=st.sampled_from(["adjacent", "bracket", "none"]),
    counts=st.lists(st.integers(1, 4), min_size=9, max_size=9),
    even=st.booleans(),
)
def test_of_any_schedule_the_order_is_pinned_and_each_pair_lies_side_by_side(
    tmp_path_factory: pytest.TempPathFactory,
    tokens: list[str],
    pairing: Any,
    counts: list[int],
    even: bool,
) -> None:
    starts = names("/".join(tokens))
    repeats = dict(zip(starts, [3] * 9 if even else counts, strict=False))
    arms = "".join(
        f'[arms.{token.lower()}]\nrole = "candidate"\nsymbol = "{token}"\n'
        for token in "XY"
        if token in tokens
    )
    text = (
        '[window]\nlane = "L"\nname = "w"\nhypothesis = "h"\nkind = "report"\n'
        f'schedule = "{"/".join(tokens)}"\npairing = "{pairing}"\n'
        f"repeats = {{{', '.join(f'{name} = {count}' for name, count in repeats.items())}}}\n"
        f'[arms.c]\nrole = "control"\nsymbol = "C"\n{arms}'
        '[[cells]]\nname = "decode-b1"\n[[cells]]\nname = "decode-b2"\n'
        '[target]\nkind = "local"\n'
    )
    file = tmp_path_factory.getbasetemp() / "schedule.toml"
    file.write_text(text)
    try:
        spec = load_spec(file)
    except SpecError:
        # Every pairing is refused only for a reason that can be seen in the schedule.
        alternates = all((token == "C") == (at % 2 == 0) for at, token in enumerate(tokens))
        complete = len(tokens) % 2 == (0 if pairing == "adjacent" else 1) and len(tokens) > 1
        assert "C" not in tokens or (pairing != "none" and not (alternates and complete and even))
        return
    plan = make_plan(spec, CELLS, window_id="L-w-W-1")
    assert len(set(ids(plan))) == len(plan.items) == 2 * sum(repeats.values())
    assert [item.index for item in plan.items] == list(range(len(plan.items)))
    assert Plan.from_json(plan.to_json()) == plan
    index_of = {start.name: start.index for start in plan.starts}
    item_of = {item.id: item for item in plan.items}
    for arm in spec.candidates:
        places = layout(plan, "decode-b2", arm.name)
        assert {item_of[item].arm for item in places.candidate} == {arm.name}
        assert len(places.candidate) == sum(
            repeats[start.name] for start in plan.starts if start.arm == arm.name
        )
        controls = [item_of[item] for group in places.control for item in group]
        assert {item.arm for item in controls} == {"c"}
        assert {item.cell for item in controls} == {"decode-b2"}
        if pairing == "none":
            assert len(controls) == sum(
                repeats[start.name] for start in plan.starts if start.arm == "c"
            )
            continue
        offsets = [-1] if pairing == "adjacent" else [-1, 1]
        assert len(places.control) == len(places.candidate)
        for group, candidate in zip(places.control, places.candidate, strict=True):
            own = item_of[candidate]
            assert [item_of[item].repeat for item in group] == [own.repeat] * len(offsets)
            assert [index_of[item_of[item].start] - index_of[own.start] for item in group] == (
                offsets
            )
