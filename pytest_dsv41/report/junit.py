"""junit.xml of a window: a view of its folder for build servers, which can be made again.

One case for every planned item, whatever became of it, and cases of the window's own:

    window::restore    always: how production was given back, so that a failed restore is never an
                       error that hangs on some cell
    window::open       only when the window was refused: the reason
    window::complete   only when the window is INCOMPLETE: what stopped it, what is missing
    window::alert      only when a person has to look: every alert

A verdict is no test failure: NOT A CANDIDATE stands in the suite's properties, with the exit code
and everything needed to find the window again. A measurement that failed is a failure, one that
was refused (its value cannot be trusted) an error.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from .. import __version__, durable
from ..text import one_line, visible
from ..window.summary import WATCH_FAILED, Summary
from .model import (
    EXIT_MEANINGS,
    Item,
    WindowFiles,
    archive_text,
    load_window,
    missing_lines,
    number_text,
    pilot_text,
    quality_rows,
    restore_text,
    watch_text,
)

__all__ = ["FILE_NAME", "junit_xml", "write_junit"]

FILE_NAME = "junit.xml"

# XML 1.0 has no form for these even as a reference; `visible` already escapes what is a control.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _attribute(text: object, limit: int = 300) -> str:
    return _NOT_XML.sub("\ufffd", one_line(str(text), limit))


def _body(text: str) -> str:
    return _NOT_XML.sub("\ufffd", visible(text, 20_000))


def _properties(files: WindowFiles) -> list[tuple[str, str]]:
    summary, plan = files.summary, files.plan
    pairs: list[tuple[str, object]] = [
        ("window", files.id),
        ("lane", files.lane),
        ("name", files.name),
        ("status", files.status),
    ]
    if summary is None:
        pairs += [("seed", plan.get("seed", "")), ("plan_digest", plan.get("digest", ""))]
    else:
        window = summary.window
        pairs += [
            ("exit_code", summary.exit_code),
            ("exit_meaning", EXIT_MEANINGS.get(summary.exit_code, "pytest's own code")),
            ("kind", window.kind),
            ("hypothesis", window.hypothesis),
            ("seed", "" if window.seed is None else window.seed),
            ("plan_digest", window.plan_digest or plan.get("digest", "")),
            ("arms", ", ".join(f"{arm.name} ({arm.role})" for arm in summary.arms)),
            ("decision_cells", ", ".join(summary.decision_cells)),
            ("target", summary.target.kind if summary.target else ""),
            ("restore", restore_text(summary)),
            ("watch", watch_text(summary)),
            ("chain", summary.chain or ""),
            ("production_commit", summary.production_commit or ""),
            ("archive", archive_text(summary)),
        ]
        for when in ("before", "after"):
            head = getattr(summary.archive, when, None)
            if head is not None:
                pairs.append((f"archive_head_{when}", f"{head.rows} {head.sha256 or ''}".strip()))
        if summary.process_rules:
            asked = summary.process_rules
            cap = asked.window_cap
            pairs.append(("window_cap", f"{cap.answer}: {cap.reason}"))
            pairs += [
                (f"resolution.{one.cell}.{one.arm}", f"{one.answer}: {one.reason}")
                for one in asked.resolution
            ]
            pairs.append(("override", asked.override or ""))
        pairs += [
            (f"decision.{arm}", decision.get("verdict", ""))
            for arm, decision in summary.decisions.items()
        ]
        pairs += [
            (
                f"{'gate' if row.is_gate else 'quality'}.{row.arm}.{row.cell}",
                f"{row.verdict}: {row.reason}",
            )
            for row in quality_rows(summary)
        ]
        if summary.pilot:
            pairs.append(("aa_pilot", pilot_text(summary)))
        if summary.promotion:
            promoted = summary.promotion
            pairs.append(
                (
                    "promotion",
                    f"{promoted.arm} {promoted.profile or ''} {' '.join(promoted.cells)}",
                )
            )
        pairs += [(f"software.{name}", version) for name, version in summary.software.items()]
    pairs.append(("report_version", f"pytest-dsv41 {__version__}"))
    return [(_attribute(name), _attribute(value)) for name, value in pairs]


def _case(files: WindowFiles, name: str, group: str, seconds: float | None) -> TestCase:
    return TestCase(
        _attribute(name), classname=_attribute(f"{files.lane}.{files.name}.{group}"), time=seconds
    )


def _why_missing(files: WindowFiles, item: Item) -> str:
    """Say why values.jsonl has no line of a planned item, as far as the files tell."""
    summary = files.summary
    if summary is None:
        return "not measured: the window was killed, or it still runs"
    for start in summary.starts:
        if start.name == item.start and start.reason:
            return f"start {start.name} did not come up: {start.reason}"
    for line in summary.incomplete:
        # A line that lists several items says no more than that they are missing.
        if line.startswith(f"{item.id} "):
            return line
    if summary.stopped:
        return f"not reached: {summary.stopped}"
    return "deselected"


def _item_case(files: WindowFiles, item: Item) -> TestCase:
    case = _case(files, item.id, item.start, item.duration_s)
    reason = _attribute(item.reason or item.kind or "no reason was recorded")
    if item.outcome == "failed":
        case.result = [Failure(reason, _attribute(f"failed.{item.kind or 'unknown'}"))]
    elif item.outcome == "refused":
        case.result = [Error(reason, _attribute(f"refused.{item.kind or 'unknown'}"))]
    elif item.outcome == "skipped":
        case.result = [Skipped(reason, _attribute(item.kind or "skipped"))]
    elif item.outcome == "missing":
        case.result = [Skipped(_attribute(_why_missing(files, item)), "missing")]
    lines = [
        f"{metric} {number_text(value)} {item.values[metric].get('unit', '')}"
        f" ({item.values[metric].get('source', 'unknown source')})"
        for metric in item.values
        if (value := item.value(metric)) is not None
    ]
    if lines:
        case.system_out = _body("\n".join(lines))
    return case


def _restore_seconds(files: WindowFiles) -> float | None:
    if files.summary and files.summary.restore.seconds is not None:
        return files.summary.restore.seconds
    took = [
        seconds
        for line in files.journal
        if str(line.get("step", "")).startswith("restore")
        and isinstance(seconds := line.get("seconds"), (int, float))
    ]
    return float(sum(took)) if took else None


def _restore_case(files: WindowFiles) -> TestCase:
    case = _case(files, "window::restore", "window", _restore_seconds(files))
    summary = files.summary
    if summary is None:
        text = "no summary.json: how production was left is not recorded; see dsv41 status"
        case.result = [Error(text, "unknown")]
        return case
    text = _attribute(f"{restore_text(summary)}; watch {watch_text(summary)}")
    head = summary.restore.head
    if head in {"CHAINED", "NOT NEEDED"}:
        case.result = [Skipped(text, _attribute(head))]
    elif not summary.restore.production_up:
        case.result = [Failure(text, _attribute(head))]
    elif summary.watch.status.startswith(WATCH_FAILED):
        case.result = [Failure(text, "watch")]
    case.system_out = text
    return case


def _window_cases(files: WindowFiles, summary: Summary) -> list[TestCase]:
    told: list[tuple[str, str]] = []
    if summary.status == "REFUSED":
        told.append(("open", summary.stopped or "refused; no reason was recorded"))
    if summary.status == "INCOMPLETE":
        lines = [f"stopped: {summary.stopped}"] if summary.stopped else []
        lines += missing_lines(summary)
        told.append(("complete", "; ".join(lines) or "no reason was recorded"))
    if summary.alerts or summary.exit_code == 21:
        told.append(("alert", "; ".join(summary.alerts) or EXIT_MEANINGS[21]))
    cases = []
    for name, text in told:
        case = _case(files, f"window::{name}", "window", None)
        case.result = [Error(_attribute(text), _attribute(summary.status))]
        case.system_out = _body(text)
        cases.append(case)
    return cases


def junit_xml(files: WindowFiles) -> bytes:
    """Return the window as JUnit XML, UTF-8."""
    suite = TestSuite(_attribute(f"{files.lane}.{files.name}"))
    for name, value in _properties(files):
        suite.add_property(name, value)
    cases = [_item_case(files, item) for item in files.items]
    if files.summary:
        cases += _window_cases(files, files.summary)
    cases.append(_restore_case(files))
    suite.add_testcases(cases)
    if files.summary and files.summary.started_utc:
        suite.timestamp = _attribute(files.summary.started_utc.removesuffix("Z"))
    # Any: junitparser's own types leave these calls untyped.
    xml: Any = JUnitXml(_attribute(f"pytest-dsv41 {files.id}"))
    xml.add_testsuite(suite)
    xml.update_statistics()
    return bytes(xml.tostring())


def write_junit(folder: Path, files: WindowFiles | None = None) -> Path:
    """Write `folder`/junit.xml from the folder's other files and return its path.

    Raises:
        UsageError: the folder is no window's, or a file in it is damaged; one line.
    """
    path = folder / FILE_NAME
    durable.write_atomic(path, junit_xml(files or load_window(folder)))
    return path
