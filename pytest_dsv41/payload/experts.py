"""Which experts of a mixture are kept whole: the protection law.

An expert is protected when, in its layer, its share of the energy is at least 3 % and at least
three times its share of the routing (FRANK-ARCHON "The payload chain", step 5). A rank holds its
half of a layer's experts as two tables of one size, so the protected ones of each half must be even
in number: an odd half gains its next most energetic expert. Shares are compared as exact fractions;
what is exactly at a threshold is in. Ties go by energy share, then layer, then expert.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.payload.grams import Gram

__all__ = [
    "EXPERTS_MOST",
    "NAMES_SCHEMA",
    "Derivation",
    "Law",
    "Protected",
    "derive",
    "expert_name",
]

EXPERTS_MOST: Final = 1_000_000
"""Of one layer: a file's name has no more digits."""
NAMES_SCHEMA: Final = "dsv41-protected-experts-v1"


@dataclass(frozen=True)
class Law:
    """The thresholds, both inclusive."""

    energy_share: Fraction = Fraction(3, 100)
    over_routing: Fraction = Fraction(3)
    """How many times the routing share the energy share must be."""


@dataclass(frozen=True)
class Protected:
    """One expert that is kept whole, with its shares in its layer and the reason in words."""

    layer: int
    expert: int
    rank: int
    energy_share: Fraction
    routing_share: Fraction
    by_law: bool
    """False: added to make its half even."""
    why: str

    @property
    def name(self) -> str:
        """The expert's name in a recipe, both of its projections."""
        return expert_name(self.layer, self.expert)


@dataclass(frozen=True)
class Derivation:
    """What a derivation found. `protected` is in order of layer and expert."""

    protected: tuple[Protected, ...]
    layers: tuple[int, ...]
    experts: int
    """Experts of each layer."""
    empty: tuple[int, ...]
    """Layers in which nothing was routed or no energy was seen."""
    k: int
    domain: int
    law: Law

    def ranked(self) -> list[Protected]:
        """The protected experts, most energetic first."""
        return sorted(self.protected, key=lambda p: (-p.energy_share, p.layer, p.expert))

    def to_json(self) -> dict[str, Any]:
        """Return the derivation as `dsv41 experts derive --out` writes it."""
        return {
            "schema": NAMES_SCHEMA,
            "law": {
                "energy_share": float(self.law.energy_share),
                "over_routing": float(self.law.over_routing),
            },
            "layers": list(self.layers),
            "experts": self.experts,
            "empty": list(self.empty),
            "k": self.k,
            "domain": self.domain,
            "protected": [
                {
                    "name": p.name,
                    "layer": p.layer,
                    "expert": p.expert,
                    "rank": p.rank,
                    "energy_share": float(p.energy_share),
                    "routing_share": float(p.routing_share),
                    "by_law": p.by_law,
                    "why": p.why,
                }
                for p in self.protected
            ],
        }


def expert_name(layer: int, expert: int) -> str:
    """Return the pattern that names both projections of one expert."""
    return f"blk.{layer}.ffn_*_exps.{expert}.weight"


def derive(grams: Sequence[Gram], law: Law | None = None, *, experts: int = 0) -> Derivation:
    """Apply the law to one recording.

    Args:
        grams: every expert of every layer once.
        law: the thresholds; default: the document's.
        experts: how many a layer has; 0: one more than the largest that was seen.

    Raises:
        UsageError: an expert is missing, one is beyond `experts`, a half is odd and has none left
            to add, or `experts` is no such number.
    """
    if not 0 <= experts <= EXPERTS_MOST:
        raise UsageError(f"--experts {experts}: valid: 1 to {EXPERTS_MOST:,}")
    law = law or Law()
    by_layer: dict[int, list[Gram]] = defaultdict(list)
    for gram in grams:
        by_layer[gram.layer].append(gram)
    count = experts or 1 + max(gram.expert for gram in grams)
    _whole(by_layer, count)

    protected: list[Protected] = []
    empty = []
    for layer in sorted(by_layer):
        rows = by_layer[layer]
        energy = sum((Fraction(gram.energy) for gram in rows), Fraction())
        tokens = sum(gram.rows for gram in rows)
        if not energy or not tokens:
            empty.append(layer)
            continue
        shares = {g.expert: (Fraction(g.energy) / energy, Fraction(g.rows, tokens)) for g in rows}
        for rank in sorted({gram.rank for gram in rows}):
            half = [gram.expert for gram in rows if gram.rank == rank]
            half.sort(key=lambda expert: (-shares[expert][0], expert))
            protected += _half(layer, rank, half, shares, law)
    protected.sort(key=lambda p: (p.layer, p.expert))
    return Derivation(
        tuple(protected),
        tuple(sorted(by_layer)),
        count,
        tuple(empty),
        grams[0].k,
        grams[0].domain,
        law,
    )


def _whole(by_layer: dict[int, list[Gram]], count: int) -> None:
    for layer, rows in sorted(by_layer.items()):
        seen = sorted(gram.expert for gram in rows)
        for before, after in itertools.pairwise(seen):
            if before == after:
                raise UsageError(f"layer {layer} expert {after} twice")
        if seen[-1] >= count:
            raise UsageError(f"layer {layer} expert {seen[-1]}: a layer has {count} experts")
        missing = sorted(set(range(count)) - set(seen))
        if missing:
            told = ", ".join(map(str, missing[:8]))
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise UsageError(
                f"layer {layer}: no Gram of expert {told}{more}; a layer has {count} experts"
            )


def _half(
    layer: int,
    rank: int,
    half: Sequence[int],
    shares: dict[int, tuple[Fraction, Fraction]],
    law: Law,
) -> list[Protected]:
    """The protected experts of one rank's half, most energetic first."""

    def tell(expert: int, *, by_law: bool, why: str) -> Protected:
        return Protected(layer, expert, rank, *shares[expert], by_law, why)

    taken = []
    for expert in half:
        energy, routing = shares[expert]
        if energy >= law.energy_share and energy >= law.over_routing * routing:
            times = f"{float(energy / routing):.1f} times" if routing else "with none of"
            why = f"{_percent(energy)} of the energy, {times} its routing share"
            taken.append(tell(expert, by_law=True, why=why))
    if len(taken) % 2:
        chosen = {p.expert for p in taken}
        spare = next((expert for expert in half if expert not in chosen), None)
        if spare is None:
            raise UsageError(
                f"layer {layer} rank {rank}: all {len(taken)} experts are protected, an odd "
                "number, and none is left to make it even"
            )
        why = (
            f"{_percent(shares[spare][0])} of the energy: the next most energetic, "
            f"to make rank {rank}'s half even"
        )
        taken.append(tell(spare, by_law=False, why=why))
    return taken


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):.2f} %"
