"""The end of the facts: decide from the window's own files, archive the control, write the summary.

Everything here reads the folder, so a killed window is finished by the keeper or `dsv41 recover`
exactly as the session would have done it, and doing it twice changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..archive import archive_append, archive_head, archive_spreads
from ..archive.history import recorded_clocks, rows_of, unfinished_starts
from ..archive.spread import pooled_cv
from ..archive.verify import read_checkpoints
from ..durable import dump_json, parse_json, read_json_lines, write_atomic
from ..errors import Dsv41Error, UsageError
from ..text import one_line
from ..unit.memory import diff_ledgers, parse_ledger
from ..unit.memory.ledger import DIALECTS
from ..window.advice import read_prior
from ..window.claims import judge_claims
from ..window.cost import cost_tables
from ..window.plan import Plan
from ..window.quality import judge_quality
from ..window.served import STARTS, read_served
from ..window.summary import (
    RESTORE_FAILED,
    RESTORE_NOT_NEEDED,
    ArchiveHead,
    ArchiveUse,
    ArmInfo,
    PilotInfo,
    ProcessRules,
    Promotion,
    Restore,
    Spread,
    StartInfo,
    Summary,
    TargetInfo,
    Watch,
    WindowInfo,
    write_summary,
)
from ..window.verdict import Outcome, conclude, read_folder
from .closing import CHAIN_ENDED, CHAIN_ENDED_WITH_ALERT, CloseResult
from .journal import Journal, utc_now
from .pilot import conclude_pilot
from .record import TargetRecord, read_record

__all__ = [
    "ARCHIVE_NAME",
    "EXIT_ALERT",
    "EXIT_DOWN",
    "Rule",
    "finish_abort",
    "finish_window",
    "load_plan",
    "refuse_window",
]

ARCHIVE_NAME = "control-archive.jsonl"
EXIT_DOWN = 20
EXIT_ALERT = 21
Rule = Callable[[Plan, Sequence[dict[str, Any]]], Sequence[str]]
"""A rule of the user's own: lines shown beside the verdict, which they never change."""

_SOFTWARE = ("pytest-dsv41", "pytest", "numpy", "scipy", "httpx")


def load_plan(folder: Path) -> Plan:
    """Read the folder's `plan.json`.

    Raises:
        UsageError: it is missing or damaged.
    """
    path = folder / "plan.json"
    try:
        return Plan.from_json(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: not a window's plan ({one_line(str(error))})") from error


def finish_window(
    folder: Path,
    journal: Journal,
    closed: CloseResult,
    *,
    stopped: str | None,
    report_only: bool = False,
    rules: Mapping[str, Rule] | None = None,
) -> Summary:
    """Conclude, archive, and write `summary.json`, the last file that holds facts.

    A failing archive never hides the verdict and never the reverse: each is an alert of its own.
    """
    plan, values, fault = _read(folder)
    stopped = stopped or fault
    record = read_record(folder)
    alerts = [*closed.alerts, *_told(folder)]
    prior, served = read_prior(folder, plan), read_served(folder)
    outcome = conclude(
        plan,
        values,
        stopped=stopped,
        report_only=report_only,
        prior=prior,
        quality=judge_quality(folder, plan, values),
        served=served,
    )
    clocks = recorded_clocks(journal.lines())
    # Before the append: the archive's spread is that of the windows before this one.
    spreads = _spreads(plan, record, values, clocks)
    archive = _archive(folder, plan, record, values, clocks, journal, alerts, stopped=stopped)
    lines = journal.lines()
    status, code = outcome.status, outcome.exit_code
    incomplete = list(outcome.incomplete)
    if closed.errors:
        untold = [error for error in closed.errors if not any(error in told for told in alerts)]
        incomplete += untold
        # Also of a stopped window: 12 says that production is back and nothing is left.
        alerts += untold
    if closed.production_down:
        code = EXIT_DOWN
    elif alerts:
        code = EXIT_ALERT
    if code in (EXIT_DOWN, EXIT_ALERT) and closed.open:
        campaign = shlex.quote(record.campaign)
        alerts.append(f"next: dsv41 {closed.next_command} --campaign {campaign}")
    asked = _process_rules(lines)
    notes = [*outcome.notes, *_seam_note(closed)]
    if "world" in record.table:
        notes.insert(0, "over simulated hosts: the verdict is nobody's")
    if asked is not None and asked.override:
        notes += [f"opened by override ({asked.override}) although {why}" for why in asked.refusals]
    summary = Summary(
        window=_window(folder, plan),
        status=status,
        exit_code=code,
        started_utc=lines[0]["utc"] if lines else None,
        ended_utc=utc_now(),
        target=TargetInfo(**_described(record)),
        arms=_arms(plan),
        starts=tuple(_starts(plan, lines)),
        decision_cells=plan.window.decision_cells,
        decisions=outcome.decisions,
        explanations={arm: tuple(text) for arm, text in outcome.explanations.items()},
        promotion=_promotion(outcome, code),
        claims=judge_claims(plan, values),
        ledgers=_ledgers(folder, plan, record),
        incomplete=tuple(incomplete),
        stopped=stopped,
        process_rules=asked,
        restore=_restore(closed, lines),
        watch=Watch(**(closed.watch or {"status": "NOT RUN"})),
        chain=closed.chain,
        production_commit=record.commit or None,
        archive=archive,
        spreads=spreads,
        costs=cost_tables(plan, values, served),
        alerts=tuple(alerts),
        software=_software(),
        notes=tuple(notes),
        pilot=PilotInfo(**conclude_pilot(folder)) if plan.window.pilot else None,
        advisory={
            **_advisory(plan, values, rules or {}),
            **{name: tuple(lines) for name, lines in outcome.advisory.items()},
        },
    )
    write_summary(folder, summary)
    return summary


def _told(folder: Path) -> list[str]:
    """What a target saw of others' work on its unit while production was down."""
    try:
        lines = read_json_lines(folder / STARTS)
    except (OSError, ValueError):
        return []
    return [one_line(str(x.get("line")), 600) for x in lines if x.get("event") == "told"]


def _seam_note(closed: CloseResult) -> tuple[str, ...]:
    """The measurement in the restore's seam decides nothing; only its absence is worth a line."""
    if closed.seam is None or closed.seam == "DONE":
        return ()
    return (f"the measurement in the restore's seam: {closed.seam}",)


def finish_abort(folder: Path, closed: CloseResult) -> Summary:
    """Write the summary of a chain's recovery or end by hand; the next gate accepts it."""
    record = read_record(folder)
    journal = Journal(folder)
    kind, lines = "end" if journal.mode() == "end" else "abort", journal.lines()
    ended = closed.chain in (CHAIN_ENDED, CHAIN_ENDED_WITH_ALERT)
    code = EXIT_DOWN if closed.production_down else EXIT_ALERT
    # It was killed, and somebody else has ended the chain since: nothing is left to do.
    by_another = closed.restore.get("status") == RESTORE_NOT_NEEDED
    if closed.clean and (ended or by_another):
        code = 0
    alerts = [*closed.alerts, *(x for x in closed.errors if x not in closed.alerts)]
    if code and closed.open:
        campaign = shlex.quote(record.campaign)
        alerts.append(f"next: dsv41 {closed.next_command} --campaign {campaign}")
    summary = Summary(
        window=WindowInfo(
            id=record.window,
            lane=f"CHAIN-{kind.upper()}",
            name=record.window,
            hypothesis="Production is back and itself, and the chain is ended.",
            kind=kind,
            folder=folder.name,
        ),
        status="COMPLETE" if code == 0 else "INCOMPLETE",
        exit_code=code,
        started_utc=lines[0]["utc"] if lines else None,
        ended_utc=utc_now(),
        target=TargetInfo(**_described(record)),
        restore=_restore(closed, lines),
        watch=Watch(**(closed.watch or {"status": "NOT RUN"})),
        chain=closed.chain,
        production_commit=record.commit or None,
        alerts=tuple(alerts),
        software=_software(),
    )
    write_summary(folder, summary)
    return summary


def _restore(closed: CloseResult, lines: list[dict[str, Any]]) -> Restore:
    restore = closed.restore
    return Restore(
        status=restore.get("status", RESTORE_FAILED),
        answers_identical=restore.get("answers_identical"),
        seconds=_seconds(lines, ("restore-start", "restore-check", "hold-close")),
        reason=restore.get("reason") or None,
        seam=closed.seam,
    )


def refuse_window(
    folder: Path,
    plan: Plan,
    record: TargetRecord,
    reason: str,
    process_rules: ProcessRules | None = None,
    closed: CloseResult | None = None,
) -> Summary:
    """Write the files of a window that was refused before it touched anything.

    `closed` is how the chain that it belonged to was brought to its end because of that.
    """
    write_atomic(folder / "plan.json", dump_json(plan.to_json()) + "\n")
    closed = closed or CloseResult()
    code = 13
    if closed.production_down:
        code = EXIT_DOWN
    elif not closed.clean:
        code = EXIT_ALERT
    alerts = [*closed.alerts, *(x for x in closed.errors if x not in closed.alerts)]
    if code != 13:
        alerts.append(f"next: dsv41 status --campaign {shlex.quote(record.campaign)}")
    summary = Summary(
        window=_window(folder, plan),
        status="REFUSED",
        exit_code=code,
        started_utc=utc_now(),
        ended_utc=utc_now(),
        target=TargetInfo(**_described(record)),
        arms=_arms(plan),
        decision_cells=plan.window.decision_cells,
        stopped=reason,
        process_rules=process_rules,
        restore=_restore(closed, []),
        watch=Watch(**(closed.watch or {"status": "NOT RUN"})),
        chain=closed.chain,
        alerts=tuple(alerts),
        software=_software(),
    )
    write_summary(folder, summary)
    return summary


def _process_rules(lines: Sequence[Mapping[str, Any]]) -> ProcessRules | None:
    """What was asked before the window opened, as its journal has it."""
    for line in lines:
        if line.get("step") == "window" and isinstance(line.get("process_rules"), dict):
            return ProcessRules.model_validate(line["process_rules"])
    return None


def _read(folder: Path) -> tuple[Plan, list[dict[str, Any]], str | None]:
    """Read plan and values as `dsv41 decide` does; of damaged values what is whole, and the fault.

    Raises:
        UsageError: the plan itself is missing or damaged.
    """
    try:
        return (*read_folder(folder), None)
    except UsageError as error:
        # A window must have its end told, whatever became of its values.
        return load_plan(folder), read_json_lines(folder / "values.jsonl"), str(error)


def _window(folder: Path, plan: Plan) -> WindowInfo:
    return WindowInfo(
        id=plan.window_id,
        lane=plan.window.lane,
        name=plan.window.name,
        hypothesis=plan.window.hypothesis,
        kind=plan.window.kind,
        seed=plan.seed,
        plan_digest=plan.digest,
        folder=folder.name,
    )


def _arms(plan: Plan) -> tuple[ArmInfo, ...]:
    return tuple(
        ArmInfo(name=arm.name, role=arm.role, symbol=arm.symbol)
        for arm in (plan.window.control, *plan.window.candidates)
    )


def _promotion(outcome: Outcome, code: int) -> Promotion | None:
    """Nothing is promoted out of a window whose production is not known to be well."""
    if outcome.promotion is None or code != 0:
        return None
    return Promotion(**outcome.promotion)


def _described(record: TargetRecord) -> dict[str, Any]:
    return {
        "kind": str(record.table.get("kind", "unknown")),
        "engine": str(record.table.get("engine", "")),
    }


def _seconds(lines: list[dict[str, Any]], steps: tuple[str, ...]) -> float | None:
    found = [
        float(line.get("seconds", 0.0))
        for line in lines
        if line.get("event") in ("end", "fail") and line.get("step") in steps
    ]
    return sum(found) if found else None


def _starts(plan: Plan, lines: list[dict[str, Any]]) -> list[StartInfo]:
    infos = []
    for start in plan.starts:
        own = [line for line in lines if line.get("step") == f"start:{start.name}"]
        if not own:
            continue
        end = next((line for line in own if line["event"] == "end"), {})
        fail = next((line for line in own if line["event"] == "fail"), {})
        # The start that was up when the window closed ends with the close's own first step.
        stops = (f"stop:{start.name}", "experiment-stop")
        stop = next((x for x in lines if x.get("step") in stops and x["event"] == "end"), {})
        infos.append(
            StartInfo(
                name=start.name,
                arm=start.arm,
                started_utc=own[0]["utc"],
                ready_s=end.get("seconds"),
                ended_utc=stop.get("utc"),
                reason=fail.get("reason"),
            )
        )
    return infos


def _archive(
    folder: Path,
    plan: Plan,
    record: TargetRecord,
    values: list[dict[str, Any]],
    clocks: Mapping[str, tuple[int, str]],
    journal: Journal,
    alerts: list[str],
    *,
    stopped: str | None,
) -> ArchiveUse | None:
    """Append every control repeat that was measured; idempotent by the row's key.

    After a stop, those of the starts that finished.
    """
    if plan.window.kind == "admission":
        return None
    path = Path(record.campaign) / ARCHIVE_NAME
    control = plan.window.control.name
    lost = unfinished_starts(plan.to_json(), values, journal.lines()) if stopped else set()
    measured = [
        v
        for v in values
        if v["arm"] == control and v["outcome"] == "measured" and v["start"] not in lost
    ]
    alerts += [
        f"archive: the journal has no clock cap of start {start}; its values were not appended"
        for start in sorted({v["start"] for v in measured} - clocks.keys())
    ]
    rows = rows_of(
        measured, window=plan.window_id, commit=record.commit, date=record.date, clocks=clocks
    )
    try:
        before = archive_head(path)
        if rows:
            head = [before.rows, before.sha256]
            with journal.step("archive", rows=len(rows), before=head):
                known = [point.head for point in read_checkpoints([record.campaign], path)]
                archive_append(path, rows, checkpoints=known)
        after = archive_head(path)
    except (Dsv41Error, ValueError, OSError) as error:
        alerts.append(
            f"archive: {one_line(str(error))}; the values are in {folder.name}/values.jsonl, "
            f"append them with: dsv41 archive append {folder}"
        )
        return ArchiveUse(path=str(path))
    # A window that is finished a second time found its own rows there already.
    rows_before, sha256_before = next(
        (
            line["before"]
            for line in journal.lines()
            if (line.get("step"), line.get("event")) == ("archive", "begin") and "before" in line
        ),
        (before.rows, before.sha256),
    )
    use = ArchiveUse(
        path=str(path),
        before=ArchiveHead(rows=rows_before, sha256=sha256_before),
        after=ArchiveHead(rows=after.rows, sha256=after.sha256),
        appended=len(rows),
    )
    write_atomic(folder / "archive-head.json", dump_json(use.model_dump(mode="json")) + "\n")
    return use


def _spreads(
    plan: Plan,
    record: TargetRecord,
    values: list[dict[str, Any]],
    clocks: Mapping[str, tuple[int, str]],
) -> dict[str, Spread]:
    """The control's relative SD in this window beside the archive's, for each decision metric."""
    control = plan.window.control.name
    path = Path(record.campaign) / ARCHIVE_NAME
    spreads: dict[str, Spread] = {}
    for cell in plan.window.cells:
        own = [
            v
            for v in values
            if v["cell"] == cell.name and v["arm"] == control and v["outcome"] == "measured"
        ]
        for metric in (plan.primary(cell.name), *cell.guards):
            numbers = [v["values"][metric]["value"] for v in own if metric in v["values"]]
            if len(numbers) < 2 or not statistics.fmean(numbers):
                continue
            archived = None
            try:
                definition = {
                    "commit": record.commit,
                    "max_tokens": own[0]["max_tokens"],
                    "prompt_sha256": own[0]["prompt_sha256"],
                    "clock_cap_mhz": clocks[own[0]["start"]][0],
                }
                archived = _archived(path, cell.name, metric, definition, plan.window_id)
            except (Dsv41Error, KeyError, ValueError, OSError):
                # Without a clock cap there is no definition, and the archive's fault is an alert
                # of its own: the window's spread still shows.
                archived = None
            spreads[f"{cell.name}/{metric}"] = Spread(
                in_window_cv=statistics.stdev(numbers) / statistics.fmean(numbers),
                archive_cv=archived,
            )
    return spreads


def _archived(
    path: Path, cell: str, metric: str, definition: Mapping[str, Any], window_id: str
) -> float | None:
    """The spread of that one definition over the archive's other windows."""
    for spread in archive_spreads(path, cell, metric):
        if definition.items() <= spread.definition.items():
            return pooled_cv(one for one in spread.windows if one.window != window_id)[0]
    return None


def _ledgers(folder: Path, plan: Plan, record: TargetRecord) -> dict[str, tuple[str, ...]]:
    """What each candidate's first boot ledger has other than the control's first."""
    dialect = str(record.table.get("engine", ""))
    if dialect not in DIALECTS:
        return {}
    first: dict[str, Any] = {}
    for start in plan.starts:
        try:
            text = (folder / "ledger" / f"{start.name}.log").read_text("utf-8", "replace")
        except OSError:
            continue
        first.setdefault(start.arm, parse_ledger(text, dialect))
    control = first.pop(plan.window.control.name, None)
    if control is None:
        return {}
    return {
        arm: tuple(one_line(str(change)) for change in diff_ledgers(control, ledger))
        for arm, ledger in first.items()
    }


def _advisory(
    plan: Plan, values: Sequence[dict[str, Any]], rules: Mapping[str, Rule]
) -> dict[str, tuple[str, ...]]:
    """What rules of the user's own say beside the verdict; a failing one says so and no more."""
    said = {}
    for name, rule in rules.items():
        try:
            said[name] = tuple(one_line(str(line)) for line in rule(plan, values))
        except Exception as error:  # noqa: BLE001 - foreign code never costs a window its summary
            said[name] = (one_line(f"failed: {type(error).__name__}: {error}"),)
    return said


def _software() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _SOFTWARE:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
