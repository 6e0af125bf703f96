"""A server that answers each path with the bytes it is given, whatever they are, as they come."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Bytes = Callable[[threading.Event], Iterator[bytes]]
"""Makes the pieces of one answer; the event is set when the test is over."""


def http(body: bytes | str, *, code: int = 200, more: str = "") -> Bytes:
    """A whole answer with `more` headers."""
    raw = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    head = f"HTTP/1.1 {code} X\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n{more}\r\n"
    return lambda _over: iter([head.encode() + raw])


def said(body: Any, **more: Any) -> Bytes:
    """A whole answer in JSON."""
    return http(json.dumps(body), **more)


def trickle(first: bytes, every: bytes, *, each_s: float = 0.02) -> Bytes:
    """`first`, and then `every` now and then, for ever."""

    def pieces(over: threading.Event) -> Iterator[bytes]:
        yield first
        while not over.wait(each_s):
            yield every

    return pieces


def endless(first: bytes, piece: bytes) -> Bytes:
    """`first`, and then `piece` again and again as fast as it is read."""
    return lambda _over: itertools.chain([first], itertools.repeat(piece))


ODD: Mapping[str, Bytes] = {
    "closes": lambda _over: iter(()),
    "cut": lambda _over: iter([b'HTTP/1.1 200 X\r\nContent-Length: 99\r\n\r\n{"usage": {']),
    "html": http("<html><body>\x1b[2J\x1b]0;owned\x07 It works!</body></html>"),
    "redirect": http("", code=302, more="Location: http://192.0.2.1/\r\n"),
    "no-http": lambda _over: iter([b"\x1b[2J SSH-2.0\r\n"]),
    "deep": http("[" * 100_000),
    "list": said([]),
    "null": said(None),
    "number": http("1e999"),
    "utf16": http("{}".encode("utf-16")),
    "surrogate": http('{"usage": "\\ud800"}'),
    "headers": endless(b"HTTP/1.1 200 X\r\n", b"A: \x1b[2J" + b"b" * 4000 + b"\r\n"),
    "trickled-headers": trickle(b"HTTP/1.1 200 X\r\n", b"A: b\r\n"),
    "trickled-body": trickle(b"HTTP/1.1 200 X\r\nContent-Length: 999999\r\n\r\n", b" "),
    "endless-body": endless(b"HTTP/1.1 200 X\r\n\r\n", b" " * 65536),
    "bomb": http(b"\x1f\x8b\x08\x00", more="Content-Encoding: gzip\r\n"),
    "strange-coding": http("{}", more="Content-Encoding: x-own\r\n"),
    "error-ansi": http("\x1b[2J\x9b2J\u202e no", code=400),
    "500-html": http("<html>\x1b[2J", code=500),
}
"""What an answer may be instead of one, by name."""


@contextlib.contextmanager
def odd_server(answers: Mapping[str, Bytes]) -> Iterator[str]:
    """Serve `answers` by path, `*` for every other one (else 404); yield the server's address."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            connection.settimeout(30)
            with contextlib.suppress(OSError):
                raw = b""
                while b"\r\n\r\n" not in raw:
                    part = connection.recv(65536)
                    if not part:
                        return
                    raw += part
                head, _, body = raw.partition(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n")[1:]:
                    name, _, value = line.partition(b":")
                    if name.lower() == b"content-length":
                        length = int(value)
                while len(body) < length:
                    body += connection.recv(65536)
                path = head.split(b" ")[1].decode()
                answer = answers.get(path) or answers.get("*") or http("none", code=404)
                for piece in answer(over):
                    if over.is_set():
                        return
                    connection.sendall(piece)
                connection.shutdown(socket.SHUT_WR)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

    with Server(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            over.set()
            server.shutdown()
            serving.join()
