"""win3-moderated and the widened A/A: their arithmetic, and that no verdict moves."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats

from pytest_dsv41.decision_v2 import (
    Prior,
    Refused,
    SeededSeries,
    Series,
    decide_cell,
    decide_paired_window,
    decide_window,
    fit_prior,
    moderated_advice,
    widened_aa_advice,
)
from pytest_dsv41.decision_v2.moderated import fit_variances

A = "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
PRIOR = Prior(paired=False, s0_squared=0.0004, d0=20.0, groups=125, definition={"cell": "short-b1"})


def series(control: list[float], candidate: list[float], *, paired: bool = False) -> Series:
    return Series(
        "short-b1",
        "ms_per_round",
        control,
        candidate,
        lower_is_better=True,
        paired=paired,
        control_prompts=[A] * len(control),
        candidate_prompts=[A] * len(candidate),
    )


FOUR_V_THREE = series([99, 101, 100, 100], [95.5, 96.5, 96])


# -- the prior -------------------------------------------------------------------------------------


def test_the_fit_solves_its_two_equations() -> None:
    rng = np.random.default_rng(1)
    dfs = rng.integers(1, 6, 60).astype(float)
    variances = 0.0004 * scipy.stats.f.rvs(dfs, 8, random_state=2)
    s0_squared, d0 = fit_variances(variances, dfs)
    e = np.log(variances) - scipy.special.digamma(dfs / 2) + np.log(dfs / 2)
    v = e.var(ddof=1) - scipy.special.polygamma(1, dfs / 2).mean()
    half = scipy.optimize.brentq(lambda x: float(scipy.special.polygamma(1, x)) - v, 1e-3, 1e3)
    assert d0 == pytest.approx(2 * half, rel=1e-8)
    expected = math.exp(e.mean() + scipy.special.digamma(half) - math.log(half))
    assert s0_squared == pytest.approx(expected, rel=1e-8)


def test_the_fit_finds_the_truth_in_a_large_archive() -> None:
    rng = np.random.default_rng(2)
    variances = 0.0004 * rng.f(3, 8, 200_000)
    s0_squared, d0 = fit_variances(variances, np.full(200_000, 3.0))
    assert s0_squared == pytest.approx(0.0004, rel=0.02)
    assert d0 == pytest.approx(8, rel=0.05)


def test_variances_that_differ_less_than_chance_give_an_infinite_d0() -> None:
    s0_squared, d0 = fit_variances(np.full(10, 0.0004), np.full(10, 3.0))
    assert d0 == math.inf
    # exp(ln s² - ψ(1.5) + ln 1.5)
    bias = math.log(1.5) - float(scipy.special.digamma(1.5))
    assert s0_squared == pytest.approx(0.0004 * math.exp(bias), rel=1e-12)


def test_a_group_gives_the_variance_relative_to_its_mean() -> None:
    groups = [[99.0, 101.0], [198.0, 202.0], [9.9, 10.1]]
    prior = fit_prior(groups)
    # All three are 2e-4 at one degree of freedom.
    bias = math.log(0.5) - float(scipy.special.digamma(0.5))
    assert prior.s0_squared == pytest.approx(2e-4 * math.exp(bias), rel=1e-9)
    assert (prior.groups, prior.d0) == (3, math.inf)


def test_paired_groups_give_the_variance_of_adjacent_differences_without_overlap() -> None:
    # Differences +1 % and -1 % (100 -> 101, 100 -> 99): variance 2e-4. A fifth value is left over.
    prior = fit_prior([[100.0, 101.0, 100.0, 99.0, 500.0]] * 3, paired=True)
    bias = math.log(0.5) - float(scipy.special.digamma(0.5))
    assert prior.s0_squared == pytest.approx(2e-4 * math.exp(bias), rel=1e-9)


@pytest.mark.parametrize(
    ("groups", "what"),
    [
        ([[100.0, 101.0]] * 2, "2 groups with a spread, at least 3"),
        ([[100.0]] * 9, "0 groups with a spread"),
        ([[100.0, 100.0]] * 9, "no spread at all"),
        ([[100.0, 0.0]] * 9, "above 0"),
        ([[100.0, math.nan]] * 9, "above 0"),
    ],
)
def test_archives_without_a_prior_are_refused(groups: Any, what: str) -> None:
    with pytest.raises(Refused, match=what):
        fit_prior(groups)


def test_a_frozen_prior_comes_back_and_a_changed_one_does_not() -> None:
    for prior in (PRIOR, Prior(paired=True, s0_squared=0.0008, d0=math.inf, groups=9)):
        frozen = json.loads(json.dumps(prior.to_dict(), allow_nan=False))
        assert Prior.from_dict(frozen) == prior
        with pytest.raises(Refused, match="it was changed"):
            Prior.from_dict({**frozen, "s0_squared": 0.0001})
        with pytest.raises(Refused, match="not a frozen prior"):
            Prior.from_dict({"rule": "win3-moderated"})


def test_the_seal_is_the_sha256_of_the_canonical_json() -> None:
    text = (
        '{"d0":20.0,"definition":{"cell":"short-b1"},"groups":125,"paired":false,'
        '"rule":"win3-moderated","s0_squared":0.0004}'
    )
    assert PRIOR.sha256 == hashlib.sha256(text.encode()).hexdigest()


# -- the call --------------------------------------------------------------------------------------


def test_moderated_t_by_hand() -> None:
    result = decide_cell([FOUR_V_THREE]).series[0]
    facts = moderated_advice(result, PRIOR).facts
    # s² = (2/3·3 + .25·... ) : control SS 2, candidate SS .5 over 100²: 2.5e-4/5 = 5e-5
    assert facts["variance"] == pytest.approx(5e-5, rel=1e-9)
    # d0 capped at 10: s̃² = (10·4e-4 + 5·5e-5)/15 = 2.8333e-4; t = .04/√(7/12 · s̃²) at 15
    t = 0.04 / math.sqrt(7 / 12 * (10 * 4e-4 + 5 * 5e-5) / 15)
    assert facts["t"] == pytest.approx(t, rel=1e-9)
    assert facts["df"] == 15
    assert facts["p_win"] == pytest.approx(float(scipy.stats.t.sf(t, 15)), rel=1e-9)
    assert facts["call"] == "WIN"
    assert facts["levels"] == [0.0165, 0.0160]


def test_the_prior_never_makes_a_windows_own_spread_smaller() -> None:
    noisy = decide_cell([series([90, 110, 100, 100], [85, 96, 107])]).series[0]
    own = moderated_advice(noisy, PRIOR).facts["variance"]
    t = noisy.gain / math.sqrt(7 / 12 * own)
    assert moderated_advice(noisy, PRIOR).facts["t"] == pytest.approx(t, rel=1e-12)


def test_paired_series_take_the_variance_of_their_differences() -> None:
    prior = Prior(paired=True, s0_squared=0.0008, d0=4.0, groups=50)
    result = decide_cell([series([100, 100, 100], [95, 96, 94], paired=True)]).series[0]
    facts = moderated_advice(result, prior).facts
    # d = .05 .04 .06: variance 1e-4; s̃² = (4·8e-4 + 2·1e-4)/6
    t = 0.05 / math.sqrt((4 * 8e-4 + 2e-4) / 6 / 3)
    assert facts["t"] == pytest.approx(t, rel=1e-9)
    assert facts["df"] == 6
    assert facts["levels"] == [0.0200, 0.0110]


def test_other_designs_are_shown_without_a_call() -> None:
    result = decide_cell([series([99, 101, 100], [95.5, 96.5, 96])]).series[0]
    advice = moderated_advice(result, PRIOR)
    assert advice.facts["call"] is None
    assert "no level is known for unpaired 3 v 3" in advice.line


def test_a_loss_is_called_as_well() -> None:
    result = decide_cell([series([99, 101, 100, 100], [104, 105, 106])]).series[0]
    assert moderated_advice(result, PRIOR).facts["call"] == "LOSS"


def test_a_prior_of_the_other_layout_is_refused() -> None:
    paired = decide_cell([series([100, 100, 100], [95, 96, 94], paired=True)]).series[0]
    with pytest.raises(Refused, match="a prior of unpaired values for a paired series"):
        moderated_advice(paired, PRIOR)


def test_advice_is_shown_beside_the_verdict_and_never_decides() -> None:
    # Beyond the required gain, but win2-v1's own interval is too wide; the archive knows better.
    window = decide_window([series([98, 102, 100, 100], [94, 98, 96])], ["short-b1"])
    assert window.verdict == "INCONCLUSIVE"
    advice = moderated_advice(window.cells["short-b1"].series[0], PRIOR)
    assert advice.facts["call"] == "WIN"
    advised = window.advised({"short-b1": [advice]})
    assert advised.verdict == "INCONCLUSIVE"
    assert "With the archive's spread: WIN" in advised.cells["short-b1"].explain()
    document = advised.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    told = document["cells"]["short-b1"].pop("advice")[0]
    assert (told["rule"], told["decides"]) == ("win3-moderated", False)
    assert told["prior"]["sha256"] == PRIOR.sha256
    assert document == window.to_dict()


# -- the widened A/A -------------------------------------------------------------------------------

FLAT = [100.0] * 6
DRIFTED = [101.0, 102.0, 101.0, 102.0, 101.0, 102.0]


def seeded(controls: list[list[float]], candidate: list[float]) -> dict[str, list[SeededSeries]]:
    one = SeededSeries(
        "a",
        "decode_tok_s",
        controls,
        candidate,
        lower_is_better=False,
        profile="single",
        control_prompts=[[A] * 6 for _ in controls],
        candidate_prompts=[A] * 6,
    )
    return {"a": [one]}


def test_a_start_difference_within_the_registered_spread_is_no_drift_when_widened() -> None:
    window = decide_paired_window(
        seeded([FLAT, DRIFTED], [110.0] * 6), ["a"], start_sd={"a/decode_tok_s": 0.01}
    )
    assert window.verdict == "INCONCLUSIVE"
    advice = widened_aa_advice(window.cells["a"])
    # e = .01 .02 …: mean .015, variance 3e-5; half = 2.570582·√(3e-5/6 + 2e-4) = .036805
    assert advice.facts["high"] == pytest.approx(0.015 + 0.0368051, abs=1e-6)
    assert (advice.facts["drift"], advice.facts["call"]) == (False, "WIN")
    assert window.advised({"a": [advice]}).verdict == "INCONCLUSIVE"


def test_a_start_difference_beyond_the_registered_spread_stays_drift() -> None:
    window = decide_paired_window(
        seeded([FLAT, DRIFTED], [110.0] * 6), ["a"], start_sd={"a/decode_tok_s": 0.001}
    )
    advice = widened_aa_advice(window.cells["a"])
    assert (advice.facts["drift"], advice.facts["call"]) == (True, "INCONCLUSIVE")


def test_widening_needs_a_registered_spread_and_two_control_starts() -> None:
    window = decide_paired_window(seeded([FLAT, DRIFTED], [110.0] * 6), ["a"])
    with pytest.raises(Refused, match="registered start_sd"):
        widened_aa_advice(window.cells["a"])
    window = decide_paired_window(
        seeded([FLAT], [110.0] * 6), ["a"], start_sd={"a/decode_tok_s": 0.01}
    )
    with pytest.raises(Refused, match="two control starts"):
        widened_aa_advice(window.cells["a"])
