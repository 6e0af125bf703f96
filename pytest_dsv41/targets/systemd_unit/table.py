"""The keys of a target's table of kind `systemd-unit`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from ..tables import HostTable, Table

__all__ = ["Knobs", "UnitHost", "UnitTable"]

_UNIT: Final = r"^[A-Za-z0-9:_.@\\-]{1,200}\.service$"


class UnitHost(HostTable):
    """The unit's host over ssh, and what it is called."""

    name: str = Field(default="host", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class Knobs(Table):
    """Kernel limits of the host that must clear a floor."""

    paths: tuple[Annotated[str, Field(pattern="^/")], ...] = Field(min_length=1)
    unit: Literal["pages", "bytes", "kib", "mib"] = "pages"
    floor_mib: int = Field(ge=1)


class UnitTable(Table):
    """The keys of `[target]`; docs/reference.md says what each means."""

    kind: Literal["systemd-unit"] = "systemd-unit"
    engine: str = "llamacpp"
    model: str = Field(min_length=1)
    commit: str = Field(default="", pattern="^([0-9a-f]{40})?$", description="40 hex digits")
    unit: str = Field(pattern=_UNIT, description="a service's name with .service, as serve.service")
    manager: Literal["system", "user"] = "system"
    sudo: bool = False
    env_file: str = Field(
        pattern="^/[^\\s\"'%\\\\$]+$",
        description="an absolute path without blanks, quotes, %, $ and backslashes",
    )
    env_var: str = Field(
        default="", pattern="^([A-Za-z_][A-Za-z0-9_]*)?$", description="a variable's name"
    )
    runtime: Literal["process", "podman"] = "process"
    container: str = ""
    port: int = Field(ge=1, le=65535)
    url: str = ""
    health: tuple[str, ...] = ()
    payloads: dict[str, str] = Field(default_factory=dict)
    checkout: str = ""
    registered_drift: tuple[str, ...] = ()
    knobs: Knobs | None = None
    law: str = ""
    hold: str = Field(default="/var/lib/dsv41/HOLD", pattern="^/", description="an absolute path")
    label: str = ""
    world: str = ""
    host: UnitHost | None = None
