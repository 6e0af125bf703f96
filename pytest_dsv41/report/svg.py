"""The page's plots as inline SVG: no script, no font file, colours from the page's variables.

Every text that comes from a file is escaped here, and every mark carries a `<title>`, which is a
tooltip for the eye and a name for a screen reader.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from markupsafe import Markup

from ..text import one_line
from .model import (
    REQUIRED_EFFECT,
    Item,
    SeriesRow,
    interval_text,
    number_text,
    percent_text,
)

__all__ = ["fit", "interval_plot", "run_plot", "ticks"]

_WIDTH: Final = 760
_LETTER: Final = 6.7
"""Mean width of a letter at 12 px in the page's fonts, on the wide side."""


def fit(text: str, width: float, size: float = 12) -> str:
    """Return `text` cut to `width` pixels at a font size, with an ellipsis where it is cut."""
    room = int(width / (_LETTER * size / 12))
    return text if len(text) <= room else text[: max(1, room - 1)] + "…"


def ticks(low: float, high: float, wanted: int = 5) -> tuple[float, ...]:
    """Return round numbers inside [low, high], about `wanted` of them."""
    if not high > low:
        return (low,)
    rough = (high - low) / max(1, wanted)
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(
        factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= rough * (1 - 1e-9)
    )
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def _tick_text(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    # A step such as 0.25 needs one digit more than its magnitude says.
    if digits < 6 and abs(round(step, digits) - step) > step * 1e-6:
        digits += 1
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.2e}"


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", css: str = "", size: float = 12
) -> Markup:
    return Markup(
        '<text x="{:.1f}" y="{:.1f}" text-anchor="{}" font-size="{}" class="{}">{}</text>'
    ).format(x, y, anchor, size, css, text)


def _line(x1: float, y1: float, x2: float, y2: float, css: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(
        x1, y1, x2, y2, css
    )


_SHAPES: Final = ("circle", "diamond", "triangle", "square", "down")
_CORNERS: Final[dict[str, tuple[tuple[float, float], ...]]] = {
    "diamond": ((0, -1), (1, 0), (0, 1), (-1, 0)),
    "triangle": ((0, -1), (1, 0.85), (-1, 0.85)),
    "square": ((-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)),
    "down": ((0, 1), (1, -0.85), (-1, -0.85)),
}


def marker(arm_index: int, x: float, y: float, title: str, size: float = 4.6) -> Markup:
    """Return an arm's mark: arms differ in shape as well as in colour. Arm 0 is the control."""
    shape = _SHAPES[arm_index % len(_SHAPES)]
    css = f"arm{arm_index % 6} dot"
    if shape == "circle":
        body = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{:.1f}" class="{}">').format(
            x, y, size, css
        )
        end = Markup("</circle>")
    else:
        wide = size * 1.25
        corners = _CORNERS[shape]
        points = " ".join(f"{x + dx * wide:.1f},{y + dy * wide:.1f}" for dx, dy in corners)
        body = Markup('<polygon points="{}" class="{}">').format(points, css)
        end = Markup("</polygon>")
    return Markup("{}<title>{}</title>{}").format(body, title, end)


def _open(width: float, height: float, title: str, description: str, key: str) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {} {:.0f}" role="img" aria-labelledby="{}-t {}-d">'
        '<title id="{}-t">{}</title><desc id="{}-d">{}</desc>'
    ).format(width, height, key, key, key, title, key, description)


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def run_plot(
    items: Sequence[Item],
    metric: str,
    unit: str,
    arms: Sequence[str],
    *,
    lower_is_better: bool,
    key: str,
    width: float = _WIDTH,
) -> Markup:
    """Return the plot of every repeat of one cell and metric in run order.

    Args:
        items: the cell's items of all arms, in run order.
        metric, unit: what is plotted.
        arms: all arms, the control first; an arm's place gives its colour and shape.
        lower_is_better: said on the axis.
        key: unique id of the plot in the page.
        width: of the drawing in its own units; the text keeps its size in them.
    """
    left, right, top, bottom = 66.0, 62.0, 30.0, 208.0
    height = 246.0
    values = [value for item in items if (value := item.value(metric)) is not None]
    metric, unit = one_line(metric, 60), one_line(unit, 20)
    title = f"{metric} of every repeat in run order"
    description = f"{len(values)} of {len(items)} repeats measured"
    parts = [_open(width, height, title, description, key)]
    if not values:
        parts.append(_text(width / 2, 120, f"no repeat gave {metric}", anchor="middle", css="mute"))
        parts.append(Markup("</svg>"))
        return Markup("").join(parts)
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
    y = _Scale(low - room, high + room, bottom - 4, top + 4)
    step = (width - left - right) / len(items)

    def x(position: float) -> float:
        return left + step * (position + 0.5)

    position = 0
    for band, (start, members) in enumerate(groupby(items, key=lambda item: item.start)):
        group = list(members)
        x0, x1 = left + step * position, left + step * (position + len(group))
        parts.append(
            Markup(
                '<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" class="{}">'
                "<title>start {}, arm {}</title></rect>"
            ).format(
                x0,
                top,
                x1 - x0,
                bottom - top,
                "band odd" if band % 2 else "band",
                one_line(start, 60),
                one_line(group[0].arm, 60),
            )
        )
        if x1 - x0 >= 22:
            label = fit(one_line(start, 60), x1 - x0 - 2)
            parts.append(
                _text(
                    (x0 + x1) / 2,
                    top - 10,
                    label,
                    anchor="middle",
                    css=f"start fill{_arm_index(group[0].arm, arms)}",
                )
            )
        position += len(group)
    marks = ticks(y.low, y.high)
    gap = marks[1] - marks[0] if len(marks) > 1 else abs(marks[0]) or 1.0
    for mark in marks:
        parts.append(_line(left, y(mark), width - right, y(mark), "grid"))
        parts.append(_text(left - 8, y(mark) + 4, _tick_text(mark, gap), anchor="end", css="mute"))
    parts += _relative_axis(items, metric, arms, y, width - right)
    position = 0
    for _, members in groupby(items, key=lambda item: item.start):
        group = list(members)
        known = [value for item in group if (value := item.value(metric)) is not None]
        if len(known) > 1:
            mean = math.fsum(known) / len(known)
            css = f"arm{_arm_index(group[0].arm, arms)} mean"
            parts.append(
                _line(
                    left + step * position + 2,
                    y(mean),
                    left + step * (position + len(group)) - 2,
                    y(mean),
                    css,
                )
            )
        position += len(group)
    for position, item in enumerate(items):
        value = item.value(metric)
        name = one_line(item.id, 80)
        if value is not None:
            label = f"{name}: {number_text(value)} {unit} ({one_line(item.arm, 60)})"
            size = 4.6 if step >= 11 else max(2.0, step * 0.42)
            parts.append(marker(_arm_index(item.arm, arms), x(position), y(value), label, size))
        else:
            label = f"{name}: {item.outcome}" + (
                f", {one_line(item.reason)}" if item.reason else ""
            )
            parts.append(
                Markup(
                    '<path d="M{:.1f} {:.1f}l8 8m0 -8l-8 8" class="gone"><title>{}</title></path>'
                ).format(x(position) - 4, bottom - 14, label)
            )
    parts.append(_line(left, bottom, width - right, bottom, "axis"))
    better = "lower is better" if lower_is_better else "higher is better"
    if width >= 600:
        parts.append(_text(left, height - 16, f"run order, {len(items)} repeats →", css="mute"))
    parts.append(
        _text(
            width - right,
            height - 16,
            fit(
                f"{metric}{f' in {unit}' if unit else ''}, {better}",
                width - right - (left + 150 if width >= 600 else 4),
            ),
            anchor="end",
            css="mute",
        )
    )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _relative_axis(
    items: Sequence[Item], metric: str, arms: Sequence[str], y: _Scale, x: float
) -> list[Markup]:
    """The same height as a change against the control mean, on the right."""
    control = [
        value
        for item in items
        if item.arm in arms[:1] and (value := item.value(metric)) is not None
    ]
    mean = math.fsum(control) / len(control) if control else 0.0
    if mean <= 0:
        return []
    low, high = 100 * (y.low / mean - 1), 100 * (y.high / mean - 1)
    marks = ticks(low, high, 6)
    gap = marks[1] - marks[0] if len(marks) > 1 else 1.0
    parts = []
    for mark in marks:
        height = y(mean * (1 + mark / 100))
        label = "control" if mark == 0 else f"{_signed(mark, gap)} %"
        parts.append(_line(x, height, x + 4, height, "axis"))
        parts.append(_text(x + 8, height + 4, label, css="mute", size=11))
    return parts


def _signed(percent: float, step: float) -> str:
    return f"{percent:+.{_digits(step)}f}".replace("-", "−")


def _arm_index(arm: str, arms: Sequence[str]) -> int:
    return list(arms).index(arm) if arm in arms else len(arms)


def interval_plot(
    rows: Sequence[tuple[str, SeriesRow]], *, key: str, title: str = "Gain with 95 % interval"
) -> Markup:
    """Return gains with their intervals against 0 and the required 2 %.

    Args:
        rows: label and series, top to bottom; series without a gain are said to have none.
        key: unique id of the plot in the page.
        title: accessible name.
    """
    left, right, top, row_height = 196.0, 186.0, 26.0, 27.0
    bottom = top + row_height * len(rows) + 4
    height = bottom + 42
    ends = [end for _, row in rows for end in (row.low, row.high, row.gain) if end is not None]
    low, high = min([0.0, *ends]), max([REQUIRED_EFFECT, *ends])
    room = (high - low) * 0.07
    x = _Scale(low - room, high + room, left, _WIDTH - right)
    described = "; ".join(
        f"{label} {percent_text(row.gain)} ({interval_text(row.low, row.high)})"
        for label, row in rows
    )
    parts = [_open(_WIDTH, height, title, one_line(described, 1000), key)]
    marks = ticks(x.low * 100, x.high * 100, 6)
    gap = marks[1] - marks[0] if len(marks) > 1 else 1.0
    for mark in marks:
        parts.append(_line(x(mark / 100), top, x(mark / 100), bottom, "grid"))
        label = "0" if mark == 0 else _signed(mark, gap)
        parts.append(_text(x(mark / 100), bottom + 16, label, anchor="middle", css="mute"))
    parts.append(_line(x(0), top - 4, x(0), bottom, "zero"))
    parts.append(_line(x(REQUIRED_EFFECT), top - 4, x(REQUIRED_EFFECT), bottom, "required"))
    parts.append(
        _text(x(REQUIRED_EFFECT), top - 10, "2 % required", anchor=_anchor(x), css="need", size=11)
    )
    for position, (label, row) in enumerate(rows):
        middle = top + row_height * (position + 0.5) + 2
        css = {"WIN": "win", "LOSS": "loss"}.get(row.verdict, "open")
        weight = "strong" if row.role == "primary" else ""
        shown = fit(one_line(label, 80), left - 14)
        parts.append(_text(left - 12, middle + 4, shown, anchor="end", css=weight))
        if row.gain is None or row.low is None or row.high is None:
            parts.append(_text(left + 8, middle + 4, "no interval", css="mute"))
            continue
        told = (
            f"{one_line(label, 80)}: gain {percent_text(row.gain)},"
            f" 95 % interval {interval_text(row.low, row.high)}"
        )
        thick = 9 if row.role == "primary" else 6
        parts.append(
            Markup(
                '<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{}" rx="{}" class="{} bar">'
                "<title>{}</title></rect>"
            ).format(
                x(row.low),
                middle - thick / 2,
                max(1.0, x(row.high) - x(row.low)),
                thick,
                thick / 2,
                css,
                told,
            )
        )
        parts.append(
            Markup(
                '<circle cx="{:.1f}" cy="{:.1f}" r="{}" class="{} point"><title>{}</title></circle>'
            ).format(x(row.gain), middle, thick / 2 + 1, css, told)
        )
        parts.append(
            _text(_WIDTH - right + 12, middle + 4, percent_text(row.gain), css=f"{css} strong")
        )
        parts.append(
            _text(_WIDTH, middle + 4, interval_text(row.low, row.high), anchor="end", css="mute")
        )
    parts.append(_line(left, bottom, _WIDTH - right, bottom, "axis"))
    parts.append(_text(left, height - 8, "← candidate worse", css="mute", size=11))
    parts.append(
        _text(
            _WIDTH - right,
            height - 8,
            "candidate better, gain in % →",
            anchor="end",
            css="mute",
            size=11,
        )
    )
    parts.append(Markup("</svg>"))
    return Markup("").join(parts)


def _anchor(x: _Scale) -> str:
    """Keep the label of the 2 % line inside the plot where the line stands at an edge."""
    place = (x(REQUIRED_EFFECT) - x.start) / (x.end - x.start)
    return "start" if place < 0.12 else "end" if place > 0.88 else "middle"


def _digits(step: float) -> int:
    return 0 if step >= 1 and float(step).is_integer() else 1 if step >= 0.1 else 2
