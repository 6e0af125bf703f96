"""From the values of a window to its status and exit code: the plan and the values alone decide.

Each candidate arm gets a decision of its own: by rule win2-v1 (RULES section 1), or where the
decision cells are seeded by win2-paired-v1 (section 2), per profile. A window in which
anything planned for a decision is missing, failed, refused or skipped is INCOMPLETE; what can still
be judged is judged and marked provisional, and never makes it a CANDIDATE.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..decision_v2 import (
    ORIENTATION,
    Advice,
    CellResult,
    Decision,
    Refused,
    SeededSeries,
    Series,
    decide_cell,
    decide_paired_cell,
    decide_paired_window,
    decide_window,
    report_paired_window,
    report_window,
    seeded_series,
)
from ..durable import dump_json, read_regular
from ..errors import UsageError
from ..text import counted, one_line
from .advice import (
    MODERATED,
    FrozenPrior,
    advice_text,
    moderated,
    widened,
)
from .deciding import in_pairs, is_seeded, judged
from .gates import judge_gates
from .plan import Plan, PlannedItem
from .quality import QualityVerdict
from .schedule import layout
from .source import shown
from .spec import CellUse
from .summary import Status

__all__ = ["EXIT_CODES", "Outcome", "conclude", "read_folder"]

CANDIDATE: Final = "CANDIDATE"
NOT_A_CANDIDATE: Final = "NOT A CANDIDATE"
INCONCLUSIVE: Final = "INCONCLUSIVE"
COMPLETE: Final = "COMPLETE"
INCOMPLETE: Final = "INCOMPLETE"
NOT_JUDGED: Final = "NOT JUDGED"
"""What an arm's decision says when none of the cells that were to decide could be judged."""

EXIT_CODES: Final[dict[Status, int]] = {
    CANDIDATE: 0,
    COMPLETE: 0,
    INCONCLUSIVE: 10,
    NOT_A_CANDIDATE: 11,
    INCOMPLETE: 12,
}
"""The exit code of each status; the state of production may outrank it (20, 21)."""

_IDS_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a window ended, as far as its values tell.

    `decisions` maps each candidate arm to `Decision.to_dict()` with `provisional` beside it,
    `explanations` to its sentences; an arm of which no cell could be judged has none. `incomplete`
    names what is missing for the decision (empty unless INCOMPLETE), `notes` what is missing
    elsewhere and stops nothing. `promotion` is {arm, profile, cells} for a CANDIDATE. `advisory`
    maps each registered advice to its lines; nothing else depends on it.
    """

    status: Status
    exit_code: int
    decisions: dict[str, dict[str, Any]]
    promotion: dict[str, Any] | None
    incomplete: list[str]
    explanations: dict[str, list[str]]
    notes: list[str]
    advisory: dict[str, list[str]]

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON values."""
        return dataclasses.asdict(self)


def conclude(
    plan: Plan,
    values: Sequence[Mapping[str, Any]],
    *,
    stopped: str | None = None,
    report_only: bool = False,
    prior: FrozenPrior | None = None,
    quality: Mapping[str, Sequence[QualityVerdict]] | None = None,
    served: Mapping[str, Sequence[str]] | None = None,
) -> Outcome:
    """Decide a window from its plan and its values.

    Args:
        plan: the plan as it was written before the window.
        values: the records of values.jsonl in any order, one an item.
        stopped: why the window ended early, if it did.
        report_only: report and decide nothing, also where the plan says otherwise.
        prior: what `read_prior` gives, for the advice of a window that registered it.
        quality: what `judge_quality` gives, for a window with quality cells.
        served: what `read_served` gives.
    """
    judge = _Judge(
        plan, values, report_only=report_only or plan.window.report_only, served=served or {}
    )
    return judge.outcome(stopped, prior, quality or {})


class _Judge:
    """One window's plan and values, and what was found to be missing."""

    def __init__(
        self,
        plan: Plan,
        values: Sequence[Mapping[str, Any]],
        *,
        report_only: bool,
        served: Mapping[str, Sequence[str]],
    ) -> None:
        self._plan = plan
        self._served = served
        self._window = plan.window
        self._decides = plan.window.kind == "candidate" and not report_only
        self._incomplete: list[str] = []
        self._notes: list[str] = []
        self._records = self._measured(values)

    def outcome(
        self,
        stopped: str | None,
        prior: FrozenPrior | None,
        quality: Mapping[str, Sequence[QualityVerdict]],
    ) -> Outcome:
        if stopped:
            self._incomplete.append(f"stopped: {one_line(stopped)}")
        decisions: dict[str, Decision] = {}
        if self._window.kind != "admission":
            for arm in self._window.candidates:
                decision = self._decide(arm.name)
                cells = self._quality(arm.name, quality.get(arm.name, ()))
                cells += self._gates(arm.name)
                if decision is not None:
                    decisions[arm.name] = decision.with_quality(cells)
        if not self._records and not self._incomplete:
            self._incomplete.append("nothing was measured")
        status = self._status(decisions)
        provisional = status == INCOMPLETE
        if provisional and self._decides:
            # COMPLETE is said of a window that was to decide nothing.
            decisions = {
                arm: found
                if found.decision_cells
                else dataclasses.replace(found, verdict=NOT_JUDGED)
                for arm, found in decisions.items()
            }
        advice = {arm: self._advice(found, prior) for arm, found in decisions.items()}
        return Outcome(
            status=status,
            exit_code=EXIT_CODES[status],
            decisions={
                arm: {**decision.advised(advice[arm]).to_dict(), "provisional": provisional}
                for arm, decision in decisions.items()
            },
            promotion=self._promotion(decisions) if status == CANDIDATE else None,
            incomplete=list(dict.fromkeys(self._incomplete)),
            explanations={
                arm: [
                    *(["Provisional, the window is incomplete:"] if provisional else []),
                    *decision.explain(),
                ]
                for arm, decision in decisions.items()
            },
            notes=list(dict.fromkeys(self._notes)),
            advisory=self._advisory(advice, prior, provisional=provisional),
        )

    # -- what was measured -------------------------------------------------------------------------

    def _measured(self, values: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """The records of measured items by id; every fault is noted where it belongs."""
        items = {item.id: item for item in self._plan.items}
        found: dict[str, Mapping[str, Any]] = {}
        twice: set[str] = set()
        foreign = 0
        for record in values:
            key = record.get("item")
            if not isinstance(key, str) or key not in items:
                foreign += 1
            elif key not in found:
                found[key] = record
            elif _canonical(record) != _canonical(found[key]):
                # Which of two answers counts must not be anybody's choice afterwards.
                twice.add(key)
        if foreign:
            self._notes.append(f"{counted(foreign, 'value')} of no planned item: left out")
        measured: dict[str, Mapping[str, Any]] = {}
        faults: dict[tuple[bool, str], list[str]] = {}
        for item in self._plan.items:
            fault = "measured twice" if item.id in twice else _fault(item, found.get(item.id))
            if fault is None:
                measured[item.id] = found[item.id]
            else:
                faults.setdefault((item.decision, fault), []).append(item.id)
        for (decision, fault), ids in faults.items():
            self._missing(decision, f"{_listed(ids)} {fault}")
        return measured

    def _missing(self, decision: bool, line: str) -> None:
        (self._incomplete if decision and self._decides else self._notes).append(line)

    # -- decisions ---------------------------------------------------------------------------------

    def _decide(self, arm: str) -> Decision | None:
        """The decision of one arm over the cells that can be judged; None when none can."""
        repeats: dict[str, list[Series]] = {}
        pairs: dict[str, list[SeededSeries]] = {}
        deciding: list[str] = []
        for use in self._window.cells:
            decides = use.decision and self._decides
            try:
                definition = self._plan.cells[use.name]
                if in_pairs(self._window, definition):
                    seeded = self._pairs(use.name, arm, decides=decides)
                    if decides:
                        decide_paired_cell(use.name, seeded)
                        self._tell_difference(use)
                    pairs[use.name] = seeded
                elif decides and is_seeded(definition):
                    raise Refused("is seeded, and the starts have no pairs", cell=use.name)
                else:
                    series = self._series(use.name, arm, decides=decides)
                    if decides:
                        decide_cell(series)
                    repeats[use.name] = series
            except Refused as refusal:
                self._missing(use.decision, f"arm {arm}: {one_line(str(refusal))}")
                continue
            if decides:
                deciding.append(use.name)
        found = [
            *([self._of_pairs(pairs, [n for n in deciding if n in pairs])] if pairs else []),
            *(
                [self._of_repeats(repeats, [n for n in deciding if n in repeats])]
                if repeats
                else []
            ),
        ]
        if not found:
            return None
        # The plan has decision cells of one kind only: that kind's rule is the window's.
        ruling = max(found, key=lambda one: len(one.decision_cells))
        cells = {name: cell for one in found for name, cell in one.cells.items()}
        in_order = {use.name: cells[use.name] for use in self._window.cells if use.name in cells}
        return dataclasses.replace(ruling, cells=in_order)

    def _quality(self, arm: str, verdicts: Sequence[QualityVerdict]) -> list[CellResult]:
        """The quality cells of one arm; what could not be judged is missing for the decision."""
        told = {verdict.cell: verdict for verdict in verdicts}
        cells: list[CellResult] = []
        for use in self._window.quality:
            found = told.get(use.name)
            if found is None or found.verdict is None:
                why = found.reason if found else "its probes were not looked at"
                self._missing(True, f"arm {arm}: {use.name} not judged: {one_line(why)}")
                continue
            self._notes.extend(f"arm {arm}: {one_line(note)}" for note in found.notes)
            cells.append(
                CellResult(
                    use.name, found.verdict, self._decides, (), found.reason, gate=found.facts
                )
            )
        return cells

    def _gates(self, arm: str) -> list[CellResult]:
        """The gates of one arm; what could not be judged is missing for the decision."""
        cells: list[CellResult] = []
        for found in judge_gates(self._plan, self._records, arm, self._served):
            if found.verdict is None:
                self._missing(True, f"arm {arm}: gate {found.gate} not judged: {found.reason}")
                continue
            self._notes.extend(f"arm {arm}: {one_line(note)}" for note in found.notes)
            cells.append(
                CellResult(
                    found.gate, found.verdict, self._decides, (), found.reason, gate=found.facts
                )
            )
        return cells

    def _of_repeats(
        self, cells: Mapping[str, Sequence[Series]], deciding: Sequence[str]
    ) -> Decision:
        series = [one for cell in cells.values() for one in cell]
        if not deciding:
            return report_window(series)
        return decide_window(series, deciding, groups=self._groups(deciding))

    def _of_pairs(
        self, cells: Mapping[str, Sequence[SeededSeries]], deciding: Sequence[str]
    ) -> Decision:
        judged_here = {f"{name}/{one.metric}" for name, cell in cells.items() for one in cell}
        registered = self._window.start_sd.items()
        start_sd = {key: sd for key, sd in registered if key in judged_here}
        if not deciding:
            return report_paired_window(cells, start_sd=start_sd)
        expected = [
            name for name in deciding if self._window.cell(name).expect_identical is not None
        ]
        return decide_paired_window(
            cells,
            deciding,
            start_sd=start_sd,
            expect_identical=expected,
            streams_identical={
                name: self._difference(self._window.cell(name)) is None for name in expected
            },
        )

    def _difference(self, use: CellUse) -> str | None:
        """In what the control starts' streams of a cell differ, or what is not known of them.

        None where every pair has the same outputs and the same number of rounds in both, on the
        prompt of the A/A pilot that allowed to expect it (RULES section 2).
        """
        assert use.expect_identical is not None
        control = self._window.control.name
        pairs: dict[int, list[Mapping[str, Any]]] = {}
        for item in self._plan.items:
            if item.cell == use.name and item.arm == control and item.id in self._records:
                pairs.setdefault(item.repeat, []).append(self._records[item.id])
        for repeat, rows in pairs.items():
            if any(row.get("prompt_sha256") != use.expect_identical.prompt_sha256 for row in rows):
                return f"pair {repeat} ran on another prompt than the A/A pilot"
            for key, what in (("outputs", "outputs"), ("rounds", "round counts")):
                told = [row.get(key) for row in rows]
                if len(told) < 2 or None in told or [] in told:
                    return f"pair {repeat} does not tell its {what} in both control starts"
                if told[0] != told[1]:
                    return f"pair {repeat} has different {what} in the two control starts"
        return None

    def _tell_difference(self, use: CellUse) -> None:
        if use.expect_identical is not None and (why := self._difference(use)):
            self._notes.append(f"{use.name}: identical streams were expected: {why}")

    def _groups(self, cells: Iterable[str]) -> dict[str, list[str]] | None:
        if not self._window.by_profile:
            return None
        groups: dict[str, list[str]] = {}
        for cell in cells:
            groups.setdefault(self._plan.profile(cell), []).append(cell)
        return groups

    def _series(self, cell: str, arm: str, *, decides: bool) -> list[Series]:
        """The series of a cell, primary first. Raises `Refused` when there is nothing to judge."""
        places = layout(self._plan, cell, arm)
        used = [*(item for group in places.control for item in group), *places.candidate]
        metrics = self._metrics(cell, used, decides=decides)

        def whole(*ids: str) -> bool:
            return all(self._value(item, name) is not None for item in ids for name in metrics)

        if places.paired:
            pairs = [
                (group, item)
                for group, item in zip(places.control, places.candidate, strict=True)
                if whole(*group, item)
            ]
            controls = [group for group, _ in pairs]
            candidates = [item for _, item in pairs]
        else:
            controls = [group for group in places.control if whole(*group)]
            candidates = [item for item in places.candidate if whole(item)]
        return [
            self._one_series(cell, name, controls, candidates, paired=places.paired)
            for name in metrics
        ]

    def _pairs(self, cell: str, arm: str, *, decides: bool) -> list[SeededSeries]:
        """The pairs of a seeded cell, primary first; repeat r is pair r in every start.

        Raises `Refused` when a pair that decides is not whole, or the prompts are not proved one.
        """
        control = self._window.control.name
        starts = [start.name for start in self._plan.starts if start.arm in (control, arm)]
        items = {
            (item.start, item.repeat): item.id for item in self._plan.items if item.cell == cell
        }
        metrics = self._metrics(cell, list(items.values()), decides=decides)

        def whole(repeat: int) -> bool:
            return all(
                self._value(items[start, repeat], metric) is not None
                for start in starts
                for metric in metrics
            )

        def record(start: str) -> dict[str, Any]:
            pairs = [
                {
                    "pair": repeat,
                    "prompt_sha256": self._records[item].get("prompt_sha256"),
                    "values": self._records[item]["values"],
                }
                for (name, repeat), item in items.items()
                # A reported cell shows the pairs it has; one that decides needs every one.
                if name == start and item in self._records and (decides or whole(repeat))
            ]
            return {"cell": cell, "report_only": not decides, "pairs": pairs}

        first, mine, *second = map(record, starts)
        return seeded_series(
            first,
            mine,
            second[0] if second else None,
            metrics=metrics,
            profile=self._plan.profile(cell),
        )

    def _metrics(self, cell: str, used: Sequence[str], *, decides: bool) -> list[str]:
        """The metrics of a cell, primary first; what measured items lack is noted."""
        metrics = [self._plan.primary(cell), *self._window.cell(cell).guards]
        if not decides:
            # A reported cell shows what it has: a metric that was never measured drops out.
            metrics = [name for name in metrics if any(self._value(i, name) for i in used)]
        if not metrics:
            raise Refused("nothing was measured", cell=cell)
        lacking: dict[tuple[str, str], list[str]] = {}
        for item in dict.fromkeys(used):
            for name in metrics:
                if item in self._records and self._value(item, name) is None:
                    lacking.setdefault((name, self._why(item, name)), []).append(item)
        for (name, why), ids in lacking.items():
            self._missing(decides, f"{_listed(ids)} without {name}{why}")
        return metrics

    def _one_series(
        self,
        cell: str,
        metric: str,
        controls: Sequence[tuple[str, ...]],
        candidates: Sequence[str],
        *,
        paired: bool,
    ) -> Series:
        used = [*(item for group in controls for item in group), *candidates]
        found = [self._value(item, metric) or {} for item in used]
        where = f"{cell} / {metric}"
        lower = _agreed(where, "orientation", (value.get("lower_is_better") for value in found))
        if lower is None:
            lower = ORIENTATION.get(metric)
        if not isinstance(lower, bool):
            raise Refused("the values do not say whether lower is better", cell=cell, metric=metric)
        unit = _agreed(where, "unit", (value.get("unit") for value in found))

        def number(item: str) -> Any:
            return (self._value(item, metric) or {}).get("value")

        def prompt(item: str) -> Any:
            return self._records[item].get("prompt_sha256")

        def prompt_of(group: tuple[str, ...]) -> Any:
            prompts = [prompt(item) for item in group]
            if None in prompts:
                return None
            if any(other != prompts[0] for other in prompts):
                raise Refused(
                    f"{' and '.join(group)} have different prompts", cell=cell, metric=metric
                )
            return prompts[0]

        return Series(
            cell,
            metric,
            [_mean([number(item) for item in group]) for group in controls],
            [number(item) for item in candidates],
            lower_is_better=lower,
            paired=paired,
            control_prompts=[prompt_of(group) for group in controls],
            candidate_prompts=[prompt(item) for item in candidates],
            unit=unit if isinstance(unit, str) else None,
        )

    def _value(self, item: str, metric: str) -> Mapping[str, Any] | None:
        record = self._records.get(item)
        values = record.get("values") if record is not None else None
        value = values.get(metric) if isinstance(values, Mapping) else None
        return value if isinstance(value, Mapping) and "value" in value else None

    def _why(self, item: str, metric: str) -> str:
        """What the record says of a metric that it lacks, in words that follow the metric."""
        told = self._records[item].get("missing")
        reason = told.get(metric) if isinstance(told, Mapping) else None
        return f": {one_line(str(reason))}" if reason else ""

    # -- advice ------------------------------------------------------------------------------------

    def _advice(self, decision: Decision, prior: FrozenPrior | None) -> dict[str, list[Advice]]:
        """The registered advice on each decision cell that was judged: {cell: advice}."""
        use = self._window.advice
        given: dict[str, list[Advice]] = {}
        if use.moderated and prior is not None and prior.fault is None:
            for cell in judged(self._window, self._plan.cells, seeded=False):
                if cell in decision.cells:
                    series = decision.cells[cell].series
                    given[cell] = [moderated(self._plan, cell, one, prior) for one in series]
        if use.widened_aa:
            for cell in judged(self._window, self._plan.cells, seeded=True):
                if cell in decision.cells and decision.cells[cell].series:
                    given[cell] = [widened(decision.cells[cell])]
        return given

    def _advisory(
        self,
        given: Mapping[str, Mapping[str, Sequence[Advice]]],
        prior: FrozenPrior | None,
        *,
        provisional: bool,
    ) -> dict[str, list[str]]:
        """What a person reads of the advice, by rule."""
        said: dict[str, list[str]] = {}
        if self._window.advice.moderated and (prior is None or prior.fault):
            said[MODERATED] = [f"no advice: {prior.fault if prior else 'no prior was given'}"]
        for arm, cells in given.items():
            before = ["provisional"] if provisional else []
            before += [arm] if len(self._window.candidates) > 1 else []
            for cell, advice in cells.items():
                for one in advice:
                    said.setdefault(one.rule, []).append(advice_text(cell, one, before=before))
        return said

    # -- the window --------------------------------------------------------------------------------

    def _status(self, decisions: Mapping[str, Decision]) -> Status:
        if self._incomplete:
            return INCOMPLETE
        if not self._decides:
            return COMPLETE
        verdicts = {
            verdict for decision in decisions.values() for _, verdict, _ in _verdicts(decision)
        }
        for status in (CANDIDATE, NOT_A_CANDIDATE):
            if status in verdicts:
                return status
        return INCONCLUSIVE

    def _promotion(self, decisions: Mapping[str, Decision]) -> dict[str, Any]:
        """The arm to promote, and every profile and cell that it won.

        Of several arms the one with the largest gain; a profile that lost is not relied on.
        """
        found: list[tuple[float, dict[str, Any]]] = []
        for arm, decision in decisions.items():
            won = [
                cell
                for _, verdict, cells in _verdicts(decision)
                if verdict == CANDIDATE
                for cell in cells
                if decision.cells[cell].verdict == "WIN"
            ]
            if not won:
                continue
            profiles = dict.fromkeys(self._plan.profile(cell) for cell in won)
            gain = max(decision.cells[cell].series[0].gain for cell in won)
            found.append((gain, {"arm": arm, "profile": "+".join(profiles), "cells": won}))
        return max(found, key=lambda one: one[0])[1]


def _verdicts(decision: Decision) -> list[tuple[str | None, str, tuple[str, ...]]]:
    """(profile, verdict, cells) of each verdict a decision gives: one a profile, or one in all."""
    if groups := decision.groups or decision.profiles:
        return [(name, group.verdict, group.cells) for name, group in groups.items()]
    return [(None, decision.verdict, decision.decision_cells)]


def _fault(item: PlannedItem, record: Mapping[str, Any] | None) -> str | None:
    """Why an item has no value, in words that follow its id; None when it was measured."""
    if record is None:
        return "not measured"
    for key in ("start", "arm", "cell", "repeat"):
        if record.get(key) != getattr(item, key):
            return f"damaged: its {key} is {shown(record.get(key))}"
    outcome = record.get("outcome")
    if outcome == "measured":
        return None if isinstance(record.get("values"), Mapping) else "damaged: it has no values"
    if outcome not in ("failed", "refused", "skipped"):
        return f"damaged: its outcome is {shown(outcome)}"
    told = [str(record[key]) for key in ("kind", "reason") if record.get(key)]
    return f"{outcome}: {one_line(': '.join(told))}" if told else str(outcome)


def _listed(ids: Sequence[str]) -> str:
    if len(ids) <= _IDS_SHOWN:
        return ", ".join(ids)
    return f"{', '.join(ids[:_IDS_SHOWN])} and {counted(len(ids) - _IDS_SHOWN, 'more item')}"


def _canonical(record: Mapping[str, Any]) -> str:
    try:
        return dump_json(record)
    except ValueError:
        # NaN has no canonical form; such a value is refused later, wherever it is used.
        return json.dumps(record, sort_keys=True)


def _agreed(where: str, what: str, found: Iterable[Any]) -> Any:
    """The one value that all give, None when they give none. Raises `Refused` for two."""
    distinct = list(dict.fromkeys(_hashable(value) for value in found if value is not None))
    if len(distinct) > 1:
        raise Refused(
            f"{where}: the values have more than one {what}: {distinct[0]}, {distinct[1]}"
        )
    return distinct[0] if distinct else None


def _hashable(value: Any) -> Any:
    return value if isinstance(value, (bool, str)) else str(value)


def _mean(values: Sequence[Any]) -> Any:
    """The mean of one control value's parts; what is no number is passed on to be refused."""
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if not math.isfinite(value) or value <= 0:
            return value
    return math.fsum(values) / len(values)


# -- from the files -------------------------------------------------------------------------------

_MAX_FILE = 1 << 30


def read_folder(folder: Path) -> tuple[Plan, list[dict[str, Any]]]:
    """Read plan.json and values.jsonl of a window's folder.

    A window that ended before its first item has no values.jsonl: then there are no values.

    Raises:
        UsageError: the folder or plan.json is missing, or a file is damaged; one line.
    """
    plan_file = folder / "plan.json"
    if not folder.is_dir():
        raise UsageError(f"{one_line(str(folder))}: no such folder")
    plan_text = _read(plan_file)
    if plan_text is None:
        raise UsageError(f"{one_line(str(plan_file))}: no such file; not a window's folder")
    try:
        plan = Plan.from_json(_json(plan_text))
    except (UsageError, ValueError, RecursionError) as error:
        raise UsageError(f"{one_line(str(plan_file))}: {one_line(str(error))}") from None
    values_file = folder / "values.jsonl"
    return plan, _rows(values_file, _read(values_file) or b"")


def _rows(file: Path, raw: bytes) -> list[dict[str, Any]]:
    """The records; only the last line, without a newline, may be torn (by a kill)."""
    rows: list[dict[str, Any]] = []
    lines = raw.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = _json(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif number < len(lines):
            raise UsageError(f"{one_line(str(file))}:{number}: damaged: no JSON record")
    return rows


def _json(raw: bytes) -> Any:
    return json.loads(raw.decode("utf-8"))


def _read(file: Path) -> bytes | None:
    """The bytes of a regular file, None when there is none."""
    try:
        return read_regular(file, _MAX_FILE)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"{one_line(str(file))}: {error}") from None
