"""The wire of this project as an httpx transport: `httpx.Client(transport=WireTransport())`.

No proxies, no retries, no redirects of its own, no pool limit. A stop event or a deadline ends
a running request within a fraction of a second, whatever the server does.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import httpx

from pytest_dsv41.measure.wire import Call, Connection, Exchange, Limits, Loop

__all__ = ["WireTransport"]

_FOREVER_S = 86400.0


class WireTransport(httpx.BaseTransport):
    """One thread's transport over `measure.wire`, with keep-alive.

    A request's extension `deadline_ns` bounds it as a whole, beside httpx's timeouts of a wait.

    Args:
        stop: ends whatever runs once it is set.
        deadline_ns: no request lives longer (`time.monotonic_ns`); None for no such bound.
        context: TLS settings; None for the system's.
        unix: path of a Unix socket that every request goes over.
    """

    def __init__(
        self,
        *,
        stop: threading.Event | None = None,
        deadline_ns: int | None = None,
        context: ssl.SSLContext | None = None,
        unix: str | None = None,
    ) -> None:
        self._unix = unix
        self._loop = Loop(stop=stop, context=context)
        self._deadline_ns = deadline_ns
        self._idle: dict[str, Connection] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return once the response's head is there; the body follows."""
        timeouts = request.extensions.get("timeout") or {}
        url = str(request.url)
        origin = url[: len(url) - len(request.url.raw_path.decode("ascii"))]
        headers = {name: value for name, value in request.headers.items() if name != "connection"}
        call = Call(
            url, request.method, headers, request.read(), Limits(stall_s=_wait(timeouts, "read"))
        )
        exchange = Exchange(call, self._connection(origin, url, request, timeouts))
        self._loop.start(exchange)
        wait = _wait(timeouts, "read")
        while exchange.status is None or exchange.status < 200:
            self._turn(exchange, request, wait)
            if exchange.finished:
                break
        self._raise(exchange, request)
        assert exchange.status is not None
        return httpx.Response(
            exchange.status,
            headers=list(exchange.headers.items()),
            stream=_Body(self, exchange, request, origin, wait),
            extensions={"http_version": b"HTTP/1.1", "dsv41_exchange": exchange},
        )

    def _connection(
        self, origin: str, url: str, request: httpx.Request, timeouts: dict[str, float | None]
    ) -> Connection:
        kept = self._idle.pop(origin, None)
        if kept is not None:
            if kept.still_open():
                return kept
            kept.close()
        deadline = time.monotonic_ns() + int(_wait(timeouts, "connect") * 1e9)
        if self._deadline_ns is not None:
            deadline = min(deadline, self._deadline_ns)
        try:
            return self._loop.connect(url, deadline, unix=self._unix)
        except TimeoutError:
            raise httpx.ConnectTimeout("no connection in time", request=request) from None
        except InterruptedError:
            raise httpx.ReadError("stopped", request=request) from None
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from error

    def _turn(self, exchange: Exchange, request: httpx.Request, wait: float) -> None:
        """Move on by one event; raise where the request's time is up."""
        before = len(exchange.reads)
        until = time.monotonic_ns() + int(wait * 1e9)
        until = min(until, request.extensions.get("deadline_ns", until))
        while len(exchange.reads) == before and not exchange.finished:
            self._loop.turn(min(0.1, max(0.0, (until - time.monotonic_ns()) / 1e9)))
            if self._loop.stop is not None and self._loop.stop.is_set():
                self._give_up(exchange)
                raise httpx.ReadError("stopped", request=request)
            now = time.monotonic_ns()
            if now >= until or (self._deadline_ns is not None and now >= self._deadline_ns):
                self._give_up(exchange)
                raise httpx.ReadTimeout("no answer in time", request=request)

    def _give_up(self, exchange: Exchange) -> None:
        exchange.fail("stopped", "given up")
        self._loop.drop(exchange)

    def _raise(self, exchange: Exchange, request: httpx.Request) -> None:
        if exchange.failure is None:
            return
        exchange.connection.close()
        kind = exchange.failure.kind
        error = httpx.ReadError if kind in ("reset", "write") else httpx.RemoteProtocolError
        raise error(exchange.failure.message, request=request)

    def keep(self, origin: str, exchange: Exchange) -> None:
        """Take the connection of an exchange back; closed unless it can be used again."""
        if exchange.finished and exchange.failure is None and exchange.framing.keep_alive:
            self._idle.setdefault(origin, exchange.connection)
            if self._idle[origin] is exchange.connection:
                return
        self._loop.drop(exchange)

    def close(self) -> None:
        """Close every connection."""
        for connection in self._idle.values():
            connection.close()
        self._idle.clear()
        self._loop.close()

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        self.close()


class _Body(httpx.SyncByteStream):
    """The response's body as it comes."""

    def __init__(
        self,
        transport: WireTransport,
        exchange: Exchange,
        request: httpx.Request,
        origin: str,
        wait: float,
    ) -> None:
        self._transport = transport
        self._exchange = exchange
        self._request = request
        self._origin = origin
        self._wait = wait
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        given = 0
        while True:
            while given < len(self._exchange.pieces):
                yield self._exchange.pieces[given][1]
                given += 1
            if self._exchange.finished:
                break
            self._transport._turn(self._exchange, self._request, self._wait)
        self._transport._raise(self._exchange, self._request)

    def close(self) -> None:
        """Give the connection back, or close it where the body was not read to its end."""
        if not self._closed:
            self._closed = True
            self._transport.keep(self._origin, self._exchange)


def _wait(timeouts: dict[str, float | None], name: str) -> float:
    value = timeouts.get(name)
    return _FOREVER_S if value is None else float(value)
