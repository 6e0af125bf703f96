"""`campaign.toml`: what the user sets once for a campaign's folder, never a window file.

Who may drive a chain, whom an alert is told, and which backend starts a smoke: commands and code
that run on the user's behalf come from here alone.
"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..durable import write_atomic
from ..errors import UsageError
from ..text import one_line

__all__ = ["Campaign", "keep_in_units", "not_the_coordinator", "read_campaign"]

_NAME: Final = "campaign.toml"


class Campaign(BaseModel):
    """The settings; every key has a default, and an unknown one is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    coordinator: str = ""
    """Who may open a chain's gate and end a chain: the value that WINDOW_COORDINATOR must have."""
    alert_command: tuple[str, ...] = ()
    """Run for every alert, with the alert as JSON on its standard input."""
    alert_repeat_hours: float = Field(default=6.0, gt=0)
    """Hours after which an alert that still stands is told again."""
    keeper_units: bool = False
    """Whether keepers run as units of the user's systemd: what kills the window's own scope or
    login session does not kill them (SAFETY)."""
    smoke_backend: str = Field(default="", pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?$")
    """`module:factory` of the backend that starts smokes (`dsv41 smoke`)."""


def read_campaign(campaign: Path) -> Campaign:
    """Read the folder's `campaign.toml`; without one, the defaults.

    Raises:
        UsageError: it is not TOML, or a key is unknown or of the wrong type.
    """
    path = campaign / _NAME
    try:
        return Campaign.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Campaign()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        valid = ", ".join(Campaign.model_fields)
        raise UsageError(f"{path}: {key}: {one_line(first['msg'])}; keys: {valid}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {one_line(str(error))}") from None


def keep_in_units(campaign: Path) -> Path:
    """Add `keeper_units = true` to the folder's `campaign.toml`, which keeps what it says.

    Raises:
        UsageError: the file says false, which a person wrote, or cannot be read.
    """
    path = campaign / _NAME
    settings = read_campaign(campaign)
    if settings.keeper_units:
        return path
    if "keeper_units" in settings.model_fields_set:
        raise UsageError(f"{path}: it says keeper_units = false; change it there")
    text, like = "", None
    if path.exists():
        text, like = path.read_text(encoding="utf-8"), path.stat()
    if text and not text.endswith("\n"):
        text += "\n"
    write_atomic(path, text + "keeper_units = true\n", like=like)
    return path


def not_the_coordinator(campaign: Path) -> str | None:
    """Why this process may not drive the campaign's chain, or None (WIN2, S96 FIX 1)."""
    wanted = read_campaign(campaign).coordinator
    given = os.environ.get("WINDOW_COORDINATOR", "")
    if not wanted:
        return f'{campaign / _NAME} names no coordinator; write: coordinator = "NAME"'
    if given != wanted:
        has = f"is {one_line(given)!r}" if given else "is not set"
        return f"WINDOW_COORDINATOR {has}, and this campaign's coordinator is another"
    return None
