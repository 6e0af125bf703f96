"""The exact two-sided sign-flip test of paired differences (RULES section 2).

    p = #{ e in {-1, +1}ⁿ : |Σ e_i d_i| >= |Σ d_i| } / 2ⁿ

Floats get ties wrong: sums of the same numbers in another order differ in their last digit, and a
tie that should count does not. So the differences are rounded to integers q, multiples of
max|d| · 2⁻⁴⁴, and a sum counts from |Σ q| - n on, n units being more than that rounding can move.

Up to 40 differences the count is exact: the sums of either half of the signs, at most 2²⁰ each,
are sorted, and the pairs that reach the bound counted. Above 40 signs are drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .series import Refused

__all__ = ["EXACT_LIMIT", "SignFlip", "sign_flip", "sign_flip_columns"]

EXACT_LIMIT = 40
_BITS = 44
_TABLE_LIMIT = 14
"""Up to this many differences all signs fit into one table that every column shares."""
_BLOCK = 1 << 21
"""Entries of the largest intermediate array (16 MB)."""
RESAMPLES = 200_000


@dataclass(frozen=True)
class SignFlip:
    """The test's p; for more than 40 differences its Monte Carlo standard error, else None."""

    p: float
    n: int
    error: float | None = None


def _integers(differences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Whole numbers below 2⁴⁴ (held as floats, exactly) in proportion to each column."""
    largest = np.abs(differences).max(axis=0)
    largest = np.where(largest == 0, 1.0, largest)
    out: npt.NDArray[np.float64] = np.rint(np.ldexp(differences / largest, _BITS))
    return out


def sign_flip(
    differences: Sequence[float] | npt.NDArray[np.float64],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> SignFlip:
    """The two-sided p of `differences` (at least one; zeros stay in).

    Exact up to 40; above, `resamples` random sign vectors from `seed` (the observed one is counted
    in, so p is never 0). Raises `Refused` for none, or for a difference that is not finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise Refused("the sign-flip test needs at least one difference")
    if not np.isfinite(values).all():
        raise Refused("the sign-flip test needs finite differences")
    n = int(values.size)
    q = _integers(values[:, None])[:, 0].astype(np.int64)
    bound = abs(int(q.sum())) - n
    if bound <= 0:
        return SignFlip(1.0, n)
    if n > EXACT_LIMIT:
        return _monte_carlo(q, bound, seed, resamples)
    left, right = _half_sums(q[: n // 2]), _half_sums(q[n // 2 :])
    reached = left.size * right.size - int(np.searchsorted(right, bound - left).sum())
    # The sums are symmetric around 0, so as many fall to -bound or below.
    return SignFlip(2 * reached / 2**n, n)


def _half_sums(q: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """All signed sums of `q`, sorted."""
    sums = np.zeros(1, dtype=np.int64)
    for value in q:
        # Two sorted runs: the stable sort merges them.
        sums = np.concatenate([sums - abs(value), sums + abs(value)])
        sums.sort(kind="stable")
    return sums


def _monte_carlo(q: npt.NDArray[np.int64], bound: int, seed: int, resamples: int) -> SignFlip:
    rng = np.random.default_rng(seed)
    n = q.size
    hits = 0
    block = max(1, _BLOCK // n)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        signs = rng.integers(0, 2, size=(rows, n), dtype=np.int8)
        # Σ e q with e = 2 b - 1.
        sums = 2 * (signs @ q) - int(q.sum())
        hits += int((np.abs(sums) >= bound).sum())
    p = (hits + 1) / (resamples + 1)
    return SignFlip(p, n, math.sqrt(p * (1 - p) / resamples))


def sign_flip_columns(differences: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The exact p of every column of (n, trials), the same numbers as `sign_flip` gives."""
    n, trials = differences.shape
    if n > _TABLE_LIMIT:
        return np.array([sign_flip(differences[:, t]).p for t in range(trials)])
    q = _integers(differences)
    bound = np.abs(q.sum(axis=0)) - n
    # The first sign stays +: flipping all of them changes no absolute sum.
    count = 1 << (n - 1)
    bits = (np.arange(count)[:, None] >> np.arange(n - 1)[None, :]) & 1
    signs = np.ones((count, n))
    signs[:, 1:] -= 2.0 * bits
    out = np.empty(trials)
    block = max(1, _BLOCK // count)
    for start in range(0, trials, block):
        part = slice(start, start + block)
        sums = signs @ q[:, part]
        np.abs(sums, out=sums)
        out[part] = np.count_nonzero(sums >= bound[part], axis=0)
    out /= count
    return out
