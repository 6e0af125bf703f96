"""RADGRAM2 files, read as far as a derivation needs: the header and the diagonal.

`gram.r<rank>.blk.<layer>.<stem>.<expert>.bin`, little-endian: 32 bytes of header, then k x k
float32 by rows (FORMATS "RADGRAM2"). The diagonal lies in pieces all over the file, and a read of
the whole would copy k times as much as is wanted, so the file is mapped and only looked at there.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line

__all__ = ["HEADER", "MAGIC", "Gram", "read_grams"]

MAGIC: Final = b"RADGRAM2"
HEADER: Final = struct.Struct("<8sIIQII")
"""magic, k, rank, rows, domain, pad."""

_NAME: Final = re.compile(
    r"gram\.r(?P<rank>\d{1,6})\.blk\.(?P<layer>\d{1,6})\.(?P<stem>[A-Za-z0-9_]+)"
    r"(?:\.(?P<expert>\d{1,6}))?\.bin"
)


@dataclass(frozen=True)
class Gram:
    """One expert's activations: `rows` tokens were routed to it, `energy` is the trace."""

    layer: int
    expert: int
    rank: int
    k: int
    domain: int
    """0: the plain activation; N: rotated by the Hadamard transform of width N."""
    rows: int
    energy: float
    name: str
    """The file's name."""


def read_grams(
    folder: Path, *, stem: str, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Gram], int]:
    """Read every expert's file of one weight; return them by layer and expert.

    The second value is the number of other files, which are left alone: the pooled Gram of a layer,
    other weights, whatever else lies there.

    Args:
        folder: where the files lie, directly.
        stem: the weight, `ffn_down_exps`.
        progress: called now and then with the files read so far and the number of all.

    Raises:
        UsageError: no such file, one that is no whole RADGRAM2 file or whose header's rank is not
            its name's, a diagonal that is not finite, is negative or contradicts the count of
            tokens, one expert twice, or files of different k or domain. The message names the
            file, or both.
        OSError: a file cannot be read.
    """
    try:
        # A recording has tens of thousands of files: names, no Path objects.
        names = os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    found: dict[tuple[int, int], tuple[str, int]] = {}
    others = 0
    for name in sorted(names):
        match = _NAME.fullmatch(name)
        if match is None or match["stem"] != stem or match["expert"] is None:
            others += 1
            continue
        key = int(match["layer"]), int(match["expert"])
        if key in found:
            raise UsageError(
                f"{folder}: layer {key[0]} expert {key[1]} twice: {found[key][0]}, {name}"
            )
        found[key] = name, int(match["rank"])
    if not found:
        raise UsageError(f"{folder}: no gram.r<rank>.blk.<layer>.{stem}.<expert>.bin")
    order = sorted(found)
    heads: list[_Head] = []
    diagonals = np.empty((0, 0), "<f4")
    with _opened(folder) as place:
        for done, key in enumerate(order):
            name, rank = found[key]
            head, mapped = _mapped(name, place, rank)
            with mapped:
                if not heads:
                    diagonals = np.empty((len(order), head.k), "<f4")
                heads.append(head)
                _same(head, name, heads[0], found[order[0]][0])
                view = np.frombuffer(mapped, "<f4", head.k * head.k, HEADER.size)
                diagonals[done] = view[:: head.k + 1]
                del view  # the map cannot be closed while it is looked at
            if progress is not None and done % 64 == 0:
                progress(done, len(order))
    _sound(diagonals, [found[key][0] for key in order])
    energies = diagonals.sum(axis=1, dtype=np.float64)
    grams = []
    for key, head, energy in zip(order, heads, energies.tolist(), strict=True):
        name, rank = found[key]
        if head.rows == 0 and energy > 0.0:
            raise UsageError(f"{name}: energy {energy:g} from 0 tokens")
        grams.append(Gram(*key, rank, head.k, head.domain, head.rows, energy, name))
    return grams, others


class _Head(NamedTuple):
    k: int
    rows: int
    domain: int


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield place
    finally:
        os.close(place)


def _mapped(name: str, place: int, rank: int) -> tuple[_Head, mmap.mmap]:
    # Without waiting: a pipe of that name must not hold up the reading.
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise UsageError(f"{name}: no regular file")
        size = about.st_size
        if size < HEADER.size:
            raise UsageError(f"{name}: {size} bytes, shorter than a RADGRAM2 header")
        mapped = mmap.mmap(fd, size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    magic, k, told, rows, domain, _pad = HEADER.unpack_from(mapped)
    whole = HEADER.size + 4 * k * k
    fault = ""
    if magic != MAGIC:
        fault = f"begins with {one_line(repr(magic), 60)}, not with RADGRAM2"
    elif k < 1 or size != whole:
        fault = f"{size} bytes, but k = {k} makes {whole}: cut or damaged"
    elif told != rank:
        fault = f"its header says rank {told}, its name {rank}"
    if fault:
        mapped.close()
        raise UsageError(f"{name}: {fault}")
    return _Head(k, rows, domain), mapped


def _same(head: _Head, name: str, first: _Head, first_name: str) -> None:
    for what, one, other in (("k", head.k, first.k), ("domain", head.domain, first.domain)):
        if one != other:
            raise UsageError(
                f"{name}: {what} {one}, but {first_name} has {other}: not one recording"
            )


def _sound(diagonals: np.ndarray[tuple[int, int], np.dtype[np.float32]], names: list[str]) -> None:
    bad = ~(np.isfinite(diagonals) & (diagonals >= 0.0))
    if bad.any():
        row, place = (int(where[0]) for where in np.nonzero(bad))
        value = diagonals[row, place]
        why = "; a sum of squares is not negative" if np.isfinite(value) else ""
        raise UsageError(f"{names[row]}: element {place} of the diagonal is {value:g}{why}")
