"""Reaching machines: what a target may do to a host, through one small interface."""

from __future__ import annotations

from .base import CommandLog, CommandResult, Probe, Process
from .local import LocalHost

__all__ = ["CommandLog", "CommandResult", "LocalHost", "Probe", "Process"]
