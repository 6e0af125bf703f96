"""The coarse KL (RULES section 4): its formula, its edge cases, and that it never says too much."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, rel_entr

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.kl import checked_vector, top20_kl, top_token

Pairs = list[tuple[int, float]]


def logs(*pairs: tuple[int, float]) -> Pairs:
    return [(token, math.log(p)) for token, p in pairs]


def test_the_formula_on_a_list_worked_by_hand() -> None:
    # Shared: tokens 1 and 2. p = .5, .3 (OTHER .2), q = .4, .4 (OTHER .2); token 3 and 4 are OTHER.
    p, q = logs((1, 0.5), (2, 0.3), (3, 0.1)), logs((1, 0.4), (2, 0.4), (4, 0.1))
    found = top20_kl(p, q)
    expected = 0.5 * math.log(5 / 4) + 0.3 * math.log(3 / 4) + 0.2 * math.log(1)
    assert found.kl == pytest.approx(expected, abs=1e-15)
    assert found.common_mass == pytest.approx(0.8)
    assert found.shared == 2
    assert not found.trusted
    # q's tokens 1 and 2 tie: the smaller id is its first.
    assert (found.control_top1, found.candidate_top1, found.top1_same) == (1, 1, True)


def test_the_common_mass_is_the_smaller_arms() -> None:
    found = top20_kl(logs((1, 0.995)), logs((1, 0.6), (2, 0.4)))
    assert found.common_mass == pytest.approx(0.6)
    assert top20_kl(logs((1, 0.99)), logs((1, 0.991))).trusted


def test_a_tie_goes_to_the_smaller_id() -> None:
    assert top_token([(9, -1.0), (3, -1.0), (5, -2.0)]) == 3
    assert checked_vector([(9, -1.0), (3, -1.0), (5, -2.0)]) == ((3, -1.0), (9, -1.0), (5, -2.0))
    assert not top20_kl([(9, -1.0), (3, -1.5)], [(9, -1.2), (3, -1.2)]).top1_same


def test_disjoint_lists_have_no_kl_and_no_common_mass() -> None:
    found = top20_kl(logs((1, 0.9)), logs((2, 0.9)))
    assert (found.kl, found.common_mass, found.shared, found.top1_same) == (0.0, 0.0, 0, False)


@pytest.mark.parametrize("absent", [-math.inf, -9999.0, -3.4028235e38])
def test_a_probability_of_zero_is_absent(absent: float) -> None:
    plain = top20_kl(logs((1, 0.7), (2, 0.2)), logs((1, 0.6), (2, 0.3)))
    with_zero = top20_kl(
        [*logs((1, 0.7), (2, 0.2)), (3, absent)], [*logs((1, 0.6), (2, 0.3)), (3, math.log(0.05))]
    )
    assert with_zero == plain


def test_of_more_than_twenty_the_twenty_largest_are_taken() -> None:
    rng = np.random.default_rng(1)
    p = log_softmax(rng.normal(size=40))
    pairs = [(i, float(v)) for i, v in enumerate(p)]
    largest = sorted(pairs, key=lambda pair: -pair[1])
    assert checked_vector(pairs) == tuple(largest[:20])
    assert checked_vector(pairs, top_n=5) == tuple(largest[:5])
    assert top20_kl(pairs, pairs).common_mass == pytest.approx(
        sum(math.exp(v) for _, v in largest[:20])
    )


def test_the_mass_is_clamped_up_to_a_thousandth_and_refused_above() -> None:
    # 1.0005 in all: rounding. OTHER of both is 0 (and at least 1e-9), the KL is the shared part.
    over = logs((1, 0.6), (2, 0.4005))
    assert top20_kl(over, over).kl == 0.0
    assert top20_kl(over, over).common_mass == 1.0
    with pytest.raises(MeasurementRefused, match=r"add up to 1\.0020") as refused:
        top20_kl(over, logs((1, 0.6), (2, 0.402)))
    assert refused.value.kind == "mass"


def test_an_arm_without_an_other_has_at_least_a_billionth_of_it() -> None:
    p, q = logs((1, 0.9), (2, 0.05)), logs((1, 0.9), (2, 0.1))
    expected = 0.05 * math.log(0.05 / 0.1) + 0.05 * math.log(0.05 / 1e-9)
    assert top20_kl(p, q).kl == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("pairs", "kind"),
    [
        ([(1, math.nan), (2, -1.0)], "nan"),
        ([(1, math.inf), (2, -1.0)], "nan"),
        ([(1, 0.0011), (2, -9.0)], "logprob"),
        ([(1, -1.0), (1, -1.0)], "duplicate-id"),
        ([(1, -1.0), (2, -9999.0), (2, -9999.0)], "duplicate-id"),
        ([], "empty"),
        ([(1, -math.inf)], "empty"),
        ([(i, 0.0) for i in range(20)], "all-zero"),
        ([(1, 0.0)], "all-zero"),
        ([(1, 0.0), (2, -math.inf)], "all-zero"),
        ([(1, -0.1), (2, -0.1)], "mass"),
    ],
)
def test_a_list_that_is_none_is_refused_on_either_side(pairs: Pairs, kind: str) -> None:
    good = logs((1, 0.7), (2, 0.2))
    for control, candidate in ((pairs, good), (good, pairs)):
        with pytest.raises(MeasurementRefused) as refused:
            top20_kl(control, candidate)
        assert refused.value.kind == kind


def test_a_certain_token_beside_others_is_no_broken_list() -> None:
    # float32 rounds the log-probability of a certain token to 0; the others tell that it is real.
    sure = [(1, 0.0), (2, -25.0)]
    assert top20_kl(sure, sure).kl == pytest.approx(0.0, abs=1e-12)


@st.composite
def two_models(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.integers(2, 60))
    seed = draw(st.integers(0, 2**32 - 1))
    scale = draw(st.floats(0.1, 6))
    apart = draw(st.floats(0, 3))
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=size)
    return log_softmax(logits), log_softmax(logits + apart * rng.normal(size=size))


@settings(max_examples=60, deadline=None)
@given(two_models(), st.integers(1, 30))
def test_never_above_the_full_divergence_and_never_below_zero(
    models: tuple[np.ndarray, np.ndarray], top_n: int
) -> None:
    p, q = models
    full = float(rel_entr(np.exp(p), np.exp(q)).sum())

    def listed(v: np.ndarray) -> Pairs:
        return [(int(i), float(v[i])) for i in np.argsort(-v)[:top_n]]

    found = top20_kl(listed(p), listed(q), top_n=top_n)
    assert 0 <= found.kl <= full + 1e-7
    assert 0 <= found.common_mass <= 1
    assert found.top1_same == (int(np.argmax(p)) == int(np.argmax(q)))
    if top_n >= len(p):
        # Nothing is left out: up to OTHER's least mass it is the full divergence.
        assert found.kl == pytest.approx(full, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(two_models())
def test_the_order_of_the_lists_does_not_matter(models: tuple[np.ndarray, np.ndarray]) -> None:
    p, q = ([(i, float(v)) for i, v in enumerate(side)][:20] for side in models)
    assert top20_kl(p, q) == top20_kl(p[::-1], q[::-1])
