"""A running window's progress: one line that is kept below pytest's own output.

On a terminal the line stands in the row under the cursor and the cursor goes back to where it was,
so pytest can go on writing its dots or names in the middle of a line. `erase` takes the line away
before somebody else ends his; `update` brings it back. Elsewhere (a pipe, a build server, a dumb
terminal) a plain line is written every few seconds and at each change of production's state.

The stream must not be one that pytest captures: make the `Progress` while pytest is being
configured, when standard error is still the user's, for it keeps a duplicate of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TextIO, cast

from ..text import one_line

__all__ = ["Progress", "ProgressState", "progress_line", "seconds_left"]

_PLAIN_INTERVAL_S: Final = 5.0
_LIVE_INTERVAL_S: Final = 0.1

# IND and RI make a free row below at the same column; then the cursor is saved, the row written.
_SHOW: Final = "\x1bD\x1bM\x1b7\x1b[B\r\x1b[2K{}\x1b8"
_ERASE: Final = "\x1b7\x1b[B\r\x1b[2K\x1b8"


@dataclasses.dataclass(frozen=True)
class ProgressState:
    """Where a window is. `item` and `items` count planned items, `repeat` and `repeats` those of
    the cell in this start, both from 1; `production` is its state in a word or two."""

    phase: str = ""
    start: str = ""
    cell: str = ""
    repeat: int = 0
    repeats: int = 0
    item: int = 0
    items: int = 0
    seconds_left: float | None = None
    production: str = ""


def progress_line(state: ProgressState, width: int = 1000) -> str:
    """Return the state in one line of at most `width` characters."""
    parts = []
    if state.items:
        parts.append(f"{state.item}/{state.items}")
    if state.phase:
        parts.append(state.phase)
    if state.start:
        parts.append(state.start)
    if state.cell:
        repeat = f" {state.repeat} of {state.repeats}" if state.repeats else ""
        parts.append(f"{state.cell}{repeat}")
    if state.seconds_left is not None:
        parts.append(_left(state.seconds_left))
    if state.production:
        parts.append(f"production {state.production}")
    line = one_line("window: " + ", ".join(parts))
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def _left(seconds: float) -> str:
    if seconds < 60:
        return f"{max(0, round(seconds))} s left"
    return f"{seconds / 60:.0f} min left" if seconds >= 600 else f"{seconds / 60:.1f} min left"


def seconds_left(
    items: Sequence[Mapping[str, Any]],
    estimates: Mapping[str, float],
    done: int,
    *,
    spent_s: float = 0.0,
    other_s: float = 0.0,
) -> float:
    """Return the expected seconds until a window is over.

    Args:
        items: plan.json's `items`, in order.
        estimates: plan.json's `estimates`: expected seconds of one item by cell.
        done: how many items are over.
        spent_s: seconds that those took; their pace corrects the estimate of the others.
        other_s: seconds outside the items still to come (starts, restore, watch).
    """
    expected = [float(estimates.get(str(item["cell"]), 0.0)) for item in items]
    past, future = sum(expected[:done]), sum(expected[done:])
    pace = spent_s / past if past > 0 and spent_s > 0 else 1.0
    return future * pace + other_s


def _standard_error(enabled: bool) -> TextIO:
    """A stream of our own on descriptor 2, so that a later redirection does not move it."""
    if not enabled:
        return io.StringIO()
    try:
        descriptor = os.dup(2)
    except OSError:
        return io.StringIO()
    return os.fdopen(descriptor, "w", encoding="utf-8", errors="replace")


class _Guarded:
    """A stream whose writes erase the progress line first; everything else is the stream's own."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream = stream
        self._progress = progress
        self.unfinished = False

    def write(self, text: str) -> int:
        self._progress.erase()
        if text:
            self.unfinished = not text.endswith("\n")
        # Whoever reads may leave (a closed terminal, `| head`): the window goes on to its end.
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Progress:
    """Shows a window's state. Every method is safe to call at any time and never raises OSError.

    Args:
        stream: where to write; None: a duplicate of standard error, closed with the progress.
        live: rewrite one line with cursor controls; None: if `stream` is a terminal that can.
        enabled: False makes every method do nothing (`-qq`).
        clock: seconds on a monotonic clock.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owned = stream is None
        self._stream = _standard_error(enabled) if stream is None else stream
        self._live = self._can_rewrite(self._stream) if live is None else live
        self._enabled = enabled
        self._clock = clock
        self._lock = threading.Lock()
        self._state: ProgressState | None = None
        self._shown = False
        self._last: float | None = None
        self._guarded: _Guarded | None = None

    @staticmethod
    def _can_rewrite(stream: TextIO) -> bool:
        if os.environ.get("TERM", "dumb") == "dumb":
            return False
        try:
            return stream.isatty()
        except (OSError, ValueError):
            return False

    def update(
        self,
        *,
        phase: str = "",
        start: str = "",
        cell: str = "",
        repeat: int = 0,
        repeats: int = 0,
        item: int = 0,
        items: int = 0,
        seconds_left: float | None = None,
        production: str = "",
    ) -> None:
        """Show a new state: at once where the line is rewritten, else every few seconds."""
        if not self._enabled:
            return
        state = ProgressState(
            phase, start, cell, repeat, repeats, item, items, seconds_left, production
        )
        with self._lock:
            old, self._state = self._state, state
            # Between two items nothing counts up, and the count does not fall back to 0.
            if old is not None and state.item == 0 and state.items:
                self._state = state = dataclasses.replace(state, item=old.item)
            moved = (
                old is None
                or old.production != state.production
                or (self._live and old.phase != state.phase)
            )
            interval = _LIVE_INTERVAL_S if self._live else _PLAIN_INTERVAL_S
            now = self._clock()
            if not moved and self._last is not None and now - self._last < interval:
                return
            self._last = now
            if self._guarded is not None:
                # The other's text must be out before this line, the cursor where it ends.
                with contextlib.suppress(OSError, ValueError):
                    self._guarded.flush()
            if self._live:
                self._write(_SHOW.format(progress_line(state, self._columns() - 1)))
                self._shown = True
            else:
                self._write(f"{self._line_break()}{progress_line(state)}\n")

    def guard(self, stream: TextIO) -> TextIO:
        """Return `stream` such that whoever writes to it finds the line gone.

        For pytest's own output: everything it writes erases the line first, whichever hook wrote
        it, and the next `update` shows the line again. A plain line begins a line of its own, also
        in the middle of what the other writes to the same pipe or file.
        """
        self._guarded = _Guarded(stream, self)
        return cast(TextIO, self._guarded)

    def erase(self) -> None:
        """Take the line away before somebody else writes; the next `update` shows it again."""
        with self._lock:
            if self._shown:
                self._write(_ERASE)
                self._shown = False
                self._last = None

    def close(self) -> None:
        """Erase and stop; further calls do nothing."""
        self.erase()
        with self._lock:
            self._enabled = False
            if self._owned:
                with contextlib.suppress(OSError, ValueError):
                    self._stream.close()

    def _line_break(self) -> str:
        """What ends the other's line, where it stands unfinished in the same place."""
        other = self._guarded
        if other is None or not other.unfinished:
            return ""
        with contextlib.suppress(OSError, ValueError):
            if os.path.sameopenfile(self._stream.fileno(), other.fileno()):
                other.unfinished = False
                return "\n"
        return ""

    def _columns(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80

    def _write(self, text: str) -> None:
        # A closed terminal must not end a window: its production still has to come back.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
