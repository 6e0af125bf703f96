"""HOLD sites on this machine, for tests of the lifecycle's rooms."""

from __future__ import annotations

from pathlib import Path

from pytest_dsv41.hosts import CommandLog, LocalHost
from pytest_dsv41.targets import HoldSite


def sites_of(*paths: Path) -> tuple[HoldSite, ...]:
    """One HOLD site a path."""
    return tuple(HoldSite(LocalHost(CommandLog(path.parent / "cmd")), str(path)) for path in paths)
