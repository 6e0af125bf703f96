"""KL of a candidate's recording against a reference's, row by row, streaming (FORMATS).

With `lp` the reference's log-probabilities and `lq` the candidate's log-softmax, S = Σ e^lp and
A = Σ e^lp (lp − lq): KL = A / S − ln S. The candidate's log-softmax is its stored values `v` less
ln T, T = Σ e^v, so that KL = Σ e^lp (lp − v) / S + ln (T / S). Most of a row's sums lies in its
likeliest tokens: those of both lists are summed in double precision with the exact values that a
recording keeps of them, and left out of the sums over the vocabulary, which are in float32. T − S
is summed as one, so that what float32 rounds vanishes with the difference of the two. A value at a
format's floor has no mass of its own: it is left out of the reference, and bounds what the
candidate gives a token.
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
from pytest_dsv41.quality.reference.dense import LOWEST, Block, Dense, Floats32, Floats64
from pytest_dsv41.quality.reference.recording import check_same

__all__ = ["Scores", "score"]

_PIECE: Final = 1 << 16
"""Tokens decoded at once: four buffers of them fit a processor's second cache."""
_RUN: Final = 1 << 10
"""Tokens summed in float32; sums of such runs are added in double precision."""
_BLOCK_BYTES: Final = 2 << 20
"""What a thread reads at once of each recording: its codes are then decoded from the cache."""
_AHEAD: Final = 2
"""Blocks of each thread that the kernel is asked to fetch before they are read."""
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
    """Score every row; memory stays at a few blocks of 2 MiB a thread, however long the files.

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
                    # Fetched while this block and the next ones are summed.
                    ahead = row0 + _AHEAD * threads * self.step
                    p.will_need(ahead, self.step)
                    q.will_need(ahead, self.step)
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
        both = ((self.reference, p), (self.candidate, q))
        for recording, block in both:
            for row in range(len(block.codes)):
                wrong = block.fault(row)
                if wrong is not None:
                    raise _fault("logprob", recording, row0 + row, wrong)
        totals = sums.of(p, q)
        mass, cross, more = totals.T
        for (recording, block), found in zip(both, (mass, mass + more), strict=True):
            _check_sums(recording, row0, block, found)
        self._check_zeros(row0, p, q)
        rows = slice(row0, row0 + len(totals))
        self.scores.kl[rows] = cross / mass + np.log1p(more / mass)
        self.scores.top1[rows] = p.top1 == q.top1
        for (recording, block), into in zip(
            both, (self.scores.reference_nll, self.scores.candidate_nll), strict=True
        ):
            odd = ~np.isfinite(block.nll) | (block.nll < -0.001)
            if odd.any():
                row = int(np.argmax(odd))
                what = f"the next token's negative log-likelihood is {block.nll[row]:g}"
                raise _fault("nll", recording, row0 + row, what)
            into[rows] = block.nll

    def _check_zeros(self, row0: int, p: Block, q: Block) -> None:
        for row in range(len(q.codes)):
            zeros = q.zeros(row)
            if zeros is None:
                continue
            mass = np.where(zeros, p.decoded(row)[1], 0.0)
            if mass.sum() > _ZERO_MASS:
                token = int(np.argmax(mass))
                raise _fault(
                    "zero",
                    self.candidate,
                    row0 + row,
                    f"token {token} has the probability 0, and {mass[token]:.3g} in the "
                    "reference: the KL is infinite",
                )


class _Sums:
    """One thread's buffers, and the sums over a block's rows."""

    def __init__(self) -> None:
        self._buffers = np.empty((4, _PIECE), np.float32)

    def of(self, p: Block, q: Block) -> Floats64:
        """Return S = Σ e^lp, Σ e^lp (lp − v) and T − S = Σ (e^v − e^lp) of each row."""
        ids, totals = _likeliest(p, q)
        n_vocab = p.codes.shape[1]
        firsts = range(0, n_vocab, _PIECE)
        # Where each piece's tokens begin and end in a row of `ids`.
        edges = (ids[:, :, None] < np.array([*firsts, n_vocab])).sum(axis=1)
        for row, (own, cuts, total) in enumerate(zip(ids, edges.tolist(), totals, strict=True)):
            for number, first in enumerate(firsts):
                size = min(_PIECE, n_vocab - first)
                whole = -(-size // _RUN) * _RUN
                lp, mp, lq, mq = self._buffers[:, :whole]
                p.decode(row, first, lp[:size], mp[:size])
                q.decode(row, first, lq[:size], mq[:size])
                for unused in (lp, mp, lq, mq):
                    unused[size:] = 0.0
                at = own[cuts[number] : cuts[number + 1]] - first
                mp[at] = mq[at] = 0.0
                np.subtract(lp, lq, out=lp)
                np.subtract(mq, mp, out=mq)
                total += _sum("ij->i", mp), _sum("ij,ij->i", mp, lp), _sum("ij->i", mq)
        return totals


def _sum(what: str, *factors: Floats32) -> float:
    runs = np.einsum(what, *(values.reshape(-1, _RUN) for values in factors))
    return float(runs.sum(dtype=np.float64))


def _likeliest(p: Block, q: Block) -> tuple[NDArray[np.int32], Floats64]:
    """Return the likeliest tokens of each row, in the order of their ids, and their three sums.

    Each side has its exact value of a token where it keeps one, else the stored one. A token that
    both sides list stands there twice, and counts once.
    """
    ids = np.sort(np.concatenate([p.top_ids, q.top_ids], axis=1), axis=1)
    once = np.ones(ids.shape, np.bool_)
    once[:, 1:] = ids[:, 1:] != ids[:, :-1]
    (lp, mp), (lq, mq) = (_exact(block, ids) for block in (p, q))
    terms = (mp, mp * (lp - lq), mq - mp)
    return ids, np.stack([term.sum(axis=1, where=once) for term in terms], axis=1)


def _exact(block: Block, ids: NDArray[np.int32]) -> tuple[Floats64, Floats64]:
    logp, mass = block.stored(ids)
    if block.top_ids.shape[1]:
        same = ids[:, :, None] == block.top_ids[:, None, :]
        exact = np.take_along_axis(np.maximum(block.top_logp, LOWEST), same.argmax(axis=2), axis=1)
        kept = same.any(axis=2)
        logp, mass = np.where(kept, exact, logp), np.where(kept, np.exp(exact), mass)
    return logp, mass


def _check_sums(recording: Dense, row0: int, block: Block, mass: Floats64) -> None:
    below, above = recording.slack
    wrong = ~((mass >= 1.0 - below) & (mass <= 1.0 + above))
    if wrong.any():
        row = int(np.argmax(wrong))
        if np.isnan(block.top_logp[row]).any():
            raise _fault("top", recording, row0 + row, "an exact value of a likeliest token is NaN")
        what = f"its probabilities add up to {mass[row]:.4f}"
        raise _fault("sum", recording, row0 + row, what)


def _fault(kind: str, recording: Dense, row: int, what: str) -> MeasurementRefused:
    return MeasurementRefused(kind, f"{recording.path}: {recording.where(row)}: {what}")
