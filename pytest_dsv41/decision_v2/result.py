"""What a rule answers: every number of the arithmetic, its verdict, and the verdict in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .kernel import REQUIRED_GAIN, t975
from .series import metric_label

__all__ = ["Advice", "CellResult", "Decision", "Group", "SeriesResult", "window_verdict"]

CANDIDATE, NOT_A_CANDIDATE = "CANDIDATE", "NOT A CANDIDATE"
INCONCLUSIVE, WIN, LOSS = "INCONCLUSIVE", "WIN", "LOSS"
REFUSED, REPORTED = "REFUSED", "COMPLETE"

_LOOK_AHEAD = 1000
"""Repeats up to which an INCONCLUSIVE cell's need for more data is stated as a number."""


def window_verdict(cells: Iterable[str]) -> str:
    """The verdict of decision cells together: any LOSS rejects, else a WIN accepts."""
    verdicts = list(cells)
    if LOSS in verdicts:
        return NOT_A_CANDIDATE
    return CANDIDATE if WIN in verdicts else INCONCLUSIVE


def lost_by(series: Iterable[SeriesResult]) -> str | None:
    """Which metrics lost, in words; None if none did."""
    losers = [metric_label(one.metric) for one in series if one.verdict == LOSS]
    return f"{' and '.join(losers)} lost" if losers else None


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal, without a minus on a rounded zero."""
    text = f"{100 * fraction:.1f}"
    return "0.0" if text == "-0.0" else text


@dataclass(frozen=True)
class SeriesResult:
    """One series judged. Gains and interval ends are fractions; positive = candidate better.

    `threshold`, `worse` and `needed` belong to the loss-repeat test of win2-v1 and are None for
    seeded pairs; `p` to `aa` belong to seeded pairs and are None elsewhere. A guard's verdict is
    LOSS or INCONCLUSIVE: it never wins.
    """

    metric: str
    role: str
    design: str
    n_control: int
    n_candidate: int
    gain: float
    low: float
    high: float
    df: int
    threshold: float | None
    worse: int | None
    needed: int | None
    verdict: str
    reason: str
    half: float
    lower_is_better: bool
    unit: str | None
    paired: bool
    control: tuple[Any, ...]
    candidate: tuple[float, ...]
    differences: tuple[float, ...]
    control_mean: float
    candidate_mean: float
    spread: float | None = None
    control_prompts: tuple[Any, ...] | None = None
    candidate_prompts: tuple[str, ...] | None = None
    p: float | None = None
    p_error: float | None = None
    start_sd: float | None = None
    start_sd_registered: bool | None = None
    diff_cv: float | None = None
    aa: Mapping[str, Any] | None = None
    start_variance: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the pair fields are there for seeded pairs only."""
        out: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "metric",
                "role",
                "design",
                "n_control",
                "n_candidate",
                "gain",
                "low",
                "high",
                "df",
                "threshold",
                "worse",
                "needed",
                "verdict",
                "reason",
            )
        }
        if self.p is not None:
            out["p"] = self.p
            if self.p_error is not None:
                out["p_error"] = self.p_error
            out["start_sd"] = self.start_sd
            out["start_sd_registered"] = self.start_sd_registered
            out["diff_cv"] = self.diff_cv
            out["aa"] = None if self.aa is None else dict(self.aa)
        out["half"] = self.half
        out["spread"] = self.spread
        out["lower_is_better"] = self.lower_is_better
        out["unit"] = self.unit
        out["paired"] = self.paired
        out["control_mean"] = self.control_mean
        out["candidate_mean"] = self.candidate_mean
        out["control"] = _listed(self.control)
        out["candidate"] = list(self.candidate)
        out["differences"] = list(self.differences)
        out["control_prompts"] = _listed(self.control_prompts)
        out["candidate_prompts"] = _listed(self.candidate_prompts)
        return out


def _listed(values: tuple[Any, ...] | None) -> list[Any] | None:
    if values is None:
        return None
    return [list(value) if isinstance(value, tuple) else value for value in values]


@dataclass(frozen=True)
class Advice:
    """A second opinion beside a cell's verdict. It never decides.

    `line` is one sentence for a person, `facts` the numbers it rests on (JSON values).
    """

    rule: str
    line: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"rule": self.rule, "decides": False, "line": self.line, **self.facts}


@dataclass(frozen=True)
class CellResult:
    """One cell judged: WIN, LOSS, INCONCLUSIVE, or REFUSED (a report-only cell only).

    `decides` says whether the verdict counts; `series` is primary first, empty when refused;
    `reason` says why the cell's verdict is not simply its primary's, or what was refused. A quality
    cell is PASS or LOSS, has no series, and `gate` holds what its distributional gate found;
    so does a gate of the window, whose `gate` names its `kind`.
    """

    cell: str
    verdict: str
    decides: bool
    series: tuple[SeriesResult, ...]
    reason: str
    profile: str | None = None
    advice: tuple[Advice, ...] = ()
    gate: Mapping[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        out: dict[str, Any] = {
            "verdict": self.verdict,
            "decides": self.decides,
            "reason": self.reason,
            "series": [series.to_dict() for series in self.series],
        }
        if self.profile is not None:
            out["profile"] = self.profile
        if self.advice:
            out["advice"] = [advice.to_dict() for advice in self.advice]
        if self.gate is not None:
            out["gate"] = dict(self.gate)
        return out

    def explain(self) -> str:
        """The cell in two or three plain sentences."""
        if self.gate is not None:
            what = "gate" if "kind" in self.gate else "quality"
            told = f"{self.cell}: {what} {self.verdict}: {self.reason}."
            return told if self.decides else f"{told} Reported only: it decides nothing."
        if not self.series:
            return f"{self.cell}: REFUSED, reported only: {self.reason}."
        primary, *guards = self.series
        text = [f"{self.cell}: {_primary_sentence(primary)}"]
        text += [_guard_sentence(guard) for guard in guards]
        if self.verdict != primary.verdict or self.verdict == INCONCLUSIVE:
            text.append(f"{self.verdict}: {self.reason}." if self.reason else f"{self.verdict}.")
        drifted = primary.aa is not None and primary.aa["drift"]
        if drifted:
            text.append("Only control starts that agree can judge a candidate: measure again.")
        elif self.verdict == INCONCLUSIVE and primary.reason == self.reason:
            text.append(_more_data(primary))
        if not self.decides:
            text.append("Reported only: it decides nothing.")
        text += [advice.line for advice in self.advice]
        return " ".join(text)


def _primary_sentence(series: SeriesResult) -> str:
    gain, low, high = series.gain, series.low, series.high
    n = series.n_candidate
    if round(1000 * gain) == 0:
        change = "unchanged"
    else:
        change = f"{percent(abs(gain))} % {'better' if gain > 0 else 'worse'}"
    if gain < 0:
        # Told in the direction of the change: 1.2 to 7.0 % worse, not -7.0 to -1.2 % better.
        low, high = -series.high, -series.low
    better = sum(d > 0 for d in series.differences)
    worse = sum(d < 0 for d in series.differences)
    units = "pairs" if series.p is not None else "repeats"
    count = f"{worse} of {n} {units} worse" if gain < 0 else f"{better} of {n} {units} better"
    chance = "" if series.p is None else f", sign-flip p {series.p:.3g}"
    head = (
        f"{metric_label(series.metric)} {change}, 95 % interval {percent(low)} to "
        f"{percent(high)} %, {count}{chance}"
    )
    return f"{head}." if series.verdict == INCONCLUSIVE else f"{head}: {series.verdict}."


def _guard_sentence(series: SeriesResult) -> str:
    shift = -series.gain if series.lower_is_better else series.gain
    if round(1000 * shift) == 0:
        change = "unchanged"
    else:
        change = f"{percent(abs(shift))} % {'higher' if shift > 0 else 'lower'}"
    name = f"Guard {metric_label(series.metric)}: {change}"
    if series.verdict == LOSS:
        return f"{name}: LOSS ({series.reason})."
    return f"{name}, {series.reason}: no loss."


def _more_data(series: SeriesResult) -> str:
    """What would settle an INCONCLUSIVE primary, if the gain seen is the true one."""
    gain = series.gain
    small = 0 <= gain <= REQUIRED_GAIN
    if small and (gain == 0 or series.low > 0):
        return "More data would not change that."
    # The variance of one difference; unpaired, of one repeat in each arm together.
    if series.paired:
        variance, units = _variance(series.differences, 1.0), "pairs"
    else:
        mean = series.control_mean
        variance = _variance(series.control, mean) + _variance(series.candidate, mean)
        units = "repeats an arm"
    for n in range(series.n_candidate + 1, _LOOK_AHEAD):
        df = n - 1 if series.paired else 2 * n - 2
        # Between-start spread does not shrink with more pairs of the same starts.
        drift = series.start_variance
        if t975(df) * math.sqrt(variance / n + drift) < abs(gain):
            break
    else:
        return "The difference is too small against the spread for more data to settle it."
    if small:
        return f"About {n} {units} would tell it from no effect, but 2 % would still be required."
    if gain < 0 and series.threshold is not None and -gain <= series.threshold:
        return (
            f"About {n} {units} would show that it is worse, but a LOSS also needs most repeats "
            "beyond the spread."
        )
    return f"If this is the true size, about {n} {units} would settle it."


def _variance(values: Sequence[float], scale: float) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum(((v - mean) / scale) ** 2 for v in values) / (len(values) - 1)


@dataclass(frozen=True)
class Group:
    """Cells that are judged together (a group of win2-v1, a profile of seeded pairs)."""

    cells: tuple[str, ...]
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"cells": list(self.cells), "verdict": self.verdict}


@dataclass(frozen=True)
class Decision:
    """A window's verdict: CANDIDATE, NOT A CANDIDATE or INCONCLUSIVE (COMPLETE: report-only).

    `groups` holds the named groups of win2-v1, `profiles` those of seeded pairs; the one that the
    rule does not have is None. `cells` keeps the order in which the cells were given.
    `speed_verdict` is what the measured cells alone said, where a quality cell overruled them.
    """

    rule: str
    rule_revision: int
    verdict: str
    decision_cells: tuple[str, ...]
    cells: Mapping[str, CellResult]
    groups: Mapping[str, Group] | None = None
    profiles: Mapping[str, Group] | None = None
    speed_verdict: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything needed to follow the arithmetic by hand, as JSON values (no NaN)."""
        out: dict[str, Any] = {
            "rule": self.rule,
            "rule_revision": self.rule_revision,
            "verdict": self.verdict,
            "decision_cells": list(self.decision_cells),
        }
        if self.speed_verdict is not None:
            out["speed_verdict"] = self.speed_verdict
        for name, groups in (("groups", self.groups), ("profiles", self.profiles)):
            if groups is not None:
                out[name] = {key: group.to_dict() for key, group in groups.items()}
        out["cells"] = {name: cell.to_dict() for name, cell in self.cells.items()}
        return out

    def explain(self) -> list[str]:
        """Each cell in two or three plain sentences, then one line for the window."""
        lines = [cell.explain() for cell in self.cells.values()]
        for name, group in {**(self.groups or {}), **(self.profiles or {})}.items():
            lines.append(f"{name} ({', '.join(group.cells)}): {group.verdict}.")
        decided = ", ".join(self.decision_cells)
        if self.speed_verdict is not None:
            lost = {
                name: "gate" if "kind" in cell.gate else "quality"
                for name, cell in self.cells.items()
                if cell.gate is not None and cell.verdict == LOSS
            }
            by = " and ".join(sorted(set(lost.values()), reverse=True))
            lines.append(
                f"Window: {self.verdict} by {by} (LOSS in {', '.join(lost)}), whatever the speed, "
                f"which alone gave {self.speed_verdict} (decided by {decided})."
            )
        elif self.decision_cells:
            lines.append(f"Window: {self.verdict} (decided by {decided}).")
        else:
            why = "no cell decides" if self.verdict == REPORTED else "no decision cell was judged"
            lines.append(f"Window: {self.verdict} ({why}).")
        return lines

    def with_quality(self, cells: Sequence[CellResult]) -> Decision:
        """The same decision with quality cells: one that decides and lost rejects the candidate.

        It rejects in every group and profile, whatever the speed.
        """
        beside = replace(self, cells={**self.cells, **{cell.cell: cell for cell in cells}})
        if not any(cell.decides and cell.verdict == LOSS for cell in cells):
            return beside

        def rejected(groups: Mapping[str, Group] | None) -> Mapping[str, Group] | None:
            if groups is None:
                return None
            return {n: replace(group, verdict=NOT_A_CANDIDATE) for n, group in groups.items()}

        return replace(
            beside,
            verdict=NOT_A_CANDIDATE,
            groups=rejected(self.groups),
            profiles=rejected(self.profiles),
            speed_verdict=self.verdict,
        )

    def advised(self, advice: Mapping[str, Sequence[Advice]]) -> Decision:
        """The same decision with advice shown beside cells: {cell: [Advice, …]}. No verdict moves.

        Raises KeyError for a cell that the decision does not have.
        """
        cells = dict(self.cells)
        for name, more in advice.items():
            cells[name] = replace(cells[name], advice=(*cells[name].advice, *more))
        return replace(self, cells=cells)
