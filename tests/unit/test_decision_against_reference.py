"""The arrays give what the slow second implementation gives, on random series of every kind."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import scipy.stats
from decision_reference import paired as reference_paired
from decision_reference import sign_flip as reference_sign_flip
from decision_reference import win2 as reference_win2
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.decision_v2 import (
    SeededSeries,
    Series,
    decide_cell,
    decide_paired_cell,
    sign_flip,
)
from pytest_dsv41.decision_v2.kernel import pair_verdicts, win2_pairs, win2_repeats
from pytest_dsv41.decision_v2.signflip import sign_flip_columns

EDGE = 1e-12
"""Relative distance from the edge of a strict comparison within which rounding may decide it."""

MAGNITUDES = st.floats(1e-9, 1e9, allow_nan=False)
NEAR = st.floats(0.9, 1.1).map(lambda v: 100 * v)
TIES = st.sampled_from([95.0, 98.0, 99.0, 100.0, 100.0, 101.0, 102.0, 105.0])


@st.composite
def cells(draw: st.DrawFn) -> tuple[list[float], list[float], bool, bool, int, bool]:
    values = draw(st.sampled_from([MAGNITUDES, NEAR, TIES]))
    is_paired = draw(st.booleans())
    nc = draw(st.integers(3, 12))
    nx = nc if is_paired else draw(st.integers(3, 12))

    def arm(n: int) -> list[float]:
        if draw(st.integers(0, 9)) == 0:
            return [draw(values)] * n
        return draw(st.lists(values, min_size=n, max_size=n))

    control, candidate = arm(nc), arm(nx)
    return (
        control,
        candidate,
        draw(st.booleans()),
        is_paired,
        draw(st.sampled_from([1, 2, 3])),
        draw(st.booleans()),
    )


def near_an_edge(edges: Sequence[float], gain: float) -> bool:
    return any(abs(edge) <= EDGE * max(1.0, abs(gain)) for edge in edges)


def check_cell(
    control: list[float],
    candidate: list[float],
    lower: bool,
    is_paired: bool,
    revision: int,
    guard: bool,
) -> bool:
    """Compare one series; False where it lies on an edge that rounding may decide."""
    expected = reference_win2(
        control, candidate, lower_is_better=lower, paired=is_paired, guard=guard, revision=revision
    )
    one = Series("c", "m", control, candidate, lower_is_better=lower, paired=is_paired)
    flat = Series("c", "flat", [1.0] * 3, [1.0] * 3, lower_is_better=lower, paired=is_paired)
    parts = [flat, one] if guard else [one]
    result = decide_cell(parts, decides=False, revision=revision).series[-1]
    size = max(abs(expected.gain), abs(expected.low), abs(expected.high))
    tolerance = 1e-9 * max(size, 1e-3)
    assert result.gain == pytest.approx(expected.gain, abs=tolerance)
    assert result.low == pytest.approx(expected.low, abs=tolerance)
    assert result.high == pytest.approx(expected.high, abs=tolerance)
    assert result.threshold == pytest.approx(expected.threshold, rel=1e-9, abs=1e-15)
    if near_an_edge(expected.edges, size):
        return False
    assert result.df == expected.df
    assert result.worse == expected.worse
    assert result.verdict == expected.verdict
    return True


@settings(max_examples=300, deadline=None)
@given(cells())
def test_any_series_is_judged_as_the_reference_judges_it(
    cell: tuple[list[float], list[float], bool, bool, int, bool],
) -> None:
    check_cell(*cell)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(cells())
def test_ten_thousand_series_are_judged_as_the_reference_judges_them(
    cell: tuple[list[float], list[float], bool, bool, int, bool],
) -> None:
    check_cell(*cell)


def test_thousands_of_random_series_are_judged_alike_and_few_lie_on_an_edge() -> None:
    rng = random.Random(20)
    compared = 0
    total = 4_000
    for _ in range(total):
        is_paired = rng.random() < 0.5
        nc = rng.randint(3, 12)
        nx = nc if is_paired else rng.randint(3, 12)
        mean = 10 ** rng.uniform(-9, 9)
        effect = 1 + rng.choice([0, 0.02, 0.03, 0.05, -0.03, -0.05, 1])
        cv = rng.choice([0, 0.001, 0.02, 0.02, 0.3])
        steps = rng.choice([0, 0, 5])

        def value(m: float, cv: float = cv, steps: int = steps) -> float:
            z = rng.gauss(0, 1)
            z = round(z * steps) / steps if steps else z
            return max(m * (1 + cv * z), 1e-12)

        control = [value(mean) for _ in range(nc)]
        candidate = [value(mean * effect) for _ in range(nx)]
        compared += check_cell(
            control,
            candidate,
            rng.random() < 0.5,
            is_paired,
            rng.choice([1, 2, 3]),
            rng.random() < 0.3,
        )
    assert compared > 0.9 * total


def test_unpaired_intervals_are_scipys_welch_interval_where_df_is_whole() -> None:
    # Equal counts and variances: Welch's df is nc + nx - 2 and scipy's interval is ours.
    control = [98.0, 100.0, 101.0, 103.0]
    candidate = [c - 4 for c in control]
    one = decide_cell(
        [Series("c", "m", control, candidate, lower_is_better=False, paired=False)], decides=False
    ).series[0]
    interval = scipy.stats.ttest_ind(candidate, control, equal_var=False).confidence_interval()
    mean = sum(control) / 4
    assert one.low == pytest.approx(interval.low / mean, rel=1e-9)
    assert one.high == pytest.approx(interval.high / mean, rel=1e-9)


def test_paired_intervals_are_scipys_one_sample_interval() -> None:
    rng = np.random.default_rng(4)
    for n in (3, 6, 12):
        control = rng.normal(100, 2, n)
        candidate = rng.normal(97, 2, n)
        one = decide_cell(
            [Series("c", "m", control, candidate, lower_is_better=True)], decides=False
        ).series[0]
        interval = scipy.stats.ttest_1samp((control - candidate) / control, 0).confidence_interval()
        assert (one.low, one.high) == pytest.approx((interval.low, interval.high), rel=1e-9)


def test_one_window_and_a_batch_of_them_are_the_same_arithmetic() -> None:
    rng = np.random.default_rng(8)
    for is_paired in (True, False):
        control = rng.normal(100, 2, (4, 500))
        candidate = rng.normal(96, 2, (4 if is_paired else 3, 500))
        batch = win2_repeats(control, candidate, lower_is_better=True, paired=is_paired)
        for trial in range(0, 500, 7):
            one = decide_cell(
                [
                    Series(
                        "c",
                        "m",
                        control[:, trial],
                        candidate[:, trial],
                        lower_is_better=True,
                        paired=is_paired,
                    )
                ],
                decides=False,
            ).series[0]
            assert one.gain == pytest.approx(float(batch.gain[trial]), rel=1e-12)
            assert one.half == pytest.approx(float(batch.half[trial]), rel=1e-12)
            assert one.worse == batch.worse[trial]
            assert (one.verdict == "WIN") == batch.win[trial]
            assert (one.verdict == "LOSS") == batch.loss[trial]


# -- seeded pairs ----------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(-1, 1), st.sampled_from([-0.3, -0.1, 0.0, 0.1, 0.1, 0.2, 0.3])),
        min_size=1,
        max_size=10,
    )
)
def test_sign_flip_counts_what_trying_every_sign_counts(differences: list[float]) -> None:
    expected = reference_sign_flip(differences)
    assert sign_flip(differences).p == expected
    assert sign_flip_columns(np.array([differences]).T)[0] == expected


def test_sign_flip_is_scipys_exact_permutation_test_where_nothing_ties() -> None:
    rng = np.random.default_rng(3)
    for n in (4, 6, 8):
        differences = rng.normal(0.5, 1, n)
        exact = scipy.stats.permutation_test(
            (differences, np.zeros(n)),
            lambda x, y, axis: np.sum(x - y, axis=axis),
            permutation_type="samples",
            n_resamples=np.inf,
            vectorized=True,
        )
        assert sign_flip(differences.tolist()).p == pytest.approx(exact.pvalue, rel=1e-12)


@pytest.mark.parametrize("starts", [1, 2])
def test_random_seeded_cells_are_judged_as_the_reference_judges_them(starts: int) -> None:
    rng = np.random.default_rng(11 + starts)
    for trial in range(150):
        n = int(rng.integers(6, 9))
        luck = 1 + 0.07 * rng.standard_normal(n)
        sd = float(rng.choice([0, 0.01]))
        offsets = 1 + 0.02 * rng.standard_normal((starts, 1)) * (trial % 3 == 0)
        controls = 50 * luck * offsets * (1 + 0.01 * rng.standard_normal((starts, n)))
        effect = rng.choice([0, 0.03, 0.05, -0.03])
        candidate = 50 * luck * (1 + effect) * (1 + 0.01 * rng.standard_normal(n))
        lower = bool(rng.integers(0, 2))
        expected = reference_paired(
            controls.tolist(), candidate.tolist(), lower_is_better=lower, start_sd=sd
        )
        series = SeededSeries(
            "c", "m", controls.tolist(), candidate.tolist(), lower_is_better=lower, profile="single"
        )
        # Judged without prompt identities, which only a decision needs.
        batch = win2_pairs(
            controls[:, :, None], candidate[:, None], lower_is_better=lower, start_sd=sd
        )
        p = sign_flip_columns(batch.differences)
        aa_p = None if batch.aa_differences is None else sign_flip_columns(batch.aa_differences)
        win, loss, drift = pair_verdicts(batch, p, aa_p)
        assert float(batch.point[0]) == pytest.approx(expected.point, abs=1e-12)
        assert float(batch.low[0]) == pytest.approx(expected.low, abs=1e-12)
        assert float(batch.high[0]) == pytest.approx(expected.high, abs=1e-12)
        assert p[0] == expected.p
        assert drift[0] == expected.drift
        verdict = "INCONCLUSIVE"
        if not drift[0]:
            verdict = "LOSS" if loss[0] else "WIN" if win[0] else verdict
        assert verdict == expected.verdict
        prompts = ["ab" * 32] * n
        proved = SeededSeries(
            "c",
            "m",
            series.controls,
            series.candidate,
            lower_is_better=lower,
            profile="single",
            control_prompts=[prompts] * starts,
            candidate_prompts=prompts,
        )
        whole = decide_paired_cell("c", [proved], start_sd={"m": sd})
        assert whole.verdict == expected.verdict
        assert whole.series[0].p == expected.p


# -- metamorphic: what a change of the input must and must not change ------------------------------


@settings(max_examples=100, deadline=None)
@given(cells(), st.integers(-200, 200))
def test_scaling_by_a_power_of_two_changes_nothing_at_all(
    cell: tuple[list[float], list[float], bool, bool, int, bool], exponent: int
) -> None:
    control, candidate, lower, is_paired, revision, _ = cell

    def judged(factor: float) -> dict[str, object]:
        one = Series(
            "c",
            "m",
            [factor * v for v in control],
            [factor * v for v in candidate],
            lower_is_better=lower,
            paired=is_paired,
        )
        result = decide_cell([one], decides=False, revision=revision).series[0].to_dict()
        unscaled = ("control", "candidate", "control_mean", "candidate_mean")
        return {key: value for key, value in result.items() if key not in unscaled}

    assert judged(2.0**exponent) == judged(1.0)


@settings(max_examples=100, deadline=None)
@given(cells(), st.randoms(use_true_random=False))
def test_the_order_of_pairs_and_of_unpaired_repeats_does_not_matter(
    cell: tuple[list[float], list[float], bool, bool, int, bool], shuffler: random.Random
) -> None:
    control, candidate, lower, is_paired, revision, _ = cell
    if is_paired:
        order = list(range(len(control)))
        shuffler.shuffle(order)
        moved = [control[i] for i in order], [candidate[i] for i in order]
    else:
        moved = shuffler.sample(control, len(control)), shuffler.sample(candidate, len(candidate))
    first, second = (
        decide_cell(
            [Series("c", "m", c, x, lower_is_better=lower, paired=is_paired)],
            decides=False,
            revision=revision,
        ).series[0]
        for c, x in ((control, candidate), moved)
    )
    size = 1e-9 * max(1e-3, abs(first.low), abs(first.high))
    assert second.gain == pytest.approx(first.gain, abs=size)
    assert second.low == pytest.approx(first.low, abs=size)
    assert second.high == pytest.approx(first.high, abs=size)
    edges = [first.gain - 0.02, first.low, first.high]
    edges += [d + (first.threshold or 0.0) for d in first.differences]
    if not near_an_edge(edges, max(abs(first.low), abs(first.high))):
        assert (second.verdict, second.worse) == (first.verdict, first.worse)


@settings(max_examples=100, deadline=None)
@given(cells())
def test_the_other_orientation_mirrors_gain_and_interval(
    cell: tuple[list[float], list[float], bool, bool, int, bool],
) -> None:
    control, candidate, _, is_paired, revision, _ = cell
    one, other = (
        decide_cell(
            [Series("c", "m", control, candidate, lower_is_better=lower, paired=is_paired)],
            decides=False,
            revision=revision,
        ).series[0]
        for lower in (True, False)
    )
    assert other.gain == -one.gain
    assert (other.low, other.high) == (-one.high, -one.low)
    assert other.threshold == one.threshold
    assert other.differences == tuple(-d for d in one.differences)
    assert not (one.verdict == "WIN" and other.verdict == "WIN")


@settings(max_examples=100, deadline=None)
@given(cells())
def test_a_guard_that_equals_its_control_changes_no_verdict(
    cell: tuple[list[float], list[float], bool, bool, int, bool],
) -> None:
    control, candidate, lower, is_paired, revision, _ = cell
    primary = Series("c", "m", control, candidate, lower_is_better=lower, paired=is_paired)
    guard = Series("c", "g", control, control, lower_is_better=lower, paired=True)
    alone = decide_cell([primary], decides=False, revision=revision)
    guarded = decide_cell([primary, guard], decides=False, revision=revision)
    assert guarded.verdict == alone.verdict
    assert guarded.series[1].worse == 0
    assert guarded.series[1].gain == 0


@settings(max_examples=100, deadline=None)
@given(cells(), st.floats(0.01, 0.5), st.integers(0, 11))
def test_making_one_candidate_value_better_raises_the_gain_and_never_the_count_of_worse_ones(
    cell: tuple[list[float], list[float], bool, bool, int, bool], by: float, at: int
) -> None:
    control, candidate, lower, is_paired, revision, _ = cell
    at %= len(candidate)
    better = list(candidate)
    better[at] *= 1 - by if lower else 1 + by
    before, after = (
        decide_cell(
            [Series("c", "m", control, x, lower_is_better=lower, paired=is_paired)],
            decides=False,
            revision=revision,
        ).series[0]
        for x in (candidate, better)
    )
    moved = abs(better[at] - candidate[at])
    base = control[at] if is_paired else math.fsum(control) / len(control)
    step = moved / base / len(candidate)
    size = max(abs(before.gain), abs(after.gain), step)
    assert after.gain - before.gain == pytest.approx(step, abs=1e-9 * size)
    assert after.worse is not None
    assert before.worse is not None
    assert after.worse <= before.worse
    # The other repeats keep their differences.
    for i, (d, e) in enumerate(zip(before.differences, after.differences, strict=True)):
        assert i == at or d == e
