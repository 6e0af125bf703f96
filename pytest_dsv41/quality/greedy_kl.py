"""The distributions where a candidate left the control, asked again of a control start.

A near tie says that the candidate's choice was no surprise; it does not say that its distribution
is the control's. The candidate keeps its candidates at every divergence; a control start that
follows is asked for the same prefixes with a fresh salt (WIN2, "Greedy refinement").
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytest_dsv41.errors import UsageError
from pytest_dsv41.measure.group import Endpoint
from pytest_dsv41.quality.greedy import Divergence, GreedyProgress, ask_prefixes
from pytest_dsv41.quality.kl import TOP_N, PositionKL, top20_kl

__all__ = ["BOUND_LEAST", "RecordedKL", "compare_recorded", "kl_bound", "top20_kl"]

BOUND_LEAST: Final = 0.005
"""Nats: the least default bound."""


@dataclass(frozen=True)
class RecordedKL:
    """One divergence: KL(control || candidate) in nats, and whether it keeps the bound.

    `MASS` is a common mass below 0.99: the coarse KL cannot vouch for the position.
    """

    name: str
    at: int
    position: PositionKL
    bound: float
    outcome: Literal["OK", "KL", "MASS"]


def kl_bound(aa_floor: float | None = None) -> float:
    """Return the default bound: max(0.005, 2 x the A/A floor), in nats.

    Raises:
        UsageError: a floor that is negative or not finite.
    """
    if aa_floor is None:
        return BOUND_LEAST
    if not 0 <= aa_floor < float("inf"):
        raise UsageError(f"A/A floor {aa_floor!r}: valid: 0 and more nats")
    return max(BOUND_LEAST, 2.0 * aa_floor)


def compare_recorded(
    endpoint: Endpoint,
    candidate_rows: Sequence[Divergence],
    salt_prefix: str,
    *,
    bound: float,
    deadline_s: float,
    top_n: int = TOP_N,
    progress: Callable[[GreedyProgress], None] | None = None,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> tuple[RecordedKL, ...]:
    """Ask the control at `endpoint` for the candidate's recorded prefixes and compare.

    Args:
        endpoint: a control start.
        candidate_rows: the candidate's divergences.
        salt_prefix: the beginning of the fresh cache salts.
        bound: the registered KL in nats that a position may have at most.
        deadline_s: everything is over by then.
        top_n: entries of a list, as the candidate recorded them.
        progress: called after each position.
        stop: ends the run within a fraction of a second once it is set.
        context: TLS settings; None for the system's.

    Raises:
        UsageError: a bound that is none.
        MeasurementFailed, MeasurementRefused: as in `greedy.ask_prefixes`.
    """
    if not 0 <= bound < float("inf"):
        raise UsageError(f"bound {bound!r}: valid: 0 and more nats")
    tops = ask_prefixes(
        endpoint,
        [(row.name, row.prefix_ids) for row in candidate_rows],
        top_n=top_n,
        salt_prefix=salt_prefix,
        deadline_s=deadline_s,
        progress=progress,
        stop=stop,
        context=context,
    )
    out = []
    for row, top in zip(candidate_rows, tops, strict=True):
        position = top20_kl(top, row.top, top_n=top_n)
        outcome: Literal["OK", "KL", "MASS"] = "OK"
        if position.kl > bound:
            outcome = "KL"
        elif not position.trusted:
            outcome = "MASS"
        out.append(RecordedKL(row.name, row.at, position, bound, outcome))
    return tuple(out)
