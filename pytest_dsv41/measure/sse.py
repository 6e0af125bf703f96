"""Server-sent events, parsed on bytes after the WHATWG rules (HTML, "Server-sent events").

Fed piece by piece, cut anywhere: inside a multi-byte character, between CR and LF. Lines end
with LF, CR or CRLF; comments are no events; one space after the colon belongs to the syntax.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["Event", "SseParser", "TooLongError"]

MAX_EVENT: Final = 8 << 20
"""Longest event, in bytes."""

_BOM: Final = b"\xef\xbb\xbf"


class TooLongError(ValueError):
    """A line or an event is longer than the bound."""


class Event(NamedTuple):
    """One dispatched event."""

    data: bytes
    size: int
    """Bytes of the event on the wire, its blank line included."""
    name: bytes = b""


class SseParser:
    """Feed it bytes; it returns the events that became complete."""

    def __init__(self, *, max_event: int = MAX_EVENT) -> None:
        self._max = max_event
        self._line = bytearray()
        self._data: list[bytes] = []
        self._name = b""
        self._size = 0
        self._after_cr = False
        self._begun = False
        self.comments = 0

    def feed(self, piece: bytes) -> list[Event]:
        """Take the next bytes of the stream.

        Raises:
            TooLongError: an event grew over the bound.
        """
        events: list[Event] = []
        at = 0
        if self._after_cr and piece:
            # CR | LF cut by a packet: the LF ends no further line.
            self._after_cr = False
            if piece[0] == 10:
                at = 1
        end = len(piece)
        while at < end:
            lf = piece.find(b"\n", at)
            cr = piece.find(b"\r", at, lf if lf >= 0 else end)
            stop = cr if cr >= 0 else lf
            if stop < 0:
                self._line += piece[at:]
                self._size += end - at
                if self._size > self._max:
                    raise TooLongError(f"an event longer than {self._max} bytes")
                break
            self._line += piece[at:stop]
            self._size += stop - at + 1
            if self._size > self._max:
                raise TooLongError(f"an event longer than {self._max} bytes")
            at = stop + 1
            if cr >= 0:
                if at < end:
                    if piece[at] == 10:
                        at += 1
                        self._size += 1
                else:
                    self._after_cr = True
            line = bytes(self._line)
            self._line.clear()
            event = self._end_of_line(line)
            if event is not None:
                events.append(event)
        return events

    def tail(self) -> bytes:
        """Return the data of an event the stream ended in; the rules discard it."""
        if self._line:
            self._end_of_line(bytes(self._line))
            self._line.clear()
        return b"\n".join(self._data)

    def _end_of_line(self, line: bytes) -> Event | None:
        if not self._begun:
            self._begun = True
            line = line.removeprefix(_BOM)
        if not line:
            event = None
            if self._data:
                event = Event(b"\n".join(self._data), self._size, self._name)
            self._data = []
            self._name = b""
            self._size = 0
            return event
        field, colon, value = line.partition(b":")
        if colon and not field:
            self.comments += 1
            return None
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return None
