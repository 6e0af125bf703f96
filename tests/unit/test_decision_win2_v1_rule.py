"""win2-v1, revision 3 and before: every edge of RULES section 1 with a value computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pytest_dsv41.decision_v2 import (
    Decision,
    Refused,
    Series,
    SeriesResult,
    decide_cell,
    decide_window,
    prompt_identity,
    report_window,
)
from pytest_dsv41.decision_v2.kernel import c4, needed, t975

A = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"  # sha256 of "a"
B = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"  # sha256 of "b"
# The quantile of two degrees of freedom has a closed form; the others are the tables'.
T2, T3, T4 = 0.95 * math.sqrt(2 / (1 - 0.95**2)), 3.1824463052842638, 2.7764451051977987


def series(
    control: Sequence[Any],
    candidate: Sequence[Any],
    *,
    cell: str = "short-b1",
    metric: str = "ms_per_round",
    lower: bool = True,
    paired: bool = True,
    prompt: str | None = A,
) -> Series:
    return Series(
        cell,
        metric,
        control,
        candidate,
        lower_is_better=lower,
        paired=paired,
        control_prompts=None if prompt is None else [prompt] * len(control),
        candidate_prompts=None if prompt is None else [prompt] * len(candidate),
    )


def guard(control: Sequence[Any], candidate: Sequence[Any], **more: Any) -> Series:
    return series(control, candidate, metric="accepted_per_round", lower=False, **more)


def judged(control: Sequence[Any], candidate: Sequence[Any], **more: Any) -> SeriesResult:
    revision = more.pop("revision", 3)
    return decide_cell([series(control, candidate, **more)], revision=revision).series[0]


# -- the arithmetic --------------------------------------------------------------------------------


def test_paired_gain_is_the_mean_of_ratios_with_students_interval() -> None:
    one = judged([100, 100, 100], [96, 95, 97])
    # d = .04 .05 .03: mean .04, sd .01
    assert one.gain == pytest.approx(0.04, abs=1e-15)
    assert one.half == pytest.approx(T2 * 0.01 / math.sqrt(3), rel=1e-12)
    assert one.low == pytest.approx(0.04 - 0.024841377, abs=1e-9)
    assert one.df == 2
    assert one.design == "paired 3 v 3"
    assert one.verdict == "WIN"


def test_a_pair_is_compared_with_its_own_control() -> None:
    one = judged([100, 200, 400], [96, 192, 384])
    assert one.differences == pytest.approx([0.04] * 3, abs=1e-15)
    assert one.half == pytest.approx(0.0, abs=1e-15)


def test_unpaired_is_welch_over_the_control_mean_with_floored_df() -> None:
    one = judged([99, 101, 100, 100], [95, 96, 97], paired=False)
    # v_c = (2/3)/100²/4, v_x = 1/100²/3; ws = 25/(2.7778/3 + 11.1111/2) = 3.857 -> 3
    assert one.df == 3
    assert one.gain == pytest.approx(0.04, abs=1e-15)
    assert one.half == pytest.approx(T3 * math.sqrt(5e-5), rel=1e-12)
    assert one.verdict == "WIN"


def test_a_whole_df_is_not_floored_away_by_rounding() -> None:
    # Equal variances and counts: ws is exactly nc + nx - 2 = 4, in floats 3.9999999999999996.
    control = [106.4, 96.4, 92.1]
    assert judged(control, control[::-1], paired=False).df == 4


def test_df_is_at_least_the_smaller_arms() -> None:
    # A constant control arm: ws = nx - 1 = 2, which is also the least.
    assert judged([100] * 8, [95, 96, 97], paired=False).df == 2
    assert judged([99, 101, 100, 100], [96] * 3, paired=False).df == 3


def test_equal_values_have_a_spread_of_exactly_zero() -> None:
    # Three times .1 sums to .30000000000000004 in floats.
    for is_paired in (True, False):
        one = judged([0.1] * 3, [0.1] * 3, paired=is_paired)
        assert (one.gain, one.half, one.threshold, one.worse) == (0.0, 0.0, 0.0, 0)
        assert one.verdict == "INCONCLUSIVE"
        assert one.df == 2


def test_constant_arms_win_and_lose_without_a_spread() -> None:
    assert judged([0.1] * 3, [0.097] * 3, paired=False).verdict == "WIN"
    assert judged([0.1] * 3, [0.1001] * 3, paired=False).verdict == "LOSS"
    assert judged([0.1] * 3, [0.1001] * 3).verdict == "LOSS"


def test_a_gain_of_exactly_two_per_cent_does_not_win() -> None:
    for is_paired in (True, False):
        one = judged([100] * 3, [98] * 3, paired=is_paired)
        assert one.gain == 0.02
        assert one.verdict == "INCONCLUSIVE"
        assert judged([100] * 3, [97.9] * 3, paired=is_paired).verdict == "WIN"


def test_a_difference_of_exactly_the_threshold_is_not_worse() -> None:
    # Revision 1's threshold is the plain range: (12 - 10)/11, and (9 - 11)/11 equals its negative.
    one = judged([10, 11, 12], [9, 9, 9], lower=False, paired=False, revision=1)
    assert one.threshold == 2 / 11
    assert one.worse == 0
    one = judged([10, 11, 12], [8.9, 9, 8.9], lower=False, paired=False, revision=1)
    assert one.worse == 2


def test_positive_means_better_in_both_orientations() -> None:
    assert judged([100] * 3, [90] * 3, lower=True).gain == 0.1
    assert judged([100] * 3, [90] * 3, lower=False).gain == -0.1


def test_c4_is_the_unbiasing_factor() -> None:
    # c4(2) = √(2/π), c4(3) = √π/2, c4(4) = 2 √(2/(3π))
    assert c4(2) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-13)
    assert c4(3) == pytest.approx(math.sqrt(math.pi) / 2, rel=1e-13)
    assert c4(4) == pytest.approx(2 * math.sqrt(2 / (3 * math.pi)), rel=1e-13)


def test_t_quantiles_are_the_tables() -> None:
    assert t975(1) == pytest.approx(12.706204736, rel=1e-9)
    assert (t975(2), t975(3), t975(4)) == pytest.approx((T2, T3, T4), rel=1e-9)
    assert t975(30) == pytest.approx(2.042272456, rel=1e-9)


# -- the loss-repeat test --------------------------------------------------------------------------


def test_threshold_is_the_expected_range_of_three_controls() -> None:
    # sd 1 of mean 100: 1.69/c4(3) = 1.906960 %, paired √2 times that
    assert judged([99, 100, 101], [99, 100, 101], paired=False).threshold == pytest.approx(
        0.0190696, abs=1e-7
    )
    assert judged([99, 100, 101], [99, 100, 101]).threshold == pytest.approx(0.0269685, abs=1e-7)


def test_threshold_comes_from_the_control_arm_alone() -> None:
    narrow = judged([99, 100, 101], [100, 100, 100])
    wide = judged([99, 100, 101], [50, 100, 150])
    assert narrow.threshold == wide.threshold


@pytest.mark.parametrize(
    ("n", "need"), [(3, 2), (4, 3), (5, 4), (6, 4), (7, 5), (8, 6), (9, 6), (12, 8)]
)
def test_two_thirds_rounded_up_must_be_worse(n: int, need: int) -> None:
    assert needed(n) == need


def test_loss_needs_the_repeats_and_the_interval() -> None:
    one = judged([99, 100, 101], [103, 104, 105], paired=False)
    # gain -.04, half 2.776445·√(2·1e-4/3) = .0226696
    assert one.worse == 3
    assert one.high == pytest.approx(-0.04 + T4 * math.sqrt(2e-4 / 3), abs=1e-12)
    assert one.verdict == "LOSS"


# Two of three repeats 2.5 % worse than a spread of 1.9 %, the third as before: the interval
# reaches zero.
FIRES_ONLY = ([99, 100, 101], [102.5, 102.5, 100])


def test_repeats_without_the_interval_are_inconclusive_since_revision_3() -> None:
    one = judged(*FIRES_ONLY, paired=False)
    assert one.worse == one.needed == 2
    assert one.high > 0
    assert one.verdict == "INCONCLUSIVE"
    assert judged(*FIRES_ONLY, paired=False, revision=2).verdict == "LOSS"


def test_the_interval_without_the_repeats_is_inconclusive() -> None:
    # 1.5 % worse each time, constant: below zero beyond doubt, but within the control's spread.
    one = judged([99, 100, 101], [100.485, 101.5, 102.515])
    assert one.high < 0
    assert one.worse == 0
    assert one.verdict == "INCONCLUSIVE"


def test_a_guards_loss_needs_the_interval_in_revision_2_and_not_in_revision_1() -> None:
    primary = series([100] * 3, [100] * 3, paired=False)
    control, candidate = [101, 100, 99], [97.5, 97.5, 100]
    verdicts = {
        revision: decide_cell(
            [primary, guard(control, candidate, paired=False)], revision=revision
        ).verdict
        for revision in (3, 2)
    }
    assert verdicts == {3: "INCONCLUSIVE", 2: "INCONCLUSIVE"}
    # Revision 1's threshold is the range, 2 %: these two lie beyond it as well.
    old = decide_cell([primary, guard(control, candidate, paired=False)], revision=1)
    assert old.verdict == "LOSS"


def test_revision_1_takes_the_range_for_pairs_too() -> None:
    assert judged([99, 100, 101], [99, 100, 101], revision=1).threshold == 0.02


def test_a_win_is_the_same_in_every_revision() -> None:
    for revision in (1, 2, 3):
        assert judged([100, 101, 99], [96, 97, 95], revision=revision).verdict == "WIN"


def test_an_unknown_revision_is_refused() -> None:
    with pytest.raises(Refused, match="revisions 1, 2 and 3, not 4"):
        decide_window([series([100] * 3, [100] * 3)], ["short-b1"], revision=4)


# -- cells and windows -----------------------------------------------------------------------------

WINS = ([100, 101, 99], [95, 96, 94])
LOSES = ([100, 101, 99], [110, 111, 109])
NEITHER = ([100, 101, 99], [100, 100, 100])
BOTH = ["c1", "c2"]


def test_a_guard_never_wins() -> None:
    cell = decide_cell([series(*NEITHER), guard([1.0, 1.1, 0.9], [2.0, 2.1, 1.9])])
    assert cell.series[1].gain > 0.9
    assert cell.series[1].verdict == "INCONCLUSIVE"
    assert cell.verdict == "INCONCLUSIVE"


def test_a_losing_guard_overrules_a_winning_primary() -> None:
    cell = decide_cell([series(*WINS), guard([1.0, 1.01, 0.99], [0.7, 0.71, 0.69])])
    assert [one.verdict for one in cell.series] == ["WIN", "LOSS"]
    assert [one.role for one in cell.series] == ["primary", "guard"]
    assert cell.verdict == "LOSS"
    assert cell.reason == "accepted per round lost"


def test_a_guard_of_zero_where_higher_is_better_loses_everything() -> None:
    cell = decide_cell([series(*WINS), guard([1.0, 1.1, 0.9], [0, 0, 0])])
    assert cell.series[1].differences == (-1.0, -1.0, -1.0)
    assert cell.series[1].gain == -1.0
    assert cell.verdict == "LOSS"


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (WINS, WINS, "CANDIDATE"),
        (WINS, NEITHER, "CANDIDATE"),
        (NEITHER, NEITHER, "INCONCLUSIVE"),
        (WINS, LOSES, "NOT A CANDIDATE"),
        (NEITHER, LOSES, "NOT A CANDIDATE"),
    ],
)
def test_any_loss_rejects_and_any_win_accepts(first: Any, second: Any, verdict: str) -> None:
    window = [series(*first, cell="c1"), series(*second, cell="c2")]
    assert decide_window(window, BOTH).verdict == verdict
    assert decide_window(window[::-1], BOTH[::-1]).verdict == verdict


def test_cells_that_do_not_decide_are_judged_the_same_way() -> None:
    window = decide_window([series(*WINS, cell="c1"), series(*LOSES, cell="c2")], ["c1"])
    assert window.verdict == "CANDIDATE"
    assert window.cells["c2"].verdict == "LOSS"
    assert not window.cells["c2"].decides
    assert "Reported only" in window.cells["c2"].explain()


def test_groups_have_verdicts_of_their_own() -> None:
    window = decide_window(
        [series(*WINS, cell="c1"), series(*LOSES, cell="c2")],
        BOTH,
        groups={"single-user": ["c1"], "multi-user": ["c2"]},
    )
    assert window.verdict == "NOT A CANDIDATE"
    assert window.to_dict()["groups"] == {
        "single-user": {"cells": ["c1"], "verdict": "CANDIDATE"},
        "multi-user": {"cells": ["c2"], "verdict": "NOT A CANDIDATE"},
    }


def test_a_window_without_decision_cells_reports() -> None:
    window = report_window([series(*WINS, prompt=None)])
    assert window.verdict == "COMPLETE"
    assert window.cells["short-b1"].verdict == "WIN"
    assert window.to_dict()["decision_cells"] == []


def test_a_refusal_in_a_report_only_cell_stops_nothing() -> None:
    window = decide_window(
        [series(*WINS, cell="c1"), series([100, 101], [95, 96, 97], cell="c2")], ["c1"]
    )
    assert window.verdict == "CANDIDATE"
    assert window.cells["c2"].verdict == "REFUSED"
    assert "2 repeats, at least 3" in window.cells["c2"].reason
    assert window.to_dict()["cells"]["c2"]["series"] == []


# -- what is refused, and where the message points -------------------------------------------------


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (math.nan, "not a finite number"),
        (math.inf, "not a finite number"),
        (np.float64("nan"), "not a finite number"),
        (True, "is not a number"),
        (np.bool_(True), "is not a number"),
        ("100", "is not a number"),
        (None, "is not a number"),
        (100 + 0j, "is not a number"),
        (-1.0, "is negative"),
        (0.0, "must be above 0"),
        (10**400, "too large"),
    ],
)
def test_a_control_value_no_rule_can_judge_is_refused(value: Any, what: str) -> None:
    with pytest.raises(Refused, match=what) as refusal:
        decide_window([series([100, value, 100], [100] * 3)], ["short-b1"])
    error = refusal.value
    assert (error.cell, error.metric, error.arm, error.position) == (
        "short-b1",
        "ms_per_round",
        "control",
        1,
    )
    assert str(error).startswith("short-b1 / ms_per_round / control[1]: ")


def test_a_candidate_of_zero_where_lower_is_better_is_refused() -> None:
    with pytest.raises(Refused, match=r"candidate\[2\]: 0 where lower is better"):
        decide_window([series([100] * 3, [100, 100, 0])], ["short-b1"])


def test_numpy_numbers_are_numbers() -> None:
    values = np.array([100, 101, 99], dtype=np.float32)
    assert judged(values, np.array([95, 96, 94])).verdict == "WIN"


@pytest.mark.parametrize("is_paired", [True, False])
def test_fewer_than_three_repeats_are_refused(is_paired: bool) -> None:
    with pytest.raises(Refused, match="candidate: 2 repeats, at least 3 are needed"):
        decide_window([series([100] * 3, [95] * 2, paired=is_paired)], ["short-b1"])


def test_fewer_than_three_repeats_in_a_guard_refuse_the_cell() -> None:
    with pytest.raises(Refused, match="accepted_per_round / control: 2 repeats"):
        decide_window([series(*WINS), guard([1, 1], [1, 1])], ["short-b1"])


def test_pairs_of_unequal_number_are_refused() -> None:
    with pytest.raises(Refused, match="pairs of 4 control and 3 candidate repeats"):
        decide_window([series([100] * 4, [95] * 3)], ["short-b1"])


@pytest.mark.parametrize(
    ("cells", "what"),
    [
        ([], "no decision cell"),
        (["c1", "c2", "c3"], "3 decision cells"),
        (["c1", "c1"], "named twice"),
        (["c9"], "'c9' has no series; cells: c1, c2, c3"),
        ("c1", "a list of names"),
    ],
)
def test_wrong_decision_cells_are_refused(cells: Any, what: str) -> None:
    window = [series(*WINS, cell=name) for name in ("c1", "c2", "c3")]
    with pytest.raises(Refused, match=what):
        decide_window(window, cells)


def test_groups_of_unknown_or_no_cells_are_refused() -> None:
    for groups in ({"g": ["c9"]}, {"g": []}, {"g": "short-b1"}):
        with pytest.raises(Refused, match="group 'g'"):
            decide_window([series(*WINS)], ["short-b1"], groups=groups)


def test_two_series_of_one_metric_are_refused() -> None:
    with pytest.raises(Refused, match="two series of one metric"):
        decide_window([series(*WINS), series(*WINS)], ["short-b1"])


def test_values_too_far_apart_are_refused_not_infinite() -> None:
    with pytest.raises(Refused, match="too far apart"):
        decide_window([series([1e-300] * 3, [1e300] * 3)], ["short-b1"])


def test_tiny_and_huge_values_keep_their_spread() -> None:
    # Their squares do not fit into floats; the verdict knows ratios only.
    reference = judged([100, 101, 99], [95, 96, 94], paired=False)
    for scale in (2.0**-900, 2.0**900):
        control = [v * scale for v in (100, 101, 99)]
        candidate = [v * scale for v in (95, 96, 94)]
        scaled = judged(control, candidate, paired=False)
        assert (scaled.gain, scaled.half) == (reference.gain, reference.half)


# -- prompt identity -------------------------------------------------------------------------------


def test_identity_of_one_prompt_is_its_hash_and_of_several_the_hash_of_the_sorted() -> None:
    both = "0d6b8562ada6532fbb83d290ef589552c0cdd3595596402f5d2ff2aa3368ffea"  # printf 'B\nA'
    twice = "1e985140ec84e492768b78c73653c052f10687838c9411eb2030a5de229120cc"  # printf 'A\nA'
    assert prompt_identity([A]) == A
    assert prompt_identity([A, B]) == prompt_identity([B, A]) == both
    assert prompt_identity([A, A]) == twice


@pytest.mark.parametrize("bad", [[], A, ["xyz"], [A.upper()], [A[:63]], [A + "\n"], [None]])
def test_what_is_no_hash_has_no_identity(bad: Any) -> None:
    with pytest.raises(ValueError, match="prompt"):
        prompt_identity(bad)


def prompted(control: Any, candidate: Any, metric: str = "ms_per_round") -> Series:
    return Series(
        "short-b1",
        metric,
        [100, 101, 99],
        [95, 96, 94],
        lower_is_better=True,
        control_prompts=control,
        candidate_prompts=candidate,
    )


@pytest.mark.parametrize(
    ("control", "candidate", "what"),
    [
        (None, [A] * 3, "control: values have no prompt identity"),
        ([A] * 3, None, "candidate: values have no prompt identity"),
        ([A, None, A], [A] * 3, r"control\[1\]: has no prompt identity"),
        ([A] * 2, [A] * 3, "2 prompt identities for 3 values"),
        ([A, A, B], [A] * 3, r"control\[2\]: values of two prompts in one arm"),
        ([A] * 3, [B] * 3, "candidate: the arms ran on different prompts"),
        (["short"] * 3, [A] * 3, "not a sha256"),
    ],
)
def test_prompt_faults_are_refused(control: Any, candidate: Any, what: str) -> None:
    with pytest.raises(Refused, match=what):
        decide_window([prompted(control, candidate)], ["short-b1"])


def test_a_guard_on_another_prompt_than_its_primary_is_refused() -> None:
    window = [prompted([A] * 3, [A] * 3), prompted([B] * 3, [B] * 3, metric="ttft_ms")]
    with pytest.raises(Refused, match="ttft_ms / control: a guard on another prompt"):
        decide_window(window, ["short-b1"])


def test_report_only_cells_may_lack_identities_but_not_contradict_themselves() -> None:
    bare = decide_window([series(*WINS, cell="c1"), series(*WINS, cell="c2", prompt=None)], ["c1"])
    assert bare.cells["c2"].verdict == "WIN"
    mixed = decide_window([series(*WINS, cell="c1"), prompted([A] * 3, [B] * 3)], ["c1"])
    assert mixed.cells["short-b1"].verdict == "REFUSED"


# -- reading a verdict -----------------------------------------------------------------------------


def test_to_dict_is_plain_json_with_everything_to_follow_the_arithmetic() -> None:
    window = decide_window([series(*WINS), guard([1.0, 1.1, 0.9], [1.0, 1.1, 0.9])], ["short-b1"])
    document = window.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert list(document) == [
        "rule",
        "rule_revision",
        "verdict",
        "decision_cells",
        "groups",
        "cells",
    ]
    assert (document["rule"], document["rule_revision"]) == ("win2-v1", 3)
    cell = document["cells"]["short-b1"]
    assert cell["decides"] is True
    one = cell["series"][0]
    asked = (
        "metric role design n_control n_candidate gain low high df threshold worse needed verdict "
        "reason"
    )
    assert list(one)[:14] == asked.split()
    assert one["control_prompts"] == [A] * 3
    d = [(c - x) / c for c, x in zip(one["control"], one["candidate"], strict=True)]
    assert one["differences"] == pytest.approx(d, abs=1e-15)
    assert one["gain"] == pytest.approx(sum(d) / 3, abs=1e-15)


def test_a_win_is_told_in_plain_words() -> None:
    window = decide_window(
        [
            series([70, 70.5, 69.8], [67.2, 67.9, 66.8], cell="32k-b1"),
            guard([1.05, 1.01, 1.1], [1.03, 0.99, 1.08], cell="32k-b1"),
        ],
        ["32k-b1"],
    )
    assert window.explain() == [
        "32k-b1: ms per round 4.0 % better, 95 % interval 3.2 to 4.8 %, 3 of 3 repeats better: "
        "WIN. Guard accepted per round: 1.9 % lower, within its spread: no loss.",
        "Window: CANDIDATE (decided by 32k-b1).",
    ]


def test_a_guard_that_gains_more_than_its_spread_is_not_said_to_lie_within_it() -> None:
    """Control SD 0.05 of a mean of 1: pairs: √2 · 1.69 · 0.05 / c4(3) = 13.5 %."""
    for candidate, said in (
        ([1.05, 1.15, 1.1], "within"),
        ([1.2, 1.3, 1.25], "better by more than"),
    ):
        window = decide_window(
            [
                series([70, 70.5, 69.8], [67.2, 67.9, 66.8], cell="32k-b1"),
                guard([0.95, 1.05, 1.0], candidate, cell="32k-b1"),
            ],
            ["32k-b1"],
        )
        assert f"higher, {said} its spread: no loss." in window.explain()[0]


def test_a_loss_says_how_many_repeats_and_how_far() -> None:
    text = decide_cell([series(*LOSES)]).explain()
    assert "10.0 % worse" in text
    assert "3 of 3 repeats worse: LOSS." in text


def test_inconclusive_says_what_more_data_would_settle_it() -> None:
    text = decide_cell([series([70, 72.5, 69.8], [69.2, 70.9, 67.8])]).explain()
    # d = .01143 .02207 .02865: sd .00868; 4 pairs give a half width of .0138 < .0207
    assert "the gain is above 2 %, but the interval reaches zero" in text
    assert "about 4 pairs would settle it" in text


def test_inconclusive_below_the_required_gain_says_that_more_data_does_not_help() -> None:
    text = decide_cell([series([100, 101, 99], [99, 99.99, 98.01])]).explain()
    assert "a gain of more than 2 % is required" in text
    assert "More data would not change that." in text


def test_a_decision_is_not_changed_by_advice() -> None:
    window = decide_window([series(*WINS)], ["short-b1"])
    assert isinstance(window, Decision)
    with pytest.raises(KeyError):
        window.advised({"unknown": []})
