"""Rule win2-v1: a window of repeats (RULES section 1).

    gain, low, high   Student's interval on adjacent pairs, or Welch's on unpaired arms
    loss-repeat test  worse than the control arm's spread in at least two thirds of the repeats
    WIN               primary only: gain > 2 % and low > 0
    LOSS              primary or guard: the loss-repeat test fires and high < 0
    cell              LOSS if any series is; else WIN if the primary is; else INCONCLUSIVE
    window            any LOSS: NOT A CANDIDATE; else any WIN: CANDIDATE; else INCONCLUSIVE

Revision 3 decides. Revision 2 needs no interval for a primary's LOSS; revision 1 takes the plain
range of the controls as the threshold, and no interval for any LOSS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from .kernel import REQUIRED_GAIN, win2_repeats
from .result import (
    INCONCLUSIVE,
    LOSS,
    REFUSED,
    REPORTED,
    WIN,
    CellResult,
    Decision,
    Group,
    SeriesResult,
    lost_by,
    percent,
    window_verdict,
)
from .series import MIN_REPEATS, Refused, Series, check_identity, check_values

__all__ = ["MAX_DECISION_CELLS", "decide_cell", "decide_window", "report_window"]

RULE = "win2-v1"
MAX_DECISION_CELLS = 2


def decide_window(
    series: Iterable[Series],
    decision_cells: Sequence[str],
    *,
    groups: Mapping[str, Sequence[str]] | None = None,
    revision: int = 3,
) -> Decision:
    """The verdict of a window of repeats (RULES section 1).

    `series` in order: a cell's first series is its primary, its further ones are guards.
    `decision_cells` names one or two cells; every other cell is judged the same way and reported
    only, and a refusal there stops nothing. `groups` ({name: cells}) gives further verdicts over
    the decision cells it names, for instance single-user and multi-user.

    Raises `Refused` where RULES refuses: values no rule can judge, fewer than three repeats an arm,
    pairs of unequal number, none or more than two decision cells, a prompt-identity fault.
    """
    cells = _by_cell(series)
    decisive = check_decision_cells(decision_cells, cells)
    if len(decisive) > MAX_DECISION_CELLS:
        raise Refused(
            f"{len(decisive)} decision cells ({', '.join(decisive)}); at most "
            f"{MAX_DECISION_CELLS} may decide a window"
        )
    checked = _check_groups(groups or {}, cells)
    return _judge(cells, decisive, checked, revision)


def report_window(series: Iterable[Series], *, revision: int = 3) -> Decision:
    """All cells judged, none deciding: the decision of a report-only window, verdict COMPLETE."""
    return _judge(_by_cell(series), (), {}, revision)


def decide_cell(series: Sequence[Series], *, decides: bool = True, revision: int = 3) -> CellResult:
    """One cell's verdict from its series, primary first. Raises `Refused`.

    With `decides=False` missing prompt identities are allowed; contradicting ones never are.
    """
    if revision not in (1, 2, 3):
        raise Refused(f"win2-v1 has the revisions 1, 2 and 3, not {revision!r}")
    if not series:
        raise Refused("a cell needs at least one series")
    cell = series[0].cell
    metrics: set[str] = set()
    for one in series:
        if one.cell != cell:
            raise Refused(f"belongs to cell {cell!r}", cell=one.cell, metric=one.metric)
        if one.metric in metrics:
            raise Refused("two series of one metric", cell=cell, metric=one.metric)
        metrics.add(one.metric)
    values = [_check_arms(one) for one in series]
    _check_prompts(series, needed=decides)
    judged = tuple(
        _judge_series(one, control, candidate, guard=index > 0, revision=revision)
        for index, (one, (control, candidate)) in enumerate(zip(series, values, strict=True))
    )
    if lost := lost_by(judged):
        verdict, reason = LOSS, lost
    else:
        verdict, reason = judged[0].verdict, judged[0].reason
    return CellResult(cell, verdict, decides, judged, reason)


def _judge(
    cells: Mapping[str, list[Series]],
    decisive: tuple[str, ...],
    groups: Mapping[str, tuple[str, ...]],
    revision: int,
) -> Decision:
    results: dict[str, CellResult] = {}
    for name, parts in cells.items():
        if name in decisive:
            results[name] = decide_cell(parts, revision=revision)
            continue
        try:
            results[name] = decide_cell(parts, decides=False, revision=revision)
        except Refused as refusal:
            if revision not in (1, 2, 3):
                raise
            results[name] = CellResult(name, REFUSED, False, (), str(refusal))
    verdicts = {name: results[name].verdict for name in decisive}
    return Decision(
        rule=RULE,
        rule_revision=revision,
        verdict=window_verdict(verdicts.values()) if decisive else REPORTED,
        decision_cells=decisive,
        cells=results,
        groups={
            name: Group(members, window_verdict(verdicts[m] for m in members if m in verdicts))
            for name, members in groups.items()
        },
    )


def _by_cell(series: Iterable[Series]) -> dict[str, list[Series]]:
    cells: dict[str, list[Series]] = {}
    for one in series:
        if not isinstance(one, Series):
            raise Refused(f"{one!r} is not a Series")
        cells.setdefault(one.cell, []).append(one)
    return cells


def check_decision_cells(names: Sequence[str], known: Iterable[str]) -> tuple[str, ...]:
    """`names` as a tuple, or `Refused`: none, twice the same, or unknown ones."""
    if isinstance(names, str):
        raise Refused(f"decision cells are a list of names, got the text {names!r}")
    decisive = tuple(names)
    if not decisive:
        raise Refused("no decision cell: a window without one reports and decides nothing")
    if len(set(decisive)) != len(decisive):
        raise Refused(f"a decision cell is named twice: {', '.join(decisive)}")
    cells = list(known)
    for name in decisive:
        if name not in cells:
            raise Refused(f"decision cell {name!r} has no series; cells: {', '.join(cells)}")
    return decisive


def _check_groups(
    groups: Mapping[str, Sequence[str]], cells: Mapping[str, object]
) -> dict[str, tuple[str, ...]]:
    out: dict[str, tuple[str, ...]] = {}
    for name, members in groups.items():
        if isinstance(members, str) or not members:
            raise Refused(f"group {name!r} needs a list of cells, got {members!r}")
        for member in members:
            if member not in cells:
                raise Refused(f"group {name!r} names cell {member!r}, which has no series")
        out[name] = tuple(members)
    return out


def _check_arms(series: Series) -> tuple[list[float], list[float]]:
    """Both arms as floats, or `Refused`."""
    arms = []
    for arm in ("control", "candidate"):
        values = check_values(
            getattr(series, arm),
            lower_is_better=series.lower_is_better,
            is_control=arm == "control",
            cell=series.cell,
            metric=series.metric,
            arm=arm,
        )
        if len(values) < MIN_REPEATS:
            raise Refused(
                f"{len(values)} repeat{'' if len(values) == 1 else 's'}, at least {MIN_REPEATS} "
                "are needed",
                cell=series.cell,
                metric=series.metric,
                arm=arm,
            )
        arms.append(values)
    control, candidate = arms
    if series.paired and len(control) != len(candidate):
        raise Refused(
            f"pairs of {len(control)} control and {len(candidate)} candidate repeats",
            cell=series.cell,
            metric=series.metric,
        )
    return control, candidate


def _check_prompts(series: Sequence[Series], *, needed: bool) -> None:
    """Every value on one and the same prompt, over both arms and all series of a cell."""
    first: str | None = None
    for one in series:
        for arm in ("control", "candidate"):
            refuse = partial(Refused, cell=one.cell, metric=one.metric, arm=arm)
            prompts: Sequence[str] | None = getattr(one, f"{arm}_prompts")
            if prompts is None:
                if needed:
                    raise refuse("values have no prompt identity")
                continue
            count = len(getattr(one, arm))
            if len(prompts) != count:
                raise refuse(f"{len(prompts)} prompt identities for {count} values")
            own: str | None = None
            for position, prompt in enumerate(prompts):
                identity = check_identity(
                    prompt, cell=one.cell, metric=one.metric, arm=arm, position=position
                )
                if own is not None and identity != own:
                    what = "values of two prompts in one arm are never pooled"
                    raise refuse(what, position=position)
                own = identity
            if first is not None and own != first:
                if one is series[0]:
                    raise refuse("the arms ran on different prompts")
                raise refuse("a guard on another prompt than its primary")
            first = own


def _judge_series(
    series: Series,
    control: list[float],
    candidate: list[float],
    *,
    guard: bool,
    revision: int,
) -> SeriesResult:
    # The rule knows ratios only. Scaling by a power of two is exact and keeps squares of tiny
    # or huge values inside the range of floats.
    scale = -math.frexp(max(control))[1]
    arms = [np.array([arm], dtype=np.float64).T for arm in (control, candidate)]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        columns = [np.ldexp(arm, scale) for arm in arms]
        judged = win2_repeats(
            columns[0],
            columns[1],
            lower_is_better=series.lower_is_better,
            paired=series.paired,
            guard=guard,
            revision=revision,
        )
    gain, half = float(judged.gain[0]), float(judged.half[0])
    low, high = float(judged.low[0]), float(judged.high[0])
    threshold, worse = float(judged.threshold[0]), int(judged.worse[0])
    if not all(map(math.isfinite, (gain, half, low, high, threshold))):
        raise Refused(
            "the values are too far apart to be compared", cell=series.cell, metric=series.metric
        )
    won = bool(judged.win[0]) and not guard
    verdict = LOSS if judged.loss[0] else WIN if won else INCONCLUSIVE
    nc, nx = len(control), len(candidate)
    fires = worse >= judged.needed
    if verdict == LOSS:
        reason = (
            f"{worse} of {nx} repeats are worse by more than the control spread of "
            f"{percent(threshold)} %"
        )
        if high < 0:
            reason += " and the whole interval is below zero"
    elif verdict == WIN:
        reason = "the gain is above 2 % and the whole interval above zero"
    elif guard:
        reason = _guard_reason(gain, high, threshold, worse, judged.needed, fires)
    elif fires:
        reason = "enough repeats are worse for a LOSS, but the interval reaches zero"
    elif high < 0:
        reason = (
            "the interval is below zero, but only "
            f"{worse} of the {judged.needed} repeats needed for a LOSS are worse than the spread"
        )
    elif gain > REQUIRED_GAIN:
        reason = "the gain is above 2 %, but the interval reaches zero"
    elif low > 0:
        reason = "better beyond doubt, but a gain of more than 2 % is required"
    else:
        reason = "neither a gain above 2 % nor a loss beyond the spread is shown"
    return SeriesResult(
        metric=series.metric,
        role="guard" if guard else "primary",
        design=f"{'paired' if series.paired else 'unpaired'} {nc} v {nx}",
        n_control=nc,
        n_candidate=nx,
        gain=gain,
        low=low,
        high=high,
        df=int(judged.df[0]),
        threshold=threshold,
        worse=worse,
        needed=judged.needed,
        verdict=verdict,
        reason=reason,
        half=half,
        lower_is_better=series.lower_is_better,
        unit=series.unit,
        paired=series.paired,
        control=tuple(control),
        candidate=tuple(candidate),
        differences=tuple(float(d) for d in judged.differences[:, 0]),
        control_mean=math.fsum(control) / nc,
        candidate_mean=math.fsum(candidate) / nx,
        spread=float(judged.spread[0]),
        control_prompts=None if series.control_prompts is None else tuple(series.control_prompts),
        candidate_prompts=(
            None if series.candidate_prompts is None else tuple(series.candidate_prompts)
        ),
    )


def _guard_reason(
    gain: float, high: float, threshold: float, worse: int, needed: int, fires: bool
) -> str:
    if gain > threshold and not fires:
        return "better by more than its spread"
    if gain >= -threshold and not fires:
        return "within its spread"
    if fires:
        return "beyond its spread, but the interval reaches zero"
    tail = "" if high < 0 else " and the interval reaches zero"
    return f"only {worse} of the {needed} repeats needed are beyond its spread{tail}"
