"""The seam of the restore: read-only, bounded work on restored production before the HOLD closes.

Between the check (production is itself) and the close (others may use it again) nobody else talks
to production, so a measurement of production is possible there and nowhere else (WIN2 "Seeded A/A
pilot recipe" item 2). The work runs in a thread of its own: it may fail, raise or hang, and the
close goes on after its deadline, or at once when somebody asks to stop. Work that hangs is
abandoned, and what it would still bring is not written.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from ..errors import MeasurementFailed
from ..hosts.local import boottime

__all__ = ["Seam", "run_seam"]

_GRACE_S = 5.0
"""How long work that was told to stop may take to notice."""
_LOOK_S = 0.25


@dataclasses.dataclass(frozen=True)
class Seam:
    """Work for the seam. `deadline_s` is in seconds.

    `work` gets an event that is set when it must end. It reads: it sends requests to production and
    changes nothing, neither there nor in files. `keep` gets what it returned, in the close's own
    thread and only when it came in time, and writes it.
    """

    name: str
    work: Callable[[threading.Event], Any]
    keep: Callable[[Any], None]
    deadline_s: float
    doing: Callable[[], str] = lambda: "production is measured"
    """What it is at, in a few words."""
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set from anywhere (a signal handler too) to end the work early."""


def run_seam(seam: Seam, tick: Callable[[float], None] = lambda _left: None) -> None:
    """Run the work of a seam and keep what it returns.

    `tick` gets the seconds left. However the work ends, this returns or raises at most a few
    seconds after the deadline, or after somebody has set `seam.stop`.

    Raises:
        MeasurementFailed: it raised, did not end in time, or was told to stop; one line.
        Exception: its result could not be kept.
    """
    if seam.stop.is_set():
        raise MeasurementFailed("stopped", "was told to stop before it began")
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(seam.work(seam.stop))
        except BaseException as error:  # noqa: BLE001 - a thread's error has nobody else to hear it
            errors.append(error)

    begun = boottime()
    thread = threading.Thread(target=work, name=f"dsv41-seam-{seam.name}", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not seam.stop.is_set():
            left = seam.deadline_s - (boottime() - begun)
            if left <= 0:
                break
            tick(left)
            thread.join(min(_LOOK_S, left))
        told = seam.stop.is_set()
    finally:
        # Nobody may use production while others do: whatever ends the wait ends the work.
        seam.stop.set()
    if thread.is_alive():
        thread.join(_GRACE_S)
        why = "was told to stop" if told else f"did not end within {seam.deadline_s:g} s"
        if thread.is_alive():
            why += " and does not stop; it is abandoned"
        raise MeasurementFailed("stopped" if told else "deadline", why)
    if errors:
        error = errors[0]
        why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise MeasurementFailed("seam", why) from error
    seam.keep(results[0])
