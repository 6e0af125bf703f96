"""The 2x resolution filter: half widths, the pooled spread, QUEUE and REFUSE (RULES section 3)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pytest_dsv41.decision_v2 import (
    Refused,
    half_width,
    least_design,
    parse_design,
    pooled_cv,
    queue,
)


@pytest.mark.parametrize(
    ("design", "cv", "percent"),
    [
        ("pairs:6", 0.0255, 3.785),
        ("seeded:6", 0.0255, 3.785),
        ("seeded:6", 0.0107, 1.588),
        ("seeded:7", 0.0107, 1.399),
        ("seeded:8", 0.0107, 1.265),
    ],
)
def test_half_widths_are_the_documents(design: str, cv: float, percent: float) -> None:
    assert round(100 * half_width(design, cv=cv), 3) == percent


def test_unpaired_half_width_by_hand() -> None:
    # t(5) = 2.570582, √(1/4 + 1/3) = .763763, cv 2 %: 3.9266 %
    assert half_width("unpaired:4v3", cv=0.02) == pytest.approx(0.0392663, abs=1e-7)


def test_a_measured_difference_spread_takes_the_place_of_root_two_times_cv() -> None:
    assert half_width("seeded:6", cv=0.5, diff_cv=0.01) == pytest.approx(
        2.570581835636314 * 0.01 / math.sqrt(6), rel=1e-9
    )
    assert half_width("pairs:6", diff_cv=math.sqrt(2) * 0.01) == half_width("pairs:6", cv=0.01)


def test_three_per_cent_on_32k_queues_at_seven_pairs() -> None:
    six, seven = (queue(f"seeded:{n}", 0.03, cv=0.0107) for n in (6, 7))
    assert (six.verdict, seven.verdict) == ("REFUSE", "QUEUE")
    assert six.least_design == "seeded:7"
    assert six.half_width == pytest.approx(0.0158801, abs=1e-7)
    assert six.needed_gain == pytest.approx(0.0317603, abs=1e-7)
    assert "seeded:7 would queue" in six.reason


def test_exactly_twice_the_half_width_queues() -> None:
    half = half_width("pairs:6", cv=0.01)
    assert queue("pairs:6", 2 * half, cv=0.01).verdict == "QUEUE"
    assert queue("pairs:6", math.nextafter(2 * half, 0), cv=0.01).verdict == "REFUSE"


def test_without_any_spread_nothing_is_judged_and_nothing_refused() -> None:
    answer = queue("unpaired:4v3", 0.03)
    assert (answer.verdict, answer.half_width) == ("NOT JUDGED", None)
    assert "no spread is known" in answer.reason
    # A difference spread says nothing about unpaired repeats.
    assert queue("unpaired:4v3", 0.03, diff_cv=0.01).verdict == "NOT JUDGED"


def test_a_gain_no_design_resolves_names_none() -> None:
    assert least_design("pairs", 1e-6, cv=0.5, most=50) is None
    assert queue("pairs:3", 1e-6, cv=0.5).least_design is None


def test_pooling_weighs_by_degrees_of_freedom_and_drops_single_repeats() -> None:
    # (3·.02² + 1·.04²)/4 = .0007
    assert pooled_cv([(4, 0.02), (2, 0.04), (1, 9.9)]) == pytest.approx(math.sqrt(0.0007))
    assert pooled_cv([(1, 0.02)]) is None
    assert pooled_cv([]) is None


@pytest.mark.parametrize(
    "design", ["pairs", "pairs:1", "unpaired:4", "unpaired:4v1", "seeded:x", "4v3", "", "pairs:-3"]
)
def test_unknown_designs_are_refused_with_the_valid_ones(design: str) -> None:
    with pytest.raises(Refused, match="valid: pairs:N, seeded:N, unpaired:AvB"):
        queue(design, 0.03, cv=0.01)


def test_designs_are_counts_of_repeats() -> None:
    assert parse_design("pairs:6") == ("pairs", 6, 6)
    assert parse_design("unpaired:4v3") == ("unpaired", 4, 3)


@pytest.mark.parametrize("gain", [0, -0.03, math.nan, math.inf, True, "3 %"])
def test_an_expected_gain_that_is_none_is_refused(gain: Any) -> None:
    with pytest.raises(Refused, match="expected_gain"):
        queue("pairs:6", gain, cv=0.01)


def test_a_half_width_without_a_spread_is_refused() -> None:
    for design in ("pairs:6", "unpaired:4v3"):
        with pytest.raises(Refused, match="needs"):
            half_width(design)
    with pytest.raises(Refused, match="cv must be a fraction"):
        half_width("pairs:6", cv=-0.01)
