"""Rebuilding an older archive as v4, in place, without losing or guessing anything.

    v1   window, cell, metric, value, max_tokens, date
    v3   v1 and commit, clock_cap_mhz, start, repeat (and the optional clock fields)
    v4   v3 and prompt_sha256 (and prompt_members)

What an old row lacks comes from the windows' own folders, found by everything the old row has. A
row that no folder proves stops the migration: it is all rows or none. The rebuilt file is proved
against the old one as a multiset on every field that an old row has, read back from its bytes.

In place means: under the archive's lock, the new file is written and synced beside the old one,
the old one gets a second name that stays, and one rename puts the new one in its place. A kill at
any moment leaves either the whole old archive or the whole new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_dsv41.archive.disk import DISK, Disk
from pytest_dsv41.archive.errors import (
    ArchiveError,
    HistoryUnknown,
    MigrationRefused,
    RowRefused,
)
from pytest_dsv41.archive.history import HOSTS, control_rows, window_id
from pytest_dsv41.archive.index import drop_index
from pytest_dsv41.archive.kept import OWN_HASHES, kept_name
from pytest_dsv41.archive.rows import (
    GENESIS,
    MIGRATED,
    OPTIONAL,
    SCHEMA,
    encode,
    line_fields,
    normalise,
    row_key,
)
from pytest_dsv41.archive.store import Head, checked_path, lock_path
from pytest_dsv41.durable import FileLock, dump_json
from pytest_dsv41.text import one_line

__all__ = ["Migration", "migrate"]

_PREFIX = "dsv41-control-archive-"
_V1 = ("window", "cell", "metric", "value", "max_tokens", "date")
_V3 = (*_V1, "commit", "clock_cap_mhz", "start", "repeat")
_OLD = dict(zip(MIGRATED, (_V1, _V3), strict=True))
_OPTIONAL = tuple(name for name in OPTIONAL if not name.startswith("prompt"))
# The document fixes no names for the chain of old versions; these are read.
_PREVIOUS = ("prev_sha256", "prev_sha", "prev", "previous")
_ENVELOPE = ("schema", "seq", *_PREVIOUS, *OWN_HASHES)
_PROBLEMS_SHOWN = 20

Prompts = Mapping[str, Mapping[str, str]]
"""Window to cell to prompt identity."""


@dataclass(frozen=True)
class Migration:
    """What a migration did, or would do.

    Attributes:
        version: the schema of the file before.
        rows: how many rows it has; `windows` how many windows.
        identities: prompt identities, one for each window and cell.
        head: of the rebuilt archive.
        multiset_equal: whether old and new rows agree on every field of the old ones.
        problems: why it cannot be done, empty if it can.
        notes: what was not proved about the old file.
        applied: whether the file was replaced.
        kept: the old file's new name, if it was.
    """

    version: str
    rows: int
    windows: int
    identities: int
    head: Head | None
    multiset_equal: bool
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    applied: bool = False
    kept: str | None = None


@dataclass(frozen=True)
class _Old:
    version: str
    rows: list[dict[str, Any]]
    notes: list[str]


def migrate(
    path: str | os.PathLike[str],
    folders: Iterable[str | os.PathLike[str]] = (),
    *,
    prompts: Prompts | None = None,
    clock_log: str | os.PathLike[str] | None = None,
    hosts: int = HOSTS,
    apply: bool = False,
    disk: Disk = DISK,
) -> Migration:
    """Rebuild a v1 or v3 archive as v4; a dry run unless `apply`.

    Args:
        path: the archive.
        folders: the windows' folders, which prove what the old rows lack.
        prompts: for v3, the prompt identity of each window and cell, instead of folders.
        clock_log, hosts: as for `history.start_clock_cap`.
        disk: the effects, for tests.

    Returns:
        A `Migration`; a v4 archive comes back unchanged with no problem. With `problems` nothing
        was changed.

    Raises:
        MigrationRefused: the file is of another version, mixed, or damaged.
    """
    archive = checked_path(path)
    proved = _Proved(tuple(map(Path, folders)), prompts or {}, clock_log, hosts)
    with FileLock(lock_path(archive)):
        fd = disk.open(archive)
        try:
            # Writers of old versions lock the archive itself.
            fcntl.flock(fd, fcntl.LOCK_EX)
            data = _read(fd)
            if _version(data.partition(b"\n")[0], archive.name) == SCHEMA:
                note = "already v4, nothing to do"
                return Migration(SCHEMA, data.count(b"\n"), 0, 0, None, True, (), (note,))
            old = _parse(data, archive.name)
            found, new = _rebuild(old, proved)
            if not apply or found.problems:
                return found
            kept = _replace(archive, new, old.version, disk)
            drop_index(archive)
        finally:
            disk.close(fd)
    return Migration(**{**vars(found), "applied": True, "kept": str(kept)})


def _read(fd: int) -> bytes:
    parts = []
    offset = 0
    while data := os.pread(fd, 1 << 20, offset):
        parts.append(data)
        offset += len(data)
    return b"".join(parts)


def _load(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise MigrationRefused(f"{where}: is no JSON object; repair the file first")
    return row


def _version(line: bytes, name: str) -> str:
    if not line:
        raise MigrationRefused(f"{name}: line 1: is empty; an empty archive needs no migration")
    schema = _load(line, f"{name}: line 1").get("schema")
    if schema == SCHEMA or schema in _OLD:
        return str(schema)
    shown = one_line(repr(schema), 80)
    raise MigrationRefused(
        f"{name}: line 1: schema {shown} cannot be migrated; valid: {', '.join(_OLD)}"
    )


def _parse(data: bytes, name: str) -> _Old:
    lines = data.split(b"\n")
    if lines.pop():
        raise MigrationRefused(
            f"{name}: line {len(lines) + 1}: ends in the middle; repair it first"
        )
    version = _version(lines[0], name)
    known = {*_OLD[version], *_OPTIONAL, *_ENVELOPE}
    rows: list[dict[str, Any]] = []
    whole = [_load(line, f"{name}: line {number}") for number, line in enumerate(lines, start=1)]
    for number, row in enumerate(whole, start=1):
        where = f"{name}: line {number}"
        if row.get("schema") != version:
            shown = one_line(repr(row.get("schema")), 80)
            raise MigrationRefused(f"{where}: schema {shown} in a {version} file")
        unknown = [field for field in row if field not in known]
        if unknown:
            raise MigrationRefused(
                f"{where}: {one_line(repr(unknown[0]), 80)}: unknown field of {version}"
            )
        missing = [field for field in _OLD[version] if field not in row]
        if missing:
            raise MigrationRefused(f"{where}: missing {', '.join(missing)}")
        rows.append({field: row[field] for field in row if field not in _ENVELOPE})
    return _Old(version, rows, _check_chain(whole, name))


def _check_chain(rows: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Check the old chain as far as its form is known; return what was not checked."""
    previous = next((field for field in _PREVIOUS if field in rows[0]), None)
    own = next((field for field in OWN_HASHES if field in rows[0]), None)
    if previous is None or own is None:
        return ["the old rows carry no chain that this version reads: it was not verified"]
    for number, (row, before) in enumerate(zip(rows[1:], rows, strict=False), start=2):
        if row.get(previous) != before.get(own):
            raise MigrationRefused(
                f"{name}: line {number}: not linked to the line before it; repair the file first"
            )
    matching = [row.get(own) == _old_hash(row, own) for row in rows]
    if not any(matching):
        return ["the old chain is linked; how its hashes were made is not known: not verified"]
    if not all(matching):
        raise MigrationRefused(
            f"{name}: line {matching.index(False) + 1}: its bytes do not match its {own}; "
            "repair the file first"
        )
    return []


def _old_hash(row: Mapping[str, Any], own: str) -> str:
    text = dump_json({field: value for field, value in row.items() if field != own})
    return hashlib.sha256(text.encode()).hexdigest()


class _Proved:
    """The rows that the windows' folders prove, found by what an old row has."""

    def __init__(
        self,
        folders: Sequence[Path],
        prompts: Prompts,
        clock_log: str | os.PathLike[str] | None,
        hosts: int,
    ) -> None:
        self._folders: dict[str, Path] = {}
        for folder in folders:
            self._folders.setdefault(window_id(folder), folder)
        self._prompts = prompts
        self._clock_log = clock_log
        self._hosts = hosts
        self._rows: dict[str, dict[tuple[Any, ...], deque[dict[str, Any]]]] = {}

    def complete(self, old: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
        """Return the v4 row of an old one.

        Raises:
            HistoryUnknown: nothing proves it.
        """
        identity = self._prompts.get(str(old["window"]), {}).get(str(old["cell"]))
        if identity is not None and "start" in fields:
            return {**old, "prompt_sha256": identity}
        window = str(old["window"])
        if window not in self._rows:
            self._rows[window] = self._read(window, fields)
        found = self._rows[window].get(tuple(old[field] for field in fields))
        if not found:
            raise HistoryUnknown(
                f"the folder of {window} has no such row (or not as often as the archive)"
            )
        row = found.popleft()
        if "start" in fields:
            # Only what v3 lacks is new: a v3 row keeps every field it has, and gets no other.
            extra = ("prompt_sha256", "prompt_members")
            return {**old, **{field: row[field] for field in extra if field in row}}
        return {**row, **old}

    def _read(
        self, window: str, fields: Sequence[str]
    ) -> dict[tuple[Any, ...], deque[dict[str, Any]]]:
        folder = self._folders.get(window)
        if folder is None:
            raise HistoryUnknown(f"no folder of {window} was given")
        rows: dict[tuple[Any, ...], deque[dict[str, Any]]] = defaultdict(deque)
        for row in control_rows(folder, clock_log=self._clock_log, hosts=self._hosts):
            rows[tuple(row[field] for field in fields)].append(row)
        return rows


def _rebuild(old: _Old, proved: _Proved) -> tuple[Migration, bytes]:
    problems: list[str] = []
    rows: list[dict[str, Any]] = []
    keys: dict[tuple[Any, ...], int] = {}
    identities: dict[tuple[str, str], set[str]] = defaultdict(set)
    for number, row in enumerate(old.rows, start=1):
        where = f"line {number}"
        try:
            new = normalise(proved.complete(row, _OLD[old.version]), where)
        except RowRefused as error:
            problems.append(str(error))
            continue
        except (ArchiveError, TypeError) as error:
            name = ", ".join(one_line(str(row[part]), 60) for part in ("window", "cell", "metric"))
            problems.append(f"{where}: {name}: {error}")
            continue
        first = keys.setdefault(row_key(new), number)
        if first != number:
            problems.append(
                f"{where}: has the key of line {first}: {', '.join(map(str, row_key(new)))}"
            )
        identities[(new["window"], new["cell"])].add(new["prompt_sha256"])
        rows.append(new)
    problems += [
        f"{window}, {cell}: {len(some)} prompt identities, one is needed"
        for (window, cell), some in identities.items()
        if len(some) > 1
    ]
    lines, prev = [], GENESIS
    for seq, row in enumerate(rows, start=1):
        line, prev = encode(row, seq=seq, prev=prev, batch=len(rows) if seq == 1 else 0)
        lines.append(line)
    equal = not problems and _multiset_equal(old.rows, lines)
    if not problems and not equal:
        problems.append("the rebuilt rows are not the old ones on every old field")
    hidden = len(problems) - _PROBLEMS_SHOWN
    if hidden > 0:
        problems = [*problems[:_PROBLEMS_SHOWN], f"… and {hidden} more"]
    found = Migration(
        old.version,
        len(old.rows),
        len({str(row["window"]) for row in old.rows}),
        len(identities),
        None if problems else Head(len(rows), prev),
        equal,
        tuple(problems),
        tuple(old.notes),
    )
    return found, b"".join(lines)


def _multiset_equal(old: Sequence[Mapping[str, Any]], lines: Sequence[bytes]) -> bool:
    """Whether the new lines say exactly what the old rows say, on the fields these have."""
    before = Counter(dump_json(dict(row)) for row in old)
    after: Counter[str] = Counter()
    for row, line in zip(old, lines, strict=True):
        new = line_fields(line)
        after[dump_json({field: new.get(field) for field in row})] += 1
    return before == after


def _replace(archive: Path, data: bytes, version: str, disk: Disk) -> Path:
    temp = archive.with_name(f".{archive.name}.migration")
    with contextlib.suppress(FileNotFoundError):
        # Left by a migration that was killed; the lock is ours.
        disk.unlink(temp)
    fd = disk.open(temp, create=True)
    try:
        # Who could read the old file can read the new one.
        os.fchmod(fd, stat.S_IMODE(archive.stat().st_mode))
        disk.write(fd, data, 0)
        disk.sync(fd)
    finally:
        disk.close(fd)
    kept = _keep(archive, version.removeprefix(_PREFIX), disk)
    disk.sync_folder(archive.parent)
    disk.rename(temp, archive)
    disk.sync_folder(archive.parent)
    return kept


def _keep(archive: Path, version: str, disk: Disk) -> Path:
    """Give the old file a second name; one that a killed migration gave it is used again."""
    for number in range(1000):
        kept = kept_name(archive, version, number)
        try:
            disk.link(archive, kept)
        except FileExistsError:
            if not kept.samefile(archive):
                continue
        return kept
    raise MigrationRefused(f"{archive}: too many copies {archive.name}.{version}-before-v4*")
