"""Two windows side by side: what each said of a cell, and whether they are comparable at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..text import one_line
from .model import (
    QualityRow,
    SeriesRow,
    WindowFiles,
    exit_text,
    interval_text,
    number_text,
    percent_text,
    quality_rows,
    series_rows,
)
from .terminal import print_text, safe, verdict_text

__all__ = ["Comparison", "Pair", "compare_windows", "render_comparison"]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One series in both windows; a side is None where its window has no such series."""

    cell: str
    arm: str
    metric: str
    first: SeriesRow | None
    second: SeriesRow | None

    @property
    def control_shift(self) -> float | None:
        """How the control mean moved from the first window to the second, as a fraction."""
        if not (self.first and self.second and self.first.control and self.second.control):
            return None
        return self.second.control / self.first.control - 1

    @property
    def apart(self) -> bool:
        """Whether the two intervals of the gain do not even touch."""
        ends = [_ends(side) for side in (self.first, self.second)]
        if ends[0] is None or ends[1] is None:
            return False
        (low1, high1), (low2, high2) = ends[0], ends[1]
        return high1 < low2 or high2 < low1


def _ends(row: SeriesRow | None) -> tuple[float, float] | None:
    if row is None or row.low is None or row.high is None:
        return None
    return row.low, row.high


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two windows, their common series, and what speaks against comparing them."""

    first: WindowFiles
    second: WindowFiles
    pairs: tuple[Pair, ...]
    differences: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The second window's exit code; 12 when it never reached its summary."""
        return self.second.summary.exit_code if self.second.summary else 12

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return {
            "windows": [
                {
                    "id": files.id,
                    "status": files.status,
                    "exit_code": files.summary.exit_code if files.summary else None,
                    "quality": [
                        {
                            "arm": row.arm,
                            "cell": row.cell,
                            "verdict": row.verdict,
                            "reason": row.reason,
                        }
                        for row in _quality(files)
                    ],
                }
                for files in (self.first, self.second)
            ],
            "differences": list(self.differences),
            "series": [
                {
                    "cell": pair.cell,
                    "arm": pair.arm,
                    "metric": pair.metric,
                    "first": dict(pair.first.raw) if pair.first else None,
                    "second": dict(pair.second.raw) if pair.second else None,
                    "control_shift": pair.control_shift,
                    "apart": pair.apart,
                }
                for pair in self.pairs
            ],
            "exit_code": self.exit_code,
        }


def compare_windows(first: WindowFiles, second: WindowFiles) -> Comparison:
    """Set two windows side by side; nothing is pooled and nothing is decided anew."""
    ones = {(row.cell, row.arm, row.metric): row for row in series_rows(first) if row.metric}
    twos = {(row.cell, row.arm, row.metric): row for row in series_rows(second) if row.metric}
    return Comparison(
        first,
        second,
        tuple(Pair(*key, ones.get(key), twos.get(key)) for key in dict.fromkeys([*ones, *twos])),
        tuple(_differences(first, second)),
    )


def _differences(first: WindowFiles, second: WindowFiles) -> Iterator[str]:
    """What was not the same: a difference in any of these can look like an effect."""
    ones, twos = first.plan.get("cells") or {}, second.plan.get("cells") or {}
    for cell in ones.keys() & twos.keys() if isinstance(ones, dict) else ():
        one, two = ones[cell], twos[cell]
        keys = sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
        if keys:
            told = ", ".join(
                f"{key} {_short(one.get(key))} / {_short(two.get(key))}" for key in keys
            )
            yield f"cell {cell} is defined differently: {told}"
    for label, one, two in (
        ("production commit", *_facts(first, second, "production_commit")),
        ("decision cells", *_facts(first, second, "decision_cells")),
    ):
        if one != two:
            yield f"{label}: {_short(one)} / {_short(two)}"
    one, two = (files.summary.software if files.summary else {} for files in (first, second))
    for name in sorted(one.keys() | two.keys()):
        if one.get(name) != two.get(name):
            yield f"{name}: {_short(one.get(name))} / {_short(two.get(name))}"


def _quality(files: WindowFiles) -> tuple[QualityRow, ...]:
    return quality_rows(files.summary) if files.summary else ()


def _facts(first: WindowFiles, second: WindowFiles, name: str) -> tuple[Any, Any]:
    return getattr(first.summary, name, None), getattr(second.summary, name, None)


def _short(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return one_line(str(value), 60)


def render_comparison(
    comparison: Comparison,
    *,
    width: int | None = None,
    color: bool | None = None,
    encoding: str = "utf-8",
) -> str:
    """Return the comparison as text: both windows, each common series, and what differs."""
    parts: list[RenderableType] = []
    for letter, files in (("A", comparison.first), ("B", comparison.second)):
        code = files.summary.exit_code if files.summary else None
        parts.append(
            Text.assemble(
                (f"{letter}  ", "bold"),
                verdict_text(files.status),
                "  ",
                safe(files.id),
                f"  exit {code}" if code is not None else "  no summary",
            )
        )
        parts += [
            Text.assemble(
                ("   gate " if row.is_gate else "   quality ", "dim"),
                safe(f"{row.arm}, {row.cell}:"),
                " ",
                verdict_text(row.verdict),
                safe(f": {row.reason}"),
            )
            for row in _quality(files)
        ]
    table = Table(box=None, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("cell / series", overflow="fold", min_width=19)
    for title in ("gain A", "95 % interval A", "gain B", "95 % interval B", "control"):
        table.add_column(title, justify="right", no_wrap=True)
    arms = {pair.arm for pair in comparison.pairs}
    group: tuple[str, str] | None = None
    for pair in comparison.pairs:
        if group != (pair.cell, pair.arm):
            group = (pair.cell, pair.arm)
            name = f"{pair.cell} {pair.arm}" if len(arms) > 1 else pair.cell
            sides = [pair.first, pair.second]
            verdicts = [verdict_text(side.cell_verdict) if side else Text("–") for side in sides]
            table.add_row(safe(name, "bold"), "", verdicts[0], "", verdicts[1], "")
        one, two = pair.first, pair.second
        table.add_row(
            Padding(safe(pair.metric), (0, 0, 0, 1)),
            percent_text(one.gain) if one else "–",
            interval_text(one.low, one.high) if one else "–",
            percent_text(two.gain) if two else "–",
            interval_text(two.low, two.high) if two else "–",
            percent_text(pair.control_shift),
        )
    parts += [Text(), table, Text("control: how the control mean moved from A to B", "dim")]
    parts += [
        safe(
            f"{pair.cell} {pair.arm} {pair.metric}: the two intervals do not touch "
            f"(control {number_text(one.control)} / {number_text(two.control)})",
            "yellow",
        )
        for pair in comparison.pairs
        if pair.apart and (one := pair.first) and (two := pair.second)
    ]
    if comparison.differences:
        parts += [Text(), Text("not the same in both windows:", "yellow")]
        parts += [safe(f"- {line}", "yellow") for line in comparison.differences]
    code = comparison.exit_code
    parts.append(safe(f"{exit_text(code)} (window B)"))
    return print_text(Group(*parts), width, color, encoding)
