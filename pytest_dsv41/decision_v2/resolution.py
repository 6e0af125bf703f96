"""Can a design see the gain it is meant to show? The 2x resolution filter (RULES section 3).

    pairs:N, seeded:N   half = t(0.975, N - 1) · dcv / √N       dcv = diff_cv, else √2 · cv
    unpaired:AvB        half = t(0.975, A + B - 2) · cv · √(1/A + 1/B)
    QUEUE if the expected gain is at least 2 · half, else REFUSE

`cv` is the within-window coefficient of variation of one repeat, pooled over windows of one
definition (`pooled_cv`); `diff_cv` the measured one of paired differences. All are fractions.

`drift` (**ours**) is what more pairs of the same starts do not shrink, start_sd · √(1 + 1/k) of
RULES section 2: where it is registered the interval will have it, so the half-width has it too,
t · √(dcv²/N + drift²). Seeded decode tok/s has no spread of its own to estimate from: the seeds'
luck cancels in the pairs, so the estimate is that of ms per round (`spread_metric`).
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .kernel import t975
from .series import Refused

__all__ = [
    "Resolution",
    "half_width",
    "least_design",
    "parse_design",
    "pooled_cv",
    "queue",
    "spread_metric",
]

QUEUE, REFUSE, NOT_JUDGED = "QUEUE", "REFUSE", "NOT JUDGED"

_PAIRS = re.compile(r"(pairs|seeded):(\d{1,6})")
_UNPAIRED = re.compile(r"unpaired:(\d{1,6})v(\d{1,6})")

MOST_REPEATS = 1000


@dataclass(frozen=True)
class Resolution:
    """The filter's answer: QUEUE, REFUSE, or NOT JUDGED where no spread is known.

    `half_width` is what the design can resolve (a fraction), `needed_gain` twice that;
    `least_design` the smallest design of the same kind that would queue, if one up to 1,000 does.
    """

    verdict: str
    design: str
    expected_gain: float
    half_width: float | None
    needed_gain: float | None
    least_design: str | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dict(self.__dict__)


def parse_design(design: str) -> tuple[str, int, int]:
    """`pairs:6`, `seeded:6` or `unpaired:4v3` as (kind, control repeats, candidate repeats).

    Raises `Refused` for another form, or for fewer than two repeats, which have no spread.
    """
    valid = "valid: pairs:N, seeded:N, unpaired:AvB"
    if match := _PAIRS.fullmatch(design):
        kind, n = match[1], int(match[2])
        counts = (n, n)
    elif match := _UNPAIRED.fullmatch(design):
        kind, counts = "unpaired", (int(match[1]), int(match[2]))
    else:
        raise Refused(f"design {design!r} is unknown; {valid}")
    if min(counts) < 2:
        raise Refused(f"design {design!r} needs at least two repeats an arm; {valid}")
    return kind, *counts


def pooled_cv(windows: Iterable[tuple[int, float]]) -> float | None:
    """One repeat's CV, pooled over windows of one definition by degrees of freedom.

    `windows` gives (number of repeats, CV within the window). A window with one repeat has no
    spread and drops out; None when nothing is left.
    """
    weight, total = 0, 0.0
    for n, cv in windows:
        if n < 2:
            continue
        weight += n - 1
        total += (n - 1) * _spread("cv", cv) ** 2
    return math.sqrt(total / weight) if weight else None


def spread_metric(design: str, metric: str) -> str:
    """The metric whose CV of one repeat estimates the pairs of `design` where nobody measured them.

    It is the metric itself, but for seeded decode tok/s: ms per round (WIN2 "Process rules as
    code" item 3).
    """
    seeded = design.partition(":")[0] == "seeded"
    return "ms_per_round" if seeded and metric == "decode_tok_s" else metric


def half_width(
    design: str, *, cv: float | None = None, diff_cv: float | None = None, drift: float = 0.0
) -> float:
    """Half the 95 % interval that `design` can be expected to give, as a fraction.

    Paired and seeded designs take `diff_cv` if it is given, else √2 · `cv`, and `drift`; unpaired
    ones `cv`. Raises `Refused` without the spread it needs.
    """
    kind, nc, nx = parse_design(design)
    if kind == "unpaired":
        if cv is None:
            raise Refused(f"design {design!r} needs the cv of one repeat")
        return t975(nc + nx - 2) * _spread("cv", cv) * math.sqrt(1 / nc + 1 / nx)
    if diff_cv is not None:
        spread = _spread("diff_cv", diff_cv)
    elif cv is not None:
        spread = math.sqrt(2) * _spread("cv", cv)
    else:
        raise Refused(f"design {design!r} needs diff_cv or the cv of one repeat")
    return t975(nx - 1) * math.hypot(spread / math.sqrt(nx), _spread("drift", drift))


def least_design(
    kind: str,
    expected_gain: float,
    *,
    cv: float | None = None,
    diff_cv: float | None = None,
    drift: float = 0.0,
    most: int = MOST_REPEATS,
) -> str | None:
    """The smallest design of `kind` (pairs, seeded, unpaired) that would queue, or None.

    Unpaired designs keep one control repeat more than candidate repeats, as C/X/C gives them.
    """
    first = 6 if kind == "seeded" else 3
    for n in range(first, most + 1):
        design = f"unpaired:{n + 1}v{n}" if kind == "unpaired" else f"{kind}:{n}"
        if expected_gain >= 2 * half_width(design, cv=cv, diff_cv=diff_cv, drift=drift):
            return design
    return None


def queue(
    design: str,
    expected_gain: float,
    *,
    cv: float | None = None,
    diff_cv: float | None = None,
    drift: float = 0.0,
) -> Resolution:
    """Whether a window of this design is worth its time for the gain it expects.

    `expected_gain` is a positive fraction. Without any known spread the answer is NOT JUDGED,
    which is no refusal. Raises `Refused` for an unknown design or a gain or spread that is none.
    """
    kind, _, _ = parse_design(design)
    gain = _spread("expected_gain", expected_gain)
    if gain == 0:
        raise Refused("expected_gain must be above 0")
    if cv is None and (kind == "unpaired" or diff_cv is None):
        reason = "no spread is known for this definition"
        return Resolution(NOT_JUDGED, design, gain, None, None, None, reason)
    half = half_width(design, cv=cv, diff_cv=diff_cv, drift=drift)
    least = least_design(kind, gain, cv=cv, diff_cv=diff_cv, drift=drift)
    told = f"{design} resolves ±{100 * half:.3f} %"
    if gain >= 2 * half:
        verdict, reason = QUEUE, f"{told}; {100 * gain:g} % is at least twice that"
    else:
        hint = f"; {least} would queue" if least else ""
        verdict = REFUSE
        reason = f"{told}; {100 * gain:g} % is less than twice that{hint}"
    return Resolution(verdict, design, gain, half, 2 * half, least, reason)


def _spread(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise Refused(f"{name} must be a number, got {value!r}")
    if not math.isfinite(value) or value < 0:
        raise Refused(f"{name} must be a fraction of at least 0, got {value!r}")
    return float(value)
