"""Random numbers: the published streams replayed, and fast fresh ones in bounded chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["DEFAULT_SEED", "PythonGauss", "Step", "chunks"]

Floats = npt.NDArray[np.float64]

DEFAULT_SEED = 20_261_027
CHUNK = 8_192
"""Trials at a time: the arrays of one chunk stay in a core's cache."""


class Step(Protocol):
    """Told after each chunk how many trials it held."""

    def __call__(self, trials: int, /) -> None: ...


class PythonGauss:
    """`random.Random(seed).gauss(0, 1)` call by call, up to a last digit, as arrays.

    The same generator seeded the same way (init_by_array), and the same pairs of uniforms through
    the same transformation, as array operations: a hundred times faster than the method's calls.
    """

    def __init__(self, seed: int) -> None:
        self._uniform = np.random.RandomState([seed])
        self._kept = np.empty(0)

    def take(self, count: int) -> Floats:
        """The next `count` values."""
        pairs = (count - self._kept.size + 1) // 2
        uniform = self._uniform.random_sample(2 * pairs)
        angle = uniform[::2] * (2 * np.pi)
        radius = np.sqrt(-2 * np.log(1 - uniform[1::2]))
        fresh = np.empty(2 * pairs)
        np.multiply(np.cos(angle), radius, out=fresh[::2])
        np.multiply(np.sin(angle), radius, out=fresh[1::2])
        values = np.concatenate([self._kept, fresh])
        self._kept = values[count:].copy()
        return values[:count]

    def columns(self, per_trial: int, trials: int) -> Floats:
        """The next `trials` trials of `per_trial` values each, laid out (per_trial, trials)."""
        return np.ascontiguousarray(self.take(per_trial * trials).reshape(trials, per_trial).T)


def chunks(trials: int, size: int = CHUNK) -> Iterator[int]:
    """The sizes of the chunks that make up `trials`."""
    for start in range(0, trials, size):
        yield min(size, trials - start)
