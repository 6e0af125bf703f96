"""RADGRAM2 files made by hand, from the format's description alone."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


def gram_bytes(
    diagonal: Sequence[float],
    *,
    rows: int,
    rank: int = 0,
    domain: int = 0,
    magic: bytes = b"RADGRAM2",
    k: int | None = None,
) -> bytes:
    """One file: the diagonal as given, everything beside it noise that must not count."""
    size = len(diagonal)
    matrix = np.random.default_rng(rows).normal(size=(size, size)).astype("<f4")
    np.fill_diagonal(matrix, diagonal)
    head = magic + struct.pack("<IIQII", size if k is None else k, rank, rows, domain, 0)
    return head + matrix.tobytes()


def write_layer(
    folder: Path, layer: int, energies: Sequence[float], routed: Sequence[int] | None = None
) -> None:
    """One layer: expert e has energy `energies[e]` and `routed[e]` tokens; rank 0 has one half."""
    half = len(energies) // 2
    for expert, energy in enumerate(energies):
        rank = int(expert >= half)
        rows = routed[expert] if routed else 1
        # Four parts, exact in float32 for the energies of the tests.
        data = gram_bytes([energy / 2, energy / 4, energy / 8, energy / 8], rows=rows, rank=rank)
        (folder / f"gram.r{rank}.blk.{layer}.ffn_down_exps.{expert}.bin").write_bytes(data)


def spread(total: float, given: Mapping[int, float], experts: int = 16) -> list[float]:
    """Energies that add up to `total`: those given, the rest in equal parts."""
    rest = (total - sum(given.values())) / (experts - len(given))
    return [given.get(expert, rest) for expert in range(experts)]
