"""Signals while a window is open: one ends it in order, and none reaches into the close."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final

__all__ = ["Signals", "StopNow"]

_ENDING: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGQUIT,
)


class StopNow(BaseException):
    """Raised inside a running cell by a signal. Not an Exception, so that no cell swallows it."""


class Signals:
    """Turns signals into a request to stop.

    Inside `interruptible` a signal also raises, so that a cell ends at once; anywhere else it only
    asks, and whoever waits notices. While `deferring` nothing is raised, SIGALRM included: a
    timeout plugin's alarm must not cut a restore.
    """

    def __init__(self, request_stop: Callable[[str], None]) -> None:
        self._request_stop = request_stop
        self._raises: Callable[[str], BaseException] | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._deferring = False
        self.reason: str | None = None
        """What a signal that this process sends to itself means."""

    def install(self) -> None:
        """Take the signals over; only the main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                self._before[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Give them back as they were."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        reason = self.reason or f"signal {signal.Signals(number).name}"
        self._request_stop(reason)
        raises = self._raises
        if raises is not None and not self._deferring:
            # Once: what the first one began to unwind must not be cut by a second.
            self._raises = None
            raise raises(reason)

    @contextlib.contextmanager
    def interruptible(self, raises: Callable[[str], BaseException] = StopNow) -> Iterator[None]:
        """Let a signal raise `raises(reason)` inside the block."""
        before, self._raises = self._raises, raises
        try:
            yield
        finally:
            self._raises = before

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Nothing is raised inside the block; SIGALRM is ignored."""
        main = threading.current_thread() is threading.main_thread()
        before, self._deferring = self._deferring, True
        alarm: Any = None
        if main:
            alarm = signal.signal(signal.SIGALRM, lambda _number, _frame: None)
            if not self._before:
                self.install()
        try:
            yield
        finally:
            self._deferring = before
            if main:
                signal.signal(signal.SIGALRM, alarm if alarm is not None else signal.SIG_DFL)
