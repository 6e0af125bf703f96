"""Is a recording what its format says, in every row? A full read, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.kl import checked_vector
from pytest_dsv41.quality.reference.dense import LOWEST, Block, Dense
from pytest_dsv41.quality.reference.kld import TOP, KldRecording
from pytest_dsv41.quality.reference.recording import Recording
from pytest_dsv41.quality.reference.topk import NO_ID, TopkRecording

__all__ = ["verify"]

_BLOCK_BYTES: Final = 4 << 20
_BLOCK_ROWS: Final = 512
_ENTROPY: Final = 0.01
"""Entropy and mass from float16 are off by at most 0.4 % of a probability, see `KldRecording`."""


def verify(
    recording: Recording,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Return what is wrong with a recording's rows, one line each; at most one line a row.

    Every row: its values are log-probabilities that add up to 1. Of a `radiance-kld-1` row also:
    the 16 likeliest tokens are that, in order; the next token's negative log-likelihood and the
    entropy are those of the row.

    Of a `dsv41-topk-1` row: its list is one, in order, and NLL and mass are the list's.

    Raises:
        MeasurementRefused: a row cannot be read at all, kinds `size`, `top`, `logprob`.
    """
    if isinstance(recording, TopkRecording):
        return _verify_lists(recording, progress)
    if not isinstance(recording, Dense):
        raise TypeError(type(recording).__name__)
    found: list[str] = []
    step = max(1, min(_BLOCK_ROWS, _BLOCK_BYTES // recording.row_bytes))
    following = recording.next_tokens()
    with recording.reader() as reader:
        for row0 in range(0, recording.rows, step):
            count = min(step, recording.rows - row0)
            block = reader.read(row0, count)
            stored = None
            if isinstance(recording, KldRecording):
                stored = recording.stored_rows(row0, count)
            for row in range(count):
                fault = _fault(recording, block, row)
                if fault is None and stored is not None:
                    fault = _kld_fault(block, row, stored[row], int(following[row0 + row]))
                if fault is not None:
                    found.append(f"{recording.where(row0 + row)}: {fault}")
            if progress is not None:
                progress(row0 + count, recording.rows)
    return found


def _verify_lists(
    recording: TopkRecording, progress: Callable[[int, int], None] | None
) -> list[str]:
    found = []
    following = recording.next_tokens()
    for row0 in range(0, recording.rows, _BLOCK_ROWS):
        count = min(_BLOCK_ROWS, recording.rows - row0)
        top, rows = recording.stored_top(row0, count), recording.stored_rows(row0, count)
        for row in range(count):
            fault = _list_fault(top[row].tolist(), rows[row], int(following[row0 + row]))
            if fault is not None:
                found.append(f"{recording.where(row0 + row)}: {fault}")
        if progress is not None:
            progress(row0 + count, recording.rows)
    return found


def _list_fault(
    entries: list[tuple[int, float]], stored: NDArray[np.float32], following: int
) -> str | None:
    given = [(token, logp) for token, logp in entries if token != NO_ID]
    try:
        vector = checked_vector(given, top_n=len(entries))
    except MeasurementRefused as error:
        return f"top.bin: {error}"
    if list(vector) != given or entries[len(given) :] != [(NO_ID, -math.inf)] * (
        len(entries) - len(given)
    ):
        return "top.bin: not the likeliest first, a tie the lower id, what is left over empty"
    nll, mass = float(stored[0]), float(stored[1])
    own = dict(vector).get(following)
    same = math.isnan(nll) if own is None else abs(nll - max(0.0, -own)) < 1e-6
    if not same:
        return f"rows.f32: a negative log-likelihood of {nll:g}, which is not the list's"
    expected = min(1.0, math.fsum(math.exp(logp) for _, logp in vector))
    if not abs(mass - expected) < 1e-6:
        return f"rows.f32: a mass of {mass:g}; the list holds {expected:g}"
    return None


def _fault(recording: Dense, block: Block, row: int) -> str | None:
    below, above = recording.slack
    wrong = block.fault(row)
    if wrong is not None:
        return wrong
    mass = float(block.decoded(row)[1].sum())
    if not 1.0 - below <= mass <= 1.0 + above:
        return f"its probabilities add up to {mass:.4f}"
    return None


def _kld_fault(block: Block, row: int, stored: NDArray[np.float32], following: int) -> str | None:
    codes = block.codes[row]
    ids, logp = block.top_ids[row], block.top_logp[row]
    if not (logp <= 0.001).all():
        return "top.bin: an exact value is NaN or above 0"
    order = np.lexsort((ids, -logp))
    if not np.array_equal(order, np.arange(TOP)):
        return "top.bin: not the likeliest first, a tie the lower id"
    # Magnitudes of negative float16 order as their codes do; 0 may carry either sign.
    size = codes & 0x7FFF
    likelier = int(np.count_nonzero(size < size[ids].max())) - int(
        np.count_nonzero(size[ids] < size[ids].max())
    )
    if likelier:
        return f"top.bin: {likelier} likelier tokens are missing"
    logp_all, mass = block.decoded(row)
    nll, entropy = float(stored[0]), float(stored[1])
    kept = np.flatnonzero(ids == following)
    own = float(-logp[kept[0]]) if len(kept) else float(-logp_all[following])
    slack = 1e-4 if len(kept) else 1e-4 + own * 2.0**-11
    # A probability stored as 0 says nothing of how small it was: the NLL then stands alone.
    known = own < -LOWEST
    if not (abs(nll - own) <= slack if known else math.isfinite(nll) and nll >= 0):
        return f"rows.f32: a negative log-likelihood of {nll:g}; the row says {own:g}"
    expected = -float((mass * logp_all).sum())
    if not math.isfinite(entropy) or abs(entropy - expected) > _ENTROPY * (1.0 + expected):
        return f"rows.f32: an entropy of {entropy:g}; the row says {expected:g}"
    return None
