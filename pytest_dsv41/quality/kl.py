"""The divergence of two next-token distributions of which only the largest parts are known.

A server gives the log-probabilities of its `top_n` likeliest tokens; everything else is one lump,
OTHER. The coarse KL over the shared tokens and OTHER never exceeds the KL over the vocabulary and
may lie far below it, so each position also says how much mass both lists share (RULES section 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_dsv41.errors import MeasurementRefused

__all__ = [
    "COMMON_MASS",
    "LOGPROB_MAX",
    "MASS_MAX",
    "OTHER_MIN",
    "TOP_N",
    "PositionKL",
    "Vector",
    "checked_vector",
    "top20_kl",
    "top_token",
]

TOP_N: Final = 20
"""How many entries a list has; another number is part of a registration."""
COMMON_MASS: Final = 0.99
"""From this common mass on a position's coarse KL is trusted."""
LOGPROB_MAX: Final = 0.001
"""A log-probability above this is none."""
MASS_MAX: Final = 1.001
"""A list's probabilities may add up to this; what is above 1 is rounding and clamped."""
OTHER_MIN: Final = 1e-9
"""The least mass that the candidate's OTHER is taken to have."""

Vector = tuple[tuple[int, float], ...]
"""(token id, natural log-probability), the likeliest first, a tie the smaller id first."""


@dataclass(frozen=True)
class PositionKL:
    """Two distributions at one position, control against candidate.

    `kl` is KL(control || candidate) in nats over the shared tokens and OTHER; `common_mass` the
    smaller of the two arms' mass on the shared tokens, 0 to 1.
    """

    kl: float
    common_mass: float
    top1_same: bool
    control_top1: int
    candidate_top1: int
    shared: int

    @property
    def trusted(self) -> bool:
        """Whether the lists share enough for the coarse KL to stand for the whole."""
        return self.common_mass >= COMMON_MASS


def checked_vector(pairs: Iterable[tuple[int, float]], *, top_n: int = TOP_N) -> Vector:
    """Return the `top_n` largest entries of a list, in order; a probability of 0 is absent.

    Minus infinity, and what engines write instead of it (-9999, -3.4e38), is a probability of 0.

    Raises:
        MeasurementRefused: kinds `nan` (NaN or plus infinity), `logprob` (above 0.001),
            `duplicate-id`, `all-zero` (every log-probability is 0: the server gives none),
            `empty` (no entry, or none above 0), `mass` (more than 1.001 in all).
    """
    given = list(pairs)
    seen: set[int] = set()
    present: list[tuple[int, float]] = []
    for token, value in given:
        if math.isnan(value) or value == math.inf:
            raise MeasurementRefused("nan", f"token {token} has the log-probability {value}")
        if value > LOGPROB_MAX:
            raise MeasurementRefused(
                "logprob", f"token {token} has the log-probability {value:g}: above 0"
            )
        if token in seen:
            raise MeasurementRefused("duplicate-id", f"token {token} is listed twice")
        seen.add(token)
        if math.exp(value) > 0.0:
            present.append((token, float(value)))
    if not present:
        raise MeasurementRefused("empty", "no token has a probability")
    # Absent tokens are as if not listed: one token at 0 with minus infinity beside it is what a
    # server gives that tells its sampled token in place of probabilities (RULES section 4).
    if all(value == 0.0 for _, value in present):
        raise MeasurementRefused(
            "all-zero", "every log-probability is 0: the server gives no probabilities"
        )
    vector = tuple(sorted(present, key=_rank)[:top_n])
    mass = math.fsum(math.exp(value) for _, value in vector)
    if mass > MASS_MAX:
        raise MeasurementRefused("mass", f"the probabilities add up to {mass:.4f}")
    return vector


def top20_kl(
    control: Sequence[tuple[int, float]],
    candidate: Sequence[tuple[int, float]],
    *,
    top_n: int = TOP_N,
) -> PositionKL:
    """Compare two lists of (token id, log-probability) at one position (RULES section 4).

    A token that only one list has counts as OTHER; lists that share nothing have a KL of 0 and a
    common mass of 0. Of more than `top_n` entries the largest are taken.

    Raises:
        MeasurementRefused: one of the lists is none; kinds as in `checked_vector`.
    """
    p = checked_vector(control, top_n=top_n)
    q = checked_vector(candidate, top_n=top_n)
    other = dict(q)
    shared = [(value, other[token]) for token, value in sorted(p) if token in other]
    control_mass = math.fsum(math.exp(lp) for lp, _ in shared)
    candidate_mass = math.fsum(math.exp(lq) for _, lq in shared)
    rest = max(0.0, 1.0 - control_mass)
    kl = math.fsum(math.exp(lp) * (lp - lq) for lp, lq in shared)
    if rest > 0.0:
        kl += rest * math.log(rest / max(OTHER_MIN, 1.0 - candidate_mass))
    return PositionKL(
        kl=max(0.0, kl),
        common_mass=min(1.0, control_mass, candidate_mass),
        top1_same=p[0][0] == q[0][0],
        control_top1=p[0][0],
        candidate_top1=q[0][0],
        shared=len(shared),
    )


def top_token(vector: Sequence[tuple[int, float]]) -> int:
    """Return the token of the highest log-probability; of a tie the smaller id."""
    return min(vector, key=_rank)[0]


def _rank(pair: tuple[int, float]) -> tuple[float, int]:
    return (-pair[1], pair[0])
