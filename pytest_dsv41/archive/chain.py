"""Walking the chain: which rows of a file are whole, linked and committed, and what ends them.

Each line carries the sha256 of the line before it, its own number and its own sha256, so that a
change names itself: an edited line no longer matches its hash, a deleted one leaves a hole in the
numbers, a moved or copied one carries a number that is not its place's.

Not every end is a fault. A line that begins with a NUL byte is an append that was never committed
(see `store`); it and what follows it do not exist. A last line that ends in the middle was cut
after it had been committed, because a committed line is always whole.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

from pytest_dsv41.archive.errors import ChainBroken, WrongSchema
from pytest_dsv41.archive.rows import (
    CONTINUES,
    END,
    GENESIS,
    MIGRATED,
    PREFIX,
    SCHEMA,
    SUFFIX,
    TAIL,
)
from pytest_dsv41.text import one_line

__all__ = ["START", "Gap", "Position", "Sink", "Walk", "walk"]

_BLOCK = 1 << 20
# A line is some hundred bytes, with thousands of prompt members some hundred kilobytes.
_LINE_LIMIT = 1 << 20
_SINK_ROWS = 4096
_END_OF_LINE = SUFFIX + b"%s" + END


@dataclass(frozen=True)
class Position:
    """A place between two rows: bytes and rows before it, the last sha256, and what is missing.

    `missing` counts the rows that the batch before this place still owes; it is 0 unless the file
    was cut inside a batch.
    """

    offset: int
    rows: int
    head: str
    missing: int = 0


START = Position(0, 0, GENESIS)


@dataclass(frozen=True)
class Gap:
    """A batch that lost its last rows: `line` is the first missing one, `lost` how many."""

    line: int
    lost: int


@dataclass
class Walk:
    """How far the chain holds, and what comes after.

    Attributes:
        position: the place after the last good row.
        unfinished: bytes of an append that was never committed.
        cut: bytes of a committed row that lost its end.
        newline_missing: the last good row lost just its newline.
        gaps: batches that lost rows and were continued by a later append.
    """

    position: Position
    unfinished: int = 0
    cut: int = 0
    newline_missing: bool = False
    gaps: list[Gap] = field(default_factory=list)


# (line number, offset, bytes of the line with its newline)
Sink = Callable[[Sequence[tuple[int, int, bytes]]], None]


def walk(
    fd: int,
    name: str,
    start: Position = START,
    *,
    until: int = sys.maxsize,
    last: int = sys.maxsize,
    sink: Sink | None = None,
) -> Walk:
    """Verify every row from `start` to the end of the file, to offset `until`, or to row `last`.

    Reads in blocks, so memory does not grow with the file. `sink` gets the good rows in order.

    Raises:
        ChainBroken: names the first broken line and the kind of change.
        WrongSchema: the file is an archive of another version.
    """
    offset, seq, prev, missing = start.offset, start.rows + 1, start.head.encode(), start.missing
    gaps: list[Gap] = []
    pending: list[tuple[int, int, bytes]] = []
    sha256 = hashlib.sha256
    found = Walk(start, gaps=gaps)
    with open(fd, "rb", buffering=_BLOCK, closefd=False) as file:
        file.seek(offset)
        for line in iter(partial(file.readline, _LINE_LIMIT), b""):
            if offset >= until or seq > last:
                break
            body = line[:-TAIL]
            sha = sha256(body).hexdigest().encode()
            if line[-TAIL:] != _END_OF_LINE % sha or not line.startswith(PREFIX % (seq, prev)):
                end = Position(offset, seq - 1, prev.decode(), missing)
                found = _ending(file, name, line, end)
                if not found.newline_missing:
                    break
                line += b"\n"
                body = line[:-TAIL]
                sha = sha256(body).hexdigest().encode()
            if not body.endswith(CONTINUES):
                if missing:
                    gaps.append(Gap(seq, missing))
                missing = int(body[body.rindex(b":") + 1 :]) - 1
            elif missing:
                missing -= 1
            else:
                raise _broken(name, seq, "forged", "continues a batch that has no row left")
            if sink is not None:
                pending.append((seq, offset, line))
                if len(pending) == _SINK_ROWS:
                    sink(pending)
                    pending = []
            offset += len(line)
            seq += 1
            prev = sha
    if sink is not None and pending:
        sink(pending)
    if found.newline_missing:
        offset -= 1
    return replace(found, position=Position(offset, seq - 1, prev.decode(), missing), gaps=gaps)


@dataclass(frozen=True)
class _Line:
    """What a line says of itself; None where it does not say it."""

    schema: str | None
    seq: int | None
    prev: str | None
    whole: bool  # its own hash matches


def _read(line: bytes) -> _Line:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        return _Line(None, None, None, whole=False)
    sha = hashlib.sha256(line[:-TAIL]).hexdigest().encode()
    schema, seq, prev = row.get("schema"), row.get("seq"), row.get("prev_sha256")
    return _Line(
        schema if isinstance(schema, str) else None,
        seq if isinstance(seq, int) and not isinstance(seq, bool) else None,
        prev if isinstance(prev, str) else None,
        whole=line[-TAIL:] == _END_OF_LINE % sha,
    )


def _broken(name: str, line: int, change: str, what: str) -> ChainBroken:
    return ChainBroken(f"{name}: line {line}: {change}: {what}", line=line, change=change)


def _ending(file: BinaryIO, name: str, line: bytes, end: Position) -> Walk:
    """Tell an end that is allowed from a broken line; raises for the latter.

    `line` stands at `end` and does not continue the chain; `file` is read up to behind it.
    """
    if line.startswith(b"\0"):
        # Only the last append can be uncommitted: a later whole batch makes this a damaged line.
        for later in iter(partial(file.readline, _LINE_LIMIT), b""):
            if _read(later).whole and not later[:-TAIL].endswith(CONTINUES):
                raise _broken(name, end.rows + 1, "edited", "its first byte was overwritten")
        return Walk(end, unfinished=file.tell() - end.offset)
    if not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
        whole = _read(line + b"\n")
        prefix = PREFIX % (end.rows + 1, end.head.encode())
        linked = line.startswith(prefix) or prefix.startswith(line)
        if whole.whole and linked:
            return Walk(end, newline_missing=True)
        if linked:
            return Walk(end, cut=len(line))
    raise _diagnose(file, name, line, end)


def _diagnose(file: BinaryIO, name: str, line: bytes, end: Position) -> ChainBroken | WrongSchema:
    place = end.rows + 1
    found = _read(line)
    if found.schema != SCHEMA:
        if found.schema is None:
            if not file.readline(1) and not line.endswith(b"\n"):
                return _broken(name, place, "forged", "bytes that no append wrote")
            return _broken(name, place, "edited", "is no archive row any more")
        shown = one_line(found.schema, 60)
        if place == 1:
            way = (
                "`dsv41 archive migrate` rebuilds it"
                if found.schema in MIGRATED
                else "a later version wrote it, or something else: nothing is changed"
            )
            return WrongSchema(f"{name}: is a {shown} file, this version writes {SCHEMA}; {way}")
        return _broken(name, place, "foreign row", f"a row of schema {shown} among v4 rows")
    if not found.whole:
        if found.seq == place and found.prev == end.head:
            return _broken(name, place, "edited", "its bytes do not match its sha256")
        return _broken(name, place, "forged", "neither its sha256 nor its link is right")
    if found.seq is not None and found.seq > place:
        lines = found.seq - place
        if _place_of(file, place, end.rows + 1) is not None:
            return _broken(
                name, place, "swapped", f"holds row {found.seq}; row {place} comes later"
            )
        what = f"row {place} is" if lines == 1 else f"rows {place} to {found.seq - 1} are"
        return _broken(name, place, "deleted", f"{what} missing before this line")
    if found.seq is not None and found.seq < place:
        return _earlier(file, name, line, found.seq, place)
    # In its place, whole, but not linked to the line before it. If the next line is linked to
    # this one, the chain after it is the old one, and the line before was the changed one.
    after = _read(file.readline(_LINE_LIMIT))
    if after.prev is not None and after.prev == line[-TAIL + len(SUFFIX) : -len(END)].decode():
        if place == 1:
            return _broken(name, 1, "forged", "the first row must link to 64 zeros")
        return _broken(
            name, place - 1, "edited", f"rewritten with a new sha256; row {place} links to the old"
        )
    return _broken(
        name,
        place,
        "forged",
        "not linked to the row before it"
        + (f" (or row {place - 1} was rewritten with a new sha256)" if place > 1 else ""),
    )


def _earlier(file: BinaryIO, name: str, line: bytes, seq: int, place: int) -> ChainBroken:
    if seq >= 1:
        file.seek(0)
        for number, old in enumerate(iter(partial(file.readline, _LINE_LIMIT), b""), start=1):
            if number == seq:
                if old == line:
                    return _broken(name, place, "duplicated", f"a copy of line {seq}")
                break
    return _broken(name, place, "forged", f"says it is row {seq}")


def _place_of(file: BinaryIO, seq: int, place: int) -> int | None:
    """Return the line number, after `place`, of a whole row that says it is row `seq`."""
    mark = b'"seq":%d,' % seq
    for number, line in enumerate(iter(partial(file.readline, _LINE_LIMIT), b""), start=place + 1):
        if mark in line and _read(line).seq == seq:
            return number
    return None
