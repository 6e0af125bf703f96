"""What a long step shows: one line that is rewritten on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Final, TextIO

from pytest_dsv41.text import one_line

__all__ = ["Shown"]

_LIVE_S: Final = 0.2
_PLAIN_S: Final = 5.0


class Shown:
    """Call it with a text and, where it is known, the share that is done: it adds the time left.

    Nothing is shown in the first two seconds, and a reader that has left does not end the step.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._first: tuple[float, float] | None = None
        self._live = stream.isatty()
        self._next = self._start + 2.0
        self._standing = False

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._standing:
            self._write("\r\x1b[K")

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show where the step is; cheap to call as often as you like."""
        now = self._clock()
        if self._first is None:
            self._first = now, share or 0.0
        if now < self._next:
            return
        self._next = now + (_LIVE_S if self._live else _PLAIN_S)
        began, first = self._first
        line = one_line(text, 150)
        # A step that was resumed began with a part that took it no time.
        if share is not None and share > first:
            left = (now - began) * (1.0 - share) / (share - first)
            line += f", {share:.0%}, {_time(left)} left"
        else:
            line += f", {_time(now - self._start)}"
        if self._live:
            self._write(f"\r\x1b[K{line}")
            self._standing = True
        else:
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def _time(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
