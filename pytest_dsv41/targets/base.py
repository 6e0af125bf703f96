"""What a window needs from the machines under it: the target protocol.

A target says how production is probed, captured, stopped and started again, and how an arm is
started and stopped. It holds no window state of its own: everything it must remember across a kill
is in its table and in `TargetContext.state`, which is written to the window's folder, so that the
keeper and `dsv41 recover` can build the same target again in another process.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..engines import Engine, get_engine
from ..errors import SpecError, UsageError
from ..hosts import CommandLog, Fence, Host, Placeholder, Probe
from ..measure import Endpoint
from ..text import one_line

__all__ = [
    "Arm",
    "ClockCap",
    "HoldSite",
    "ProbeResult",
    "Started",
    "Target",
    "TargetContext",
    "TargetFactory",
    "known_engine",
    "load_class",
    "load_factory",
    "name_class",
    "name_factory",
]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One server configuration: extra arguments, environment and settings of its server."""

    name: str
    role: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ProbeResult:
    """What a probe saw, the evidence in one line, and the URL that it asked, if any."""

    state: Probe
    detail: str
    url: str = ""


@dataclasses.dataclass(frozen=True)
class HoldSite:
    """Where a HOLD lies: one file on one host, on a local disk of that host."""

    host: Host
    path: str
    fence: Fence | None = None
    """What every change of the file carries; None where nobody could be overtaken."""

    def __str__(self) -> str:
        return f"{self.host.name}:{self.path}"


@dataclasses.dataclass(frozen=True)
class ClockCap:
    """The GPU clock cap of one start in MHz and where that is known from.

    `source` is "start-log", "clock-log", or "none" (then the cap is 1: nothing is capped).
    """

    mhz: int
    source: str


@dataclasses.dataclass(frozen=True)
class Started:
    """A started arm: where it answers, and the clock cap its start log proves."""

    endpoint: Endpoint
    clock_cap: ClockCap
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class TargetContext:
    """Where a target works: the window's id, folders, limits (seconds), and its durable state."""

    window_id: str
    folder: Path
    campaign: Path
    base: Path
    """The folder of the file that holds the target's table; its relative paths start here."""
    seed: int
    limits: Mapping[str, float]
    state: Mapping[str, Any]
    """What `prepare` answered when the window was opened."""
    variables: Mapping[str, str]
    log: CommandLog
    pause: Callable[[float], None]
    """Sleeps for so many seconds; raises WindowStopped when the window is asked to stop."""
    epoch: int = 0
    """The lease's epoch: every act on a host carries it. 0: the target is only looked at."""

    def hold_site(self, host: Host, path: str) -> HoldSite:
        """The HOLD at `path` on `host`, changed only while this window's epoch is the newest."""
        return HoldSite(host, path, Fence.beside(path, self.epoch, str(self.campaign)))


@runtime_checkable
class Target(Protocol):
    """The machines under a window. Every undo is idempotent; UNKNOWN never counts as DOWN."""

    holds: bool
    """Whether production is taken down under a HOLD; False when arms are servers that run."""
    ephemeral: bool
    """Whether nothing is served by default: the window starts production and ends it."""
    chains: bool
    """Whether production may stay down from one window to the next, in a chain."""

    def check(self, arms: Sequence[Arm]) -> None:
        """Look at the arms as they are written, before anything is touched.

        Raises:
            SpecError: one of them could not be started as it is.
        """

    def prepare(self) -> dict[str, Any]:
        """Choose what is chosen once a window (ports); JSON, kept as the context's state."""

    def describe(self) -> dict[str, Any]:
        """The resolved production definition as JSON; no secrets."""

    def hosts(self) -> tuple[Host, ...]:
        """The machines, in the one order in which they are always worked on; () without any."""

    def identities(self) -> dict[str, str]:
        """Each host's name to its identity; a changed one is a stopped window.

        Raises:
            TransportError: a host does not answer.
        """

    def hold_sites(self) -> tuple[HoldSite, ...]:
        """One HOLD file a host, in the order in which they are created, all or none."""

    def hold_opened(self) -> None:
        """The window's HOLD lies: say so on every host too, for as long as the window lasts.

        Where others look at processes and not at files, this is the window's own placeholder;
        `stop_all` ends it. Idempotent.

        Raises:
            TransportError: it is not known to be there.
        """

    def placeholders_up(self, owner: str) -> None:
        """Start the chain's placeholder wherever one is needed; idempotent.

        A placeholder keeps others off a host while production is down between two windows and no
        HOLD lies there. It outlives the window and every scope of it.

        Raises:
            TransportError: not every one is UP; what is there stays and is the owner's.
            RefusedByWorld: a placeholder of another owner is there; it is not touched.
        """

    def placeholders(self, owner: str) -> dict[str, Placeholder]:
        """Each host that needs a placeholder to what is seen there. Reads only, never raises."""

    def placeholders_down(self, owner: str) -> list[str]:
        """End this owner's placeholders; idempotent. What is left: `host: why`, one each.

        A foreign one is left alone, and named; so is a host that does not answer.
        """

    def probe(self) -> ProbeResult:
        """Whether production serves. Reads only."""

    def production(self) -> Endpoint:
        """Where production answers."""

    def commit(self) -> str:
        """The 40 hex digits that name the production definition."""

    def capture(self) -> dict[str, Any]:
        """What restoring must bring back, as JSON. Reads only.

        Raises:
            RefusedByWorld: what runs is not what `start_production` would start.
        """

    def stop_production(self) -> None:
        """End production. Raises TransportError when some of it is still there."""

    def start_production(self) -> None:
        """Start production if it is down, and wait until it answers.

        Raises:
            StartFailed: it did not answer in time.
        """

    def end_production(self) -> None:
        """End an ephemeral production for good; nothing for any other."""

    def start_arm(self, start: str, arm: Arm) -> Started:
        """Start `arm` as the start `start` and wait until its model answers.

        Raises:
            StartFailed: it did not come up; what was started is ended.
        """

    def check_arm(self, start: str) -> str | None:
        """The reason why the started arm cannot serve any more, or None."""

    def stop_arm(self, start: str) -> None:
        """End one start. Raises TransportError when some of it is still there."""

    def stop_all(self) -> None:
        """End everything that any start of this window has left; idempotent."""

    def live_experiments(self) -> list[str]:
        """What of this window's starts lives or is not proved dead; production is not looked at."""

    def quiet_problems(self) -> list[str]:
        """Why the machines are not proved quiet; empty means proved."""

    def leftovers(self) -> list[str]:
        """Processes of this window that still live; empty after a clean end."""


def known_engine(name: str) -> Engine:
    """Return the engine of `target.engine`.

    Raises:
        SpecError: no engine has that name.
    """
    try:
        return get_engine(name)
    except UsageError as error:
        raise SpecError(f"target.engine: {error}") from None


TargetFactory = Callable[[Mapping[str, Any], TargetContext], Target]
"""Builds a target from its table. Raises SpecError for a wrong one, before anything is touched."""


def name_factory(factory: TargetFactory) -> str:
    """Return `module:qualname`, by which another process finds the factory again.

    Raises:
        UsageError: it is a local object; the keeper could not build the target.
    """
    return _name("target factory", factory)


def load_factory(name: str) -> TargetFactory:
    """Import the factory that `name_factory` named."""
    factory: TargetFactory = _load("target factory", name)
    return factory


def name_class(engine: type[Engine]) -> str:
    """As `name_factory`, for the class of an engine that a plugin added."""
    return _name("engine", engine)


def load_class(name: str) -> type[Engine]:
    """Import the class that `name_class` named."""
    engine: type[Engine] = _load("engine", name)
    return engine


def _name(what: str, wanted: Any) -> str:
    name = f"{wanted.__module__}:{getattr(wanted, '__qualname__', '')}"
    try:
        found = _load(what, name)
    except UsageError:
        found = None
    if found is not wanted:
        raise UsageError(
            f"{what} {name} cannot be imported by the keeper; "
            "define it at the top level of an importable module"
        )
    return name


def _load(what: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # any fault of the user's own module
        raise UsageError(f"{what} {name}: {one_line(str(error))}") from error
    if not callable(found):
        raise UsageError(f"{what} {name} is not callable")
    return found
