"""Claims: what a window was said to show before it ran, and whether it did.

A claim compares two arms in one cell and metric: by at least so much up, by at least so much down,
or by no more than so much. It is judged by the 95 % interval of the relative change (RULES section
1, unpaired: every repeat of both arms pooled). A claim whose threshold lies inside the interval is
not resolvable; so two points inside each other's noise are never said to be equal, and nothing is
said of what lies between two points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decision_v2.kernel import win2_repeats
from .summary import ClaimInfo

if TYPE_CHECKING:
    from .plan import Plan
    from .spec import ClaimUse

__all__ = ["judge_claims"]

_LEAST = 3
"""Least repeats of an arm (RULES section 1)."""


def judge_claims(plan: Plan, values: Sequence[Mapping[str, Any]]) -> tuple[ClaimInfo, ...]:
    """Return how each registered claim of the window ended, in the file's order."""
    return tuple(_judge(claim, plan, values) for claim in plan.window.claims)


def _judge(claim: ClaimUse, plan: Plan, values: Sequence[Mapping[str, Any]]) -> ClaimInfo:
    metric = claim.metric or plan.primary(claim.cell)
    said: dict[str, Any] = {
        "text": claim.text,
        "cell": claim.cell,
        "metric": metric,
        "from_arm": claim.from_arm or plan.window.control.name,
        "to_arm": claim.to_arm,
        "direction": claim.direction,
        "threshold": claim.threshold,
    }
    points = [
        np.array(
            [
                value["values"][metric]["value"]
                for value in values
                if (value["cell"], value["arm"], value["outcome"]) == (claim.cell, arm, "measured")
                and metric in value["values"]
            ]
        ).reshape(-1, 1)
        for arm in (said["from_arm"], said["to_arm"])
    ]
    before, after = points
    if min(len(before), len(after)) < _LEAST:
        reason = f"{len(before)} and {len(after)} repeats; at least {_LEAST} of each are needed"
        return ClaimInfo(**said, answer="NOT RESOLVABLE", reason=reason)
    if before.min() <= 0:
        reason = f"{said['from_arm']} has a value of 0 or less; no change relative to it exists"
        return ClaimInfo(**said, answer="NOT RESOLVABLE", reason=reason)
    found = win2_repeats(before, after, lower_is_better=False, paired=False)
    change, low, high = (float(x[0]) for x in (found.gain, found.low, found.high))
    held, falsified = _answers(claim.direction, claim.threshold, low, high)
    seen = f"{100 * change:+.1f} %, between {100 * low:+.1f} % and {100 * high:+.1f} %"
    answer, reason = "NOT RESOLVABLE", f"{seen}: the threshold lies inside the noise"
    if held or falsified:
        answer, reason = ("HELD" if held else "FALSIFIED"), seen
    elif low <= 0 <= high:
        reason = f"{seen}: the two lie inside each other's noise, which does not make them equal"
    return ClaimInfo(**said, answer=answer, reason=reason, change=change, low=low, high=high)


def _answers(direction: str, threshold: float, low: float, high: float) -> tuple[bool, bool]:
    """Whether the whole interval lies where the claim says, or the whole of it elsewhere."""
    if direction == "up":
        return low >= threshold, high < threshold
    if direction == "down":
        return high <= -threshold, low > -threshold
    return -threshold <= low and high <= threshold, low > threshold or high < -threshold
