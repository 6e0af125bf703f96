"""A dense recording: every token's log-probability at every scored position, as 16-bit codes.

Both formats that hold one store a row as `n_vocab` 16-bit codes. A row is decoded piece by piece
into float32, in the processor's cache: what that rounds is far below the 16 bits, and the likeliest
tokens, which hold most of a row's mass, can be had in double precision beside it.
"""

from __future__ import annotations

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
    "LOWEST",
    "Block",
    "Codes",
    "Dense",
    "Floats32",
    "Floats64",
    "Reader",
    "read_exact",
]

Codes = NDArray[np.uint16]
Floats32 = NDArray[np.float32]
Floats64 = NDArray[np.float64]
LOGP_MAX: Final = 0.001
"""A log-probability above this is none; up to it, it is rounding."""
LOWEST: Final = -65504.0
"""The lowest finite float16: what minus infinity counts as where there is no mass on it."""


@dataclass(frozen=True)
class Block(ABC):
    """Consecutive rows of a recording.

    `codes` has the shape (rows, n_vocab). `top_ids` and `top_logp`, (rows, k), are the likeliest
    tokens with their exact values, the likeliest first; k is 0 where a format keeps none. `top1` is
    the likeliest token of each row, a tie the lower id; `nll` the negative log-likelihood of each
    row's next token, in nats.

    A token is absent where it has no probability of its own: minus infinity, or a value below the
    format's floor. It then has a log-probability, `LOWEST` or the floor, and the probability 0.
    """

    codes: Codes
    top_ids: NDArray[np.int32]
    top_logp: Floats64
    top1: NDArray[np.int32]
    nll: Floats64

    @abstractmethod
    def decode(self, row: int, first: int, logp: Floats32, mass: Floats32) -> None:
        """Write log-probabilities and probabilities of the tokens from `first` on.

        As many as the buffers hold. Of a row that `fault` finds wrong the values mean nothing.
        """

    @abstractmethod
    def stored(self, ids: NDArray[np.integer]) -> tuple[Floats64, Floats64]:
        """Return log-probabilities and probabilities of the tokens `ids`, shapes (rows, k)."""

    @abstractmethod
    def fault(self, row: int) -> str | None:
        """Say which token of a row has a code that is no log-probability; None: none has."""

    def zeros(self, row: int) -> NDArray[np.bool_] | None:  # noqa: ARG002
        """Return which tokens of a row have the probability 0; None: none has."""
        return None

    def decoded(self, row: int) -> tuple[Floats32, Floats32]:
        """Return log-probabilities and probabilities of a whole row."""
        logp, mass = np.empty((2, self.codes.shape[1]), np.float32)
        self.decode(row, 0, logp, mass)
        return logp, mass

    def codes_of(self, ids: NDArray[np.integer]) -> Codes:
        """Return the codes of the tokens `ids`, shape (rows, k)."""
        codes: Codes = self.codes[np.arange(len(ids))[:, None], ids]
        return codes


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
