"""Simulated hosts, shipped for users too: test a target without machines, and break them."""

from __future__ import annotations

from .host import FakeHost
from .machine import Container, FakeProcess, Machine
from .programs import Call, Program, Reply, Service
from .world import FAULTS, CallerKilled, FakeWorld

__all__ = [
    "FAULTS",
    "Call",
    "CallerKilled",
    "Container",
    "FakeHost",
    "FakeProcess",
    "FakeWorld",
    "Machine",
    "Program",
    "Reply",
    "Service",
]
