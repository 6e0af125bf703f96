"""Server-sent events on the wire: one event, one chunk, one write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pytest_dsv41.stub.http import chunk, dumps, head
from pytest_dsv41.stub.loop import Connection
from pytest_dsv41.stub.truth import Mark

__all__ = ["Event", "Packet", "Stream"]


class Event(NamedTuple):
    """One event before framing. `body` None is `[DONE]`; `tokens` is what it delivers."""

    kind: str
    body: dict[str, Any] | None
    tokens: int = 0


class Packet(NamedTuple):
    """Bytes for one write, and what they are."""

    data: bytes
    mark: Mark


class Stream:
    """The answer's body as a stream of events over a chunked connection."""

    def __init__(self, connection: Connection, request: int) -> None:
        self._connection = connection
        self._request = request

    def open(self, content_type: str, keep_alive: bool) -> None:
        """Send the head."""
        headers = {
            "server": "dsv41-stub",
            "content-type": content_type,
            "transfer-encoding": "chunked",
        }
        if not keep_alive:
            headers["connection"] = "close"
        self._connection.send(head(200, headers), Mark(self._request, "head"))

    def frame(self, events: Sequence[Event]) -> list[Packet]:
        """Return the packets of `events`, ready to be written."""
        return [
            Packet(
                chunk(b"data: " + (b"[DONE]" if body is None else dumps(body)) + b"\n\n"),
                Mark(self._request, kind, tokens),
            )
            for kind, body, tokens in events
        ]

    def write(self, packets: Iterable[Packet]) -> None:
        """Write each packet by a call of its own."""
        for packet in packets:
            self._connection.send(packet.data, packet.mark)

    def close(self) -> None:
        """Send the end of the body."""
        self._connection.send(b"0\r\n\r\n", Mark(self._request, "end"))
