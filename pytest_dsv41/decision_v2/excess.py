"""Count and mean tests of the distributional gate (RULES section 4), without any probe or file.

A candidate was compared with production over some positions, and production with itself k times
over the same positions. `excess_p` asks whether the candidate's count of disagreements is more than
the k A/A counts explain, `mean_ceiling` how large its mean KL may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .series import Refused

__all__ = ["EXCESS_LEVEL", "excess_p", "least_losing_count", "mean_ceiling"]

EXCESS_LEVEL = 0.01
CEILING_FACTOR, CEILING_QUANTILE, CEILING_RESAMPLES = 1.5, 0.99, 2_000
_BLOCK = 1 << 21


def excess_p(candidate: int, aa: int, k: int) -> float:
    """P(X >= candidate) for X ~ Bin(aa + candidate, 1/(k+1)): the exact conditional test.

    `candidate` is the candidate's count in one comparison, `aa` the sum over the k A/A ones. Below
    0.01 the candidate has more than production against itself. Raises `Refused` for counts below 0
    or k < 1.
    """
    if k < 1:
        raise Refused("the gate needs at least one A/A comparison")
    if candidate < 0 or aa < 0:
        raise Refused(f"counts cannot be negative: {candidate} and {aa}")
    if candidate == 0:
        return 1.0
    from scipy.special import bdtrc

    return float(bdtrc(candidate - 1, aa + candidate, 1 / (k + 1)))


@lru_cache(maxsize=4096)
def least_losing_count(aa: int, k: int) -> int:
    """The smallest candidate count that loses against `aa` disagreements in k A/A comparisons."""
    count = 0
    while excess_p(count, aa, k) >= EXCESS_LEVEL:
        count += 1
    return count


def mean_ceiling(
    aa_values: Sequence[float] | npt.NDArray[np.float64],
    *,
    seed: int,
    resamples: int = CEILING_RESAMPLES,
) -> float:
    """1.5 times the 99th percentile of the mean of the A/A positions' KL, resampled.

    `aa_values` are all k·n positions' KL (nats) of the k A/A comparisons; every resample draws as
    many with replacement. Raises `Refused` for none, or for a KL that is negative or not finite.
    """
    values = np.asarray(aa_values, dtype=np.float64)
    if values.ndim != 1 or not values.size:
        raise Refused("the ceiling needs the A/A's KL at one position at least")
    if not np.isfinite(values).all() or (values < 0).any():
        raise Refused("a KL must be finite and not negative")
    rng = np.random.default_rng(seed)
    means = np.empty(resamples)
    block = max(1, _BLOCK // values.size)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        picks = rng.integers(0, values.size, size=(rows, values.size), dtype=np.int32)
        means[start : start + rows] = values[picks].mean(axis=1)
    return float(CEILING_FACTOR * np.quantile(means, CEILING_QUANTILE))
