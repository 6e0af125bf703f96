"""Server-sent events on the wire: framing and packets, and the faults of both.

Undisturbed, one event is one chunk and one write. A fault may change the lines of an event, join
events into one write, cut one into several, or end the stream where nobody expects it.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

from pytest_dsv41.stub.faults import NONE, Faults
from pytest_dsv41.stub.http import chunk, dumps, head
from pytest_dsv41.stub.loop import DRAIN, Connection, Gone, Wait
from pytest_dsv41.stub.truth import Mark

__all__ = ["Event", "Packet", "Stream"]

_PING = b": ping\n\n"
_FLOOD_PIECE = 1 << 16


class Event(NamedTuple):
    """One event before framing. `body` None is `[DONE]`; `tokens` is what it delivers.

    `wait` seconds pass between the write before it and its own.
    """

    kind: str
    body: dict[str, Any] | None
    tokens: int = 0
    wait: float = 0.0


class Packet(NamedTuple):
    """Bytes for one write, what they are, and the seconds to wait before it."""

    data: bytes
    mark: Mark
    wait: float = 0.0


class Stream:
    """The answer's body as a stream of events.

    `joined` writes all events of one engine step at once, as llama.cpp does.
    """

    def __init__(
        self, connection: Connection, request: int, faults: Faults = NONE, *, joined: bool = False
    ) -> None:
        self._connection = connection
        self._request = request
        self._faults = faults
        self._chunked = "plain-body" not in faults
        self._events = 0
        self._index = 0
        self._begun = False
        self._newline = b"\r\n" if "crlf" in faults else b"\r" if "cr" in faults else b"\n"
        self._per_packet = 1
        if "burst" in faults:
            self._per_packet = 1 << 60
        elif "events-per-packet" in faults:
            self._per_packet = max(1, faults.count("events-per-packet"))
        self._joined = joined
        self._pending: list[tuple[bytes, str, int]] = []
        self._released = False
        self._hold_until: float | None = None
        self.ended = False

    # ---- head and end ----------------------------------------------------------------------

    def open(self, content_type: str, keep_alive: bool) -> None:
        """Send the head."""
        headers = {"server": "dsv41-stub", "content-type": content_type}
        if self._chunked:
            headers["transfer-encoding"] = "chunked"
        if not keep_alive or not self._chunked:
            headers["connection"] = "close"
        self._connection.send(head(200, headers), self._mark("head"))

    def close(self) -> None:
        """Send the end of the body."""
        if self.ended:
            return
        self.ended = True
        if self._chunked:
            self._connection.send(b"0\r\n\r\n", self._mark("end"))
        else:
            self._connection.finish()

    def flood(self, kind: str, size: int) -> Generator[Wait, None, None]:
        """Send `size` bytes of junk: one endless line, one long event, or many small ones."""
        if kind == "drip":
            piece = (b'data: {"choices":[]}\n\n' * 2000)[:_FLOOD_PIECE]
            piece = piece[: piece.rfind(b"\n\n") + 2]
        else:
            piece = b"x" * _FLOOD_PIECE
        self._connection.send(
            self._wrap(b"data: " if kind == "long" else b": "), self._mark("flood")
        )
        left = size
        wrapped = self._wrap(piece)
        while left > 0:
            self._connection.send(wrapped, self._mark("flood"))
            left -= len(piece)
            yield DRAIN
        self._connection.send(self._wrap(b"\n\n"), self._mark("flood"))

    def ping(self) -> None:
        """Send a comment block."""
        self._connection.send(
            self._wrap(_PING.replace(b"\n", self._newline)), self._mark("comment")
        )

    # ---- events ----------------------------------------------------------------------------

    def frame(self, events: Sequence[Event], *, last: bool = False) -> list[Packet]:
        """Return the packets of `events`, ready to be written; `last` lets go of all held."""
        packets: list[Packet] = []
        for event in events:
            raw = self._block(event, final=last and event is events[-1])
            if event.wait and self._pending:
                packets += self._release()
            self._pending.append((raw, event.kind, event.tokens))
            if self._joined and self._per_packet == 1 and event is not events[-1]:
                continue
            if len(self._pending) >= self._per_packet or (self._joined and self._per_packet == 1):
                packets += self._release(event.wait)
        if last and self._pending:
            packets += self._release()
        return packets

    def _block(self, event: Event, *, final: bool) -> bytes:
        faults, newline = self._faults, self._newline
        self._index += 1
        data = b"[DONE]" if event.body is None else dumps(event.body)
        spaces = 1 if "data-spaces" not in faults else faults.count("data-spaces")
        lines = [b"data:" + b" " * spaces + data]
        if not faults:
            return lines[0] + newline + newline
        if "sse-event" in faults:
            lines.insert(0, b"event: " + str(faults.text("sse-event")).encode())
        if "sse-retry" in faults:
            lines.insert(0, b"retry: %d" % faults.count("sse-retry"))
        if "sse-id" in faults:
            line = b"id: %d" % self._index
            lines.insert(len(lines) if faults.text("sse-id") == "after" else 0, line)
        if "comment-in-block" in faults:
            after = faults.text("comment-in-block") == "after"
            lines.insert(len(lines) if after else 0, b": keep-alive")
        raw = newline.join(lines) + newline
        if not (final and "no-final-blank" in faults):
            raw += newline
        if "comment" in faults:
            raw = b": keep-alive" + newline + newline + raw
        if "bom" in faults and not self._begun:
            raw = b"\xef\xbb\xbf" + raw
        self._begun = True
        return raw

    def _release(self, wait: float = 0.0) -> list[Packet]:
        """Return what is held as one write, or as the pieces a fault asks for."""
        if not self._pending:
            return []
        raw = b"".join(data for data, _, _ in self._pending)
        kinds = [kind for _, kind, _ in self._pending]
        tokens = sum(count for _, _, count in self._pending)
        kind = kinds[0] if len(set(kinds)) == 1 else "+".join(dict.fromkeys(kinds))
        self._pending.clear()
        pieces, gap = self._pieces(raw)
        packets = []
        for number, piece in enumerate(pieces):
            # A token was delivered when the last byte of its event left.
            is_last = number == len(pieces) - 1
            mark = self._mark(kind if is_last else f"{kind}-part", tokens if is_last else 0)
            packets.append(Packet(self._wrap(piece), mark, gap if number else wait))
        return packets

    def _pieces(self, raw: bytes) -> tuple[list[bytes], float]:
        faults = self._faults
        if "drip" in faults:
            return [raw[i : i + 1] for i in range(len(raw))], 0.0
        if "cut" in faults:
            at = faults.count("cut") % len(raw)
            return _split(raw, at), faults.seconds("cut", 1)
        if "cut-utf8" in faults:
            wide = next((i for i, byte in enumerate(raw) if byte >= 0xC0), 0)
            return _split(raw, wide + 1 if wide else 0), faults.seconds("cut-utf8")
        if "cut-crlf" in faults:
            return _split(raw, raw.find(b"\r\n") + 1), faults.seconds("cut-crlf")
        return [raw], 0.0

    def _wrap(self, data: bytes) -> bytes:
        return chunk(data) if self._chunked else data

    def _mark(self, kind: str, tokens: int = 0) -> Mark:
        return Mark(self._request, kind, tokens)

    # ---- writing ---------------------------------------------------------------------------

    def write_now(self, packets: Iterable[Packet]) -> list[Packet]:
        """Write until a packet wants to wait; return that one and those behind it."""
        left = list(packets)
        if self._hold_until is not None:
            return left
        while left and not left[0].wait and not self.ended:
            self._send(left.pop(0))
        return left

    def write_later(self, packets: Iterable[Packet]) -> Generator[Wait, None, None]:
        """Write the packets, each after its wait."""
        for packet in packets:
            if self._hold_until is not None:
                until, self._hold_until = self._hold_until, None
                self._released = True
                yield until
            if packet.wait:
                yield time.monotonic() + packet.wait
            if self.ended:
                return
            self._send(packet)

    def _send(self, packet: Packet) -> None:
        self._connection.send(packet.data, packet.mark)
        faults = self._faults
        if not faults or not packet.mark.tokens:
            return
        self._events += 1
        if "hold" in faults and not self._released and self._events == faults.count("hold", 1):
            self._hold_until = time.monotonic() + faults.seconds("hold")
        if "eof" in faults and self._events == faults.count("eof"):
            self.close()
            raise Gone
        if "reset" in faults and self._events == faults.count("reset"):
            self.ended = True
            self._connection.reset()
            raise Gone
        if "chunk-cut" in faults and self._events == faults.count("chunk-cut"):
            self.ended = True
            self._connection.send(b'40\r\ndata: {"id', self._mark("cut"))
            self._connection.finish()
            raise Gone


def _split(raw: bytes, at: int) -> list[bytes]:
    return [raw[:at], raw[at:]] if 0 < at < len(raw) else [raw]
