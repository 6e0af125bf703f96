"""A payload against its manifest: how many files, how large, and byte for byte the same.

A manifest is JSON: `{"schema": "dsv41-manifest-v1", "files": [{"path", "bytes", "sha256"}, …]}`,
with paths relative to the payload's folder.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pytest_dsv41.durable import parse_json
from pytest_dsv41.errors import RefusedByWorld, SpecError, UsageError
from pytest_dsv41.payload.hashing import hash_file, identity, tell_bytes
from pytest_dsv41.payload.step import Step, Untrusted
from pytest_dsv41.text import counted, one_line
from pytest_dsv41.window.source import read_input

__all__ = ["MANIFEST", "Manifest", "Verified", "load_manifest", "make_manifest", "verify_payload"]

MANIFEST: Final = "dsv41-manifest-v1"
KIND: Final = "payload verify"
_BYTES_MOST: Final = 256 << 20

Progress = Callable[[str, int, int], None]
"""Called with the file at work, the bytes that are done and those of all files."""


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    path: str = Field(min_length=1)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """What a payload must consist of."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    schema_: Literal["dsv41-manifest-v1"] = Field(alias="schema")
    files: list[_File] = Field(min_length=1)

    @property
    def total(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class Verified:
    """What a verification found. `problems` names each file that is wrong, and how."""

    problems: tuple[str, ...]
    files: int
    hashed: int = 0
    """Files that were read in this run; the others were, by an earlier one."""
    notes: tuple[str, ...] = field(default=())


def load_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        SpecError: no such file, not JSON, a wrong field, a path that is absolute, leaves the folder
            or stands twice.
    """
    raw = read_input(path, _BYTES_MOST)
    try:
        manifest = Manifest.model_validate(parse_json(raw, once=True))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "top"
        raise SpecError(f"{path}: {where}: {one_line(first['msg'], 150)}") from None
    except ValueError as error:
        raise SpecError(f"{path}: not JSON: {one_line(str(error), 100)}") from None
    seen: set[str] = set()
    for number, file in enumerate(manifest.files):
        pure = PurePosixPath(file.path)
        plain = str(pure) == file.path and not pure.is_absolute() and ".." not in pure.parts
        if not plain or "\0" in file.path:
            raise SpecError(
                f"{path}: files.{number}.path: {one_line(repr(file.path), 100)}; "
                "valid: a path inside the payload's folder, without '..'"
            )
        if file.path in seen:
            raise SpecError(f"{path}: files.{number}.path: {one_line(file.path, 100)} twice")
        seen.add(file.path)
    return manifest


def make_manifest(
    folder: Path, *, ignore: Sequence[str] = (), progress: Progress | None = None
) -> dict[str, Any]:
    """Return the manifest of what lies in `folder` now.

    Raises:
        UsageError: no such folder, or it is empty; something in it is no regular file, cannot be
            read, or has a name that is no text.
        RefusedByWorld: a file was changed while it was read.
    """
    names = sorted(_names(folder, ignore))
    if not names:
        raise UsageError(f"{folder}: holds no file")
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{folder}: {one_line(repr(name), 100)}: its name is not UTF-8; rename it, or "
                "leave it out with --ignore"
            ) from None
    found = {name: identity(folder / name) for name in names}
    count = _Counter(progress, sum(size for size, *_ in found.values()))
    rows = []
    for name, before in found.items():
        count.file = name
        digest = hash_file(folder / name, count)
        if identity(folder / name) != before:
            raise RefusedByWorld(f"{folder / name}: was changed while it was read")
        rows.append({"path": name, "bytes": before[0], "sha256": digest})
    return {"schema": MANIFEST, "files": rows}


def verify_payload(
    folder: Path,
    manifest_path: Path,
    step: Step,
    *,
    resume: bool = False,
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> Verified:
    """Hold `folder` against its manifest: count, sizes, then the sha256 of every file.

    Each file is journalled as soon as it is hashed. With `resume`, a file that an earlier run
    has hashed for this manifest, and that was not changed since (size, times, inode), is not read
    again. A receipt is written when everything is right.

    Args:
        folder: the payload.
        manifest_path: its manifest.
        step: the step's folder, held.
        resume: go on where an earlier run was ended.
        ignore: globs of paths that are no part of the payload.
        progress: see `Progress`.

    Raises:
        SpecError, UsageError: the manifest or the folder cannot be used.
        RefusedByWorld: a file was changed while it was read.
    """
    manifest = load_manifest(manifest_path)
    digest = hash_file(manifest_path)
    known = _known(step, digest) if resume else {}
    besides = [path for path in (manifest_path, step.folder) if path.exists()]
    problems = _cheap(folder, manifest, ignore, besides)
    if resume and not problems:
        done = _receipt(step, manifest_path, folder, manifest)
        if done is not None:
            return done
    step.begin({"manifest_sha256": digest, "resume": resume}, keep_journal=resume)
    if problems:
        step.note("wrong", problems=problems)
        return Verified(tuple(problems), len(manifest.files))
    count = _Counter(progress, manifest.total)
    rows = []
    hashed = 0
    for file in manifest.files:
        path = folder / file.path
        before = identity(path)
        count.file = file.path
        if known.get(file.path) == (before, file.sha256):
            count(file.bytes)
            found = file.sha256
        else:
            found = hash_file(path, count)
            hashed += 1
            if identity(path) != before:
                raise RefusedByWorld(f"{path}: was changed while it was read")
            step.note("file", path=file.path, sha256=found, identity=before)
        if found != file.sha256:
            problems.append(
                f"{one_line(file.path)}: sha256 {found}, the manifest says {file.sha256}"
            )
        rows.append({**file.model_dump(), "identity": before})
    if problems:
        step.note("wrong", problems=problems)
    else:
        step.finish(
            [{"path": str(manifest_path), "bytes": manifest_path.stat().st_size, "sha256": digest}],
            rows,
            folder=str(folder.resolve()),
        )
    return Verified(tuple(problems), len(manifest.files), hashed)


def _known(step: Step, digest: str) -> dict[str, tuple[list[int], str]]:
    """What earlier runs have hashed for this manifest: path to identity and sha256."""
    known: dict[str, tuple[list[int], str]] = {}
    same = False
    for row in step.noted():
        if row.get("event") == "begin":
            same = row.get("manifest_sha256") == digest
            if not same:
                known.clear()
        elif same and row.get("event") == "file" and isinstance(row.get("identity"), list):
            known[str(row.get("path"))] = (row["identity"], str(row.get("sha256")))
    return known


def _receipt(step: Step, manifest_path: Path, folder: Path, manifest: Manifest) -> Verified | None:
    """The answer of a whole receipt whose files were not touched since; None without one."""
    try:
        body = step.trusted([manifest_path])
    except Untrusted:
        return None
    held = {str(row["path"]): row.get("identity") for row in body["outputs"]}
    if body.get("folder") != str(folder.resolve()):
        return None
    if any(held.get(file.path) != identity(folder / file.path) for file in manifest.files):
        return None
    note = f"verified {body['ended_utc']}; no file was changed since"
    return Verified((), len(manifest.files), 0, (note,))


def _cheap(
    folder: Path, manifest: Manifest, ignore: Sequence[str], besides: Sequence[Path]
) -> list[str]:
    """What is wrong by count and size alone, each file by its name."""
    there = set(_names(folder, ignore, besides))
    wanted = {file.path: file for file in manifest.files}
    problems = []
    if len(there) != len(wanted):
        problems.append(f"{counted(len(there), 'file')}, the manifest has {len(wanted)}")
    problems += [f"{one_line(name)}: not in the manifest" for name in sorted(there - set(wanted))]
    for name, file in wanted.items():
        if name not in there:
            problems.append(f"{one_line(name)}: missing")
            continue
        try:
            size = identity(folder / name)[0]
        except UsageError as error:
            problems.append(one_line(str(error)))
            continue
        if size != file.bytes:
            told = f"{counted(size, 'byte')}, the manifest says {file.bytes:,}"
            problems.append(f"{one_line(name)}: {told}")
    return problems


def _names(folder: Path, ignore: Sequence[str], besides: Sequence[Path] = ()) -> Iterator[str]:
    """Every path below `folder` that is no folder, but for `ignore` and what lies in `besides`.

    A link to a folder counts, so that it is named: what lies behind it is not looked at.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder")
    left_out = {os.path.realpath(path) for path in besides}

    def blind(error: OSError) -> None:
        raise UsageError(f"{error.filename}: cannot be listed: {error.strerror}") from None

    for place, folders, files in os.walk(folder, onerror=blind):
        here = os.path.realpath(place)
        folders.sort()
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        folders[:] = [name for name in folders if f"{here}/{name}" not in left_out]
        for name in (*files, *links):
            if f"{here}/{name}" in left_out:
                continue
            path = (Path(place) / name).relative_to(folder).as_posix()
            if not any(fnmatch.fnmatchcase(path, glob) for glob in ignore):
                yield path


class _Counter:
    """Adds up bytes for the progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self.file = ""

    def __call__(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(f"{self.file}: {tell_bytes(self._done)}", self._done, self._total)
