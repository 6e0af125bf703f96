"""What a target's table says, held against its keys, and the hosts over ssh that it names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import SpecError
from ..hosts import CommandLog, Host
from ..text import one_line
from ..window.source import first_slip, slip_text

__all__ = ["HostTable", "Table", "beside", "read_table", "ssh_host"]

_T = TypeVar("_T", bound="Table")


class Table(BaseModel):
    """A table of a target, with no other keys than its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HostTable(Table):
    """How a host is reached."""

    address: str = ""
    user: str | None = None
    port: int = Field(default=22, ge=1, le=65535)
    key: str = ""
    known_hosts: str = ""
    connect_s: float = Field(default=5.0, gt=0)


def read_table(kind: type[_T], table: Mapping[str, Any]) -> _T:
    """Return the table as its model.

    Raises:
        SpecError: a key is unknown, missing, or of the wrong type; names it and the valid ones.
    """
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        first = first_slip(error.errors())
        where = [one_line(str(part), 60) for part in first["loc"]]
        key = ".".join(["target", *where])
        asked = _table_at(kind, first["loc"][:-1])
        above = ".".join(["target", *where[:-1]])
        raise SpecError(
            f"{key}: {slip_text(first, asked.model_fields)}; "
            f"keys of {above}: {', '.join(asked.model_fields)}"
        ) from error


def ssh_host(name: str, where: HostTable, key: str, base: Path, log: CommandLog) -> Host:
    """Return the host; nothing is asked of it yet.

    Args:
        name: what it is called.
        where: how it is reached; files are relative to `base`.
        key: where its table stands, for errors.
        base: the folder of the target's file.
        log: what keeps its commands.

    Raises:
        SpecError: it has no address, or paramiko is not installed.
    """
    if not where.address:
        raise SpecError(f"{key}.address: missing; valid: a name or an address")
    try:
        from ..hosts.ssh import SshHost
    except ImportError as error:
        raise SpecError(
            f"{key}: a host over ssh is reached by paramiko, which is not installed: "
            "pip install 'pytest-dsv41[ssh]'"
        ) from error
    return SshHost(
        name,
        where.address,
        log,
        port=where.port,
        user=where.user,
        key=beside(base, where.key),
        known_hosts=beside(base, where.known_hosts),
        connect_s=where.connect_s,
    )


def beside(base: Path, written: str) -> Path | None:
    """Return a path of the table, which is relative to the folder of its file; None for nothing."""
    return base / Path(written).expanduser() if written else None


def _table_at(kind: type[BaseModel], steps: Sequence[int | str]) -> type[BaseModel]:
    """The deepest table on the way to a key; names of a free table's entries are passed over."""
    for step in steps:
        field = kind.model_fields.get(str(step))
        if field is not None:
            kind = next(_models(field.annotation), kind)
    return kind


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
