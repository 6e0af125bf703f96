"""HTTP/1.1 as far as a measuring client needs it."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from pytest_dsv41.stub.loop import READ, Connection, Wait

__all__ = ["BadRequest", "Request", "chunk", "dumps", "head", "read_request", "respond"]

_MOST_HEAD = 64 << 10
_MOST_BODY = 64 << 20
_REASONS = {
    100: "Continue",
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    413: "Request Entity Too Large",
    429: "Too Many Requests",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
}


class BadRequest(Exception):
    """The request cannot be served: `status`, one line, and the parameter it is about.

    `form` tells how vLLM says it: "value" (its own check), "type" (its parser's), or "route" (there
    is no such endpoint).
    """

    def __init__(
        self, message: str, status: int = 400, param: str | None = None, form: str = "value"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.form = form


class Request(NamedTuple):
    """One request. Header names are lower case; of several with one name the last holds.

    `faults` (a `Faults`) is put in by the server, which knows those that always hold.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    keep_alive: bool
    faults: Any = None

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object; BadRequest when it is none."""
        try:
            value = json.loads(self.body or b"{}")
        except ValueError as error:
            raise BadRequest(f"invalid JSON: {error}") from None
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object", param="body", form="type")
        return value


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON with characters outside ASCII as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def read_request(connection: Connection) -> Generator[Wait, None, Request | None]:
    """Return the next request of the connection; None when the client has ended."""
    unread = connection.unread
    while (end := unread.find(b"\r\n\r\n")) < 0:
        if len(unread) > _MOST_HEAD:
            raise BadRequest("request head too long")
        if connection.ended:
            return None
        yield READ
    lines = connection.consume(end + 4).decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequest("not an HTTP/1.1 request")
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    path, _, query = words[1].partition("?")
    if headers.get("expect", "").lower() == "100-continue":
        connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = yield from _read_chunked(connection)
    else:
        body = yield from _read_exactly(connection, _length(headers))
    keep = headers.get("connection", "").lower()
    alive = keep != "close" if words[2] == "HTTP/1.1" else keep == "keep-alive"
    return Request(words[0], path, query, headers, body, alive)


def _length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    if not text.isdecimal():
        raise BadRequest("bad content-length")
    if int(text) > _MOST_BODY:
        raise BadRequest("request body too long", 413)
    return int(text)


def _read_exactly(connection: Connection, count: int) -> Generator[Wait, None, bytes]:
    while len(connection.unread) < count:
        if connection.ended:
            raise BadRequest("the request ended early")
        yield READ
    return connection.consume(count)


def _read_chunked(connection: Connection) -> Generator[Wait, None, bytes]:
    body = bytearray()
    while True:
        while (end := connection.unread.find(b"\r\n")) < 0:
            if connection.ended or len(connection.unread) > _MOST_HEAD:
                raise BadRequest("bad chunk")
            yield READ
        text = connection.consume(end + 2).split(b";")[0].strip()
        try:
            size = int(text, 16)
        except ValueError:
            raise BadRequest("bad chunk size") from None
        if size < 0 or len(body) + size > _MOST_BODY:
            raise BadRequest("request body too long", 413)
        data = yield from _read_exactly(connection, size + 2)
        if size == 0:
            return bytes(body)
        body += data[:-2]


def head(status: int, headers: Mapping[str, str]) -> bytes:
    """Return the head of an answer, with its blank line."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def respond(
    connection: Connection,
    status: int,
    body: bytes = b"",
    content_type: str = "application/json",
    extra: Mapping[str, str] | None = None,
) -> None:
    """Send a whole answer."""
    headers = {"server": "dsv41-stub", "content-length": str(len(body))}
    if body:
        headers["content-type"] = content_type
    connection.send(head(status, {**headers, **(extra or {})}) + body, "whole")
