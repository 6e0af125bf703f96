"""Which cells decide a window, and by which rule: repeats (win2-v1) or seeded pairs.

A seeded cell's repeat r is the same registered seed in every start, so repeat r of the candidate
start belongs to repeat r of each control start (win2-paired-v1, RULES section 2). Only C/X/C and
C/X have such pairs. What a window cannot decide is refused when its plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..text import one_line
from .source import choices
from .spec import CellUse, WindowSpec

__all__ = ["MIN_PAIRS", "check_deciding", "in_pairs", "is_seeded", "judged", "profile_of"]

MIN_PAIRS: Final = 6
"""Least pairs of a seeded decision cell (RULES section 2)."""
MAX_DECISION_CELLS: Final = 2
"""Most decision cells of repeats, and most of seeded pairs in one profile."""

_PAIRED = (["control", "candidate"], ["control", "candidate", "control"])


def is_seeded(definition: Mapping[str, Any]) -> bool:
    """Whether a cell's repeats are registered seeds."""
    return "seed_base" in definition


def judged(
    spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]], *, seeded: bool
) -> tuple[str, ...]:
    """The decision cells whose repeats are, or are not, registered seeds."""
    return tuple(name for name in spec.decision_cells if is_seeded(cells[name]) is seeded)


def in_pairs(spec: WindowSpec, definition: Mapping[str, Any]) -> bool:
    """Whether a cell's values are judged as seeded pairs in this window.

    A seeded cell that is only reported may stand in any window; where the starts have no pairs it
    is reported as every other cell.
    """
    return (
        is_seeded(definition)
        and _roles(spec) in _PAIRED
        and len({spec.repeats_of(start.name) for start in spec.starts}) == 1
    )


def profile_of(use: CellUse, definition: Mapping[str, Any]) -> str:
    """The profile of a cell, "single" or "multi": the window's word, else the cell's own."""
    return use.profile or str(definition.get("profile", "single"))


def check_deciding(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse decision cells that no one rule can judge in this window.

    Args:
        spec: the checked window.
        cells: the definition of each of its cells by name.

    Raises:
        SpecError: one line with file, line and key.
    """
    deciding = [
        (position, use, is_seeded(cells[use.name]))
        for position, use in enumerate(spec.cells)
        if use.decision
    ]
    counts: dict[str, int] = {}
    for position, use, seeded in deciding:
        key = ("cells", position, "decision")
        _, first, first_seeded = deciding[0]
        if seeded is not first_seeded:
            one, other = (use, first) if seeded else (first, use)
            raise spec.error(
                key,
                f"decision cell '{one.name}' is seeded and '{other.name}' is not: two rules "
                "cannot decide one window",
            )
        if cells[use.name].get("report_only"):
            raise spec.error(key, f"cell '{use.name}' is report-only and never decides")
        profile = profile_of(use, cells[use.name]) if seeded else ""
        counts[profile] = counts.get(profile, 0) + 1
        if counts[profile] > MAX_DECISION_CELLS:
            of = f" of profile {profile}" if profile else ""
            raise spec.error(
                key, f"{counts[profile]} decision cells{of}; at most {MAX_DECISION_CELLS}"
            )
    _check_seeds(spec, cells)
    if deciding and deciding[0][2]:
        _check_pairs(spec, deciding[0][1].name)
    _check_start_sd(spec, cells)
    _check_diff_cv(spec, cells)
    _check_identical(spec, cells)


def _roles(spec: WindowSpec) -> list[str]:
    return [spec.arm(start.arm).role for start in spec.starts]


def _check_seeds(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Every repeat of a seeded cell needs a registered seed."""
    for use in spec.cells:
        pairs = cells[use.name].get("pairs")
        for start in spec.starts:
            count = spec.repeats_of(start.name)
            if is_seeded(cells[use.name]) and pairs is not None and count > pairs:
                raise spec.error(
                    ("window", "repeats"),
                    f"{count} repeats in start {start.name}; cell '{use.name}' has seeds for "
                    f"{pairs}",
                )


def _check_pairs(spec: WindowSpec, cell: str) -> None:
    if _roles(spec) not in _PAIRED:
        raise spec.error(
            ("window", "schedule"),
            f"decision cell '{cell}' is seeded, which needs one candidate start after a control "
            f"start, or between two; valid: C/X/C, C/X; not '{one_line(spec.schedule, 60)}'",
        )
    repeats = {start.name: spec.repeats_of(start.name) for start in spec.starts}
    key = ("window", "repeats")
    if len(set(repeats.values())) > 1:
        told = ", ".join(f"{name} has {count}" for name, count in repeats.items())
        raise spec.error(
            key, f"decision cell '{cell}' is seeded, which needs equal repeats: {told}"
        )
    if min(repeats.values()) < MIN_PAIRS:
        raise spec.error(
            key,
            f"decision cell '{cell}' is seeded, which needs {MIN_PAIRS} pairs or more, not "
            f"{min(repeats.values())}",
        )


def _check_start_sd(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    known = [
        f"{use.name}/{metric}"
        for use in spec.cells
        if in_pairs(spec, cells[use.name])
        for metric in (use.primary, *use.guards)
        if metric
    ]
    for given in spec.start_sd:
        if not known:
            raise spec.error(
                ("window", "start_sd"), "belongs to seeded pairs, which this window does not have"
            )
        if given not in known:
            raise spec.error(
                ("window", "start_sd", given),
                f"no primary or guard of a seeded cell{choices(given, known)}",
            )


def _check_diff_cv(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    known = [
        f"{use.name}/{use.primary}"
        for use in spec.cells
        if use.primary and (spec.pairing != "none" or in_pairs(spec, cells[use.name]))
    ]
    for given in spec.diff_cv:
        if not known:
            raise spec.error(
                ("window", "diff_cv"), "belongs to pairs, which this window does not have"
            )
        if given not in known:
            raise spec.error(
                ("window", "diff_cv", given),
                f"no primary of a cell in pairs{choices(given, known)}",
            )


_BESIDE_DEFINITION = ("estimated_s", "profile", "pairs", "report_only")
"""What a plan knows of a cell besides `Cell.definition()`."""


def _check_identical(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Identical streams are expected of two control starts of the very cell the pilot measured."""
    for position, use in enumerate(spec.cells):
        if use.expect_identical is None:
            continue
        key = ("cells", position, "expect_identical")
        if not is_seeded(cells[use.name]):
            raise spec.error(key, f"cell '{use.name}' is not seeded")
        if _roles(spec) != _PAIRED[1]:
            raise spec.error(
                key,
                "needs two control starts to compare; valid: C/X/C, not "
                f"'{one_line(spec.schedule, 60)}'",
            )
        mine = {k: v for k, v in cells[use.name].items() if k not in _BESIDE_DEFINITION}
        told = use.expect_identical.cell
        for name in dict.fromkeys((*told, *mine)):
            if told.get(name) != mine.get(name):
                raise spec.error(
                    key,
                    f"the A/A pilot's cell {use.name} is another one: {name} is "
                    f"{one_line(repr(told.get(name)), 80)} there and "
                    f"{one_line(repr(mine.get(name)), 80)} here",
                )
