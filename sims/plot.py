"""Power against true effect as an SVG file, one line a design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

__all__ = ["save", "svg"]

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 60, 180, 30, 50
COLOURS = (
    "#1b6ca8",
    "#c8553d",
    "#3a7d44",
    "#8e5ea2",
    "#b08900",
    "#0f8b8d",
    "#7a4b2a",
    "#d1478c",
    "#555555",
)

Curve = Sequence[Mapping[str, float]]


def svg(curves: Mapping[str, Curve]) -> str:
    """The plot's text. Points hold `effect`, `win` and `loss` as fractions; WIN is drawn solid,
    LOSS dashed."""
    effects = [point["effect"] for curve in curves.values() for point in curve]
    low, high = min(effects), max(effects)
    span = (high - low) or 1.0
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(effect: float) -> float:
        return LEFT + inner_width * (effect - low) / span

    def y(rate: float) -> float:
        return TOP + inner_height * (1 - rate)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for tick in range(0, 101, 20):
        at = y(tick / 100)
        parts.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick} %</text>'
        )
    for effect in sorted({round(e, 6) for e in effects}):
        if abs(100 * effect - round(100 * effect)) > 1e-6:
            continue
        parts.append(
            f'<line x1="{x(effect):.1f}" y1="{TOP}" x2="{x(effect):.1f}" '
            f'y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
            f'<text x="{x(effect):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{100 * effect:+.0f} %</text>"
        )
    parts.append(
        f'<text x="{LEFT + inner_width / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">'
        "true effect (positive = better); solid WIN, dashed LOSS</text>"
    )
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        for key, dash in (("win", ""), ("loss", ' stroke-dasharray="5 4"')):
            points = " ".join(f"{x(p['effect']):.1f},{y(p[key]):.1f}" for p in curve)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" '
                f'stroke-width="1.8"{dash}/>'
            )
        at = TOP + 14 + 20 * index
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 14}" y1="{at}" x2="{WIDTH - RIGHT + 40}" y2="{at}" '
            f'stroke="{colour}" stroke-width="3"/>'
            f'<text x="{WIDTH - RIGHT + 46}" y="{at + 4}">{escape(name)}</text>'
        )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def save(path: Path, curves: Mapping[str, Curve]) -> None:
    """Write the plot. Raises ValueError for a file name that is not SVG's."""
    if path.suffix.lower() != ".svg":
        raise ValueError(f"{path}: the plot is an SVG file; name it something.svg")
    path.write_text(svg(curves), encoding="utf-8")
