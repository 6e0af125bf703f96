"""Signals as a question that a long step asks: was it told to stop?"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

__all__ = ["Stop", "stop_on_signals"]

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """`event` is set by the first signal; `code` is then the exit code that says which."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.code = 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Set `event` on SIGTERM, SIGINT and SIGHUP for as long as the block lasts."""
    stop = Stop()

    def told(number: int, _frame: FrameType | None) -> None:
        stop.code = stop.code or 128 + number
        stop.event.set()

    before = {number: signal.signal(number, told) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
