"""Published beside simulated: one row a number, with its standard error and distance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_dsv41.decision_v2.kernel import Floats

__all__ = [
    "LIMIT",
    "Row",
    "bound_row",
    "compare",
    "compare_clusters",
    "exact_row",
    "free_row",
    "print_rows",
]

LIMIT = 3.0
"""Standard errors beyond which a simulated number is marked."""


@dataclass(frozen=True)
class Row:
    """One number of a table, in per cent.

    `standard_error` is that of the difference between the two, both being simulated; `distance`
    is in standard errors after half a printed digit was taken off. `ok` is None where nothing was
    published to compare with. `note` explains a known difference.
    """

    table: str
    name: str
    published: float | None
    simulated: float
    standard_error: float
    distance: float | None
    ok: bool | None
    decimals: int = 1
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dict(self.__dict__)


def compare(
    table: str,
    name: str,
    hits: int,
    trials: int,
    published: float | None,
    published_trials: int | None,
    *,
    decimals: int = 1,
    most: float | None = None,
    note: str = "",
) -> Row:
    """`hits` of `trials` against a published per cent that `published_trials` gave (None: exact).

    `most` is a further bound on the plain difference, in percentage points.
    """
    rate = hits / trials
    if published is None:
        error = 100 * math.sqrt(rate * (1 - rate) / trials)
        return Row(table, name, None, 100 * rate, error, None, None, decimals, note)
    if published_trials is None:
        pooled, weight = published / 100, 1 / trials
    else:
        pooled = (hits + published / 100 * published_trials) / (trials + published_trials)
        weight = 1 / trials + 1 / published_trials
    # A published 0.0 or 100.0 is not certain: it may hide up to half a digit.
    half_digit = 0.5 * 10.0**-decimals
    pooled = min(max(pooled, half_digit / 100), 1 - half_digit / 100)
    error = 100 * math.sqrt(pooled * (1 - pooled) * weight)
    difference = abs(100 * rate - published)
    distance = max(0.0, difference - half_digit) / error
    ok = distance <= LIMIT and (most is None or difference <= most)
    return Row(table, name, published, 100 * rate, error, distance, ok, decimals, note)


def compare_clusters(
    table: str, name: str, rates: Floats, published: float | None, published_clusters: int
) -> Row:
    """A rate averaged over clusters (archives) against one averaged over `published_clusters`."""
    rate = 100 * float(rates.mean())
    between = 100 * float(rates.std(ddof=1))
    if published is None:
        error = between / math.sqrt(rates.size)
        return Row(table, name, None, rate, error, None, None)
    error = between * math.sqrt(1 / rates.size + 1 / published_clusters)
    difference = max(0.0, abs(rate - published) - 0.05)
    distance = difference / error if error else 0.0
    return Row(table, name, published, rate, error, distance, distance <= LIMIT)


def exact_row(
    table: str,
    name: str,
    hits: int,
    trials: int,
    published: float,
    *,
    decimals: int = 1,
    known: float | None = None,
) -> Row:
    """A replayed number: it must equal the published one to the printed digit.

    `known` is what the stream is known to give where that differs; the row then says so.
    """
    value = 100 * hits / trials
    target = published if known is None else known
    # Halves may have been rounded either way.
    ok = abs(value - target) <= 0.5 * 10.0**-decimals + 1e-9
    note = "" if known is None else f"known to give {known:.{decimals}f}"
    return Row(table, name, published, value, 0.0, None, ok, decimals, note)


def bound_row(
    table: str, name: str, hits: int, trials: int, most: int, of_trials: int, *, exact: bool
) -> Row:
    """A rate that was not published as a number, but is at most `most` of `of_trials`.

    A replay must keep that; a fresh simulation may exceed it by 3 standard errors of both runs.
    """
    rate, bound = hits / trials, most / of_trials
    error = math.sqrt(bound * (1 - bound) * (1 / trials + 1 / of_trials))
    ok = rate <= bound if exact else rate <= bound + LIMIT * error
    note = f"at most {most} of {of_trials:,}"
    return Row(table, name, None, 100 * rate, 100 * error, None, ok, note=note)


def free_row(table: str, name: str, value: float, published: float, *, decimals: int) -> Row:
    """A computed number without any error: it must equal the published one when rounded."""
    ok = round(value, decimals) == round(published, decimals)
    return Row(table, name, published, value, 0.0, None, ok, decimals)


def print_rows(rows: Sequence[Row]) -> None:
    """All rows as plain text, table by table; then how many are met, and which are not."""
    current = ""
    width = max(len(row.name) for row in rows)
    for row in rows:
        if row.table != current:
            current = row.table
            print(f"\n{current}")
            heads = f"{'published':>10} {'simulated':>10} {'std error':>10} {'distance':>9}"
            print(f"  {'':{width}} {heads}")
        digits = row.decimals
        published = "-" if row.published is None else f"{row.published:.{digits}f}"
        simulated = f"{row.simulated:.{digits + 2}f}"
        error = f"{row.standard_error:.{digits + 2}f}" if row.standard_error else "-"
        distance = "-" if row.distance is None else f"{row.distance:.2f}"
        mark = "  <-- differs" if row.ok is False else ""
        note = f"  ({row.note})" if row.note else ""
        print(
            f"  {row.name:{width}} {published:>10} {simulated:>10} {error:>10} {distance:>9}"
            f"{mark}{note}"
        )
    judged = [row for row in rows if row.published is not None and row.ok is not None]
    if judged:
        good = sum(row.ok is True for row in judged)
        print(f"\n{good} of {len(judged)} published numbers met.")
    for row in rows:
        if row.ok is False:
            print(f"differs: {row.table}: {row.name}")
