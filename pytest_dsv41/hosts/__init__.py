"""Reaching machines: what a target may do to a host, through one small interface."""

from __future__ import annotations

from .base import FENCED_OFF, CommandLog, CommandResult, Fence, Host, Placeholder, Probe, Process
from .local import LocalHost

__all__ = [
    "FENCED_OFF",
    "CommandLog",
    "CommandResult",
    "Fence",
    "Host",
    "LocalHost",
    "Placeholder",
    "Probe",
    "Process",
]
