"""win2-paired-v1 and its exact test: each edge of RULES section 2 with a value computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pytest_dsv41.decision_v2 import (
    CellResult,
    Refused,
    SeededSeries,
    decide_paired_cell,
    decide_paired_window,
    report_paired_window,
    seeded_series,
    sign_flip,
)

A = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
B = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"
T5 = 2.570581835636314  # 97.5 % quantile of Student's t at 5 degrees of freedom

FLAT = [100.0] * 6
# One control start against the other: the mean is 0, so nothing drifts.
STEADY = [100.0, 101.0, 99.0, 100.0, 101.0, 99.0]
BETTER = [103.0, 104.0, 105.0, 104.0, 105.0, 103.0]  # d = .03 .04 .05 .04 .05 .03 against FLAT


def series(
    controls: Sequence[Sequence[Any]],
    candidate: Sequence[Any],
    *,
    cell: str = "seeded-short-b1",
    metric: str = "decode_tok_s",
    lower: bool = False,
    profile: str = "single",
    prompt: str | None = A,
    report_only: bool = False,
) -> SeededSeries:
    return SeededSeries(
        cell,
        metric,
        controls,
        candidate,
        lower_is_better=lower,
        profile=profile,
        control_prompts=None if prompt is None else [[prompt] * len(c) for c in controls],
        candidate_prompts=None if prompt is None else [prompt] * len(candidate),
        report_only=report_only,
    )


def judged(*parts: SeededSeries, **more: Any) -> CellResult:
    return decide_paired_cell(parts[0].cell, list(parts), **more)


# -- the sign-flip test ----------------------------------------------------------------------------


def test_all_six_pairs_must_agree() -> None:
    # Only +++++ + and - - - - - - reach the sum: 2/64. With 3 pairs the least p is 2/8.
    assert sign_flip([0.03, 0.04, 0.05, 0.041, 0.052, 0.033]).p == 2 / 64
    assert sign_flip([0.03, 0.04, 0.05]).p == 0.25


def test_a_tie_in_floats_is_a_tie() -> None:
    assert sign_flip([0.1, 0.2, 0.3, 0.1, 0.2, 0.3, -0.3, -0.2]).p == 0.359375
    assert sign_flip([-0.02, 0.06, -0.03, 0.01, -0.03, 0.04]).p == 52 / 64


def test_equal_differences_tie_only_with_themselves() -> None:
    assert sign_flip([0.1] * 6).p == 2 / 64
    assert sign_flip([-0.1] * 6).p == 2 / 64
    # Five + and one -: sums of 4 are reached by 6 vectors with one minus, 6 is reached by one.
    assert sign_flip([0.1] * 5 + [-0.1]).p == 2 * (1 + 6) / 64


def test_zero_differences_stay_in() -> None:
    assert sign_flip([0.0] * 6).p == 1.0
    # A zero doubles every vector: the p of the others stays.
    assert sign_flip([0.1] * 6 + [0.0]).p == 2 / 64


def test_size_and_sign_of_everything_do_not_matter() -> None:
    d = [0.02, -0.01, 0.03, 0.05, -0.02, 0.04]
    p = sign_flip(d).p
    assert sign_flip([-one for one in d]).p == p
    for scale in (1e-300, 1e-12, 1e12, 1e300):
        assert sign_flip([scale * one for one in d]).p == p


def test_forty_differences_are_exact() -> None:
    # 40 equal ones of which one is negative: |sum| >= 38 needs at most one sign against the rest.
    assert sign_flip([1.0] * 39 + [-1.0]).p == 2 * (1 + 40) / 2**40
    assert sign_flip([1.0] * 40).error is None


def test_above_forty_it_is_a_seeded_monte_carlo_that_states_its_error() -> None:
    d = [1.0, -1.0] * 20 + [1.0] * 9
    # 49 signs of one size: |sum| >= 9 means at least 29 of a kind: 2 P(Bin(49, ½) >= 29)
    exact = 2 * sum(math.comb(49, k) for k in range(29, 50)) / 2**49
    first, again, other = sign_flip(d), sign_flip(d), sign_flip(d, seed=1)
    assert first == again
    assert first.error is not None
    assert first.error == pytest.approx(math.sqrt(exact * (1 - exact) / 200_000), rel=0.05)
    for one in (first, other):
        assert abs(one.p - exact) < 4 * first.error


def test_a_p_from_drawn_signs_is_never_zero() -> None:
    assert sign_flip([1.0] * 60, resamples=1000).p == 1 / 1001


@pytest.mark.parametrize("bad", [[], [math.nan], [1.0, math.inf]])
def test_differences_that_cannot_be_tested_are_refused(bad: list[float]) -> None:
    with pytest.raises(Refused):
        sign_flip(bad)


# -- interval and verdict --------------------------------------------------------------------------


def test_the_pairs_interval_is_students() -> None:
    one = judged(series([FLAT], BETTER)).series[0]
    # mean .04; deviations ±.01, 0: var = 4e-4/5 = 8e-5
    assert one.gain == pytest.approx(0.04, abs=1e-15)
    assert one.diff_cv == pytest.approx(math.sqrt(8e-5), rel=1e-9)
    assert one.half == pytest.approx(T5 * math.sqrt(8e-5 / 6), rel=1e-9)
    assert one.df == 5
    assert one.p == 2 / 64
    assert one.verdict == "WIN"
    assert one.design == "seeded 6 pairs, C/X"
    assert (one.threshold, one.worse, one.needed) == (None, None, None)


def test_the_control_of_a_pair_is_the_mean_of_its_starts() -> None:
    first, second = [98.0] * 6, [102.0] * 6
    one = judged(series([first, second], BETTER)).series[0]
    assert one.differences == pytest.approx([0.03, 0.04, 0.05, 0.04, 0.05, 0.03], abs=1e-15)


def test_t_multiplies_the_start_spread_too() -> None:
    sd = 0.01
    one_start = judged(series([FLAT], BETTER), start_sd={"decode_tok_s": sd}).series[0]
    assert one_start.half == pytest.approx(T5 * math.sqrt(8e-5 / 6 + sd**2 * 2), rel=1e-9)
    two = judged(series([FLAT, FLAT], BETTER), start_sd={"decode_tok_s": sd}).series[0]
    assert two.half == pytest.approx(T5 * math.sqrt(8e-5 / 6 + sd**2 * 1.5), rel=1e-9)
    assert two.start_sd_registered is True
    assert two.low == pytest.approx(0.04 - 0.0328516, abs=1e-6)
    assert two.verdict == "WIN"
    # The sign-flip test and diff_cv know nothing of it.
    assert two.p == 2 / 64
    assert two.diff_cv == pytest.approx(math.sqrt(8e-5), rel=1e-9)


def test_an_unregistered_start_sd_counts_as_zero_and_says_so() -> None:
    one = judged(series([FLAT], BETTER)).series[0]
    assert (one.start_sd, one.start_sd_registered) == (0.0, False)
    one = judged(series([FLAT], BETTER), start_sd={"decode_tok_s": 0.0}).series[0]
    assert (one.start_sd, one.start_sd_registered) == (0.0, True)


def test_a_win_needs_more_than_two_per_cent() -> None:
    assert judged(series([FLAT], [102.0] * 6)).series[0].gain == 0.02
    assert judged(series([FLAT], [102.0] * 6)).verdict == "INCONCLUSIVE"
    assert judged(series([FLAT], [102.1] * 6)).verdict == "WIN"


def test_a_loss_needs_no_size_but_the_interval_and_p() -> None:
    # d = -.001 each: the interval is below zero and all six agree.
    assert judged(series([FLAT], [99.9] * 6)).verdict == "LOSS"
    # One pair of the other sign: the interval still excludes zero, p = 4/64.
    candidate = [97.0, 97.0, 97.0, 97.0, 97.0, 100.1]
    one = judged(series([FLAT], candidate)).series[0]
    assert one.high < 0
    assert one.p == 4 / 64
    assert one.verdict == "INCONCLUSIVE"
    assert one.reason == "the interval excludes zero, but p is 0.0625"


def test_a_guard_loses_and_never_wins() -> None:
    primary = series([FLAT], BETTER)
    good = series([FLAT], BETTER, metric="accepted_per_round")
    bad = series([FLAT], [99.0] * 6, metric="accepted_per_round")
    assert judged(primary, good).series[1].verdict == "INCONCLUSIVE"
    assert judged(primary, good).verdict == "WIN"
    assert judged(primary, bad).verdict == "LOSS"


# -- A/A drift -------------------------------------------------------------------------------------

DRIFTED = [101.0, 102.0, 101.0, 102.0, 101.0, 102.0]  # against FLAT: 1 to 2 % each time


def test_drift_between_control_starts_overrules_a_win_and_a_loss() -> None:
    for candidate in ([110.0] * 6, [90.0] * 6):
        cell = judged(series([FLAT, DRIFTED], candidate))
        primary = cell.series[0]
        assert primary.aa is not None
        assert primary.aa["drift"] is True
        assert primary.aa["gain"] == pytest.approx(0.015, abs=1e-15)
        assert primary.aa["p"] == 2 / 64
        assert cell.verdict == "INCONCLUSIVE"
        assert "A/A drift" in cell.reason
        assert cell.explain().endswith("measure again.")


def test_a_difference_of_the_starts_that_p_does_not_confirm_is_no_drift() -> None:
    # The interval excludes zero, but one pair of the other sign makes p 4/64.
    second = [103.0, 103.0, 103.0, 103.0, 103.0, 99.9]
    cell = judged(series([FLAT, second], [110.0] * 6))
    assert cell.series[0].aa is not None
    assert cell.series[0].aa["low"] > 0
    assert cell.series[0].aa["p"] == 4 / 64
    assert cell.verdict == "WIN"


def test_the_aa_interval_ignores_start_sd() -> None:
    cell = judged(series([FLAT, DRIFTED], [110.0] * 6), start_sd={"decode_tok_s": 0.5})
    assert cell.series[0].aa is not None
    assert cell.series[0].aa["drift"] is True


def test_one_control_start_has_no_aa() -> None:
    assert judged(series([FLAT], BETTER)).series[0].aa is None


def test_a_guards_own_drift_stops_only_that_guard_from_losing() -> None:
    primary = series([FLAT, STEADY], [110.0, 111, 109, 110, 111, 109])
    drifted = series([FLAT, DRIFTED], [90.0] * 6, metric="accepted_per_round")
    losing = series([FLAT, FLAT], [90.0] * 6, metric="client_tok_s")
    cell = judged(primary, drifted)
    assert cell.verdict == "WIN"
    assert "so it cannot lose" in cell.series[1].reason
    assert judged(primary, drifted, losing).verdict == "LOSS"


def test_a_primarys_drift_makes_the_cell_inconclusive_over_a_losing_guard() -> None:
    losing = series([FLAT, FLAT], [90.0] * 6, metric="client_tok_s")
    assert judged(series([FLAT, DRIFTED], [110.0] * 6), losing).verdict == "INCONCLUSIVE"


# -- identical streams -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("controls", "identical", "verdict"),
    [
        ([FLAT, FLAT], True, "WIN"),
        ([FLAT, FLAT], False, "INCONCLUSIVE"),
        ([FLAT, FLAT], None, "INCONCLUSIVE"),
        ([FLAT], True, "INCONCLUSIVE"),
    ],
)
def test_expected_identical_streams_must_be_proved_in_two_starts(
    controls: list[list[float]], identical: bool | None, verdict: str
) -> None:
    for candidate, plain in ((BETTER, "WIN"), ([90.0] * 6, "LOSS")):
        cell = judged(
            series(controls, candidate), expect_identical=True, streams_identical=identical
        )
        assert cell.verdict == (plain if verdict == "WIN" else "INCONCLUSIVE")


def test_streams_that_nobody_expected_to_be_identical_may_differ() -> None:
    assert judged(series([FLAT, FLAT], BETTER), streams_identical=False).verdict == "WIN"


# -- refusals --------------------------------------------------------------------------------------


def test_fewer_than_six_pairs_are_refused() -> None:
    with pytest.raises(Refused, match="5 pairs, at least 6 are needed"):
        judged(series([FLAT[:5]], BETTER[:5]))


def test_report_only_cells_need_three_pairs_and_never_decide() -> None:
    cell = judged(series([FLAT[:3]], BETTER[:3], report_only=True))
    assert (cell.verdict, cell.decides) == ("INCONCLUSIVE", False)
    with pytest.raises(Refused, match="2 pairs, at least 3"):
        judged(series([FLAT[:2]], BETTER[:2], report_only=True))


@pytest.mark.parametrize(
    ("controls", "candidate", "what"),
    [
        ([FLAT], BETTER[:5], "6 values for 5 pairs"),
        ([FLAT, FLAT[:5]], BETTER, "control C2: 5 values for 6 pairs"),
        ([[*FLAT[:5], 0.0]], BETTER, r"control C1\[5\]: a control value must be above 0"),
        ([FLAT], [*BETTER[:5], math.nan], r"candidate\[5\]: nan is not a finite number"),
        ([FLAT], [*BETTER[:5], -1], r"candidate\[5\]: -1.0 is negative"),
    ],
)
def test_pairs_no_rule_can_judge_are_refused(controls: Any, candidate: Any, what: str) -> None:
    with pytest.raises(Refused, match=what):
        judged(series(controls, candidate))


def test_a_candidate_of_zero_where_higher_is_better_is_judged() -> None:
    cell = judged(series([FLAT], [0.0] * 6))
    assert cell.series[0].gain == -1.0
    assert cell.verdict == "LOSS"


@pytest.mark.parametrize("starts", [0, 3])
def test_only_one_or_two_control_starts_are_a_seeded_schedule(starts: int) -> None:
    with pytest.raises(Refused, match="C/X and C/X/C"):
        series([FLAT] * starts, BETTER)


@pytest.mark.parametrize("sd", [-0.01, math.nan, math.inf, True, "1%"])
def test_a_start_sd_that_is_none_is_refused(sd: Any) -> None:
    with pytest.raises(Refused, match="start_sd must be"):
        judged(series([FLAT], BETTER), start_sd={"decode_tok_s": sd})


def test_unknown_keys_are_refused() -> None:
    cells = {"seeded-short-b1": [series([FLAT, FLAT], BETTER)]}
    names = ["seeded-short-b1"]
    with pytest.raises(Refused, match="unknown key 'ttft_ms'"):
        judged(series([FLAT], BETTER), start_sd={"ttft_ms": 0.01})
    for key in ("decode_tok_s", "seeded-short-b1/ttft_ms", "other/decode_tok_s"):
        with pytest.raises(Refused, match="start_sd has the unknown key"):
            decide_paired_window(cells, names, start_sd={key: 0.01})
    with pytest.raises(Refused, match="expect_identical names cell 'other'"):
        decide_paired_window(cells, names, expect_identical=["other"])
    with pytest.raises(Refused, match="expect_identical names cell 'other'"):
        decide_paired_window(cells, names, streams_identical={"other": True})


def test_a_decision_cell_needs_one_proved_prompt() -> None:
    with pytest.raises(Refused, match="no prompt identity"):
        judged(series([FLAT], BETTER, prompt=None))
    mixed = SeededSeries(
        "seeded-short-b1",
        "decode_tok_s",
        [FLAT],
        BETTER,
        lower_is_better=False,
        profile="single",
        control_prompts=[[A] * 6],
        candidate_prompts=[A] * 5 + [B],
    )
    with pytest.raises(Refused, match=r"candidate\[5\]: pairs on different prompts"):
        decide_paired_window({"seeded-short-b1": [mixed]}, ["seeded-short-b1"])


# -- windows and profiles --------------------------------------------------------------------------


def window_of(**verdicts: tuple[str, list[float]]) -> Mapping[str, list[SeededSeries]]:
    return {
        name: [series([FLAT, FLAT], candidate, cell=name, profile=profile)]
        for name, (profile, candidate) in verdicts.items()
    }


def test_each_profile_has_its_verdict_and_one_candidate_profile_is_enough() -> None:
    cells = window_of(b1=("single", BETTER), b2=("multi", [90.0] * 6))
    window = decide_paired_window(cells, ["b1", "b2"])
    assert window.verdict == "CANDIDATE"
    document = window.to_dict()
    assert document["profiles"] == {
        "single": {"cells": ["b1"], "verdict": "CANDIDATE"},
        "multi": {"cells": ["b2"], "verdict": "NOT A CANDIDATE"},
    }
    assert "groups" not in document
    assert (document["rule"], document["rule_revision"]) == ("win2-paired-v1", 1)


def test_two_decision_cells_a_profile_and_no_more() -> None:
    cells = window_of(
        a=("single", BETTER), b=("single", FLAT), c=("multi", FLAT), d=("multi", FLAT)
    )
    assert decide_paired_window(cells, list("abcd")).verdict == "CANDIDATE"
    cells = window_of(a=("single", BETTER), b=("single", FLAT), c=("single", FLAT))
    with pytest.raises(Refused, match="3 decision cells in profile single"):
        decide_paired_window(cells, list("abc"))


def test_a_report_only_cell_cannot_be_named_as_a_decision_cell() -> None:
    cells = {"bridge": [series([FLAT[:3]], BETTER[:3], cell="bridge", report_only=True)]}
    with pytest.raises(Refused, match="bridge: is report-only"):
        decide_paired_window(cells, ["bridge"])
    assert report_paired_window(cells).verdict == "COMPLETE"


def test_what_is_no_seeded_series_is_refused() -> None:
    for cells in ({"a": []}, {"a": [1.0]}):
        with pytest.raises(Refused, match="a: "):
            decide_paired_window(cells, ["a"])
    with pytest.raises(Refused, match="without series"):
        decide_paired_cell("a", [])


def test_series_of_one_cell_belong_together() -> None:
    one = series([FLAT], BETTER)
    for other, what in (
        (series([FLAT], BETTER), "two series of one metric"),
        (series([FLAT, FLAT], BETTER, metric="ttft_ms"), "another number of control starts"),
        (series([FLAT], BETTER, metric="ttft_ms", profile="multi"), "a cell of two profiles"),
        (series([FLAT], BETTER, metric="ttft_ms", cell="other"), "a series of cell 'other'"),
        (series([FLAT], BETTER, metric="ttft_ms", prompt=B), "pairs on different prompts"),
    ):
        with pytest.raises(Refused, match=what):
            judged(one, other)


def test_no_decision_cell_is_refused() -> None:
    with pytest.raises(Refused, match="no decision cell"):
        decide_paired_window(window_of(a=("single", BETTER)), [])


def test_a_refusal_in_a_cell_that_does_not_decide_stops_nothing() -> None:
    cells = {
        **window_of(a=("single", BETTER)),
        "short": [series([FLAT[:4]], BETTER[:4], cell="short")],
    }
    window = decide_paired_window(cells, ["a"])
    assert window.verdict == "CANDIDATE"
    assert window.cells["short"].verdict == "REFUSED"


def test_the_window_is_plain_json_with_the_pair_fields() -> None:
    window = decide_paired_window(
        window_of(a=("single", BETTER)), ["a"], start_sd={"a/decode_tok_s": 0.001}
    )
    document = window.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    one = document["cells"]["a"]["series"][0]
    assert one["p"] == 2 / 64
    assert (one["start_sd"], one["start_sd_registered"]) == (0.001, True)
    assert one["aa"]["drift"] is False
    assert one["control"] == [FLAT, FLAT]
    assert one["control_prompts"] == [[A] * 6, [A] * 6]
    assert document["cells"]["a"]["profile"] == "single"


def test_a_seeded_verdict_is_told_in_plain_words() -> None:
    window = decide_paired_window(window_of(a=("single", BETTER)), ["a"])
    assert window.explain() == [
        "a: decode tok/s 4.0 % better, 95 % interval 3.1 to 4.9 %, 6 of 6 pairs better, "
        "sign-flip p 0.0312: WIN.",
        "single (a): CANDIDATE.",
        "Window: CANDIDATE (decided by a).",
    ]


# -- series from records ---------------------------------------------------------------------------


def record(
    values: Sequence[float], *, cell: str = "seeded-short-b1", **more: Any
) -> dict[str, Any]:
    return {
        "cell": cell,
        "pairs": [
            {
                "pair": i,
                "seeds": [1000 + 10 * i],
                "prompt_sha256": A,
                "values": {
                    "decode_tok_s": {"value": v, "unit": "tok/s", "lower_is_better": False},
                    "ms_per_round": 1000 / v,
                },
            }
            for i, v in enumerate(values)
        ],
        **more,
    }


def test_series_are_built_from_records_primary_first() -> None:
    primary, guard = seeded_series(
        record(FLAT),
        record(BETTER),
        record(STEADY),
        metrics=["decode_tok_s", "ms_per_round"],
        profile="single",
    )
    assert primary.controls == (tuple(FLAT), tuple(STEADY))
    assert primary.candidate == tuple(BETTER)
    assert (primary.lower_is_better, guard.lower_is_better) == (False, True)
    assert primary.unit == "tok/s"
    assert primary.candidate_prompts == (A,) * 6
    cell = decide_paired_cell("seeded-short-b1", [primary, guard])
    assert cell.verdict == "WIN"


def test_pairs_are_matched_by_their_number_not_their_place() -> None:
    shuffled = record(BETTER)
    shuffled["pairs"].reverse()
    (one,) = seeded_series(record(FLAT), shuffled, metrics=["decode_tok_s"], profile="single")
    assert one.candidate == tuple(BETTER)


def broken(change: Any) -> dict[str, Any]:
    changed = record(BETTER)
    change(changed)
    return changed


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (record(BETTER, cell="other"), "record of cell 'other'"),
        (record(BETTER[:5]), r"pairs \[5\] are not in every start"),
        (broken(lambda r: r["pairs"][2].update(seeds=[7])), r"candidate\[2\]: .*different seeds"),
        (broken(lambda r: r["pairs"][1].update(prompt_sha256=B)), r"candidate\[1\]: .*prompts"),
        (broken(lambda r: r["pairs"][1].pop("prompt_sha256")), "no prompt identity"),
        (broken(lambda r: r["pairs"][3]["values"].pop("decode_tok_s")), "pair 3 has no value"),
        (broken(lambda r: r["pairs"][3].update(pair=2)), "a pair is there twice"),
        (broken(lambda r: r["pairs"][3].pop("pair")), "a pair without its number"),
        (broken(lambda r: r.update(pairs=[])), "without pairs"),
        (broken(lambda r: r.pop("cell")), "record of cell None"),
    ],
)
def test_records_that_do_not_belong_together_are_refused(x: dict[str, Any], what: str) -> None:
    with pytest.raises(Refused, match=what):
        seeded_series(record(FLAT), x, metrics=["decode_tok_s"], profile="single")


def test_an_unknown_metric_needs_its_orientation() -> None:
    def with_extra(values: Sequence[float]) -> dict[str, Any]:
        made = record(values)
        for pair in made["pairs"]:
            pair["values"]["own"] = 1.0
        return made

    arms = with_extra(FLAT), with_extra(BETTER)
    with pytest.raises(Refused, match="own: nothing says whether lower is better"):
        seeded_series(*arms, metrics=["own"], profile="single")
    (one,) = seeded_series(*arms, metrics={"own": True}, profile="single")
    assert one.lower_is_better


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(Refused, match="valid: single, multi"):
        seeded_series(record(FLAT), record(BETTER), metrics=["decode_tok_s"], profile="b1")
