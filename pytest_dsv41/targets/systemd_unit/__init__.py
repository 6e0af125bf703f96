"""Target `systemd-unit`: one unit serves, and the arms are changes of its environment file."""

from .target import SystemdUnitTarget, systemd_unit_target

__all__ = ["SystemdUnitTarget", "systemd_unit_target"]
