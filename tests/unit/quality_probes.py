"""Probes made by hand: each position has a known KL, likeliest token and common mass."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from pytest_dsv41.quality.probe import Conditions, Position, Probe, ProbedPrompt

Kind = Literal["same", "flip", "thin", "far"]

_runs = itertools.count(1)


def _logs(*probabilities: tuple[int, float]) -> tuple[tuple[int, float], ...]:
    ranked = sorted(probabilities, key=lambda pair: (-pair[1], pair[0]))
    return tuple((token, math.log(p)) for token, p in ranked)


BASE = _logs((1, 0.4976), (2, 0.4974))
VECTORS: dict[Kind, tuple[tuple[int, float], ...]] = {
    "same": BASE,
    # The two likeliest change places.
    "flip": _logs((1, 0.4974), (2, 0.4976)),
    # Token 2 is in one list only: the common mass is 0.4976, OTHER is the same, the KL 0.
    "thin": _logs((1, 0.4976), (3, 0.4974)),
    "far": _logs((1, 0.60), (2, 0.395)),
}
FLIP_KL = 0.4976 * math.log(0.4976 / 0.4974) + 0.4974 * math.log(0.4974 / 0.4976)
FAR_KL = 0.4976 * math.log(0.4976 / 0.60) + 0.4974 * math.log(0.4974 / 0.395)


def make_probe(
    kinds: Sequence[Kind] | int,
    *,
    role: Literal["control", "candidate"] = "control",
    band: str | None = None,
    per_prompt: int = 8,
    subsets: Sequence[str] = ("short",),
    conditions: Conditions | None = None,
    top_n: int = 20,
    version: str = "1",
    corpus: str = "corpus",
    notes: tuple[str, ...] = (),
) -> Probe:
    """Return a probe whose positions have these lists; a number means so many `same` ones.

    Prompts take turns among `subsets`.
    """
    given: Sequence[Kind] = ["same"] * kinds if isinstance(kinds, int) else kinds
    count = math.ceil(len(given) / per_prompt)
    names = [f"p{number:03d}" for number in range(count)]
    return Probe(
        schema="dsv41-probe-1",
        run=f"probe-{next(_runs):016x}",
        role=role,
        band=band,
        engine="vllm",
        version=version,
        model="m",
        top_n=top_n,
        conditions=conditions or Conditions(),
        started_utc="2026-01-01T00:00:00Z",
        notes=notes,
        prompts=tuple(
            ProbedPrompt(name, subsets[i % len(subsets)], _sha(corpus + name), 100)
            for i, name in enumerate(names)
        ),
        positions=tuple(
            Position(
                names[i // per_prompt],
                92 + i % per_prompt,
                _sha(f"{corpus}{names[i // per_prompt]}{i % per_prompt}"),
                0,
                VECTORS[kind],
            )
            for i, kind in enumerate(given)
        ),
    )


def kinds(total: int, **counts: int) -> list[Kind]:
    """Return `total` kinds, so many of each named one first, the rest `same`."""
    out: list[Kind] = []
    for kind, number in counts.items():
        out += [kind] * number  # type: ignore[list-item]
    return out + ["same"] * (total - len(out))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
