"""KL of a candidate's recording against a reference's, row by row, streaming (FORMATS).

With `lp` the reference's log-probabilities and `lq` the candidate's log-softmax, S = Σ e^lp and
A = Σ e^lp (lp − lq): KL = A / S − ln S. The exact values that a recording keeps of its likeliest
tokens stand in for its 16-bit ones. Sums are in double precision. A value at a format's floor has
no mass of its own: it is left out of the reference, and bounds what the candidate gives a token.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference.dense import LOWEST, Block, Dense, Table
from pytest_dsv41.quality.reference.recording import check_same

__all__ = ["Scores", "row_fault", "score"]

_PIECE: Final = 8192
"""Tokens looked up at once: what fits the cache, and few enough that BLAS starts no threads."""
_BLOCK_BYTES: Final = 4 << 20
_BLOCK_ROWS: Final = 512
_ZERO_MASS: Final = 1e-12
"""The reference's mass on tokens whose probability the candidate gives as 0, still rounding."""


@dataclass(frozen=True)
class Scores:
    """One value a row: KL, candidate's and reference's NLL of the next token (nats), agreement."""

    kl: NDArray[np.float32]
    candidate_nll: NDArray[np.float32]
    reference_nll: NDArray[np.float32]
    top1: NDArray[np.bool_]


def score(
    reference: Dense,
    candidate: Dense,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Score every row; memory stays at a few blocks of 4 MiB a thread, however long the files.

    Args:
        reference, candidate: recordings of the same tokens at the same positions.
        threads: default: one for each processor, at most 8.
        progress: called with (rows done, rows in all), from any thread, one call at a time.

    Raises:
        MeasurementRefused: the kinds of `check_same`, or a damaged row, named: `logprob` (NaN, or
            above 0), `sum` (its probabilities do not add up to 1), `zero` (the candidate gives 0
            where the reference has mass, so that the KL is infinite), `nll`, `top`, `size`.
    """
    check_same(reference, candidate)
    work = _Work(reference, candidate, progress)
    count = threads or min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(count, thread_name_prefix="kl") as pool:
        try:
            for done in [pool.submit(work.run, count) for _ in range(count)]:
                done.result()
        finally:
            # A fault in one thread, or an interrupt in this one, ends the others.
            work.ended.set()
    return work.scores


class _Work:
    """What the threads share: the rows to do, and where their results go."""

    def __init__(
        self,
        reference: Dense,
        candidate: Dense,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.reference = reference
        self.candidate = candidate
        rows = reference.rows
        widest = max(reference.row_bytes, candidate.row_bytes)
        self.step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // widest))
        self.scores = Scores(
            kl=np.empty(rows, np.float32),
            candidate_nll=np.empty(rows, np.float32),
            reference_nll=np.empty(rows, np.float32),
            top1=np.empty(rows, np.bool_),
        )
        self._blocks = itertools.count(0, self.step)
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self._progress = progress
        self._done = 0

    def run(self, threads: int) -> None:
        """Score blocks until there are none; one thread's part."""
        sums = _Sums()
        try:
            with self.reference.reader() as p, self.candidate.reader() as q:
                while not self.ended.is_set():
                    with self._lock:
                        row0 = next(self._blocks)
                    count = min(self.step, self.reference.rows - row0)
                    if count <= 0:
                        return
                    left, right = p.read(row0, count), q.read(row0, count)
                    # Fetched while this block is summed: by then this thread's next one.
                    p.will_need(row0 + threads * self.step, self.step)
                    q.will_need(row0 + threads * self.step, self.step)
                    self._block(row0, left, right, sums)
                    self._say(count)
        except BaseException:
            self.ended.set()
            raise

    def _say(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(self._done, self.reference.rows)

    def _block(self, row0: int, p: Block, q: Block, sums: _Sums) -> None:
        totals = np.array([sums.of(p, q, row) for row in range(len(p.codes))])
        totals += _corrections(p, q)
        mass_p, cross, mass_q = totals.T
        _check_sums(self.reference, row0, p, mass_p)
        _check_sums(self.candidate, row0, q, mass_q)
        self._check_zeros(row0, p, q)
        rows = slice(row0, row0 + len(totals))
        # The candidate's log-softmax is its stored values less ln T, T being their mass.
        self.scores.kl[rows] = cross / mass_p + np.log(mass_q) - np.log(mass_p)
        self.scores.top1[rows] = p.top1 == q.top1
        for recording, block, into in (
            (self.reference, p, self.scores.reference_nll),
            (self.candidate, q, self.scores.candidate_nll),
        ):
            wrong = ~np.isfinite(block.nll) | (block.nll < -0.001)
            if wrong.any():
                row = int(np.argmax(wrong))
                raise MeasurementRefused(
                    "nll",
                    f"{recording.path}: {recording.where(row0 + row)}: the next token's negative "
                    f"log-likelihood is {block.nll[row]:g}",
                )
            into[rows] = block.nll

    def _check_zeros(self, row0: int, p: Block, q: Block) -> None:
        if q.zero is None:
            return
        for row in np.flatnonzero(q.codes.max(axis=1) >= q.zero):
            none = q.codes[row] == q.zero
            mass = p.table(int(row)).as_p.real[p.codes[row][none]]
            if mass.sum() > _ZERO_MASS:
                token = int(np.flatnonzero(none)[int(np.argmax(mass))])
                raise MeasurementRefused(
                    "zero",
                    f"{self.candidate.path}: {self.candidate.where(row0 + int(row))}: token "
                    f"{token} has the probability 0, and {mass.max():.3g} in the reference: the "
                    "KL is infinite",
                )


class _Sums:
    """One thread's buffers, and the sums over one row as it is stored."""

    def __init__(self) -> None:
        self._at = np.empty(_PIECE, np.intp)
        self._left = np.empty(_PIECE, np.complex128)
        self._right = np.empty(_PIECE, np.complex128)

    def of(self, p: Block, q: Block, row: int) -> tuple[float, float, float]:
        """Return (Σ e^lp, Σ e^lp (lp − lq), Σ e^lq) of a row."""
        as_p, as_q = p.table(row).as_p, q.table(row).as_q
        left_codes, right_codes = p.codes[row], q.codes[row]
        mass_p = cross = mass_q = 0.0
        for first in range(0, len(left_codes), _PIECE):
            piece = left_codes[first : first + _PIECE]
            at, left, right = self._at[: len(piece)], self._left[: len(piece)], self._right
            right = right[: len(piece)]
            np.copyto(at, piece)
            # Codes are 0 to 65,535 by their type: "wrap" only spares the check.
            np.take(as_p, at, out=left, mode="wrap")
            np.copyto(at, right_codes[first : first + _PIECE])
            np.take(as_q, at, out=right, mode="wrap")
            both = left.sum()
            mass_p += both.real
            cross += both.imag - np.dot(left.real, right.imag)
            mass_q += right.real.sum()
        return mass_p, cross, mass_q


def _corrections(p: Block, q: Block) -> NDArray[np.float64]:
    """Return what the exact values of the likeliest tokens change in each row's three sums."""
    changed = np.zeros((len(p.codes), 3))
    if p.top_ids.shape[1] == 0 and q.top_ids.shape[1] == 0:
        return changed
    same = p.top_ids[:, :, None] == q.top_ids[:, None, :]
    if p.top_ids.shape[1]:
        stored, other = p.pairs(p.top_ids), q.pairs(p.top_ids)
        exact = np.maximum(p.top_logp, LOWEST)
        mass = np.exp(exact)
        # The candidate's exact value where it keeps one of this token, else the stored one.
        kept = np.einsum("rij,rj->ri", same, np.maximum(q.top_logp, LOWEST))
        lq = np.where(same.any(axis=2), kept, other.imag)
        changed[:, 0] += (mass - stored.real).sum(axis=1)
        changed[:, 1] += (mass * (exact - lq) - stored.real * (stored.imag - other.imag)).sum(
            axis=1
        )
    if q.top_ids.shape[1]:
        stored, other = q.pairs(q.top_ids), p.pairs(q.top_ids)
        exact = np.maximum(q.top_logp, LOWEST)
        changed[:, 2] += (np.exp(exact) - stored.real).sum(axis=1)
        alone = ~same.any(axis=1)
        changed[:, 1] += (other.real * (stored.imag - exact)).sum(axis=1, where=alone)
    return changed


def _check_sums(recording: Dense, row0: int, block: Block, mass: NDArray[np.float64]) -> None:
    below, above = recording.slack
    wrong = ~((mass >= 1.0 - below) & (mass <= 1.0 + above))
    if wrong.any():
        row = int(np.argmax(wrong))
        kind, what = row_fault(block, row, float(mass[row]))
        raise MeasurementRefused(kind, f"{recording.path}: {recording.where(row0 + row)}: {what}")


def row_fault(block: Block, row: int, mass: float) -> tuple[str, str]:
    """Say why a row's mass is not near 1: (kind, what)."""
    if np.isnan(mass):
        table: Table = block.table(row)
        wrong = np.isnan(table.as_q.real[block.codes[row]])
        if wrong.any():
            token = int(np.argmax(wrong))
            value = table.logp[block.codes[row][token]]
            shown = "NaN, or far above 0" if np.isnan(value) else f"{value:g}: above 0"
            return "logprob", f"token {token} has the log-probability {shown}"
        return "top", "an exact value of a likeliest token is NaN"
    return "sum", f"its probabilities add up to {mass:.4f}"
