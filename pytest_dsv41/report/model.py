"""What every report shows, read once from a window's folder.

The views are made from plan.json, values.jsonl, journal.jsonl and summary.json alone, so each of
them can be made again later and on another machine. A folder without a summary (its window was
killed) is read too: what was measured is shown and the missing end is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from ..durable import read_json_lines
from ..errors import UsageError
from ..text import counted, one_line
from ..window.summary import FILE_NAME, RESTORE_CHAINED, CostRow, Summary, read_summary

__all__ = [
    "EXIT_MEANINGS",
    "NO_SUMMARY",
    "REQUIRED_EFFECT",
    "Item",
    "QualityRow",
    "SeriesRow",
    "SpreadRow",
    "WindowFiles",
    "archive_text",
    "cost_text",
    "decision_rows",
    "duration_text",
    "exit_text",
    "interval_text",
    "load_window",
    "missing_lines",
    "number_text",
    "pairs_text",
    "percent_text",
    "pilot_text",
    "quality_rows",
    "restore_text",
    "seconds_between",
    "series_rows",
    "spread_rows",
    "watch_text",
    "window_files",
]

REQUIRED_EFFECT: Final = 0.02
"""The gain that a WIN must exceed (RULES section 1). A larger spread never raises it."""

NO_SUMMARY: Final = "INCOMPLETE"
"""Status shown for a folder without summary.json: such a window never reached its end."""

EXIT_MEANINGS: Final[dict[int, str]] = {
    20: "production is down, or not known to be up",
    21: "alert: production is up but not verified, or something is foreign or unknown",
    13: "refused by the state of the world before anything was touched",
    12: "incomplete: stopped, or a decision item is missing",
    11: "not a candidate",
    10: "inconclusive",
    0: "candidate, or a complete report",
}
_SAID_BY_STATUS: Final = frozenset({0, 10, 11})

_BESIDE: Final = frozenset({"quality", "pilot"})

Outcome = Literal["measured", "failed", "refused", "skipped", "missing"]
_OUTCOMES: Final[tuple[Outcome, ...]] = ("measured", "failed", "refused", "skipped")


@dataclass(frozen=True)
class Item:
    """One planned item and what became of it. `missing`: values.jsonl has no line of it."""

    id: str
    start: str
    arm: str
    cell: str
    repeat: int
    index: int
    decision: bool
    outcome: Outcome
    kind: str | None = None
    reason: str | None = None
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    started_utc: str | None = None
    duration_s: float | None = None

    def value(self, metric: str) -> float | None:
        """Return the item's measured value of `metric` in its own unit, or None."""
        if self.outcome != "measured":
            return None
        value = self.values.get(metric, {}).get("value")
        return float(value) if _is_number(value) else None


@dataclass(frozen=True)
class WindowFiles:
    """A window's folder as the reports need it. `plan` is {} when the window had no plan yet."""

    folder: Path
    summary: Summary | None
    plan: Mapping[str, Any]
    items: tuple[Item, ...]
    journal: tuple[Mapping[str, Any], ...]

    @property
    def id(self) -> str:
        """The window's id, from the summary, else the plan, else the folder's name."""
        if self.summary:
            return self.summary.window.id
        return str(self.plan.get("window_id") or self.folder.name)

    @property
    def status(self) -> str:
        """The window's status."""
        return self.summary.status if self.summary else NO_SUMMARY

    def spec(self, key: str, default: str = "") -> str:
        """Return a top-level text of the plan's spec, such as `lane`."""
        spec = self.plan.get("spec")
        window = spec.get("window") if isinstance(spec, Mapping) else None
        for table in (window, spec):
            if isinstance(table, Mapping) and isinstance(table.get(key), str):
                return str(table[key])
        return default

    @property
    def lane(self) -> str:
        """The window's lane."""
        return self.summary.window.lane if self.summary else self.spec("lane", "window")

    @property
    def name(self) -> str:
        """The window's name."""
        return self.summary.window.name if self.summary else self.spec("name", self.folder.name)

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells in the plan's order."""
        return tuple(dict.fromkeys(item.cell for item in self.items))

    @property
    def control(self) -> str | None:
        """The control arm's name, from the summary, else the arm of the first start."""
        if self.summary:
            for arm in self.summary.arms:
                if arm.role == "control":
                    return arm.name
        return self.items[0].arm if self.items else None

    @property
    def candidates(self) -> tuple[str, ...]:
        """The other arms in the order in which they were first planned."""
        return tuple(dict.fromkeys(item.arm for item in self.items if item.arm != self.control))

    @property
    def beside(self) -> tuple[str, ...]:
        """The cells that have no values: quality cells, and the A/A pilot."""
        defined = _tables(self.plan.get("cells"))
        return tuple(cell for cell in self.cells if defined.get(cell, {}).get("kind") in _BESIDE)

    def of(self, cell: str, arm: str | None = None) -> tuple[Item, ...]:
        """Return the items of a cell, of one arm or of all, in run order."""
        return tuple(item for item in self.items if item.cell == cell and arm in (None, item.arm))

    def metrics(self, cell: str) -> tuple[str, ...]:
        """Return the metrics measured in a cell: those that decide first, then the others."""
        names = [row.metric for row in series_rows(self) if row.cell == cell]
        names += [metric for item in self.of(cell) for metric in item.values]
        return tuple(dict.fromkeys(names))

    def unit(self, metric: str) -> str:
        """Return the unit that the values of `metric` carry, or ''."""
        for item in self.items:
            unit = item.values.get(metric, {}).get("unit")
            if isinstance(unit, str):
                return unit
        return ""

    def lower_is_better(self, metric: str) -> bool:
        """Whether less of `metric` is better, as the values say; False when none says it."""
        return any(
            item.values.get(metric, {}).get("lower_is_better") is True for item in self.items
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _items(plan: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> tuple[Item, ...]:
    """Join the plan's items with the lines of values.jsonl; the last line of an item counts."""
    lines = {line["item"]: line for line in values if isinstance(line.get("item"), str)}
    planned = [item for item in plan.get("items", ()) if isinstance(item, Mapping)]
    known = {str(item.get("id")) for item in planned}
    # A value without a plan (plan.json lost) is still a fact, and shown.
    planned += [
        {**line, "id": name, "index": len(planned) + offset}
        for offset, (name, line) in enumerate(
            (name, line) for name, line in lines.items() if name not in known
        )
    ]
    return tuple(
        _item(entry, index, lines.get(str(entry.get("id")), {}))
        for index, entry in enumerate(planned)
    )


def _item(entry: Mapping[str, Any], index: int, line: Mapping[str, Any]) -> Item:
    outcome = line.get("outcome")
    values = line.get("values")
    duration = line.get("duration_s")
    repeat = entry.get("repeat")
    return Item(
        id=str(entry.get("id")),
        start=str(entry.get("start", "?")),
        arm=str(entry.get("arm", "?")),
        cell=str(entry.get("cell", "?")),
        repeat=repeat if isinstance(repeat, int) else 0,
        index=index,
        decision=bool(entry.get("decision")),
        outcome=next((known for known in _OUTCOMES if known == outcome), "missing"),
        kind=_text(line.get("kind")),
        reason=_text(line.get("reason")),
        values={
            str(metric): value
            for metric, value in (values.items() if isinstance(values, Mapping) else ())
            if isinstance(value, Mapping)
        },
        started_utc=_text(line.get("started_utc")),
        duration_s=float(duration) if _is_number(duration) else None,
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def load_window(folder: Path) -> WindowFiles:
    """Read a window's folder.

    Raises:
        UsageError: it is no window's folder, or plan.json or summary.json is damaged; one line.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    plan_path = folder / "plan.json"
    has_summary = (folder / FILE_NAME).exists()
    if not plan_path.exists() and not has_summary:
        raise UsageError(f"{folder}: not a window's folder: no plan.json and no {FILE_NAME}")
    plan: Mapping[str, Any] = {}
    if plan_path.exists():
        try:
            loaded = json.loads(plan_path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{plan_path}: damaged, not JSON: {one_line(str(error))}") from None
        if not isinstance(loaded, dict):
            raise UsageError(f"{plan_path}: damaged: a JSON object is expected")
        plan = loaded
    return window_files(
        folder,
        read_summary(folder) if has_summary else None,
        plan,
        read_json_lines(folder / "values.jsonl"),
        read_json_lines(folder / "journal.jsonl"),
    )


def window_files(
    folder: Path,
    summary: Summary | None,
    plan: Mapping[str, Any],
    values: Sequence[Mapping[str, Any]],
    journal: Sequence[Mapping[str, Any]] = (),
) -> WindowFiles:
    """Join what is already in memory: plan.json's content and the lines of the two logs."""
    return WindowFiles(folder, summary, plan, _items(plan, values), tuple(journal))


@dataclass(frozen=True)
class SeriesRow:
    """One series of one cell of one candidate's decision; gains are fractions, + is better."""

    arm: str
    cell: str
    metric: str
    role: str
    decides: bool
    cell_verdict: str
    verdict: str
    reason: str
    design: str
    control: float | None
    candidate: float | None
    unit: str
    n_control: int | None
    n_candidate: int | None
    gain: float | None
    low: float | None
    high: float | None
    worse: int | None
    needed: int | None
    threshold: float | None
    p: float | None
    raw: Mapping[str, Any]


def _number(table: Mapping[str, Any], key: str) -> float | None:
    value = table.get(key)
    return float(value) if _is_number(value) else None


def _count(table: Mapping[str, Any], key: str) -> int | None:
    value = table.get(key)
    return int(value) if _is_number(value) else None


def _tables(value: object) -> dict[str, Mapping[str, Any]]:
    if not isinstance(value, Mapping):
        return {}
    return {str(key): table for key, table in value.items() if isinstance(table, Mapping)}


def decision_rows(arm: str, decision: Mapping[str, Any]) -> tuple[SeriesRow, ...]:
    """Return every series of one decision (`Decision.to_dict()`), in its order.

    A cell that was refused has one row without a metric that carries its reason.
    """
    named = decision.get("decision_cells")
    deciding = set(named) if isinstance(named, (list, tuple)) else set()
    rows: list[SeriesRow] = []
    for cell, table in _tables(decision.get("cells")).items():
        series = [one for one in table.get("series") or () if isinstance(one, Mapping)]
        for position, one in enumerate(series or [{}]):
            metric = str(one.get("metric", ""))
            rows.append(
                SeriesRow(
                    arm=arm,
                    cell=cell,
                    metric=metric,
                    role=str(one.get("role") or ("primary" if position == 0 else "guard")),
                    decides=bool(table.get("decides", cell in deciding)),
                    cell_verdict=str(table.get("verdict", "")),
                    verdict=str(one.get("verdict") or table.get("verdict") or ""),
                    reason=str(one.get("reason") or table.get("reason") or ""),
                    design=str(one.get("design") or ""),
                    control=_number(one, "control_mean"),
                    candidate=_number(one, "candidate_mean"),
                    unit=str(one.get("unit") or ""),
                    n_control=_count(one, "n_control"),
                    n_candidate=_count(one, "n_candidate"),
                    gain=_number(one, "gain"),
                    low=_number(one, "low"),
                    high=_number(one, "high"),
                    worse=_count(one, "worse"),
                    needed=_count(one, "needed"),
                    threshold=_number(one, "threshold"),
                    p=_number(one, "p"),
                    raw=one,
                )
            )
    return tuple(rows)


def pairs_text(row: SeriesRow) -> str:
    """Return what seeded pairs rest on: the start spread and the A/A check; "" for repeats."""
    if "start_sd_registered" not in row.raw:
        return ""
    start_sd = percent_text(_number(row.raw, "start_sd"), signed=False, digits=2)
    if row.raw["start_sd_registered"]:
        start = f"start_sd {start_sd}, registered"
    else:
        start = "start_sd not registered, counts as 0"
    aa = row.raw.get("aa")
    if not isinstance(aa, Mapping):
        return f"{start}; no built-in A/A (one control start)"
    low, high = _number(aa, "low"), _number(aa, "high")
    found = "DRIFT" if aa.get("drift") else "no drift"
    return (
        f"{start}; A/A {percent_text(_number(aa, 'gain'))}, 95 % interval "
        f"{interval_text(low, high)}, p {number_text(_number(aa, 'p'))}: {found}"
    )


def series_rows(files: WindowFiles) -> tuple[SeriesRow, ...]:
    """Return every series of every decision of a window, candidate by candidate."""
    if files.summary is None:
        return ()
    return tuple(
        row
        for arm, decision in files.summary.decisions.items()
        for row in decision_rows(arm, decision)
    )


@dataclass(frozen=True)
class SpreadRow:
    """In-window spread of the control repeats beside the archive's of the same definition.

    `larger`: the archive's real variation exceeds the required effect, so the report says so. Only
    a primary has to show that effect; of a guard it is never said.
    """

    cell: str
    metric: str
    in_window: float | None
    archive: float | None
    larger: bool

    @property
    def note(self) -> str:
        """What a reader should know about the archive's spread; mostly nothing."""
        if self.larger and self.archive is not None:
            return (
                f"the archive's spread of {_cv(self.archive)} is larger than the required 2 %,"
                " which stays as it is"
            )
        return ""


def spread_rows(summary: Summary) -> tuple[SpreadRow, ...]:
    """Return the summary's spreads, in its order."""
    guards = {
        (row.cell, row.metric)
        for arm, decision in summary.decisions.items()
        for row in decision_rows(arm, decision)
        if row.role == "guard"
    }
    rows = []
    for key, spread in summary.spreads.items():
        cell, _, metric = key.rpartition("/")
        archive = spread.archive_cv
        larger = archive is not None and archive > REQUIRED_EFFECT and (cell, metric) not in guards
        rows.append(SpreadRow(cell, metric, spread.in_window_cv, archive, larger))
    return tuple(rows)


def _cv(value: float) -> str:
    return f"{100 * value:.2f} %"


def number_text(value: float | None) -> str:
    """Return a measured value with four digits that count, or a dash."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3e}"
    # Rounded first: 9.9999 has two digits before the point once it is shown.
    digits = max(0, 3 - math.floor(math.log10(abs(float(f"{value:.3e}")))))
    return f"{value:.{digits}f}"


def percent_text(value: float | None, *, signed: bool = True, digits: int = 1) -> str:
    """Return a fraction as percent: 0.041 is `+4.1 %`; a dash for None."""
    if value is None:
        return "–"
    # A value that rounds to zero has no sign a reader could use.
    rounded = round(100 * value, digits) + 0.0
    text = f"{abs(rounded):.{digits}f} %"
    if rounded < 0:
        return f"−{text}"
    return f"+{text}" if signed and rounded > 0 else text


def interval_text(low: float | None, high: float | None) -> str:
    """Return a 95 % interval of a gain: `+1.2 to +7.0 %`; a dash when there is none.

    One that reaches 100 % has no decimals: it says nothing in them, and a table of 80 columns has
    no room for them.
    """
    if low is None or high is None:
        return "–"
    digits = 1 if max(abs(low), abs(high)) < 0.9995 else 0
    first, last = (percent_text(end, digits=digits) for end in (low, high))
    return f"{first.removesuffix(' %')} to {last}"


def duration_text(seconds: float | None) -> str:
    """Return seconds as a person says them: `3.2 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Return the seconds between two ISO UTC stamps, or None when either is missing or odd."""
    if not start or not end:
        return None
    try:
        span = (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
    except (ValueError, TypeError):
        return None
    return span if span >= 0 else None


def missing_lines(summary: Summary) -> tuple[str, ...]:
    """Return what is missing, without the line that only repeats why the window was stopped."""
    return tuple(
        line
        for line in summary.incomplete
        if not (summary.stopped and line.startswith("stopped: "))
    )


def pilot_text(summary: Summary) -> str:
    """Return the A/A pilot in one line; "" where none was planned."""
    pilot = summary.pilot
    if pilot is None:
        return ""
    parts = [f"{pilot.status}, reported only"]
    parts += pilot.reasons
    found = pilot.distribution
    if found and _is_number(found.get("mean_kl")):
        parts.append(f"A/A mean KL {number_text(found['mean_kl'])}")
    if pilot.record:
        parts.append(pilot.record)
    return "; ".join(parts)


@dataclass(frozen=True)
class QualityRow:
    """One quality cell's word on one candidate arm; `facts` is the gate's result."""

    arm: str
    cell: str
    verdict: str
    decides: bool
    reason: str
    facts: Mapping[str, Any]

    @property
    def is_gate(self) -> bool:
        """Whether it is a gate of the window, and no quality cell."""
        return "kind" in self.facts

    def tests(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return (test, candidate, what it is held against, LOSS or no loss) for a table."""
        facts = self.facts
        rows = [
            (
                "mean KL",
                number_text(_number(facts, "mean_kl")),
                f"at most {number_text(_number(facts, 'kl_ceiling'))}; A/A "
                f"{number_text(_number(facts, 'aa_mean_kl'))}",
                "LOSS" if facts.get("kl_loss") else "no loss",
            )
        ]
        positions = facts.get("positions")
        for key, name in (
            ("top1", "other likeliest tokens"),
            ("mass", "positions with a common mass below 0.99"),
        ):
            test = facts.get(key)
            if not isinstance(test, Mapping):
                continue
            counts = test.get("aa")
            aa = " ".join(str(count) for count in counts) if isinstance(counts, list) else "–"
            verdict = "LOSS" if test.get("loss") else "no loss"
            rows.append(
                (
                    name,
                    f"{test.get('candidate', '–')} of {positions}",
                    f"A/A {aa}; p {number_text(_number(test, 'p'))}",
                    verdict if test.get("decides") else "does not decide",
                )
            )
        for name, part in _tables(facts.get("by_subset")).items():
            rows.append(
                (
                    f"mean KL, {name}",
                    number_text(_number(part, "mean_kl")),
                    f"A/A {number_text(_number(part, 'aa_mean_kl'))}",
                    "reported",
                )
            )
        if facts.get("worst_prompt"):
            worst = number_text(_number(facts, "worst_prompt_kl"))
            rows.append(("worst prompt", worst, str(facts["worst_prompt"]), "reported"))
        return tuple(rows)


def quality_rows(summary: Summary) -> tuple[QualityRow, ...]:
    """Return every quality cell and gate that was judged, arm by arm."""
    return tuple(
        QualityRow(
            arm=arm,
            cell=cell,
            verdict=str(table.get("verdict", "")),
            decides=bool(table.get("decides")),
            reason=str(table.get("reason", "")),
            facts=gate,
        )
        for arm, decision in summary.decisions.items()
        for cell, table in _tables(decision.get("cells")).items()
        if isinstance(gate := table.get("gate"), Mapping)
    )


def cost_text(row: CostRow) -> str:
    """Return what a change means beside the registered noise of its metric."""
    if row.floor is None:
        return "not registered"
    if row.outside is None:
        return "the control is 0"
    if not row.outside:
        return "inside"
    return "outside, better" if row.better else "outside, WORSE"


def restore_text(summary: Summary) -> str:
    """Return the restore in one line."""
    restore = summary.restore
    parts = [restore.status]
    if restore.answers_identical is not None:
        parts.append(f"{restore.answers_identical} of 6 answers identical")
    # Nothing was restored at a chained end, so nothing took a time.
    if restore.seconds is not None and restore.status != RESTORE_CHAINED:
        parts.append(duration_text(restore.seconds))
    if restore.reason:
        parts.append(restore.reason)
    if restore.seam:
        parts.append(f"seam {restore.seam}")
    return ", ".join(parts)


def exit_text(code: int) -> str:
    """Return an exit code, with its meaning where the status beside it does not say that."""
    if code in _SAID_BY_STATUS:
        return f"exit {code}"
    meaning = EXIT_MEANINGS.get(code, "pytest's own code")
    return f"exit {code}: {meaning}"


def watch_text(summary: Summary) -> str:
    """Return the watch in one line."""
    watch = summary.watch
    parts = [watch.status]
    if watch.seconds is not None:
        parts.append(duration_text(watch.seconds))
    if watch.samples is not None:
        parts.append(f"{counted(watch.samples, 'sample')}")
    if watch.reason:
        parts.append(watch.reason)
    return ", ".join(parts)


def archive_text(summary: Summary) -> str:
    """Return what the window did to the control archive in one line."""
    archive = summary.archive
    if archive is None:
        return "not used"
    parts = [f"{counted(archive.appended, 'row')} appended"]
    if archive.before and archive.after:
        parts.append(f"{archive.before.rows} before, {archive.after.rows} after")
    if archive.after and archive.after.sha256:
        parts.append(f"head {archive.after.sha256[:12]}")
    if archive.path:
        parts.append(Path(archive.path).name)
    return ", ".join(parts)
