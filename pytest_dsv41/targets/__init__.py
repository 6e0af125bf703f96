"""Targets: the machines under a window, and how production and arms are run on them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from .base import (
    Arm,
    ClockCap,
    HoldSite,
    ProbeResult,
    Started,
    Target,
    TargetContext,
    TargetFactory,
    load_class,
    load_factory,
    name_class,
    name_factory,
)

if TYPE_CHECKING:
    from .endpoints import endpoints_target
    from .local import local_target
    from .spark_pair import spark_pair_target
    from .systemd_unit import systemd_unit_target

__all__ = [
    "TARGETS",
    "Arm",
    "ClockCap",
    "HoldSite",
    "ProbeResult",
    "Started",
    "Target",
    "TargetContext",
    "TargetFactory",
    "endpoints_target",
    "load_class",
    "load_factory",
    "local_target",
    "name_class",
    "name_factory",
    "spark_pair_target",
    "systemd_unit_target",
]

TARGETS: dict[str, TargetFactory]
"""The shipped kinds. A plugin adds its own through the hook `pytest_dsv41_targets`."""

_HOMES: Final = {
    "endpoints": "endpoints",
    "local": "local",
    "spark-pair": "spark_pair",
    "systemd-unit": "systemd_unit",
}
"""Kind to its module, whose factory is called as the module is."""


def __getattr__(name: str) -> Any:
    # Who looks at a campaign needs the one kind that its record names.
    if name == "TARGETS":
        found = {kind: _factory(home) for kind, home in _HOMES.items()}
        return globals().setdefault(name, found)
    home = name.removesuffix("_target")
    if home != name and home in _HOMES.values():
        return _factory(home)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _factory(home: str) -> TargetFactory:
    factory: TargetFactory = getattr(
        importlib.import_module(f"{__name__}.{home}"), f"{home}_target"
    )
    return factory
