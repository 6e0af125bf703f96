"""Advice beside a verdict: what the archive's spread, or a wider A/A check, would have said.

Neither ever decides (RULES section 5). Both must be registered before the first start.

**win3-moderated.** Three repeats estimate a variance badly, the archive knows it well. Its
variances of one definition give a prior (limma's fitFDist), worth d0 degrees of freedom at s0²:

    e_g = ln s²_g - ψ(df_g/2) + ln(df_g/2)          v = var(e) - mean ψ'(df_g/2)
    d0 = 2 ψ'⁻¹(v),  s0² = exp(mean e + ψ(d0/2) - ln(d0/2))       v <= 0: d0 = ∞, s0² = exp(mean e)
    s̃² = max((d0 s0² + d s²)/(d0 + d), s²),  d0 at most 10;   t = point/√(f s̃²) at d0 + d
    WIN  point > 2 % and one-sided p <= pW            LOSS  one-sided p <= pL

The window's own spread is never made smaller by the prior, so a noisy window stays noisy.

**Widened A/A.** Two control starts differ by the between-start spread even when nothing is wrong;
with a registered start_sd the A/A interval is widened by 2 · start_sd² before drift is called.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .kernel import REQUIRED_GAIN, SIGNIFICANT, t975
from .result import INCONCLUSIVE, LOSS, WIN, Advice, CellResult, SeriesResult
from .series import Refused

__all__ = [
    "LEVELS",
    "Prior",
    "fit_prior",
    "fit_variances",
    "moderated_advice",
    "moderated_t",
    "widened_aa_advice",
]

Floats = npt.NDArray[np.float64]

RULE = "win3-moderated"
WIDENED = "widened-aa"
D0_CAP = 10.0
LEVELS: dict[tuple[bool, int, int], tuple[float, float]] = {
    (False, 4, 3): (0.0165, 0.0160),
    (True, 3, 3): (0.0200, 0.0110),
}
"""(paired, control repeats, candidate repeats) -> (pW, pL). Other designs get no call."""


@dataclass(frozen=True)
class Prior:
    """What the archive knows of one definition's variance of a value (or a paired difference).

    `s0_squared` is relative to the mean (0.0004 = a CV of 2 %), `d0` its worth in degrees of
    freedom (infinite where the archive's variances differ no more than chance allows), `groups`
    the number of variances behind it. `definition` names the cell, metric, prompt and so on.
    """

    paired: bool
    s0_squared: float
    d0: float
    groups: int
    definition: Mapping[str, Any] = field(default_factory=dict)

    def _content(self) -> dict[str, Any]:
        return {
            "rule": RULE,
            "paired": self.paired,
            "s0_squared": self.s0_squared,
            "d0": "infinite" if math.isinf(self.d0) else self.d0,
            "groups": self.groups,
            "definition": dict(self.definition),
        }

    @property
    def sha256(self) -> str:
        """The seal: sha256 of the prior's canonical JSON (sorted keys, no spaces)."""
        text = json.dumps(self._content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """JSON values with the seal, to be kept in the window's folder before its first start."""
        return {**self._content(), "sha256": self.sha256}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Prior:
        """A frozen prior read back. Raises `Refused` if it is none or was changed since."""
        try:
            d0 = document["d0"]
            prior = cls(
                paired=bool(document["paired"]),
                s0_squared=float(document["s0_squared"]),
                d0=math.inf if d0 == "infinite" else float(d0),
                groups=int(document["groups"]),
                definition=dict(document["definition"]),
            )
            seal = document["sha256"]
        except (KeyError, TypeError, ValueError) as error:
            raise Refused(f"not a frozen prior: {error}") from None
        if document.get("rule") != RULE or seal != prior.sha256:
            raise Refused("the frozen prior does not match its sha256: it was changed")
        return prior


def fit_prior(
    groups: Sequence[Sequence[float]],
    *,
    paired: bool = False,
    definition: Mapping[str, Any] | None = None,
) -> Prior:
    """A prior from the archive's control values of ONE definition.

    Every group holds the values of one start of one window in run order. Unpaired, a group gives
    the variance of its values relative to their mean; paired, the variance of the relative
    differences of its adjacent values, taken two by two without overlap. Groups too small for a
    variance drop out. Raises `Refused` when fewer than 3 are left, or for a value not above 0.
    """
    variances, dfs = [], []
    for values in groups:
        numbers = [float(v) for v in values]
        if any(not math.isfinite(v) or v <= 0 for v in numbers):
            raise Refused("an archive value must be a finite number above 0", arm="archive")
        if paired:
            pairs = zip(numbers[::2], numbers[1::2], strict=False)
            relative = [(b - a) / a for a, b in pairs]
        else:
            mean = math.fsum(numbers) / len(numbers) if numbers else 1.0
            relative = [v / mean for v in numbers]
        if len(relative) >= 2:
            variances.append(float(np.var(relative, ddof=1)))
            dfs.append(len(relative) - 1)
    s0_squared, d0 = fit_variances(np.array(variances), np.array(dfs, dtype=np.float64))
    return Prior(paired, s0_squared, d0, len(variances), dict(definition or {}))


def fit_variances(variances: Floats, dfs: Floats) -> tuple[float, float]:
    """(s0², d0) from group variances and their degrees of freedom, as limma's fitFDist gives them.

    Variances below 1e-5 of their median (a constant group) are raised to that. Raises `Refused`
    for fewer than 3 groups, or when most have no spread at all.
    """
    from scipy.special import digamma, polygamma

    if variances.size < 3:
        raise Refused(f"{variances.size} groups with a spread, at least 3 are needed for a prior")
    median = float(np.median(variances))
    if median <= 0:
        raise Refused("most of the archive's groups have no spread at all")
    half_df = dfs / 2
    e = np.log(np.maximum(variances, 1e-5 * median)) - digamma(half_df) + np.log(half_df)
    mean = float(e.mean())
    v = float(e.var(ddof=1) - polygamma(1, half_df).mean())
    if v <= 0:
        return math.exp(mean), math.inf
    d0 = 2 * _trigamma_inverse(v)
    return math.exp(mean + float(digamma(d0 / 2)) - math.log(d0 / 2)), d0


def _trigamma_inverse(value: float) -> float:
    """x with ψ'(x) = value > 0, by Newton's method on 1/ψ', which is nearly linear."""
    from scipy.special import polygamma

    if value > 1e7:
        return 1 / math.sqrt(value)
    if value < 1e-6:
        return 1 / value
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, x))
        x += step
        if -step / x < 1e-10:
            break
    return x


def moderated_t(
    point: Floats, variance: Floats, *, factor: float, df: int, s0_squared: Floats, d0: Floats
) -> tuple[Floats, Floats]:
    """(t, degrees of freedom) of the moderated test, elementwise.

    `variance` is the window's own relative one at `df` degrees of freedom, `factor` what it is
    multiplied by for the variance of `point`.
    """
    d0 = np.minimum(d0, D0_CAP)
    pooled = (d0 * s0_squared + df * variance) / (d0 + df)
    spread = np.sqrt(factor * np.maximum(pooled, variance))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(point == 0, 0.0, point / spread)
    return t, d0 + df


def moderated_advice(result: SeriesResult, prior: Prior) -> Advice:
    """What win3-moderated says of a series that win2-v1 judged. It never decides.

    Raises `Refused` for a series of seeded pairs, or a prior of the other layout.
    """
    if result.p is not None:
        raise Refused("win3-moderated judges repeats, not seeded pairs", metric=result.metric)
    if result.paired is not prior.paired:
        layouts = ["unpaired", "paired"]
        what = f"a prior of {layouts[prior.paired]} values for a {layouts[result.paired]} series"
        raise Refused(what, metric=result.metric)
    nc, nx = result.n_control, result.n_candidate
    if result.paired:
        df, factor = nx - 1, 1 / nx
        variance = _variance(result.differences, 1.0)
    else:
        df, factor = nc + nx - 2, 1 / nc + 1 / nx
        mean = result.control_mean
        variance = (
            (nc - 1) * _variance(result.control, mean)
            + (nx - 1) * _variance(result.candidate, mean)
        ) / df
    t, total_df = moderated_t(
        np.array(result.gain),
        np.array(variance),
        factor=factor,
        df=df,
        s0_squared=np.array(prior.s0_squared),
        d0=np.array(prior.d0),
    )
    return _advice(result, prior, variance, float(t), float(total_df))


def _advice(
    result: SeriesResult, prior: Prior, variance: float, t: float, total_df: float
) -> Advice:
    from scipy.special import stdtr

    p_win, p_loss = float(stdtr(total_df, -t)), float(stdtr(total_df, t))
    facts: dict[str, Any] = {
        "call": None,
        "t": t if math.isfinite(t) else None,
        "df": total_df,
        "p_win": p_win,
        "p_loss": p_loss,
        "variance": variance,
        "prior": prior.to_dict(),
    }
    measured = f"t {t:.2f} at {total_df:g} degrees of freedom"
    levels = LEVELS.get((result.paired, result.n_control, result.n_candidate))
    if levels is None:
        line = f"With the archive's spread: {measured}; no level is known for {result.design}."
        return Advice(RULE, line, facts)
    p_level_win, p_level_loss = levels
    if p_loss <= p_level_loss:
        call = LOSS
    elif result.gain > REQUIRED_GAIN and p_win <= p_level_win and result.role == "primary":
        call = WIN
    else:
        call = INCONCLUSIVE
    facts["call"] = call
    facts["levels"] = [p_level_win, p_level_loss]
    p = min(p_win, p_loss)
    line = (
        f"With the archive's spread: {call} ({measured}, one-sided p {p:.2g}); it decides nothing."
    )
    return Advice(RULE, line, facts)


def _variance(values: Sequence[Any], scale: float) -> float:
    return float(np.var(np.array(values, dtype=np.float64) / scale, ddof=1))


def widened_aa_advice(cell: CellResult) -> Advice:
    """What a seeded cell's primary would be if its A/A check knew the registered start_sd.

    The control starts then count as drifted only if their difference exceeds
    t · √(s²/n + 2 start_sd²). Raises `Refused` for a cell without two control starts or without a
    registered start_sd.
    """
    primary = cell.series[0] if cell.series else None
    if primary is None or primary.p is None or primary.aa is None:
        raise Refused("a widened A/A needs a seeded cell with two control starts", cell=cell.cell)
    if not primary.start_sd_registered or primary.start_sd is None:
        raise Refused("a widened A/A needs a registered start_sd", cell=cell.cell)
    n = primary.n_candidate
    drifts = primary.aa["differences"]
    half = t975(n - 1) * math.sqrt(_variance(drifts, 1.0) / n + 2 * primary.start_sd**2)
    gain, p = float(primary.aa["gain"]), float(primary.aa["p"])
    drift = abs(gain) > half and p < SIGNIFICANT
    significant = primary.p < SIGNIFICANT
    if drift:
        call = INCONCLUSIVE
    elif primary.high < 0 and significant:
        call = LOSS
    elif primary.gain > REQUIRED_GAIN and primary.low > 0 and significant:
        call = WIN
    else:
        call = INCONCLUSIVE
    found = "drift" if drift else "no drift"
    line = (
        f"With the A/A interval widened by the registered start spread: {call} ({found}); "
        "it decides nothing."
    )
    facts = {"call": call, "drift": drift, "low": gain - half, "high": gain + half, "p": p}
    return Advice(WIDENED, line, facts)
