"""The verdict on a terminal: tables that a person reads at a glance.

Everything is returned as text, so the caller decides where it goes. Colour follows the terminal:
NO_COLOR, TERM=dumb and a pipe give plain text. Whatever a server or a file said goes through
`pytest_dsv41.text.visible` first, so no text of theirs can move the cursor.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ..text import counted, one_line
from ..window.summary import RESTORE_CHAINED, WATCH_FAILED, Cost, Summary
from .model import (
    SeriesRow,
    WindowFiles,
    archive_text,
    cost_text,
    decision_rows,
    duration_text,
    exit_text,
    interval_text,
    missing_lines,
    number_text,
    pairs_text,
    percent_text,
    pilot_text,
    quality_rows,
    restore_text,
    seconds_between,
    series_rows,
    spread_rows,
    watch_text,
    window_files,
)
from .progress import Progress

__all__ = [
    "Progress",
    "console_width",
    "print_text",
    "render_costs",
    "render_decision",
    "render_files",
    "render_window",
    "safe",
    "verdict_text",
    "wants_color",
]

_STYLE: Final[dict[str, str]] = {
    "CANDIDATE": "bold green",
    "WIN": "bold green",
    "PASS": "bold green",
    "COMPLETE": "bold green",
    "NOT A CANDIDATE": "bold red",
    "LOSS": "bold red",
    "REFUSED": "bold magenta",
    "INCONCLUSIVE": "bold yellow",
    "INCOMPLETE": "bold magenta",
    "NOT JUDGED": "bold magenta",
}


def wants_color(stream: Any = None) -> bool:
    """Whether `stream` (default: stdout) is a terminal that shows colour and may get it."""
    stream = sys.stdout if stream is None else stream
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def console_width(columns: int | None = None) -> int:
    """Return the width to lay out for: the terminal's, between 80 and 120."""
    return min(120, max(80, columns or shutil.get_terminal_size((80, 24)).columns))


def safe(text: object, style: str = "", limit: int = 300) -> Text:
    """Return one line of untrusted text, made visible and cut at `limit` characters."""
    return Text(one_line(str(text), limit), style=style)


def _style(verdict: str) -> str:
    return _STYLE.get(verdict, "")


def verdict_text(text: str) -> Text:
    """Return a verdict or status in its colour."""
    return safe(text, _style(text))


def _series_verdict(row: SeriesRow) -> Text:
    if row.role == "guard":
        return verdict_text(row.verdict) if row.verdict == "LOSS" else Text("no loss", style="dim")
    return Text() if row.verdict == row.cell_verdict else verdict_text(row.verdict)


def _table(rows: Sequence[SeriesRow]) -> Table:
    with_p = any(row.p is not None for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("cell / series", overflow="fold", min_width=19)
    for title in ("control", "candidate", "gain", "95 % interval", *(["p"] if with_p else [])):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("lost", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    blank = [""] * (5 + with_p)
    for cell, members in groupby(rows, key=lambda row: row.cell):
        series = list(members)
        heading = safe(cell, "bold")
        if not series[0].decides:
            heading.append(" (reported)", "dim")
        table.add_row(heading, *blank, verdict_text(series[0].cell_verdict))
        for row in series:
            if not row.metric:
                continue
            name = safe(row.metric, "" if row.role == "primary" else "dim")
            table.add_row(
                Padding(name, (0, 0, 0, 1)),
                number_text(row.control),
                number_text(row.candidate),
                percent_text(row.gain),
                interval_text(row.low, row.high),
                *([number_text(row.p)] if with_p else []),
                "–" if row.worse is None else f"{row.worse}/{row.n_candidate}",
                _series_verdict(row),
            )
    return table


def _why(rows: Sequence[SeriesRow], sentences: Sequence[str]) -> list[RenderableType]:
    if sentences:
        return [_indented(safe(sentence, limit=600)) for sentence in sentences]
    return [
        _indented(safe(f"{row.cell}{f' {row.metric}' if row.metric else ''}: {row.reason}"))
        for row in rows
        if row.reason
    ]


def _indented(text: Text) -> RenderableType:
    return Padding(text, (0, 0, 0, 2))


def _decision(
    arm: str,
    decision: Mapping[str, Any],
    rows: Sequence[SeriesRow],
    sentences: Sequence[str],
) -> Group:
    rule = str(decision.get("rule", ""))
    if decision.get("rule_revision") is not None:
        rule += f", revision {decision['rule_revision']}"
    head = Text.assemble(
        safe(arm, "bold"),
        ": ",
        verdict_text(str(decision.get("verdict", ""))),
        "  ",
        safe(rule, "dim"),
    )
    if decision.get("provisional"):
        head.append("  provisional: the window is incomplete", "magenta")
    parts: list[RenderableType] = [head]
    for kind in ("groups", "profiles"):
        named = decision.get(kind)
        for name, group in named.items() if isinstance(named, Mapping) else ():
            if isinstance(group, Mapping):
                cells = ", ".join(str(cell) for cell in group.get("cells") or ())
                parts.append(
                    Text.assemble(
                        "  ",
                        safe(name),
                        ": ",
                        verdict_text(str(group.get("verdict", ""))),
                        " on ",
                        safe(cells),
                    )
                )
    parts.append(_table(rows))
    parts += [
        _indented(safe(f"pairs of {row.cell} {row.metric}: {told}", "dim"))
        for row in rows
        if (told := pairs_text(row))
    ]
    parts += _why(rows, sentences)
    return Group(*parts)


def _spreads(summary: Summary) -> list[RenderableType]:
    rows = spread_rows(summary)
    if not rows:
        return []
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("spread of the control repeats", overflow="fold")
    table.add_column("this window", justify="right", no_wrap=True)
    table.add_column("archive, same definition", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            safe(f"{row.cell} {row.metric}"),
            percent_text(row.in_window, signed=False, digits=2),
            percent_text(row.archive, signed=False, digits=2)
            if row.archive is not None
            else "none",
        )
    notes = [
        _indented(safe(f"{row.cell} {row.metric}: {row.note}", "yellow"))
        for row in rows
        if row.larger
    ]
    return [Text(), table, *notes]


def _costs(costs: Mapping[str, Cost]) -> list[RenderableType]:
    """The cost table of each candidate arm, and every key in which its arm differs."""
    parts: list[RenderableType] = []
    for arm, cost in costs.items():
        table = Table(
            box=None, show_edge=False, pad_edge=False, padding=(0, 1), header_style="bold"
        )
        # A cell's name in one piece, as long as it leaves room for the numbers.
        widest = min(30, max((len(row.cell) for row in cost.rows), default=0))
        table.add_column(safe(f"cost of {arm}"), overflow="fold", min_width=widest)
        for title in ("control", "candidate", "Δ", "noise"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        cell = ""
        for row in cost.rows:
            if row.cell != cell:
                cell = row.cell
                table.add_row(safe(cell))
            floor = "none" if row.floor is None else f"± {percent_text(row.floor, signed=False)}"
            style = "bold red" if row.outside and not row.better else "green" if row.outside else ""
            table.add_row(
                Text.assemble(" ", safe(row.metric)),
                number_text(row.control),
                number_text(row.candidate),
                percent_text(row.delta),
                floor,
                Text(cost_text(row), style),
            )
        parts += [Text(), table]
        parts += [
            _indented(safe(f"differs in {key.key}: {key.control} → {key.candidate}"))
            for key in cost.differing
        ] or [_indented(Text("the two arms differ in no key", "dim"))]
    return parts


def _facts(summary: Summary) -> list[RenderableType]:
    """The lines below the tables: what was asked for, what is missing, production, the archive."""
    lines: list[tuple[str, str, str]] = []
    if summary.promotion:
        promotion = summary.promotion
        profile = f", profile {promotion.profile}" if promotion.profile else ""
        lines.append(
            ("promotion", f"{promotion.arm}{profile}, on {', '.join(promotion.cells)}", "green")
        )
    if summary.stopped:
        lines.append(("stopped", summary.stopped, "magenta"))
    lines += [("incomplete", text, "magenta") for text in missing_lines(summary)]
    lines += [
        (
            f"{'gate' if row.is_gate else 'quality'} {row.arm}",
            f"{row.verdict} in {row.cell}: {row.reason}",
            _style(row.verdict),
        )
        for row in quality_rows(summary)
    ]
    if summary.pilot:
        lines.append(("A/A pilot", pilot_text(summary), ""))
    lines += [("claim", claim.line, "") for claim in summary.claims]
    lines += [(f"ledger {arm}", text, "") for arm, said in summary.ledgers.items() for text in said]
    lines += [("note", text, "") for text in summary.notes]
    lines += [(name, text, "") for name, said in summary.advisory.items() for text in said]
    left = summary.restore.status == RESTORE_CHAINED
    lines.append(
        (
            "restore",
            restore_text(summary),
            "" if summary.restore.production_up else "yellow" if left else "bold red",
        )
    )
    lines.append(
        (
            "watch",
            watch_text(summary),
            "bold red" if summary.watch.status.startswith(WATCH_FAILED) else "",
        )
    )
    if summary.chain:
        lines.append(("chain", summary.chain, ""))
    if summary.archive:
        lines.append(("archive", archive_text(summary), ""))
    lines += [("ALERT", text, "bold red") for text in summary.alerts]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text, style in lines:
        table.add_row(safe(label, "dim" if label != "ALERT" else style, 40), safe(text, style))
    return [Text(), table]


def _header(files: WindowFiles) -> list[RenderableType]:
    summary = files.summary
    title = Text.assemble(
        safe(f"{files.lane} {files.name}", "bold"), ": ", verdict_text(files.status)
    )
    parts: list[RenderableType] = [Rule(title, characters="=", style="dim")]
    facts = [f"window {files.id}"]
    if summary:
        if summary.window.seed is not None:
            facts.append(f"seed {summary.window.seed}")
        span = seconds_between(summary.started_utc, summary.ended_utc)
        if span is not None:
            facts.append(duration_text(span))
        measured = sum(item.outcome == "measured" for item in files.items)
        facts.append(f"{measured} of {counted(len(files.items), 'item')} measured")
        if summary.window.hypothesis:
            parts.append(safe(summary.window.hypothesis, "italic"))
    parts.append(safe(", ".join(facts), "dim"))
    return parts


def render_files(
    files: WindowFiles,
    *,
    width: int | None = None,
    color: bool | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return a window's report as text, ending with a newline.

    Args:
        files: what `load_window` read.
        width: columns to lay out for, clipped to 80 to 120; None: the terminal's.
        color: escape codes for colour; None: as stdout can show them.
        encoding: of the terminal; what it cannot show becomes a question mark.
    """
    parts = _header(files)
    summary = files.summary
    if summary is None:
        parts.append(
            safe("no summary.json: the window was killed, or it still runs", "bold magenta")
        )
    else:
        rows = series_rows(files)
        for arm, decision in summary.decisions.items():
            of_arm = [row for row in rows if row.arm == arm]
            sentences = summary.explanations.get(arm, ())
            parts.append(Text())
            parts.append(_decision(arm, decision, of_arm, sentences))
        parts += _costs(summary.costs)
        parts += _spreads(summary)
        parts += _facts(summary)
    parts += _broken_items(files)
    if summary is not None:
        parts.append(
            Text.assemble(verdict_text(summary.status), "  ", safe(exit_text(summary.exit_code)))
        )
    return print_text(Group(*parts), width, color, encoding)


def _broken_items(files: WindowFiles) -> list[RenderableType]:
    """The first items that gave no value, each with its reason."""
    shown = 8
    broken = [item for item in files.items if item.outcome in {"failed", "refused"}]
    lines: list[RenderableType] = [
        safe(f"{item.id} {item.outcome}: {item.reason or item.kind or 'no reason given'}", "red")
        for item in broken[:shown]
    ]
    if len(broken) > shown:
        lines.append(safe(f"… and {len(broken) - shown} more, see values.jsonl", "red"))
    return lines


def render_window(
    summary: Summary,
    plan: Mapping[str, Any],
    values: Sequence[Mapping[str, Any]],
    *,
    width: int | None = None,
    color: bool | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return a window's report as text, from what is in memory.

    Args:
        summary: the window's summary.
        plan: the content of plan.json.
        values: the lines of values.jsonl.
        width, color, encoding: as `render_files`.
    """
    files = window_files(Path(summary.window.folder), summary, plan, values)
    return render_files(files, width=width, color=color, encoding=encoding)


def render_decision(
    arm: str,
    decision: Mapping[str, Any],
    sentences: Sequence[str] = (),
    *,
    width: int | None = None,
    color: bool | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return one decision (`Decision.to_dict()`) as text: the table and why.

    Args:
        arm: the candidate arm's name.
        decision: the decision as JSON values.
        sentences: `Decision.explain()`; without them the reasons of the series are shown.
        width, color, encoding: as `render_files`.
    """
    rows = decision_rows(arm, decision)
    return print_text(_decision(arm, decision, rows, sentences), width, color, encoding)


def render_costs(
    costs: Mapping[str, Cost],
    *,
    width: int | None = None,
    color: bool | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return the cost table of each candidate arm as text; empty where there is none.

    Args:
        costs: what `cost_tables` gives.
        width, color, encoding: as `render_files`.
    """
    return print_text(Group(*_costs(costs)), width, color, encoding) if costs else ""


def print_text(what: RenderableType, width: int | None, color: bool | None, encoding: str) -> str:
    """Return what rich makes of `what`, without trailing blanks, ending with a newline."""
    colored = wants_color() if color is None else color
    console = Console(
        file=io.StringIO(),
        width=console_width(width),
        force_terminal=colored,
        color_system="standard" if colored else None,
        no_color=not colored,
        legacy_windows=False,
        emoji=False,
        markup=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(what)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    text = "\n".join(lines) + "\n"
    return text.encode(encoding, "replace").decode(encoding)
