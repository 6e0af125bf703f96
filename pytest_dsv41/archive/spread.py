"""How much a control value moves: spreads of one definition, never of several.

A definition is cell, metric, max_tokens, clock cap, commit and prompt identity. Values of
different definitions are never pooled: acceptance follows the prompt, ms per round follows the
answer's length and the clock (WIN2, "Spreads never pool definitions").

All SDs divide by n − 1; a CV is SD / mean, as a fraction.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pytest_dsv41.archive.errors import MixedDefinitions
from pytest_dsv41.archive.index import COLUMNS, StaleIndex
from pytest_dsv41.archive.rows import DEFINITION, PREFIX, definition_bytes, field_bytes
from pytest_dsv41.archive.store import Reader, Where, allowed_values, answer

__all__ = ["Spread", "WindowSpread", "archive_spread", "archive_spreads", "pooled_cv"]

_PICKED = DEFINITION[2:]


@dataclass(frozen=True)
class WindowSpread:
    """One window's values of a definition: count, mean, SD and CV (None for a single value)."""

    window: str
    n: int
    mean: float
    sd: float | None
    cv: float | None


@dataclass(frozen=True)
class Spread:
    """The spread of one definition's control values; every figure is None where n is too small.

    Attributes:
        n: values.
        mean, sd, cv, minimum, maximum: over all values; `sd` and `cv` need two.
        cv_within: the CV of one repeat inside a window, pooled over windows and weighted by their
            degrees of freedom (RULES section 3); windows with one repeat drop out.
        df_within: those degrees of freedom.
        cv_between: the CV of the windows' means, what moves from window to window; needs two.
        windows: each window's own values, in the archive's order.
    """

    cell: str
    metric: str
    max_tokens: int | None
    clock_cap_mhz: int | None
    commit: str | None
    prompt_sha256: str | None
    n: int
    mean: float | None
    sd: float | None
    cv: float | None
    minimum: float | None
    maximum: float | None
    cv_within: float | None
    df_within: int
    cv_between: float | None
    windows: tuple[WindowSpread, ...]

    @property
    def definition(self) -> dict[str, Any]:
        """The fields that make the definition, as a `where` that picks it."""
        return {field: getattr(self, field) for field in DEFINITION}

    def to_dict(self) -> dict[str, Any]:
        """Return the spread as JSON."""
        return asdict(self)


def _mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    # Equal values have a mean that is exactly theirs and SD 0, whatever the sum rounds to.
    if all(value == values[0] for value in values):
        return float(values[0]), 0.0 if len(values) > 1 else None
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1))


def _cv(mean: float | None, sd: float | None) -> float | None:
    return None if sd is None or not mean else sd / abs(mean)


def pooled_cv(windows: Iterable[WindowSpread]) -> tuple[float | None, int]:
    """Return the df-weighted CV of one repeat within a window, and its degrees of freedom."""
    total, df = 0.0, 0
    for window in windows:
        if window.cv is not None:
            total += (window.n - 1) * window.cv**2
            df += window.n - 1
    return (math.sqrt(total / df) if df else None), df


def spread_of(definition: dict[str, Any], values: Iterable[tuple[str, float]]) -> Spread:
    """Return the spread of (window, value) pairs of one definition, in the archive's order."""
    by_window: dict[str, list[float]] = {}
    for window, value in values:
        by_window.setdefault(window, []).append(value)
    windows = []
    for window, some in by_window.items():
        mean, sd = _mean_sd(some)
        windows.append(WindowSpread(window, len(some), mean, sd, _cv(mean, sd)))
    every = list(itertools.chain.from_iterable(by_window.values()))
    all_mean, all_sd = _mean_sd(every) if every else (None, None)
    within, df = pooled_cv(windows)
    between = _mean_sd([window.mean for window in windows]) if windows else (None, None)
    return Spread(
        **{field: definition.get(field) for field in DEFINITION},  # type: ignore[arg-type]
        n=len(every),
        mean=all_mean,
        sd=all_sd,
        cv=_cv(all_mean, all_sd),
        minimum=min(every, default=None),
        maximum=max(every, default=None),
        cv_within=within,
        df_within=df,
        cv_between=_cv(*between),
        windows=tuple(windows),
    )


def archive_spread(
    path: str | os.PathLike[str], cell: str, metric: str, where: Where | None = None
) -> Spread:
    """Return the spread of a cell's metric over the control rows that `where` picks.

    Args:
        path: the archive; a missing one, or one without such rows, gives a spread with n = 0.
        where: as for `archive_rows`, for instance {'max_tokens': 512, 'clock_cap_mhz': 2300}.

    Raises:
        MixedDefinitions: the rows are of several definitions; the message says what differs.
    """
    wanted = {**allowed_values(where), "cell": [cell], "metric": [metric]}
    return answer(path, lambda reader: _spread(reader, wanted))


def _spread(reader: Reader | None, wanted: dict[str, list[Any]]) -> Spread:
    found = [] if reader is None else _definitions(reader, wanted)
    if len(found) > 1:
        raise _mixed([definition for _, definition in found])
    if reader is None or not found:
        picked = {
            field: wanted[field][0] for field in DEFINITION if len(wanted.get(field, ())) == 1
        }
        return spread_of(picked, ())
    number, definition = found[0]
    if wanted.keys() <= set(DEFINITION):
        return spread_of(definition, _values(reader, number, definition))
    return spread_of(definition, [(row["window"], row["value"]) for _, row in reader.rows(wanted)])


def archive_spreads(path: str | os.PathLike[str], cell: str, metric: str) -> list[Spread]:
    """Return one spread per definition of a cell's metric, in the archive's order."""
    wanted = {"cell": [cell], "metric": [metric]}
    return answer(path, lambda reader: [] if reader is None else _spreads(reader, wanted))


def _spreads(reader: Reader, wanted: dict[str, list[Any]]) -> list[Spread]:
    return [
        spread_of(definition, _values(reader, number, definition))
        for number, definition in _definitions(reader, wanted)
    ]


def _definitions(reader: Reader, wanted: dict[str, list[Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Return the definitions that have rows among `wanted`'s."""
    indexed = {field: wanted[field] for field in wanted if field in COLUMNS}
    if indexed.keys() == wanted.keys():
        return reader.index.definitions(indexed)
    # A filter that the index does not know (a date, an audit field): look at the rows.
    seen = {tuple(row[field] for field in DEFINITION) for _, row in reader.rows(wanted)}
    return [
        (number, definition)
        for number, definition in reader.index.definitions(indexed)
        if tuple(definition[field] for field in DEFINITION) in seen
    ]


def _mixed(found: list[dict[str, Any]]) -> MixedDefinitions:
    differ: dict[str, list[object]] = {}
    for field in _PICKED:
        values: list[object] = []
        for definition in found:
            if definition[field] not in values:
                values.append(definition[field])
        if len(values) > 1:
            differ[field] = values
    shown = "; ".join(
        f"{field} {', '.join(str(value)[:12] for value in values)}"
        for field, values in differ.items()
    )
    name = f"{found[0]['cell']}/{found[0]['metric']}"
    return MixedDefinitions(
        f"{name}: rows of {len(found)} definitions are never pooled; pick one by {shown}",
        differ=differ,
    )


def _values(reader: Reader, number: int, definition: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (window, value) of a definition's rows, each read from the archive's own bytes."""
    # What a line must hold between its chain prefix and its value, and behind the value.
    between = definition_bytes(definition) + b'"value":'
    fixed = len(PREFIX % (0, b"0" * 64)) - 1
    room = len(between) + 400
    window_bytes: dict[str, bytes] = {}
    values = []
    for seq, offset, window in reader.index.offsets(number):
        start = offset + fixed + len(str(seq))
        data = os.pread(reader.fd, room, start)
        named = window_bytes.get(window)
        if named is None:
            named = window_bytes[window] = field_bytes("window", window)
        end = data.find(b",", len(between))
        if not data.startswith(between) or not data.startswith(named, end + 1):
            raise StaleIndex(f"row {seq} does not stand where the index has it")
        values.append((window, float(data[len(between) : end])))
    return values
