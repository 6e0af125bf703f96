"""The read index: where each row stands in the archive, in SQLite, beside the file.

The index holds places, never values: every number of an answer is read from the archive's own
bytes and compared there with what was asked. It is bound to the exact state of the file (device,
inode, size, both change times, row count, head) and to this boot. Whatever does not match is not
used: the chain is verified again from the first row, and the index is continued or built anew.
It can be deleted at any time. Where it cannot be written it is built in memory.

SQLite runs with `synchronous=OFF`: a kill cannot harm it, a power failure can, hence the boot id.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from pytest_dsv41.archive.chain import START, Position, Walk, walk
from pytest_dsv41.archive.errors import ChainBroken
from pytest_dsv41.archive.rows import DEFINITION, parse_line, row_key

__all__ = ["Index", "Place", "StaleIndex", "drop_index", "index_path"]

_FORMAT = 6
# Ids are hashes of what they stand for: nothing has to be looked up before a row is added.
_TABLES = """
CREATE TABLE bound (
    id INTEGER PRIMARY KEY, state TEXT NOT NULL, offset INTEGER NOT NULL, rows INTEGER NOT NULL,
    head TEXT NOT NULL, missing INTEGER NOT NULL
);
CREATE TABLE window (id INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE definition (
    id INTEGER PRIMARY KEY, first INTEGER NOT NULL, cell TEXT NOT NULL, metric TEXT NOT NULL,
    max_tokens INTEGER NOT NULL, clock_cap_mhz INTEGER NOT NULL, "commit" TEXT NOT NULL,
    prompt_sha256 TEXT NOT NULL
);
CREATE TABLE row (
    definition INTEGER NOT NULL, seq INTEGER NOT NULL, key BLOB NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, window INTEGER NOT NULL, PRIMARY KEY (definition, seq)
) WITHOUT ROWID;
CREATE UNIQUE INDEX row_key ON row (key);
"""
# Which column answers a filter on a field; the other fields are compared in the rows themselves.
COLUMNS = {
    "window": "window.name",
    "cell": "definition.cell",
    "metric": "definition.metric",
    "max_tokens": "definition.max_tokens",
    "clock_cap_mhz": "definition.clock_cap_mhz",
    "commit": 'definition."commit"',
    "prompt_sha256": "definition.prompt_sha256",
}
_JOINED = """
FROM row
JOIN definition ON definition.id = row.definition
JOIN window ON window.id = row.window
"""
_KEYS_AT_ONCE = 500
# What SQLite says of a value that is no row's, or of a second row with a key.
_UNFIT = (sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError)
_definition_of = itemgetter(*DEFINITION)
_named_of = itemgetter("window", "start", *DEFINITION)


@functools.lru_cache(maxsize=4096)
def _id(*parts: Any) -> int:
    """Return 64 bits that stand for the parts of a name; printable parts hold no NUL."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)


def _key(group: bytes, repeat: int) -> bytes:
    """Return what stands for a row's key: its group, and the repeat itself."""
    return group + repeat.to_bytes(1 if repeat < 256 else 8, "big")


@functools.lru_cache(maxsize=4096)
def _ids(window: str, start: str, *definition: Any) -> tuple[int, int, bytes]:
    """Return the ids of a row's definition and window, and its group."""
    cell, metric = definition[:2]
    return _id(*definition), _id(window), _group(window, cell, metric, start)


def _group(window: str, *rest: str) -> bytes:
    """Return 128 bits for a start of a window's cell and metric.

    The first half stands for the window, so that its rows lie together.
    """
    return _prefix(window) + hashlib.blake2b("\0".join(rest).encode(), digest_size=8).digest()


def _prefix(window: str) -> bytes:
    return _id(window).to_bytes(8, "big", signed=True)


def index_path(path: Path) -> Path:
    """Return where the index of an archive lies."""
    return path.with_name(path.name + ".index")


def drop_index(path: Path) -> None:
    """Remove the index of an archive, as far as that is possible; the next use builds it anew."""
    for file in (index_path(path), index_path(path).with_name(path.name + ".index-journal")):
        with contextlib.suppress(OSError):
            file.unlink()


class StaleIndex(sqlite3.DatabaseError):
    """The index names a place where something else stands. It must be built anew."""


@dataclass(frozen=True)
class Place:
    """Where a row stands: its number, and its line's offset and length in bytes."""

    seq: int
    offset: int
    length: int


@functools.cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _state(fd: int) -> str:
    info = os.fstat(fd)
    return json.dumps(
        [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, _boot_id()]
    )


_Owner = tuple[int, int, int]
"""Whose connection it is: process, and device and inode of the index file."""

_spare: list[tuple[_Owner, sqlite3.Connection]] = []
"""The connection that was closed last: opening one costs as much as adding a batch of rows.

Whoever opens an index takes it out, so nobody shares it.
"""


def _take_spare(owner: _Owner) -> sqlite3.Connection | None:
    with contextlib.suppress(IndexError):
        known, connection = _spare.pop()
        if known == owner:
            return connection
        connection.close()
    return None


@atexit.register
def _close_spare() -> None:
    while _spare:
        _spare.pop()[1].close()


class Index:
    """One connection to an archive's index. Every method may raise `sqlite3.Error`.

    It opens in a read transaction, so that all look-ups lock the file once and see one state.
    """

    def __init__(self, connection: sqlite3.Connection, owner: _Owner | None) -> None:
        self._db = connection
        self._owner = owner

    @property
    def in_memory(self) -> bool:
        """Whether it lies beside no archive and is gone when it is closed."""
        return self._owner is None

    @classmethod
    def open(cls, path: Path) -> Index:
        """Open or create the index beside the archive `path`; in memory where that fails."""
        with contextlib.suppress(sqlite3.Error, OSError):
            return cls._open_file(index_path(path))
        return cls.memory()

    @classmethod
    def memory(cls) -> Index:
        """Return an empty index that lives as long as the object."""
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.executescript(_TABLES)
        return cls(connection, None)

    @classmethod
    def _open_file(cls, file: Path) -> Index:
        # The file is created here and not by SQLite, for its mode and against symbolic links.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(file, flags, 0o600)
        info = os.fstat(fd)
        os.close(fd)
        owner = (os.getpid(), info.st_dev, info.st_ino)
        connection = _take_spare(owner)
        try:
            if connection is None:
                connection = sqlite3.connect(
                    file, timeout=2, isolation_level=None, check_same_thread=False
                )
                connection.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            if connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                connection.execute("COMMIT")
                connection.execute("BEGIN IMMEDIATE")
                cls._wipe(connection)
                connection.execute(f"PRAGMA user_version={_FORMAT}")
                connection.execute("COMMIT")
                connection.execute("BEGIN")
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        return cls(connection, owner)

    @staticmethod
    def _wipe(connection: sqlite3.Connection) -> None:
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
        for (name,) in names:
            connection.execute(f'DROP TABLE "{name}"')
        for statement in _TABLES.split(";"):
            connection.execute(statement)

    def close(self) -> None:
        """Give the connection back; an in-memory index is gone."""
        if self._owner is None or _spare:
            self._db.close()
            return
        with contextlib.suppress(sqlite3.Error):
            self._db.rollback()
        _spare.append((self._owner, self._db))

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Run the body in one write transaction, rolled back if it raises."""
        self.end()
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def begin(self) -> None:
        """Begin a read transaction, unless there is one: what follows sees one state."""
        if not self._db.in_transaction:
            self._db.execute("BEGIN")

    def end(self) -> None:
        """End the read transaction, if there is one."""
        if self._db.in_transaction:
            self._db.execute("COMMIT")

    def _described(self) -> tuple[str, Position] | None:
        """Return the state of the file that the index describes, and its end."""
        found = self._db.execute("SELECT state, offset, rows, head, missing FROM bound").fetchone()
        return None if found is None else (found[0], Position(*found[1:]))

    def bound(self, fd: int) -> Position | None:
        """Return the archive's end if the index describes exactly the file `fd`, else None."""
        found = self._described()
        return found[1] if found is not None and found[0] == _state(fd) else None

    def bind(self, fd: int, end: Position, *, trusted: bool = True) -> None:
        """Record that the index describes the file as it is now, up to `end`."""
        self._db.execute(
            "INSERT OR REPLACE INTO bound VALUES (1, ?, ?, ?, ?, ?)",
            (_state(fd) if trusted else "", end.offset, end.rows, end.head, end.missing),
        )

    def refresh(self, fd: int, name: str) -> Walk:
        """Verify the whole chain and bring the index to the file's end; one transaction.

        Raises:
            ChainBroken, WrongSchema: as `chain.walk`.
        """
        with self.changing():
            described = self._described()
            known = None if described is None else described[1]
            if known is None or not self._holds(fd, name, known):
                self._wipe(self._db)
                known = START
            found = walk(fd, name, known, sink=lambda lines: self._add_lines(name, lines))
            # With something dangling at its end the file is never taken on trust: an appender
            # must see and settle it.
            dangling = found.unfinished or found.cut or found.newline_missing
            self.bind(fd, found.position, trusted=not dangling)
            return found

    def _holds(self, fd: int, name: str, known: Position) -> bool:
        count = self._db.execute("SELECT count(*) FROM row").fetchone()[0]
        if count != known.rows:
            return False
        try:
            return walk(fd, name, until=known.offset).position == known
        except ChainBroken:
            # Said by the walk that follows, from the first row.
            return False

    def _add_lines(self, name: str, lines: Sequence[tuple[int, int, bytes]]) -> None:
        try:
            self.add((seq, offset, len(line), json.loads(line)) for seq, offset, line in lines)
        except (ValueError, KeyError, TypeError, OverflowError, *_UNFIT):
            # The chain holds, so whoever wrote this row knew how to forge it: name the first one.
            self._name_bad_row(name, lines)
            raise

    def _name_bad_row(self, name: str, lines: Sequence[tuple[int, int, bytes]]) -> None:
        seen: dict[tuple[Any, ...], int] = {}
        for seq, _, line in lines:
            row = parse_line(line, f"{name}: line {seq}", seq)
            key = row_key(row)
            place = self.find_keys([key]).get(key)
            first = seen.setdefault(key, seq if place is None else place.seq)
            if first != seq:
                raise ChainBroken(
                    f"{name}: line {seq}: forged: has the key of line {first} "
                    f"({', '.join(str(part) for part in key)})",
                    line=seq,
                    change="forged",
                )

    def add(self, rows: Iterable[tuple[int, int, int, Mapping[str, Any]]]) -> None:
        """Add rows as (seq, offset, length, fields)."""
        records = []
        definitions: dict[int, tuple[Any, ...]] = {}
        windows: dict[int, str] = {}
        for seq, offset, length, row in rows:
            definition, window, group = _ids(*_named_of(row))
            if definition not in definitions:
                definitions[definition] = (definition, seq, *_definition_of(row))
            windows[window] = row["window"]
            records.append((definition, seq, _key(group, row["repeat"]), offset, length, window))
        self._db.executemany("INSERT OR IGNORE INTO window VALUES (?, ?)", windows.items())
        self._db.executemany(
            "INSERT OR IGNORE INTO definition VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            definitions.values(),
        )
        self._db.executemany("INSERT INTO row VALUES (?, ?, ?, ?, ?, ?)", records)

    def find_keys(self, keys: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], Place]:
        """Return where the rows of keys (window, cell, metric, start, repeat) stand."""
        wanted = {_key(_group(*key[:-1]), key[-1]): key for key in keys}
        found = {}
        for some in _some(list(wanted), _KEYS_AT_ONCE):
            marks = ", ".join("?" for _ in some)
            for key, *place in self._db.execute(
                f"SELECT key, seq, offset, length FROM row WHERE key IN ({marks})",  # noqa: S608
                some,
            ):
                found[wanted[key]] = Place(*place)
        return found

    def place(self, seq: int) -> Place | None:
        """Return where the row of a number stands."""
        found = self._db.execute(
            "SELECT seq, offset, length FROM definition CROSS JOIN row"
            " ON row.definition = definition.id AND row.seq = ?",
            (seq,),
        ).fetchone()
        return Place(*found) if found else None

    def select(self, where: Mapping[str, Sequence[Any]]) -> list[Place]:
        """Return the places of the rows whose indexed fields are among `where`'s, in file order."""
        condition, values = _condition(where)
        found = self._db.execute(
            f"SELECT row.seq, row.offset, row.length {_JOINED} {condition} ORDER BY row.seq",
            values,
        )
        return [Place(*row) for row in found]

    def definitions(self, where: Mapping[str, Sequence[Any]]) -> list[tuple[int, dict[str, Any]]]:
        """Return (id, definition) of every definition that has rows among `where`'s.

        They come in the order of their first rows.
        """
        condition, values = _condition(where)
        # Every definition has rows: as long as only its own fields are asked for, none of them
        # needs to be looked at.
        rows = "FROM definition" if where.keys() <= set(DEFINITION) else _JOINED
        found = self._db.execute(
            "SELECT DISTINCT definition.id, definition.cell, definition.metric,"
            " definition.max_tokens, definition.clock_cap_mhz,"
            ' definition."commit", definition.prompt_sha256'
            f" {rows} {condition} ORDER BY definition.first",
            values,
        )
        return [(row[0], dict(zip(DEFINITION, row[1:], strict=True))) for row in found]

    def offsets(self, definition: int) -> list[tuple[int, int, str]]:
        """Return (seq, offset, window) of a definition's rows, in file order."""
        return self._db.execute(
            "SELECT row.seq, row.offset, window.name FROM row"
            " JOIN window ON window.id = row.window WHERE row.definition = ?"
            " ORDER BY row.seq",
            (definition,),
        ).fetchall()


def _some(keys: list[bytes], size: int) -> Iterator[list[bytes]]:
    for first in range(0, len(keys), size):
        yield keys[first : first + size]


def _condition(where: Mapping[str, Sequence[Any]]) -> tuple[str, list[Any]]:
    parts: list[str] = []
    values: list[Any] = []
    for field, allowed in where.items():
        parts.append(f"{COLUMNS[field]} IN ({', '.join('?' for _ in allowed)})")
        values += allowed
    windows = where.get("window")
    if windows:
        parts.append(f"({' OR '.join('row.key BETWEEN ? AND ?' for _ in windows)})")
        for window in windows:
            values += [_prefix(str(window)), _prefix(str(window)) + b"\xff" * 24]
    return ("WHERE " + " AND ".join(parts) if parts else ""), values
