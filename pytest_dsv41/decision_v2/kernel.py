"""The arithmetic of the rules on arrays laid out (repeats, trials): a window is one trial.

A sum over the first axis adds whole rows, which is about twice as fast as summing short rows one
by one, so the simulations and the verdict of a single window share this code at no cost to either.

Means are taken around an arm's first value. The result is the same up to rounding, and an arm of
equal values has its value as its mean and a variance of exactly 0; a plain sum of three times 0.1
has neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = [
    "REQUIRED_GAIN",
    "SIGNIFICANT",
    "Pairs",
    "Repeats",
    "c4",
    "mean_var",
    "needed",
    "pair_verdicts",
    "t975",
    "win2_pairs",
    "win2_repeats",
]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

REQUIRED_GAIN = 0.02
SPREAD_FACTOR = 1.69
"""The expected range of three normal values, in standard deviations."""


@lru_cache(maxsize=1024)
def t975(df: int) -> float:
    """The 97.5 % quantile of Student's t at `df` >= 1 degrees of freedom."""
    from scipy.special import stdtrit  # a tenth of a second nobody pays who decides nothing

    return float(stdtrit(float(df), 0.975))


@lru_cache(maxsize=1024)
def c4(n: int) -> float:
    """E(sample SD of n normal values) / SD, n >= 2."""
    log_ratio = math.lgamma(n / 2) - math.lgamma((n - 1) / 2)
    return math.sqrt(2 / (n - 1)) * math.exp(log_ratio)


def needed(n_candidate: int) -> int:
    """How many candidate repeats must be worse for the loss-repeat test: two thirds, rounded up."""
    return -(-2 * n_candidate // 3)


def mean_var(values: Floats) -> tuple[Floats, Floats]:
    """Mean and variance (over n - 1) of each column of (n, trials)."""
    n = values.shape[0]
    deviations = values - values[0]
    shift = deviations.sum(axis=0)
    shift /= n
    deviations -= shift
    variance = np.einsum("ij,ij->j", deviations, deviations)
    variance /= n - 1
    return values[0] + shift, variance


@dataclass(frozen=True)
class Repeats:
    """What win2-v1 computes for one series, one entry a trial (fractions; positive = better).

    `differences` is (n_candidate, trials). `loss` holds the series' own LOSS, `win` is meant for a
    primary. `spread` is the control arm's expected range of three values relative to its mean, or
    its plain range in revision 1.
    """

    differences: Floats
    gain: Floats
    half: Floats
    low: Floats
    high: Floats
    df: Ints
    spread: Floats
    threshold: Floats
    worse: Ints
    needed: int
    win: Bools
    loss: Bools


def win2_repeats(
    control: Floats,
    candidate: Floats,
    *,
    lower_is_better: bool,
    paired: bool,
    guard: bool = False,
    revision: int = 3,
) -> Repeats:
    """win2-v1 (RULES section 1) on `control` (nc, trials) and `candidate` (nx, trials).

    Paired: the interval is Student's on the pairs' relative differences. Unpaired: Welch's, over
    the control mean, with floored degrees of freedom. Inputs are trusted: at least two repeats an
    arm, positive control values, equal counts when paired.
    """
    nc, nx = control.shape[0], candidate.shape[0]
    control_mean, control_var = mean_var(control)
    if paired:
        differences = candidate - control
        differences /= control
        if lower_is_better:
            np.negative(differences, out=differences)
        gain, var = mean_var(differences)
        df = np.full(gain.shape, nx - 1, dtype=np.int64)
        half = np.sqrt(var / nx)
        half *= t975(nx - 1)
    else:
        differences = candidate - control_mean
        differences /= control_mean
        candidate_mean, candidate_var = mean_var(candidate)
        gain = candidate_mean - control_mean
        gain /= control_mean
        if lower_is_better:
            np.negative(differences, out=differences)
            np.negative(gain, out=gain)
        squared_mean = control_mean * control_mean
        vc = control_var / squared_mean
        vc /= nc
        vx = candidate_var / squared_mean
        vx /= nx
        df = _welch_df(vc, vx, nc, nx)
        least, most = min(nc, nx) - 1, nc + nx - 2
        table = np.array([0.0] * least + [t975(k) for k in range(least, most + 1)])
        vc += vx
        half = np.sqrt(vc, out=vc)
        half *= table[df]
    low, high = gain - half, gain + half

    if revision == 1:
        spread = (control.max(axis=0) - control.min(axis=0)) / control_mean
        threshold = spread
    else:
        spread = np.sqrt(control_var)
        spread *= SPREAD_FACTOR / c4(nc)
        spread /= control_mean
        threshold = spread * math.sqrt(2) if paired else spread
    worse = (differences < -threshold).sum(axis=0)
    need = needed(nx)
    loss = worse >= need
    if revision == 3 or (revision == 2 and guard):
        loss &= high < 0
    win = gain > REQUIRED_GAIN
    win &= low > 0
    return Repeats(
        differences, gain, half, low, high, df, spread, threshold, worse, need, win, loss
    )


def _welch_df(vc: Floats, vx: Floats, nc: int, nx: int) -> Ints:
    """Welch-Satterthwaite, floored and clipped; two arms without any spread get the least."""
    total = vc + vx
    below = vc * vc
    below /= nc - 1
    part = vx * vx
    part /= nx - 1
    below += part
    total *= total
    flat = below == 0
    if flat.any():
        total[flat] = 0.0
        below[flat] = 1.0
    total /= below
    total += 1e-9
    np.floor(total, out=total)
    np.clip(total, min(nc, nx) - 1, nc + nx - 2, out=total)
    return total.astype(np.int64)


@dataclass(frozen=True)
class Pairs:
    """What win2-paired-v1 computes for one series before its sign-flip test, one entry a trial.

    `aa_*` describe the two control starts against each other, without any start_sd; they are None
    with one control start.
    """

    differences: Floats
    point: Floats
    var: Floats
    half: Floats
    low: Floats
    high: Floats
    aa_differences: Floats | None
    aa_point: Floats | None
    aa_half: Floats | None


def win2_pairs(
    controls: Floats,
    candidate: Floats,
    *,
    lower_is_better: bool,
    start_sd: float = 0.0,
) -> Pairs:
    """Intervals of seeded pairs (RULES section 2).

    `controls` is (k, n, trials), `candidate` (n, trials). A pair's control is the mean over the k
    control starts. The interval holds the pairs' spread and the registered between-start SD, once
    for the candidate and 1/k for the controls.
    """
    k, n = controls.shape[:2]
    control = controls.sum(axis=0)
    control /= k
    differences = _relative(control, candidate, lower_is_better)
    point, var = mean_var(differences)
    t = t975(n - 1)
    half = t * np.sqrt(var / n + start_sd**2 * (1 + 1 / k))
    if k == 1:
        return Pairs(differences, point, var, half, point - half, point + half, None, None, None)
    drift = _relative(controls[0], controls[1], lower_is_better)
    aa_point, aa_var = mean_var(drift)
    aa_half = t * np.sqrt(aa_var / n)
    return Pairs(
        differences, point, var, half, point - half, point + half, drift, aa_point, aa_half
    )


def _relative(control: Floats, candidate: Floats, lower_is_better: bool) -> Floats:
    out = candidate - control
    out /= control
    if lower_is_better:
        np.negative(out, out=out)
    return out


SIGNIFICANT = 0.05


def pair_verdicts(
    pairs: Pairs, p: Floats, aa_p: Floats | None = None, *, aa_half: Floats | None = None
) -> tuple[Bools, Bools, Bools]:
    """(WIN, LOSS, drift) of each trial. WIN and LOSS are meant before drift overrules them.

    `p` and `aa_p` are the sign-flip tests of the pairs and of the control starts; `aa_half` takes
    the place of the plain A/A interval's half width.
    """
    significant = p < SIGNIFICANT
    win = (pairs.point > REQUIRED_GAIN) & (pairs.low > 0) & significant
    loss = (pairs.high < 0) & significant
    if pairs.aa_point is None or pairs.aa_half is None or aa_p is None:
        return win, loss, np.zeros_like(win)
    drift = np.abs(pairs.aa_point) > (pairs.aa_half if aa_half is None else aa_half)
    drift &= aa_p < SIGNIFICANT
    return win, loss, drift
