"""The exception tree, split by whose fault it is. Every message is one line a person can act on.

Dsv41Error
├── UsageError            the user's input is wrong: exit 4, nothing was touched
│   └── SpecError         … in a file: names file, line, key and the valid values
├── RefusedByWorld        the state of the world forbids it: exit 13, nothing was touched
├── WindowStopped         a signal, a deadline or the user ended the window early: exit 12
├── StartFailed           an arm did not come up: its cells are skipped with this as the cause
├── MeasurementRefused    a value cannot be trusted (foreign traffic, reset counters, …)
├── MeasurementFailed     a request failed; it is never averaged
├── CommandFailed         a command ran and answered with another code than 0
│   └── StaleEpoch        … because a newer coordinator has taken over; nothing was changed
├── TransportError        a host or link did not answer: the outcome is UNKNOWN
└── RestoreFailed         production is not known to be up: exit 20
"""

from __future__ import annotations

__all__ = [
    "CommandFailed",
    "Dsv41Error",
    "MeasurementFailed",
    "MeasurementRefused",
    "RefusedByWorld",
    "RestoreFailed",
    "SpecError",
    "StaleEpoch",
    "StartFailed",
    "TransportError",
    "UsageError",
    "WindowStopped",
]


class Dsv41Error(Exception):
    """Base of everything this project raises on purpose."""


class UsageError(Dsv41Error):
    """The caller's input is wrong. Correct it and run again; nothing was touched."""


class SpecError(UsageError):
    """A file the user wrote is wrong. The message is `file:line: key: what, valid values`."""


class RefusedByWorld(Dsv41Error):
    """A HOLD, a lease, a cap or an unknown state forbids the act; nothing was touched."""


class WindowStopped(Dsv41Error):
    """The window was ended early by a signal, its deadline, or the user."""


class StartFailed(Dsv41Error):
    """An arm did not start or did not become healthy in time. See its start log."""


class MeasurementRefused(Dsv41Error):
    """A value was measured but cannot be trusted. `kind` is a short, stable name of the reason."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class MeasurementFailed(Dsv41Error):
    """A request did not deliver what it was asked for. `kind` is a short, stable name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CommandFailed(Dsv41Error):
    """A command ended with a code other than 0. `returncode` is negative for a signal."""

    def __init__(self, message: str, returncode: int) -> None:
        super().__init__(message)
        self.returncode = returncode


class StaleEpoch(CommandFailed):
    """A host has seen a newer epoch. Stop: another coordinator owns it, nothing was changed."""


class TransportError(Dsv41Error):
    """The other side did not answer in time: whether the act happened is unknown."""


class RestoreFailed(Dsv41Error):
    """Production is not known to be up. Follow the command in the message."""
