"""The laws that come with the package, and a law out of a file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from pytest_dsv41.errors import UsageError
from pytest_dsv41.unit.memory.law import Law, law_from
from pytest_dsv41.window.source import read_toml

__all__ = ["read_law", "shipped_laws"]

_LAWS = files("pytest_dsv41.unit.memory").joinpath("laws")


def shipped_laws() -> list[str]:
    """Return the names of the laws that come with the package."""
    names = (one.name for one in _LAWS.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def read_law(name: str, what: str = "--law") -> Law:
    """Read a shipped law by its name, or a file; `what` is who names it, for messages.

    Raises:
        UsageError: there is none.
        SpecError: one line with file, line and key of what is wrong in it.
    """
    path = Path(name)
    if name in shipped_laws():
        path = Path(str(_LAWS.joinpath(f"{name}.toml")))
    elif not path.exists():
        raise UsageError(f"{what} {name}: no such file; shipped: {', '.join(shipped_laws())}")
    values, source = read_toml(path, name)
    return law_from(values, source.error)
