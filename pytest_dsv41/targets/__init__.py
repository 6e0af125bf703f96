"""Targets: the machines under a window, and how production and arms are run on them."""

from __future__ import annotations

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

TARGETS: dict[str, TargetFactory] = {
    "endpoints": endpoints_target,
    "local": local_target,
    "spark-pair": spark_pair_target,
    "systemd-unit": systemd_unit_target,
}
"""The shipped kinds. A plugin adds its own through the hook `pytest_dsv41_targets`."""
