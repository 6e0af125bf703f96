"""report.html of a window: one page that needs nothing else, a view that can be made again.

The page holds no script and asks no other host for anything; a content security policy says so to
the browser too. Every text from a file is escaped where it enters the page, after its control and
bidirectional marks were made visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from .. import __version__, durable
from ..text import one_line
from ..window.summary import RESTORE_CHAINED, Summary
from .model import (
    SeriesRow,
    WindowFiles,
    archive_text,
    cost_text,
    duration_text,
    exit_text,
    interval_text,
    load_window,
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
)
from .svg import interval_plot, marker, run_plot

__all__ = ["FILE_NAME", "html_page", "write_html"]

FILE_NAME = "report.html"

_TONES = {
    "CANDIDATE": "good",
    "COMPLETE": "good",
    "WIN": "good",
    "PASS": "good",
    "NOT A CANDIDATE": "bad",
    "LOSS": "bad",
    "INCONCLUSIVE": "open",
}


def _tone(verdict: str) -> str:
    """The colour a verdict is shown in."""
    return _TONES.get(verdict, "odd")


def _show(value: object, limit: int = 400) -> str:
    return "" if value is None else one_line(str(value), limit)


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        show=_show,
        tone=_tone,
        number=number_text,
        cost=cost_text,
        percent=percent_text,
        duration=duration_text,
    )
    environment.globals["interval"] = interval_text
    environment.globals["pairs"] = pairs_text
    return environment.get_template("window.html.j2")


def _legend(arms: tuple[str, ...], files: WindowFiles) -> list[tuple[Markup, str, str]]:
    """Mark, name and role of every arm."""
    roles = {arm.name: arm.role for arm in files.summary.arms} if files.summary else {}
    return [
        (
            Markup('<svg viewBox="0 0 14 14" class="key" aria-hidden="true">{}</svg>').format(
                marker(index, 7, 7, arm, 5)
            ),
            one_line(arm, 60),
            roles.get(arm, "control" if index == 0 else "candidate"),
        )
        for index, arm in enumerate(arms)
    ]


def _cells(files: WindowFiles, arms: tuple[str, ...], rows: tuple[SeriesRow, ...]) -> list[Any]:
    """What the page shows of each cell: plots, table rows, and the definition."""
    keys = count()
    cells = []
    several = len({row.arm for row in rows}) > 1
    # Quality cells and the pilot have no values to plot; they have sections of their own.
    rows = tuple(row for row in rows if "gate" not in _cell_table(files, row))
    measured = [cell for cell in files.cells if cell not in files.beside]
    names = dict.fromkeys([*measured, *(row.cell for row in rows)])
    deciding = set(files.summary.decision_cells) if files.summary else set()
    for cell in names:
        items = files.of(cell)
        series = [row for row in rows if row.cell == cell]
        judged = {row.metric: row for row in series if row.metric}
        plots = [
            run_plot(
                items,
                metric,
                files.unit(metric),
                arms,
                lower_is_better=files.lower_is_better(metric),
                key=f"run{next(keys)}",
                width=760 if position == 0 else 440,
            )
            for position, metric in enumerate(files.metrics(cell))
            if items
        ]
        shown = max(1, len(judged))
        definition = files.plan.get("cells")
        definition = definition.get(cell) if isinstance(definition, Mapping) else None
        labelled = [
            (f"{row.metric} · {row.arm}" if several else row.metric, row)
            for row in series
            if row.metric
        ]
        cells.append(
            {
                "name": cell,
                "decides": cell in deciding or any(row.decides for row in series),
                "provisional": any(_provisional(files, row.arm) for row in series),
                "verdicts": list(dict.fromkeys((row.arm, row.cell_verdict) for row in series)),
                "plot": plots[0] if plots else None,
                "guard_plots": plots[1:shown],
                "other_plots": plots[shown:],
                "intervals": interval_plot(labelled, key=f"gain{next(keys)}") if labelled else None,
                "series": series,
                "with_p": any(row.p is not None for row in series),
                "measured": sum(item.outcome == "measured" for item in items),
                "planned": len(items),
                "definition": definition if isinstance(definition, Mapping) else {},
            }
        )
    return cells


def _cell_table(files: WindowFiles, row: SeriesRow) -> Mapping[str, Any]:
    """What the summary says of a row's cell."""
    decision = files.summary.decisions.get(row.arm, {}) if files.summary else {}
    cells = decision.get("cells")
    table = cells.get(row.cell) if isinstance(cells, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def _pilot_rows(summary: Summary) -> list[tuple[str, float | None, float | None]]:
    """(cell and metric, diff CV, start SD) of the A/A pilot."""
    pilot = summary.pilot
    if pilot is None:
        return []
    return [(key, cv, pilot.start_sd.get(key)) for key, cv in pilot.diff_cv.items()]


def _provisional(files: WindowFiles, arm: str) -> bool:
    """Whether the arm's decision is of an incomplete window and may still have come out else."""
    decisions = files.summary.decisions if files.summary else {}
    return bool(decisions.get(arm, {}).get("provisional"))


def html_page(files: WindowFiles) -> str:
    """Return the window's page, complete HTML."""
    summary = files.summary
    rows = series_rows(files)
    arms = tuple(
        dict.fromkeys(
            [*([files.control] if files.control else []), *(item.arm for item in files.items)]
        )
    )
    overview = [
        (f"{row.cell} · {row.arm}" if len({r.arm for r in rows}) > 1 else row.cell, row)
        for row in rows
        if row.role == "primary" and row.metric
    ]
    judged = quality_rows(summary) if summary else ()
    page = _template().render(
        files=files,
        summary=summary,
        title=f"{files.lane} {files.name}: {files.status}",
        exit_text=exit_text(summary.exit_code) if summary else "",
        span=seconds_between(summary.started_utc, summary.ended_utc) if summary else None,
        measured=sum(item.outcome == "measured" for item in files.items),
        legend=_legend(arms, files),
        cells=_cells(files, arms, rows),
        overview=interval_plot(overview, key="overview", title="Gain of each cell's primary")
        if len(overview) > 2
        else None,
        spreads=spread_rows(summary) if summary else (),
        missing=missing_lines(summary) if summary else (),
        quality=[row for row in judged if not row.is_gate],
        gates=[row for row in judged if row.is_gate],
        costs=summary.costs if summary else {},
        pilot=pilot_text(summary) if summary else "",
        pilot_rows=_pilot_rows(summary) if summary else [],
        archive=archive_text(summary) if summary else "",
        restore=restore_text(summary) if summary else "",
        chained=RESTORE_CHAINED,
        watch=watch_text(summary) if summary else "",
        version=__version__,
    )
    # Half a surrogate pair has no UTF-8 form; `visible` escapes it, and nothing else may carry it.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def write_html(folder: Path, files: WindowFiles | None = None) -> Path:
    """Write `folder`/report.html from the folder's other files and return its path.

    Raises:
        UsageError: the folder is no window's, or a file in it is damaged; one line.
    """
    path = folder / FILE_NAME
    durable.write_atomic(path, html_page(files or load_window(folder)))
    return path
