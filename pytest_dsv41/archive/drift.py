"""A metric over time, one definition at a time: control limits, and drift by name.

The points are the windows' means in the order of time: by the window's day, then by the time in its
id. The archive's own order is that of the appends, and a backfill appends older windows last. The
limits are those of a chart of individuals: mean ± 2.66 times the mean moving range (three sigma,
where sigma is the mean moving range over 1.128), so a slow drift does not widen its own limits.
Named are: a point beyond the limits; nine points in a row on one side of the mean; six in a row
that only rise or only fall.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from pytest_dsv41.archive.history import parse_utc
from pytest_dsv41.archive.spread import Spread
from pytest_dsv41.text import one_line

__all__ = ["Chart", "chart", "svg"]

_LIMIT = 2.66  # 3 / 1.128
_SIDE = 9
_TREND = 6


@dataclass(frozen=True)
class Chart:
    """A control chart of window means; the limits are None below three windows."""

    spread: Spread
    points: tuple[tuple[str, float], ...]
    centre: float | None
    low: float | None
    high: float | None
    drift: tuple[str, ...]


def _runs(signs: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Return (first, last) of every longest run of one non-zero sign of at least `length`."""
    runs = []
    first = 0
    for place in range(1, len(signs) + 1):
        if place == len(signs) or signs[place] != signs[first]:
            if place - first >= length and signs[first]:
                runs.append((first, place - 1))
            first = place
    return runs


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def chart(spread: Spread, days: Mapping[str, str]) -> Chart:
    """Return the control chart of a definition's window means, with every drift named.

    `days` gives each window's day, YYYYMMDD, as its rows have it.
    """

    def when(point: tuple[str, float]) -> tuple[str, str]:
        told = parse_utc(point[0])
        return days[point[0]], f"{told:%Y%m%dT%H%M%S}" if told else ""

    # Of what is not told apart the archive's order stays.
    points = tuple(sorted(((one.window, one.mean) for one in spread.windows), key=when))
    values = [value for _, value in points]
    if len(values) < 3:
        centre = sum(values) / len(values) if values else None
        return Chart(spread, points, centre, None, None, ())
    centre = sum(values) / len(values)
    steps = [after - before for before, after in itertools.pairwise(values)]
    reach = _LIMIT * sum(map(abs, steps)) / len(steps)
    low, high = centre - reach, centre + reach
    # A pattern says more than the single points that it leads beyond the limits.
    drift = []
    for first, last in _runs([_sign(step) for step in steps], _TREND - 1):
        way = "rising" if steps[first] > 0 else "falling"
        by = f", by {100 * (values[last + 1] / values[first] - 1):+.2f} %" if values[first] else ""
        drift.append(
            f"{points[first][0]} to {points[last + 1][0]}: {last - first + 2} windows in a row "
            f"{way}{by}"
        )
    for first, last in _runs([_sign(value - centre) for value in values], _SIDE):
        side = "above" if values[first] > centre else "below"
        drift.append(
            f"{points[first][0]} to {points[last][0]}: {last - first + 1} windows in a row "
            f"{side} the mean {centre:.6g}"
        )
    drift += [
        f"{window}: {value:.6g} is {'above' if value > high else 'below'} the limits "
        f"{low:.6g} to {high:.6g}"
        for window, value in points
        if not low <= value <= high
    ]
    return Chart(spread, points, centre, low, high, tuple(drift))


_WIDTH, _HEIGHT, _LEFT, _TOP, _PLOT = 900, 290, 90, 44, 150
_DRIFT_SHOWN = 3


def svg(charts: Sequence[Chart]) -> str:
    """Return one SVG page with a panel for each chart."""
    panels = "".join(_panel(one, place * _HEIGHT) for place, one in enumerate(charts))
    height = _HEIGHT * max(len(charts), 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>{panels}</svg>\n'
    )


def _panel(one: Chart, top: int) -> str:
    spread = one.spread
    title = (
        f"{spread.cell} / {spread.metric}: {spread.max_tokens} tokens, {spread.clock_cap_mhz} MHz, "
        f"commit {str(spread.commit)[:12]}, prompt {str(spread.prompt_sha256)[:12]}"
    )
    parts = [_text(_LEFT, top + 20, title, "font-weight='bold'")]
    values = [value for _, value in one.points]
    values += [limit for limit in (one.low, one.high) if limit is not None]
    if not one.points:
        return "".join([*parts, _text(_LEFT, top + 60, "no rows")])
    least, most = min(values), max(values)
    room = (most - least) or abs(most) or 1.0
    least, most = least - 0.08 * room, most + 0.08 * room

    def y(value: float) -> float:
        return round(top + _TOP + _PLOT * (most - value) / (most - least), 1)

    def x(place: int) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - 40) * (place + 0.5) / len(one.points), 1)

    right = _WIDTH - 30
    for value, colour, dash, name in (
        (one.high, "#b00", "6 4", "limit"),
        (one.centre, "#444", "0", "mean"),
        (one.low, "#b00", "6 4", "limit"),
    ):
        if value is not None:
            parts.append(
                f'<line x1="{_LEFT}" x2="{right}" y1="{y(value)}" y2="{y(value)}" '
                f'stroke="{colour}" stroke-dasharray="{dash}"/>'
            )
            parts.append(_text(6, y(value) + 4, f"{name} {value:.5g}"))
    path = " ".join(f"{x(place)},{y(value)}" for place, (_, value) in enumerate(one.points))
    parts.append(f'<polyline points="{path}" fill="none" stroke="#36c"/>')
    for place, (window, value) in enumerate(one.points):
        outside = one.low is not None and not one.low <= value <= (one.high or value)
        parts.append(
            f'<circle cx="{x(place)}" cy="{y(value)}" r="4" fill="{"#b00" if outside else "#36c"}">'
            f"<title>{_safe(window)}: {value:.6g}</title></circle>"
        )
    below = top + _TOP + _PLOT + 16
    parts.append(_text(_LEFT, below, one.points[0][0], "fill='#666'"))
    if len(one.points) > 1:
        parts.append(_text(right, below, one.points[-1][0], "fill='#666' text-anchor='end'"))
    shown = list(one.drift[:_DRIFT_SHOWN]) or ["no drift named"]
    if len(one.drift) > _DRIFT_SHOWN:
        shown[-1] += f" (and {len(one.drift) - _DRIFT_SHOWN} more)"
    colour = "#b00" if one.drift else "#666"
    for place, text in enumerate(shown, start=1):
        parts.append(_text(_LEFT, below + 18 * place, text, f"fill='{colour}'"))
    return "".join(parts)


def _safe(text: str) -> str:
    return escape(one_line(text, 200))


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{_safe(text)}</text>'
