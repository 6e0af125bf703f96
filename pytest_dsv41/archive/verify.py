"""Is this archive what it was? The chain says what was changed, checkpoints say what is missing.

A chain proves that no row before its end was edited, removed, moved or added. What it cannot see
is its own end: rows cut off where an append ended, an older copy of the file, or a different
archive in its place. For these somebody must remember a head: the summaries of windows do
(`archive.before` and `archive.after`), and any file with `{"rows": …, "sha256": …}` will do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_dsv41.archive.chain import START, Position, Walk, walk
from pytest_dsv41.archive.errors import ArchiveError, ChainBroken, WrongSchema
from pytest_dsv41.archive.history import window_folders
from pytest_dsv41.archive.kept import kept_copies, old_heads
from pytest_dsv41.archive.rows import parse_line, row_key
from pytest_dsv41.archive.store import Head, checked_path, lock_path
from pytest_dsv41.durable import FileLock
from pytest_dsv41.text import counted

__all__ = ["Checkpoint", "Finding", "Verification", "read_checkpoints", "verify_archive"]

_HEX64 = re.compile(r"[0-9a-f]{64}")
_JSON_LIMIT = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A head that existed once, and who says so."""

    head: Head
    source: str


@dataclass(frozen=True)
class Finding:
    """One change: a short name, the first line it shows at (None: the end), and a sentence."""

    change: str
    line: int | None
    message: str


@dataclass(frozen=True)
class Verification:
    """What a verification saw.

    `head` is the last row up to which the chain holds; `findings` come first broken line first;
    `notes` are no faults, but say what was not checked or was left over.
    """

    path: str
    head: Head
    size: int
    checkpoints: int
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was changed, as far as it can be seen."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON."""
        return {
            "path": self.path,
            "ok": self.ok,
            "rows": self.head.rows,
            "sha256": self.head.sha256,
            "size": self.size,
            "checkpoints": self.checkpoints,
            "findings": [vars(finding) for finding in self.findings],
            "notes": list(self.notes),
        }


def _heads(value: Any) -> Iterator[Head]:
    if not isinstance(value, dict):
        return
    rows, sha = value.get("rows"), value.get("sha256")
    if isinstance(rows, int) and not isinstance(rows, bool) and rows >= 0:
        if isinstance(sha, str) and _HEX64.fullmatch(sha):
            yield Head(rows, sha)
        return
    for part in ("archive", "before", "after"):
        yield from _heads(value.get(part))


def _of_archive(value: Any, archive: Path | None, folder: Path) -> bool:
    """Whether a summary speaks of this archive; one that names none is taken to."""
    block = value.get("archive") if isinstance(value, dict) else None
    named = block.get("path") if isinstance(block, dict) else None
    if archive is None or not isinstance(named, str):
        return True
    wanted = os.path.realpath(archive)
    with contextlib.suppress(OSError, ValueError):
        return wanted in (os.path.realpath(named), os.path.realpath(folder / named))
    return False


def _documents(file: Path) -> list[Any]:
    if file.stat().st_size > _JSON_LIMIT:
        raise ArchiveError(f"{file}: too large for checkpoints")
    text = file.read_text(encoding="utf-8")
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def read_checkpoints(
    sources: Iterable[str | os.PathLike[str]], archive: str | os.PathLike[str] | None = None
) -> list[Checkpoint]:
    """Return the checkpoints that files and folders hold, oldest rows first.

    Args:
        sources: a file with a head, a summary.json, JSON lines of either; or a folder, of which
            and of whose windows summary.json and archive-head.json are read.
        archive: with it, the files of a folder that name another archive are left out.

    Raises:
        ArchiveError: a named file cannot be read or holds no head.
    """
    found: dict[tuple[int, str], Checkpoint] = {}
    only = None if archive is None else Path(archive)
    for source in map(Path, sources):
        if source.is_dir():
            files = [
                folder / name
                for folder in (source, *window_folders(source))
                for name in ("summary.json", "archive-head.json")
                if (folder / name).is_file()
            ]
        else:
            files = [source]
        for file in files:
            try:
                documents = _documents(file)
                heads = [
                    head
                    for document in documents
                    if not source.is_dir() or _of_archive(document, only, file.parent)
                    for head in _heads(document)
                ]
            except (OSError, ValueError, RecursionError) as error:
                if source.is_dir():
                    continue
                reason = error.strerror if isinstance(error, OSError) else "is not JSON"
                raise ArchiveError(f"{file}: {reason}; a checkpoint file holds heads") from None
            if not heads and not source.is_dir():
                raise ArchiveError(
                    f'{file}: holds no checkpoint; valid: {{"rows": …, "sha256": …}} or a '
                    "window's summary.json"
                )
            for head in heads:
                found.setdefault((head.rows, head.sha256), Checkpoint(head, str(file)))
    return [found[key] for key in sorted(found)]


@dataclass
class _Seen:
    """What the walk saw on its way: the end, and the sha256 at each checkpoint's row."""

    found: Walk
    shas: dict[int, str] = field(default_factory=dict)
    broken: ChainBroken | WrongSchema | None = None


def verify_archive(
    path: str | os.PathLike[str],
    checkpoints: Sequence[Checkpoint] = (),
    *,
    fields: bool = False,
) -> Verification:
    """Verify an archive from its own bytes; the index is not used.

    Args:
        path: the archive.
        checkpoints: heads that must lie in its history, see `read_checkpoints`.
        fields: check every field of every row and every key too (several times slower).

    Raises:
        ArchiveError: there is no such file.
    """
    archive = checked_path(path)
    given, before = len(checkpoints), old_heads(archive)
    checkpoints = [p for p in checkpoints if (p.head.rows, p.head.sha256) not in before]
    try:
        fd = os.open(archive, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ArchiveError(f"{archive}: there is no such archive") from None
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                # Not while somebody appends; where the lock cannot be taken, without it.
                stack.enter_context(FileLock(lock_path(archive)))
            seen = _walk(fd, archive.name, {point.head.rows for point in checkpoints}, fields)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    end = seen.found.position
    findings = [*_own_findings(archive.name, seen)]
    vouched = max(
        (p.head.rows for p in checkpoints if seen.shas.get(p.head.rows) == p.head.sha256),
        default=0,
    )
    notes = []
    for gap in seen.found.gaps:
        finding = Finding(
            "truncated",
            gap.line,
            f"{archive.name}: line {gap.line}: truncated: the append before it lost its last "
            f"{counted(gap.lost, 'row')}, later rows were appended behind the cut",
        )
        if vouched >= gap.line:
            notes.append(f"{finding.message}; a later checkpoint accepts this")
        else:
            findings.append(finding)
    findings.sort(key=lambda finding: finding.line or end.rows + 1)
    findings += _checkpoint_findings(archive.name, seen, checkpoints)
    notes += _notes(archive, seen, checkpoints)
    if len(checkpoints) < given:
        notes.append(
            f"{counted(given - len(checkpoints), 'checkpoint')} of the file before its migration: "
            f"{', '.join(copy.name for copy in kept_copies(archive))}"
        )
    return Verification(
        str(archive),
        Head(end.rows, end.head),
        size,
        len(checkpoints),
        tuple(findings),
        tuple(notes),
    )


def _walk(fd: int, name: str, stops: set[int], fields: bool) -> _Seen:
    sink = _FieldCheck(name) if fields else None
    seen = _Seen(Walk(START), {0: START.head})
    position = START
    try:
        for rows in (*sorted(stop for stop in stops if stop > 0), None):
            found = (
                walk(fd, name, position, sink=sink)
                if rows is None
                else walk(fd, name, position, last=rows, sink=sink)
            )
            seen.found = replace(found, gaps=seen.found.gaps + found.gaps)
            position = found.position
            if rows is not None and position.rows == rows:
                seen.shas[rows] = position.head
    except (ChainBroken, WrongSchema) as error:
        seen.broken = error
        good = _before(fd, name, position, error)
        seen.found = replace(seen.found, position=good)
    return seen


def _before(fd: int, name: str, start: Position, error: Exception) -> Position:
    """Return the place before the broken line, for the report."""
    if isinstance(error, ChainBroken) and error.line > start.rows + 1:
        with contextlib.suppress(ChainBroken):
            return walk(fd, name, start, last=error.line - 1).position
    return start


class _FieldCheck:
    """A sink that checks what the chain does not: the rules of the fields, and the keys."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: set[bytes] = set()

    def __call__(self, lines: Sequence[tuple[int, int, bytes]]) -> None:
        for seq, _, line in lines:
            row = parse_line(line, f"{self._name}: line {seq}", seq)
            key = json.dumps(row_key(row)).encode()
            digest = hashlib.blake2b(key, digest_size=16).digest()
            if digest in self._keys:
                raise ChainBroken(
                    f"{self._name}: line {seq}: forged: an earlier line has its key",
                    line=seq,
                    change="forged",
                )
            self._keys.add(digest)


def _own_findings(name: str, seen: _Seen) -> Iterator[Finding]:
    """What the file says of itself."""
    if isinstance(seen.broken, ChainBroken):
        yield Finding(seen.broken.change, seen.broken.line, str(seen.broken))
        return
    if seen.broken is not None:
        yield Finding("foreign row", 1, str(seen.broken))
        return
    end = seen.found.position
    if seen.found.cut:
        yield Finding(
            "truncated",
            end.rows + 1,
            f"{name}: line {end.rows + 1}: truncated: the file ends in the middle of it, "
            f"{seen.found.cut} bytes are left",
        )
    elif seen.found.newline_missing:
        yield Finding(
            "truncated", end.rows, f"{name}: line {end.rows}: truncated: its last byte is missing"
        )
    if end.missing:
        yield Finding(
            "truncated",
            end.rows + 1,
            f"{name}: line {end.rows + 1}: truncated: the last append lost its last "
            f"{counted(end.missing, 'row')}",
        )


def _checkpoint_findings(
    name: str, seen: _Seen, checkpoints: Sequence[Checkpoint]
) -> Iterator[Finding]:
    """What others say of the file."""
    end = seen.found.position
    if seen.broken is not None:
        # Rows behind the first broken line prove nothing, with or without checkpoints.
        checkpoints = [point for point in checkpoints if point.head.rows <= end.rows]
    points = sorted(checkpoints, key=lambda point: point.head.rows)
    within = [point for point in points if 0 < point.head.rows <= end.rows]
    matching = [p for p in within if seen.shas.get(p.head.rows) == p.head.sha256]
    differing = [p for p in within if p not in matching]
    if differing:
        first = differing[0]
        agreed = max((p.head.rows for p in matching if p.head.rows < first.head.rows), default=0)
        if agreed:
            what = f"rewritten after row {agreed}, up to which the checkpoints agree"
            change = "forged"
        else:
            what = "another archive's copy, or rewritten from its first row"
            change = "another archive"
        yield Finding(
            change,
            agreed + 1,
            f"{name}: row {first.head.rows} is not the one that {first.source} knows: {what}",
        )
    beyond = [point for point in points if point.head.rows > end.rows]
    if beyond and not differing:
        newest = beyond[-1]
        older = [p for p in matching if p.head.rows == end.rows]
        dangling = seen.found.cut or seen.found.newline_missing or end.missing
        if older and not dangling:
            what, change = f"an older copy, as {older[0].source} knew it", "older copy"
        else:
            what, change = "truncated", "truncated"
        yield Finding(
            change,
            None,
            f"{name}: ends at row {end.rows}: {what}; {newest.source} knows "
            f"{newest.head.rows} rows, {newest.head.rows - end.rows} are missing",
        )


def _notes(archive: Path, seen: _Seen, checkpoints: Sequence[Checkpoint]) -> Iterator[str]:
    rows = seen.found.position.rows
    if seen.found.unfinished:
        yield (
            f"{archive.name}: {seen.found.unfinished} bytes of an append that was never "
            "acknowledged stand at the end; the next append sets them aside"
        )
    if not checkpoints:
        yield (
            "no checkpoint was given: rows cut off where an append ended, an older copy or "
            "another archive's copy cannot be seen (--checkpoints)"
        )
    elif seen.broken is None:
        newest = max(point.head.rows for point in checkpoints)
        if rows > newest:
            yield f"{counted(rows - newest, 'row')} newer than the newest checkpoint (row {newest})"
    aside = sorted(archive.parent.glob(f"{archive.name}.torn-*"))
    if aside:
        yield f"bytes set aside by earlier appends: {', '.join(file.name for file in aside)}"
