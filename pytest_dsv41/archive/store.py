"""Writing and reading the control archive.

An append is: lock, settle the file's end, refuse bad rows, write, sync, answer the new head. The
rows are written from their second byte on and synced; only then is the first byte, a `{`, written
over the NUL that the gap left, and synced. So that one byte commits the whole batch: after a kill
or a power failure either all of its rows exist or none does, and a torn append can be told from a
file that somebody cut.

Files beside `control-archive.jsonl`: `….lock` (the lock, never renamed), `….index` (see `index`,
can be deleted), `….torn-<rows>-<n>` (bytes that were set aside when a dangling end was settled).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pytest_dsv41.archive.chain import START, Position, Walk
from pytest_dsv41.archive.disk import DISK, Disk
from pytest_dsv41.archive.errors import (
    ArchiveError,
    ChainBroken,
    KeyConflict,
    RolledBack,
    RowRefused,
)
from pytest_dsv41.archive.index import COLUMNS, Index, Place, StaleIndex, drop_index
from pytest_dsv41.archive.kept import old_heads
from pytest_dsv41.archive.rows import (
    END,
    FIELDS,
    GENESIS,
    NUMBERED,
    Prepared,
    encode_text,
    line_fields,
    prepare,
    row_key,
)
from pytest_dsv41.durable import FileLock
from pytest_dsv41.text import one_line

__all__ = [
    "Head",
    "Where",
    "archive_append",
    "archive_head",
    "archive_rows",
    "checked_path",
    "iter_rows",
    "lock_path",
    "reading",
]

Where = Mapping[str, Any]
_T = TypeVar("_T")
_TRIES = 3


@dataclass(frozen=True)
class Head:
    """The state of an archive: how many rows, and the sha256 of the last (64 zeros if none)."""

    rows: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the head as JSON."""
        return {"rows": self.rows, "sha256": self.sha256}


def lock_path(path: Path) -> Path:
    """Return the lock file of an archive."""
    return path.with_name(path.name + ".lock")


def _head(position: Position) -> Head:
    return Head(position.rows, position.head)


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return the archive's path; a symbolic link, and what is no file, is refused."""
    checked = Path(path)
    if not checked.name:
        raise ArchiveError(f"{os.fspath(path)!r}: names no file; valid: an archive's path")
    if checked.is_symlink():
        # Two names of one archive would mean two lock files.
        raise ArchiveError(f"{checked}: is a symbolic link; name the archive itself")
    if checked.is_dir():
        raise ArchiveError(f"{checked}: is a folder; name the archive's file")
    if checked.exists() and not checked.is_file():
        # Before a lock file is made beside it, and before a pipe is waited for.
        raise ArchiveError(f"{checked}: is no regular file; name the archive itself")
    return checked


def archive_append(
    path: str | os.PathLike[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    checkpoints: Iterable[Head] = (),
    disk: Disk = DISK,
) -> Head:
    """Append a batch of control rows, all or nothing, and return the archive's new head.

    When this returns, every row of the batch is on disk. A row that is already there, equal in
    every field, is not written again. The file is created if it is missing; its folder must exist.

    Args:
        path: the archive.
        rows: see `rows` for the fields.
        checkpoints: heads that are known to have existed; each must lie in the file's history.
        disk: the effects, for tests.

    Raises:
        RowRefused: a row breaks a rule; nothing was written.
        KeyConflict: a row with the same key exists and differs; nothing was written.
        RolledBack: the file lacks rows of a checkpoint; nothing was written.
        ChainBroken, WrongSchema: the file itself is damaged or of another version.
        OSError: the disk failed; the batch is not in the archive.
    """
    archive = checked_path(path)
    batch, known = _batch(rows), tuple(checkpoints)
    if not archive.parent.is_dir():
        raise ArchiveError(f"{archive}: its folder does not exist; create it first")
    with FileLock(lock_path(archive)):
        try:
            fd = disk.open(archive)
        except FileNotFoundError:
            _refuse_rollback(archive, START, known, dict[int, str]().get)
            if not batch:
                return Head(0, GENESIS)
            fd = disk.open(archive, create=True)
            try:
                disk.sync_folder(archive.parent)
            except BaseException:
                disk.close(fd)
                raise
        try:
            return _with_index(
                archive, lambda index: _append(archive, fd, index, batch, known, disk)
            )
        finally:
            disk.close(fd)


def _batch(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, ...], Prepared]:
    if isinstance(rows, Mapping | str | bytes):
        raise RowRefused("rows: must be a list of rows, not one row")
    batch: dict[tuple[Any, ...], Prepared] = {}
    for number, given in enumerate(rows):
        row = prepare(given, number)
        earlier = batch.setdefault(row.key, row)
        if earlier is not row:
            _refuse_conflict(f"row {number}", row.row, earlier.row, "an earlier row")
    return batch


def _refuse_conflict(
    name: str, row: Mapping[str, Any], other: Mapping[str, Any], where: str
) -> None:
    differ = [field for field in FIELDS if row.get(field) != other.get(field)]
    if differ:
        key = ", ".join(f"{part}" for part in row_key(row))
        shown = "; ".join(
            f"{field} {one_line(repr(row.get(field)), 80)} against "
            f"{one_line(repr(other.get(field)), 80)}"
            for field in differ
        )
        raise KeyConflict(f"{name}: {key}: {where} has this key and differs: {shown}")


def _with_index(archive: Path, work: Callable[[Index], _T]) -> _T:
    """Run `work` with the index beside the file, or with one in memory if that one fails.

    `work` lets a `sqlite3.Error` out only before it has appended anything.
    """
    index = Index.open(archive)
    try:
        return work(index)
    except sqlite3.Error:
        if index.in_memory:
            raise
        drop_index(archive)
    finally:
        index.close()
    memory = Index.memory()
    try:
        return work(memory)
    finally:
        memory.close()


def _append(
    archive: Path,
    fd: int,
    index: Index,
    batch: Mapping[tuple[Any, ...], Prepared],
    checkpoints: Iterable[Head],
    disk: Disk,
) -> Head:
    bound = index.bound(fd)
    found = index.refresh(fd, archive.name) if bound is None else Walk(bound)
    _refuse_rollback(archive, found.position, checkpoints, lambda seq: _sha_of(fd, index, seq))
    end = _settle(archive, fd, found, disk)
    try:
        return _write(archive, fd, index, list(batch.values()), end, disk)
    except sqlite3.IntegrityError:
        # Nothing was written: the index has one of the keys already.
        return _write(archive, fd, index, _fresh(archive, fd, index, batch), end, disk)


def _fresh(
    archive: Path, fd: int, index: Index, batch: Mapping[tuple[Any, ...], Prepared]
) -> list[Prepared]:
    """Return the rows of a batch that are not in the archive; those that are must be equal."""
    index.begin()
    known = index.find_keys(batch)
    for key, place in known.items():
        there = line_fields(_line(fd, place))
        _refuse_conflict(archive.name, batch[key].row, there, f"line {place.seq}")
    index.end()
    return [row for key, row in batch.items() if key not in known]


def _lines(
    rows: Sequence[Prepared], end: Position
) -> tuple[bytes, list[tuple[int, int, int, Mapping[str, Any]]], Position]:
    lines: list[bytes] = []
    places: list[tuple[int, int, int, Mapping[str, Any]]] = []
    offset, seq, prev, batch = end.offset, end.rows, end.head, len(rows)
    for prepared in rows:
        seq += 1
        line, prev = encode_text(prepared.text, seq=seq, prev=prev, batch=batch)
        lines.append(line)
        length = len(line)
        places.append((seq, offset, length, prepared.row))
        offset += length
        batch = 0
    return b"".join(lines), places, Position(offset, seq, prev)


def _write(
    archive: Path, fd: int, index: Index, rows: Sequence[Prepared], end: Position, disk: Disk
) -> Head:
    """Append rows that are not there yet.

    Raises:
        sqlite3.Error: the index is no good, or (IntegrityError) has one of the rows already; the
            file is as it was.
    """
    if not rows:
        # Rows that a killed appender left may be in the page cache only: acknowledge after a sync.
        disk.sync(fd)
        return _head(end)
    lines, places, new_end = _lines(rows, end)
    committed = False
    try:
        with index.changing():
            # The index looks for the keys as it adds them: nothing has to look beforehand.
            index.add(places)
            _commit(archive, fd, lines, end, disk)
            committed = True
            index.bind(fd, new_end)
    except (sqlite3.Error, OSError):
        # Once the batch is on disk the index can fail without harm: it is checked before its use.
        if not committed:
            raise
    return _head(new_end)


def _commit(archive: Path, fd: int, lines: bytes, end: Position, disk: Disk) -> None:
    try:
        disk.write(fd, lines[1:], end.offset + 1)
        disk.sync(fd)
        disk.write(fd, lines[:1], end.offset)
        disk.sync_data(fd)
    except BaseException as error:
        # Take the batch back, so that readers do not see what was not acknowledged. Should this
        # fail too, the next append settles the end, or finds the whole batch.
        with contextlib.suppress(OSError):
            disk.truncate(fd, end.offset)
        if isinstance(error, OSError):
            error.add_note(f"{archive}: the batch was not appended")
        raise


def _settle(archive: Path, fd: int, found: Walk, disk: Disk) -> Position:
    """Make the file end with its last whole, committed row, and return that place.

    What dangles behind it is kept aside.
    """
    end = found.position
    if found.newline_missing:
        disk.write(fd, b"\n", end.offset)
        disk.sync(fd)
        return Position(end.offset + 1, end.rows, end.head, end.missing)
    if found.unfinished or found.cut:
        dangling = os.fstat(fd).st_size - end.offset
        _set_aside(archive, fd, end, dangling, disk)
        disk.truncate(fd, end.offset)
        disk.sync(fd)
    return end


def _set_aside(archive: Path, fd: int, end: Position, size: int, disk: Disk) -> None:
    for number in range(1_000_000):
        aside = archive.with_name(f"{archive.name}.torn-{end.rows}-{number}")
        try:
            copy = disk.open(aside, create=True)
        except FileExistsError:
            continue
        break
    else:
        raise ArchiveError(f"{archive}: too many {archive.name}.torn-* files; remove old ones")
    try:
        for offset in range(0, size, 1 << 20):
            data = os.pread(fd, min(1 << 20, size - offset), end.offset + offset)
            disk.write(copy, data, offset)
        disk.sync(copy)
    finally:
        disk.close(copy)
    disk.sync_folder(archive.parent)


def _sha_of(fd: int, index: Index, seq: int) -> str | None:
    place = index.place(seq)
    # The last 67 bytes of a line are its sha256 and the closing of the object.
    return None if place is None else _line(fd, place)[-67:-3].decode("ascii", "replace")


def _line(fd: int, place: Place) -> bytes:
    """Return the bytes of the row at `place`, which must be the row that the index says it is."""
    line = os.pread(fd, place.length, place.offset)
    if not line.startswith(NUMBERED % place.seq) or not line.endswith(END):
        raise StaleIndex(f"row {place.seq} does not stand where the index has it")
    return line


def _refuse_rollback(
    archive: Path, end: Position, checkpoints: Iterable[Head], sha_of: Callable[[int], str | None]
) -> None:
    """Refuse a file that lacks the row of a checkpoint; `sha_of` gives the hash of a row before
    the end."""
    ends = {0: GENESIS, end.rows: end.head}
    absent = [
        known
        for known in sorted(set(checkpoints), key=lambda head: -head.rows)
        if known.rows > end.rows or known.sha256 != (ends.get(known.rows) or sha_of(known.rows))
    ]
    if not absent:
        return
    before = old_heads(archive)
    for known in absent:
        if (known.rows, known.sha256) in before:
            continue
        if known.rows > end.rows:
            raise RolledBack(
                f"{archive}: has {end.rows} rows, a checkpoint knows {known.rows} "
                f"(head {known.sha256[:12]}…): it was cut, or an older copy lies in its place; "
                "nothing was appended"
            )
        raise RolledBack(
            f"{archive}: row {known.rows} is not the one a checkpoint knows "
            f"({known.sha256[:12]}…): another archive lies in its place, or it was rewritten; "
            "nothing was appended"
        )


def archive_head(path: str | os.PathLike[str]) -> Head:
    """Return row count and head sha256; `Head(0, 64 zeros)` for a missing or empty archive.

    The chain is verified first, unless the index proves that the file has not changed since.

    Raises:
        ChainBroken, WrongSchema: the file is damaged or of another version.
    """
    return answer(path, lambda reader: _head(START if reader is None else reader.end))


def archive_rows(path: str | os.PathLike[str], where: Where | None = None) -> list[dict[str, Any]]:
    """Return the archive's rows, in file order, as they were appended.

    Args:
        path: the archive; a missing one has no rows.
        where: {field: value}, or {field: [values]} for any of them.

    Raises:
        ArchiveError: `where` names an unknown field.
        ChainBroken, WrongSchema: the file is damaged or of another version.
    """
    return list(iter_rows(path, where))


def iter_rows(path: str | os.PathLike[str], where: Where | None = None) -> Iterator[dict[str, Any]]:
    """Yield what `archive_rows` returns, one row at a time."""
    wanted = allowed_values(where)
    done = 0
    try:
        with reading(path) as reader:
            if reader is not None:
                for seq, row in reader.rows(wanted):
                    yield row
                    done = seq
            return
    except sqlite3.Error:
        drop_index(Path(path))
    # The index was no good: what is still owed comes from the file alone.
    with reading(path) as reader:
        if reader is not None:
            for seq, row in reader.scan(wanted):
                if seq > done:
                    yield row


def answer(path: str | os.PathLike[str], work: Callable[[Reader | None], _T]) -> _T:
    """Return what `work` reads from the archive; with a new index if the old one was no good."""
    try:
        with reading(path) as reader:
            return work(reader)
    except sqlite3.Error:
        drop_index(Path(path))
    with reading(path) as reader:
        return work(reader)


def allowed_values(where: Where | None) -> dict[str, list[Any]]:
    """Return {field: allowed values} of a `where`, refusing unknown fields."""
    allowed: dict[str, list[Any]] = {}
    for field, value in (where or {}).items():
        if field not in FIELDS:
            raise ArchiveError(
                f"where: {one_line(repr(field), 80)}: unknown field; valid: {', '.join(FIELDS)}"
            )
        many = isinstance(value, list | tuple | set | frozenset) and field not in (
            "clock_caps_mhz",
            "prompt_members",
        )
        allowed[field] = list(value) if many else [value]
        if field in COLUMNS and any(not _is_key(one) for one in allowed[field]):
            raise ArchiveError(
                f"where: {field}: must be a text or an integer, or a list of them, "
                f"got {one_line(repr(value), 80)}"
            )
    return allowed


def _is_key(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and -(2**63) <= value < 2**63)


class Reader:
    """An archive that was verified up to `end`, with the index that leads into it.

    The index is held in one read transaction until the first rows are read: it describes `fd`
    and not a file that a migration puts in its place meanwhile.
    """

    def __init__(self, fd: int, index: Index, end: Position, name: str) -> None:
        self.fd = fd
        self.index = index
        self.end = end
        self.name = name

    def rows(self, wanted: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield (number, row) where the row's fields are among `wanted`'s, in file order.

        Raises:
            sqlite3.Error: the index is no good; the rows before are right.
        """
        indexed = {field: values for field, values in wanted.items() if field in COLUMNS}
        if not indexed:
            yield from self.scan(wanted)
            return
        places = self.index.select(indexed)
        self.index.end()
        for place in places:
            row = line_fields(_line(self.fd, place))
            if matches(row, wanted):
                yield place.seq, row

    def scan(self, wanted: Mapping[str, Sequence[Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield what `rows` yields, without the index."""
        self.index.end()
        with open(self.fd, "rb", buffering=1 << 20, closefd=False) as file:
            file.seek(0)
            for seq in range(1, self.end.rows + 1):
                row = line_fields(file.readline())
                if matches(row, wanted):
                    yield seq, row


def matches(row: Mapping[str, Any], wanted: Mapping[str, Sequence[Any]]) -> bool:
    """Whether every field that `wanted` names has one of its values."""
    return all(row.get(field) in values for field, values in wanted.items())


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[Reader | None]:
    """Open an archive for reading; None if there is none."""
    archive = checked_path(path)
    with contextlib.ExitStack() as stack:
        reader = _open_indexed(archive, stack)
        if reader is None:
            reader = _open_unindexed(archive, stack)
        yield reader


def _open(archive: Path, stack: contextlib.ExitStack) -> int | None:
    try:
        fd = os.open(archive, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    stack.callback(os.close, fd)
    return fd


def _open_indexed(archive: Path, stack: contextlib.ExitStack) -> Reader | None:
    """Return a reader over the index beside the file; None if that index cannot be used."""
    fd = _open(archive, stack)
    if fd is None:
        return None
    index = Index.open(archive)
    stack.callback(index.close)
    if index.in_memory:
        return None
    try:
        end = index.bound(fd)
        if end is None:
            index.end()
            # Appenders change file and index under the lock; a migration puts a new file there.
            with FileLock(lock_path(archive)):
                fd = _open(archive, stack)
                if fd is None:
                    return None
                end = index.bound(fd) or index.refresh(fd, archive.name).position
                index.begin()
    except (sqlite3.Error, OSError):
        return None
    return Reader(fd, index, end, archive.name)


def _open_unindexed(archive: Path, stack: contextlib.ExitStack) -> Reader | None:
    fd = _open(archive, stack)
    if fd is None:
        return None
    index = Index.memory()
    stack.callback(index.close)
    for attempt in range(_TRIES):
        try:
            end = index.refresh(fd, archive.name).position
        except ChainBroken:
            # Without the lock an append can be seen half way; a real break stays.
            if attempt == _TRIES - 1:
                raise
        else:
            index.begin()
            return Reader(fd, index, end, archive.name)
    raise AssertionError("unreachable")
