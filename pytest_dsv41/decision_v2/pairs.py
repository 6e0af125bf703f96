"""Rule win2-paired-v1: seeded pairs (RULES section 2).

Every pair is one registered seed (or, for prefill cells, one cold repeat) measured in the candidate
start and in each control start, so the luck of the sampled text cancels.

    d_i    relative difference against the mean of the control starts, positive = better
    WIN    primary only: point > 2 %, low > 0 and sign-flip p < 0.05
    LOSS   primary or guard: high < 0 and p < 0.05
    drift  the control starts differ from each other (plain interval and p): INCONCLUSIVE

All pairs share one candidate start, so a start that happens to be fast looks like an effect: the
registered between-start SD widens the interval by t · start_sd · √(1 + 1/k), combined in squares.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .kernel import REQUIRED_GAIN, SIGNIFICANT, Pairs, pair_verdicts, win2_pairs
from .repeats import MAX_DECISION_CELLS, check_decision_cells
from .result import (
    CANDIDATE,
    INCONCLUSIVE,
    LOSS,
    NOT_A_CANDIDATE,
    REFUSED,
    REPORTED,
    WIN,
    CellResult,
    Decision,
    Group,
    SeriesResult,
    lost_by,
    window_verdict,
)
from .seeded import PROFILES, SeededSeries, start_name
from .series import Refused, check_identity, check_values
from .signflip import SignFlip, sign_flip

__all__ = ["decide_paired_cell", "decide_paired_window", "report_paired_window"]

RULE, REVISION = "win2-paired-v1", 1
MIN_PAIRS = 6
MIN_REPORTED_PAIRS = 3


def decide_paired_cell(
    cell: str,
    series: Sequence[SeededSeries],
    *,
    start_sd: Mapping[str, float] | None = None,
    expect_identical: bool = False,
    streams_identical: bool | None = None,
) -> CellResult:
    """One seeded cell's verdict from its series, primary first (RULES section 2).

    `start_sd` ({metric: fraction}) is the registered between-start SD; a metric without one counts
    as 0 and is recorded as unregistered. With `expect_identical` both control starts must have
    shown identical token streams and round counts (`streams_identical`), else INCONCLUSIVE.

    Raises `Refused` for fewer than 6 pairs (3 where the series are report-only), an unequal number
    of pairs, a start_sd for a metric the cell does not have, values no rule can judge, and prompt
    identities that are missing or differ.
    """
    _check_window({cell: series}, ())
    return _decide(
        cell,
        series,
        start_sd=start_sd or {},
        expect_identical=expect_identical,
        streams_identical=streams_identical,
        decides=not any(one.report_only for one in series),
    )


def decide_paired_window(
    cells: Mapping[str, Sequence[SeededSeries]],
    decision_cells: Sequence[str],
    *,
    start_sd: Mapping[str, float] | None = None,
    expect_identical: Iterable[str] = (),
    streams_identical: Mapping[str, bool] | None = None,
) -> Decision:
    """The verdict of a window of seeded cells, one per profile (RULES section 2).

    `cells` is {name: series, primary first}; at most two of them decide in each profile. Keys of
    `start_sd` are "<cell>/<metric>". The window's own verdict is CANDIDATE if a profile's is, else
    NOT A CANDIDATE if one is that, else INCONCLUSIVE; a promotion names its profile.

    Raises `Refused` for what `decide_paired_cell` refuses in a decision cell, for no decision cell
    or more than two in a profile, for a report-only or unknown one, and for unknown keys.
    """
    decisive = check_decision_cells(decision_cells, cells)
    return _window(cells, decisive, start_sd, expect_identical, streams_identical)


def report_paired_window(
    cells: Mapping[str, Sequence[SeededSeries]],
    *,
    start_sd: Mapping[str, float] | None = None,
) -> Decision:
    """All seeded cells judged, none deciding: the decision of a report-only window."""
    return _window(cells, (), start_sd, (), None)


def _window(
    cells: Mapping[str, Sequence[SeededSeries]],
    decisive: tuple[str, ...],
    start_sd: Mapping[str, float] | None,
    expect_identical: Iterable[str],
    streams_identical: Mapping[str, bool] | None,
) -> Decision:
    _check_window(cells, decisive)
    expected = [expect_identical] if isinstance(expect_identical, str) else list(expect_identical)
    proved = dict(streams_identical or {})
    for name in (*expected, *proved):
        if name not in cells:
            raise Refused(f"expect_identical names cell {name!r}, which has no series")
    registered: dict[str, dict[str, float]] = {name: {} for name in cells}
    for key, value in (start_sd or {}).items():
        name, _, metric = key.rpartition("/")
        if name not in cells or metric not in {one.metric for one in cells[name]}:
            raise Refused(f"start_sd has the unknown key {key!r}; keys are <cell>/<metric>")
        registered[name][metric] = value

    results: dict[str, CellResult] = {}
    for name, series in cells.items():
        judge = partial(
            _decide,
            name,
            series,
            start_sd=registered[name],
            expect_identical=name in expected,
            streams_identical=proved.get(name),
        )
        if name in decisive:
            results[name] = judge(decides=True)
            continue
        try:
            results[name] = judge(decides=False)
        except Refused as refusal:
            results[name] = CellResult(name, REFUSED, False, (), str(refusal))
    profiles = {}
    for profile in PROFILES:
        members = tuple(name for name in decisive if cells[name][0].profile == profile)
        if members:
            verdict = window_verdict(results[name].verdict for name in members)
            profiles[profile] = Group(members, verdict)
    verdicts = [profile.verdict for profile in profiles.values()]
    for verdict in (CANDIDATE, NOT_A_CANDIDATE, INCONCLUSIVE):
        if verdict in verdicts:
            break
    else:
        verdict = REPORTED
    return Decision(RULE, REVISION, verdict, decisive, results, profiles=profiles)


def _check_window(cells: Mapping[str, Sequence[SeededSeries]], decisive: tuple[str, ...]) -> None:
    for name, series in cells.items():
        if not series:
            raise Refused("a cell without series", cell=name)
        for one in series:
            if not isinstance(one, SeededSeries):
                raise Refused(f"{one!r} is not a seeded series", cell=name)
    per_profile: dict[str, list[str]] = {}
    for name in decisive:
        if any(one.report_only for one in cells[name]):
            raise Refused("is report-only and cannot be a decision cell", cell=name)
        per_profile.setdefault(cells[name][0].profile, []).append(name)
    for profile, names in per_profile.items():
        if len(names) > MAX_DECISION_CELLS:
            raise Refused(
                f"{len(names)} decision cells in profile {profile} ({', '.join(names)}); at most "
                f"{MAX_DECISION_CELLS} may decide it"
            )


def _decide(
    cell: str,
    series: Sequence[SeededSeries],
    *,
    start_sd: Mapping[str, float],
    expect_identical: bool,
    streams_identical: bool | None,
    decides: bool,
) -> CellResult:
    if not (streams_identical is None or isinstance(streams_identical, bool)):
        raise Refused(
            f"streams_identical must be True or False, got {streams_identical!r}", cell=cell
        )
    _check_series(cell, series)
    for metric, value in start_sd.items():
        if metric not in {one.metric for one in series}:
            raise Refused(f"start_sd has the unknown key {metric!r}", cell=cell)
        _check_start_sd(value, cell, metric)
    values = [_check_pairs(one) for one in series]
    _check_prompts(series, needed=decides)
    judged = tuple(
        _judge_series(one, controls, candidate, start_sd.get(one.metric), guard=index > 0)
        for index, (one, (controls, candidate)) in enumerate(zip(series, values, strict=True))
    )
    primary = judged[0]
    lost = lost_by(judged)
    if expect_identical and len(series[0].controls) < 2:
        verdict, reason = INCONCLUSIVE, "identical streams were expected of two control starts"
    elif expect_identical and not streams_identical:
        verdict = INCONCLUSIVE
        reason = (
            "identical token streams and round counts were expected of the control starts and "
            + ("not proved" if streams_identical is None else "are not")
        )
    elif primary.aa is not None and primary.aa["drift"]:
        verdict, reason = INCONCLUSIVE, primary.reason
    elif lost:
        verdict, reason = LOSS, lost
    else:
        verdict, reason = primary.verdict, primary.reason
    return CellResult(cell, verdict, decides, judged, reason, profile=series[0].profile)


def _check_series(cell: str, series: Sequence[SeededSeries]) -> None:
    metrics: set[str] = set()
    for one in series:
        if one.cell != cell:
            raise Refused(f"a series of cell {one.cell!r}", cell=cell, metric=one.metric)
        if one.metric in metrics:
            raise Refused("two series of one metric", cell=cell, metric=one.metric)
        metrics.add(one.metric)
        if one.profile != series[0].profile:
            raise Refused("a cell of two profiles", cell=cell, metric=one.metric)
        if len(one.controls) != len(series[0].controls):
            raise Refused("another number of control starts", cell=cell, metric=one.metric)


def _check_start_sd(value: object, cell: str, metric: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(f"start_sd must be a number, got {value!r}", cell=cell, metric=metric)
    if not math.isfinite(value) or value < 0:
        what = f"start_sd must be a fraction of at least 0, got {value!r}"
        raise Refused(what, cell=cell, metric=metric)


def _check_pairs(series: SeededSeries) -> tuple[list[list[float]], list[float]]:
    arms = [(start_name(j), values) for j, values in enumerate(series.controls)]
    arms.append(("candidate", series.candidate))
    least = MIN_REPORTED_PAIRS if series.report_only else MIN_PAIRS
    checked = []
    for arm, values in arms:
        spot = partial(Refused, cell=series.cell, metric=series.metric, arm=arm)
        floats = check_values(
            values,
            lower_is_better=series.lower_is_better,
            is_control=arm != "candidate",
            cell=series.cell,
            metric=series.metric,
            arm=arm,
        )
        if len(floats) != len(series.candidate):
            raise spot(f"{len(floats)} values for {len(series.candidate)} pairs")
        if len(floats) < least:
            raise spot(
                f"{len(floats)} pair{'' if len(floats) == 1 else 's'}, at least {least} are needed"
            )
        checked.append(floats)
    return checked[:-1], checked[-1]


def _check_prompts(series: Sequence[SeededSeries], *, needed: bool) -> None:
    """One proved prompt over all pairs, starts and series of a cell."""
    first: str | None = None
    for one in series:
        arms: list[tuple[str, Sequence[str] | None, int]] = []
        lists = one.control_prompts
        if lists is not None and len(lists) != len(one.controls):
            raise Refused(
                f"prompt identities of {len(lists)} control starts for {len(one.controls)}",
                cell=one.cell,
                metric=one.metric,
            )
        for j, values in enumerate(one.controls):
            arms.append((start_name(j), None if lists is None else lists[j], len(values)))
        arms.append(("candidate", one.candidate_prompts, len(one.candidate)))
        for arm, prompts, count in arms:
            refuse = partial(Refused, cell=one.cell, metric=one.metric, arm=arm)
            if prompts is None:
                if needed:
                    raise refuse("values have no prompt identity")
                continue
            if len(prompts) != count:
                raise refuse(f"{len(prompts)} prompt identities for {count} values")
            for position, prompt in enumerate(prompts):
                identity = check_identity(
                    prompt, cell=one.cell, metric=one.metric, arm=arm, position=position
                )
                if first is not None and identity != first:
                    raise refuse("pairs on different prompts", position=position)
                first = identity


def _judge_series(
    series: SeededSeries,
    controls: list[list[float]],
    candidate: list[float],
    start_sd: float | None,
    *,
    guard: bool,
) -> SeriesResult:
    k, n = len(controls), len(candidate)
    scale = -math.frexp(max(max(start) for start in controls))[1]
    sd = 0.0 if start_sd is None else float(start_sd)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        columns = np.ldexp(np.array([*controls, candidate], dtype=np.float64)[:, :, None], scale)
        pairs = win2_pairs(
            columns[:k], columns[k], lower_is_better=series.lower_is_better, start_sd=sd
        )
    point, half = float(pairs.point[0]), float(pairs.half[0])
    low, high = float(pairs.low[0]), float(pairs.high[0])
    finite = [point, half, low, high]
    if pairs.aa_point is not None and pairs.aa_half is not None:
        finite += [float(pairs.aa_point[0]), float(pairs.aa_half[0])]
    if not all(map(math.isfinite, finite)):
        raise Refused(
            "the values are too far apart to be compared", cell=series.cell, metric=series.metric
        )
    test = sign_flip(pairs.differences[:, 0].tolist())
    aa_test = (
        None if pairs.aa_differences is None else sign_flip(pairs.aa_differences[:, 0].tolist())
    )
    win, loss, drift = pair_verdicts(
        pairs, np.array([test.p]), None if aa_test is None else np.array([aa_test.p])
    )
    verdict, reason = _verdict(
        won=bool(win[0]) and not guard,
        lost=bool(loss[0]),
        drift=bool(drift[0]),
        guard=guard,
        point=point,
        low=low,
        high=high,
        p=test.p,
    )
    means = [math.fsum(start) / n for start in controls]
    return SeriesResult(
        metric=series.metric,
        role="guard" if guard else "primary",
        design=f"seeded {n} pairs, {'C/X/C' if k == 2 else 'C/X'}",
        n_control=n,
        n_candidate=n,
        gain=point,
        low=low,
        high=high,
        df=n - 1,
        threshold=None,
        worse=None,
        needed=None,
        verdict=verdict,
        reason=reason,
        half=half,
        lower_is_better=series.lower_is_better,
        unit=series.unit,
        paired=True,
        control=tuple(tuple(start) for start in controls),
        candidate=tuple(candidate),
        differences=tuple(float(d) for d in pairs.differences[:, 0]),
        control_mean=math.fsum(means) / k,
        candidate_mean=math.fsum(candidate) / n,
        control_prompts=_kept(series.control_prompts),
        candidate_prompts=(
            None if series.candidate_prompts is None else tuple(series.candidate_prompts)
        ),
        p=test.p,
        p_error=test.error,
        start_sd=sd,
        start_sd_registered=start_sd is not None,
        start_variance=sd**2 * (1 + 1 / k),
        diff_cv=math.sqrt(float(pairs.var[0])),
        aa=_aa(pairs, aa_test, bool(drift[0])),
    )


def _kept(prompts: Sequence[Sequence[str]] | None) -> tuple[tuple[str, ...], ...] | None:
    return None if prompts is None else tuple(tuple(start) for start in prompts)


def _aa(pairs: Pairs, test: SignFlip | None, drift: bool) -> dict[str, Any] | None:
    """The control starts against each other, as JSON values; None with one control start."""
    if test is None or pairs.aa_point is None or pairs.aa_half is None:
        return None
    assert pairs.aa_differences is not None
    point, half = float(pairs.aa_point[0]), float(pairs.aa_half[0])
    return {
        "gain": point,
        "low": point - half,
        "high": point + half,
        "p": test.p,
        "drift": drift,
        "differences": [float(d) for d in pairs.aa_differences[:, 0]],
    }


def _verdict(
    *,
    won: bool,
    lost: bool,
    drift: bool,
    guard: bool,
    point: float,
    low: float,
    high: float,
    p: float,
) -> tuple[str, str]:
    if drift and guard:
        lost_too = ", so it cannot lose" if lost else ""
        return INCONCLUSIVE, f"the two control starts differ from each other in it{lost_too}"
    if drift:
        return INCONCLUSIVE, "the two control starts differ from each other (A/A drift)"
    if lost:
        return LOSS, f"the whole interval is below zero and p is {p:.3g}"
    if won:
        return WIN, f"the gain is above 2 %, the whole interval above zero and p is {p:.3g}"
    if guard:
        if high < 0:
            return INCONCLUSIVE, f"below zero, but p is {p:.3g}"
        return INCONCLUSIVE, "its interval does not lie below zero"
    if (high < 0 or (point > REQUIRED_GAIN and low > 0)) and p >= SIGNIFICANT:
        return INCONCLUSIVE, f"the interval excludes zero, but p is {p:.3g}"
    if point > REQUIRED_GAIN:
        return INCONCLUSIVE, "the gain is above 2 %, but the interval reaches zero"
    if low > 0:
        return INCONCLUSIVE, "better beyond doubt, but a gain of more than 2 % is required"
    return INCONCLUSIVE, "neither a gain above 2 % nor a loss is shown"
