"""Sealed JSON files: what was written is what is read, or the edit is named.

The last field is the sha256 of all the others. It is no signature: it finds an edit by hand, a
torn copy or a mixed-up file, and it is the name by which one file speaks of another.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final, TypeVar

from pytest_dsv41.durable import create_exclusive, dump_json, read_regular
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.text import one_line

__all__ = ["outside_git", "read_sealed", "seal_of", "write_sealed"]

_SEAL: Final = "sha256"
_MOST_BYTES: Final = 256 << 20
"""Twice what all positions with lists of 1,000 tokens take."""
_Record = TypeVar("_Record")


def seal_of(body: dict[str, Any]) -> str:
    """Return the sha256 of a record's canonical JSON, 64 hex digits."""
    return hashlib.sha256(dump_json(body).encode()).hexdigest()


def write_sealed(path: Path, body: dict[str, Any]) -> str:
    """Create `path` with `body` and its seal, once, and return the seal.

    Raises:
        UsageError: the file exists; it is never overwritten.
    """
    seal = seal_of(body)
    text = json.dumps({**body, _SEAL: seal}, indent=1, allow_nan=False)
    try:
        create_exclusive(path, text + "\n")
    except FileExistsError:
        raise UsageError(f"{path}: exists; a sealed file is never overwritten") from None
    return seal


def read_sealed(
    path: Path, kind: str, schema: str | tuple[str, ...], form: type[_Record]
) -> tuple[_Record, str]:
    """Read a sealed file of one schema as `form`; return it and its seal.

    Args:
        path: the file.
        kind: what it is, for messages and the kinds of refusals (`probe`, `band`).
        schema: what its field `schema` must say, or one of several.
        form: a dataclass, whose fields are checked one by one, or a plain dict.

    Raises:
        UsageError: no such file, another schema, or a field that is wrong.
        MeasurementRefused: kind `<kind>-edited`: the seal is not that of the content.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        raw = read_regular(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: no {kind}: not JSON: {one_line(str(error), 100)}") from None
    valid = (schema,) if isinstance(schema, str) else schema
    if not isinstance(body, dict) or body.get("schema") not in valid:
        found = one_line(repr(body.get("schema")), 40) if isinstance(body, dict) else "no object"
        told = ", ".join(map(repr, valid))
        raise UsageError(f"{path}: no {kind}: schema {found}, valid: {told}")
    seal = body.pop(_SEAL, None)
    try:
        edited = seal != seal_of(body)
    except ValueError:
        edited = True
    if edited:
        raise MeasurementRefused(
            f"{kind}-edited", f"{path}: its content is not what was sealed: the {kind} was edited"
        )
    try:
        record = TypeAdapter(form).validate_json(dump_json(body), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: {where}: {one_line(first['msg'], 150)}") from None
    return record, str(seal)


def outside_git(path: Path) -> Path:
    """Return `path` where it lies in no git work tree.

    Raises:
        UsageError: it does; what a model says of a prompt is kept out of repositories.
    """
    whole = path.resolve()
    for folder in whole.parents:
        if (folder / ".git").exists():
            raise UsageError(
                f"{path}: inside the git work tree {folder}; name a place outside of it"
            )
    return path
