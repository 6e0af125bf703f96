"""A dense recording: every token's log-probability at every scored position, as 16-bit codes.

Both formats that hold one store a row as `n_vocab` 16-bit codes; a table of 65,536 entries gives
each code its log-probability. So a row is never turned into floats: sums over it are sums over
looked-up table entries, in double precision, piece by piece in the processor's cache.
"""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference.recording import Recording

__all__ = [
    "LOGP_MAX",
    "Block",
    "Codes",
    "Dense",
    "Reader",
    "Table",
    "read_exact",
]

Codes = NDArray[np.uint16]
LOGP_MAX: Final = 0.001
"""A log-probability above this is none; up to it, it is rounding."""
N_CODES: Final = 1 << 16


LOWEST: Final = -65504.0
"""The lowest finite float16: what minus infinity counts as where there is no mass on it."""


class Table:
    """What each of the 65,536 codes stands for: `logp[code]`, a natural log-probability.

    A code that is no log-probability is NaN in the pairs, so that no sum over it passes. `absent`
    codes have no probability of their own: minus infinity, or a value below the format's floor.
    """

    def __init__(self, logp: NDArray[np.float64], absent: NDArray[np.bool_]) -> None:
        self.logp = logp
        self._absent = absent

    @functools.cached_property
    def as_q(self) -> NDArray[np.complex128]:
        """(e^logp, logp) of each code, as one complex number: one look-up gives both."""
        pairs = np.empty(len(self.logp), np.complex128)
        pairs.imag = np.maximum(self.logp, LOWEST)
        pairs.real = np.exp(pairs.imag)
        pairs.real[self._absent] = 0.0
        pairs[~(self.logp <= LOGP_MAX)] = complex(np.nan, np.nan)
        return pairs

    @functools.cached_property
    def as_p(self) -> NDArray[np.complex128]:
        """(e^logp, e^logp · logp) of each code."""
        pairs = self.as_q.copy()
        pairs.imag *= pairs.real
        return pairs


@dataclass(frozen=True)
class Block(ABC):
    """Consecutive rows of a recording.

    `codes` has the shape (rows, n_vocab). `top_ids` and `top_logp`, (rows, k), are the likeliest
    tokens with their exact values, the likeliest first; k is 0 where a format keeps none. `top1`
    is the likeliest token of each row, a tie the lower id; `nll` the negative log-likelihood of
    each row's next token, in nats. `zero` is the code of a probability of 0, where there is one.
    """

    codes: Codes
    top_ids: NDArray[np.int32]
    top_logp: NDArray[np.float64]
    top1: NDArray[np.int32]
    nll: NDArray[np.float64]
    zero: int | None

    @abstractmethod
    def table(self, row: int) -> Table:
        """Return what the codes of one row stand for."""

    @abstractmethod
    def pairs(self, ids: NDArray[np.int32]) -> NDArray[np.complex128]:
        """Return `Table.as_q` of the tokens `ids`, shape (rows, k), as they are stored."""

    def codes_of(self, ids: NDArray[np.int32]) -> Codes:
        """Return the codes of the tokens `ids`, shape (rows, k)."""
        return self.codes[np.arange(len(ids))[:, None], ids]


class Reader(ABC):
    """One thread's way to a recording's rows: own descriptors, own buffers, a context manager."""

    @abstractmethod
    def read(self, row0: int, count: int) -> Block:
        """Return `count` rows from `row0` on; valid until the next call.

        Raises:
            MeasurementRefused: kinds `size`, and those of a damaged row.
        """

    @abstractmethod
    def will_need(self, row0: int, count: int) -> None:
        """Let the kernel fetch these rows ahead; rows beyond the end are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class Dense(Recording):
    """A dense recording.

    `row_bytes` is what a row takes in the file; `slack` how far the probabilities of a row may add
    up beside 1, below and above, by the format's rounding alone.
    """

    row_bytes: int
    slack: tuple[float, float]

    @abstractmethod
    def reader(self) -> Reader:
        """Open the rows for reading."""


def read_exact(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from `offset` on; a file that ends before is refused, kind `size`."""
    while buffer:
        got = os.preadv(fd, [buffer], offset)
        if got == 0:
            raise MeasurementRefused("size", f"{path}: ends at byte {offset}, too short")
        buffer = buffer[got:]
        offset += got
