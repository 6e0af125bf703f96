"""A second implementation of the rules: slow, obvious, from RULES and nothing else.

Plain lists, correctly rounded sums, scipy.stats for quantiles, every sign vector in turn. It shares
no line with the package and is what its arrays are held against.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import scipy.stats


@cache
def t975(df: int) -> float:
    return float(scipy.stats.t.ppf(0.975, df))


def mean(values: Sequence[float]) -> float:
    if all(v == values[0] for v in values):
        return values[0]
    return math.fsum(values) / len(values)


def sd(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def c4(n: int) -> float:
    return math.sqrt(2 / (n - 1)) * math.gamma(n / 2) / math.gamma((n - 1) / 2)


@dataclass(frozen=True)
class Answer:
    gain: float
    low: float
    high: float
    df: int
    threshold: float
    worse: int
    verdict: str
    edges: tuple[float, ...]
    """How far each strict comparison was from its edge; near 0 rounding may decide it."""


def win2(
    control: Sequence[float],
    candidate: Sequence[float],
    *,
    lower_is_better: bool,
    paired: bool,
    guard: bool = False,
    revision: int = 3,
) -> Answer:
    s = -1 if lower_is_better else 1
    nc, nx = len(control), len(candidate)
    c_mean, x_mean = mean(control), mean(candidate)
    if paired:
        d = [s * (x - c) / c for c, x in zip(control, candidate, strict=True)]
        gain = mean(d)
        df = nx - 1
        half = t975(df) * sd(d) / math.sqrt(nx)
    else:
        d = [s * (x - c_mean) / c_mean for x in candidate]
        gain = s * (x_mean - c_mean) / c_mean
        vc = (sd(control) / c_mean) ** 2 / nc
        vx = (sd(candidate) / c_mean) ** 2 / nx
        least, most = min(nc, nx) - 1, nc + nx - 2
        if vc == 0 and vx == 0:
            df = least
        else:
            ws = (vc + vx) ** 2 / (vc**2 / (nc - 1) + vx**2 / (nx - 1))
            df = max(least, min(most, math.floor(ws + 1e-9)))
        half = t975(df) * math.sqrt(vc + vx)
    low, high = gain - half, gain + half
    if revision == 1:
        threshold = (max(control) - min(control)) / c_mean
    else:
        threshold = 1.69 * (sd(control) / c4(nc)) / c_mean
        if paired:
            threshold *= math.sqrt(2)
    worse = sum(1 for one in d if one < -threshold)
    fires = worse >= math.ceil(2 * nx / 3)
    needs_interval = revision == 3 or (revision == 2 and guard)
    if fires and (high < 0 or not needs_interval):
        verdict = "LOSS"
    elif not guard and gain > 0.02 and low > 0:
        verdict = "WIN"
    else:
        verdict = "INCONCLUSIVE"
    edges = (gain - 0.02, low, high, *(one + threshold for one in d))
    return Answer(gain, low, high, df, threshold, worse, verdict, edges)


def sign_flip(differences: Sequence[float]) -> float:
    """Every sign vector, on the integers that RULES names."""
    largest = max(abs(d) for d in differences)
    if largest == 0:
        return 1.0
    q = [round(d / largest * 2**44) for d in differences]
    n = len(q)
    bound = abs(sum(q)) - n
    hits = sum(
        abs(sum(e * one for e, one in zip(signs, q, strict=True))) >= bound
        for signs in itertools.product((-1, 1), repeat=n)
    )
    return hits / 2**n


@dataclass(frozen=True)
class PairedAnswer:
    point: float
    low: float
    high: float
    p: float
    drift: bool
    verdict: str


def paired(
    controls: Sequence[Sequence[float]],
    candidate: Sequence[float],
    *,
    lower_is_better: bool,
    start_sd: float = 0.0,
    guard: bool = False,
) -> PairedAnswer:
    s = -1 if lower_is_better else 1
    k, n = len(controls), len(candidate)
    c = [sum(start[i] for start in controls) / k for i in range(n)]
    d = [s * (x - one) / one for one, x in zip(c, candidate, strict=True)]
    point = mean(d)
    half = t975(n - 1) * math.sqrt(sd(d) ** 2 / n + start_sd**2 * (1 + 1 / k))
    low, high = point - half, point + half
    p = sign_flip(d)
    drift = False
    if k == 2:
        e = [s * (b - a) / a for a, b in zip(*controls, strict=True)]
        aa_half = t975(n - 1) * sd(e) / math.sqrt(n)
        drift = abs(mean(e)) > aa_half and sign_flip(e) < 0.05
    if drift:
        verdict = "INCONCLUSIVE"
    elif high < 0 and p < 0.05:
        verdict = "LOSS"
    elif not guard and point > 0.02 and low > 0 and p < 0.05:
        verdict = "WIN"
    else:
        verdict = "INCONCLUSIVE"
    return PairedAnswer(point, low, high, p, drift, verdict)
