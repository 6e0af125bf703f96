"""HTTP/1.1 over one selector loop, every read stamped by the kernel. Standard library only.

What it is for: many response streams at once, each read kept with the time its last packet
reached this machine. Connections are opened before the clock starts; the clock of a request is
its first write. Nothing is decoded while streams run except the HTTP framing, which alone says
where a response ends.

Times are integers in nanoseconds of `time.monotonic_ns`. The kernel's stamps (SO_TIMESTAMPNS)
are wall-clock times; `measure.clock` brings them onto the monotonic clock or drops them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.text import one_line

__all__ = [
    "TRANSPORT",
    "Address",
    "Call",
    "Connection",
    "Exchange",
    "Failure",
    "Finished",
    "Framing",
    "Limits",
    "Loop",
    "Read",
    "parse_url",
]

TRANSPORT: Final = {"name": "dsv41-wire", "version": 1}
"""Name and version of this transport, kept in every record."""

_LINUX: Final = sys.platform == "linux"
_SO_TIMESTAMPNS: Final = 35  # asm-generic; the constant is not in every Python
_TCP_INFO: Final = 11
_DATA_SEGS_IN: Final = struct.Struct("=I")
_DATA_SEGS_IN_OFFSET: Final = 152  # struct tcp_info, Linux 4.6 and later
_TIMESPEC: Final = struct.Struct("@ll")
_POLL_S: Final = 0.02
_RECV: Final = 65536
_HEAD_LIMIT: Final = 65536
_AWAY_NS: Final = 1_000_000
_DONE_GRACE_NS: Final = 2_000_000_000


class Failure(NamedTuple):
    """Why an exchange did not end well: a short stable name and one line for a person."""

    kind: str
    message: str


class Read(NamedTuple):
    """One `recvmsg` and what is known about when its bytes came."""

    at_ns: int
    """The monotonic clock right after the call."""
    kernel_ns: int | None
    """The kernel's wall-clock stamp of the last packet in it; None where none came."""
    offset_ns: int
    """Wall clock minus monotonic clock, sampled right after the call."""
    size: int
    segments: int | None
    """TCP data segments that came since the read before; None where the kernel cannot say."""
    floor_ns: int
    """The socket was seen empty at this time: every byte of the read came later."""
    away: bool
    """The reader was held up (over 1 ms) between that moment and the read."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to connect, and what to ask for there."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = 443 if self.scheme == "https" else 80
        return host if self.port == default else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """Split an http or https URL.

    Raises:
        UsageError: another scheme, no host, or a port that is none.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"{one_line(url)}: the port is not a number from 0 to 65535") from None
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"{one_line(url)}: not a server address; valid: http://host:port, https://…, unix:PATH"
        )
    default = 443 if parts.scheme == "https" else 80
    return Address(parts.scheme, parts.hostname, default if port is None else port, path or "/")


def _refuse_proxy(scheme: str, host: str) -> None:
    if host in ("localhost", "::1") or host.startswith("127."):
        return
    proxies = getproxies_environment()
    proxy = proxies.get(scheme) or proxies.get("all")
    bypass = [name.strip().lower().lstrip("*.") for name in proxies.get("no", "").split(",")]
    direct = proxies.get("no", "").strip() == "*" or any(
        host.lower() == name or host.lower().endswith(f".{name}") for name in bypass if name
    )
    if proxy and not direct:
        shown = urlsplit(proxy).hostname or "set in the environment"
        raise MeasurementRefused(
            "proxy",
            f"a proxy ({one_line(shown)}) stands between here and {one_line(host)}: its delays "
            f"would be measured; add the host to NO_PROXY",
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one exchange. Sizes in bytes, times in seconds."""

    body: int = 64 << 20
    events: int | None = None
    """Most occurrences of an SSE data line; None where the body is no stream."""
    stall_s: float = 120.0
    """Longest silence after the response's first byte."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: everything is bytes before the clock starts."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    limits: Limits = Limits()

    def encode(self) -> bytes:
        """Return the request as it goes over the wire."""
        address = parse_url(self.url)
        names = {name.lower() for name in self.headers}
        lines = [f"{self.method} {address.path} HTTP/1.1"]
        if "host" not in names:
            lines.append(f"Host: {address.host_header}")
        if "accept-encoding" not in names:
            lines.append("Accept-Encoding: identity")
        if (self.body or self.method == "POST") and "content-length" not in names:
            lines.append(f"Content-Length: {len(self.body)}")
        for name, value in self.headers.items():
            if any(char in f"{name}{value}" for char in "\r\n\0"):
                raise UsageError(f"header {one_line(name)}: a line break or NUL in it")
            lines.append(f"{name}: {value}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + self.body


class Framing:
    """Where the head ends and what of the bytes is body; fed as they come."""

    def __init__(self, method: str) -> None:
        """Expect the answer to a `method` request."""
        self.method = method
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.done = False
        self.keep_alive = True
        self._buffer = bytearray()
        self._state = "head"
        self._left = 0

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes in `data`; raise ValueError where it is not HTTP."""
        if self._state == "eof":
            return data
        if self._state == "length":
            return self._take_length(data)
        self._buffer += data
        if self._state == "head" and not self._read_head():
            return b""
        if self._state == "chunked":
            return self._read_chunks()
        rest = bytes(self._buffer)
        self._buffer.clear()
        if self._state == "eof":
            return rest
        return self._take_length(rest)

    def eof(self) -> bool:
        """The connection was closed: is the response whole?"""
        if self._state == "eof":
            self.done = True
            self.keep_alive = False
        return self.done

    def _take_length(self, data: bytes) -> bytes:
        if self._left <= len(data):
            self.done = True
        taken = data[: self._left]
        self._left -= len(taken)
        return taken

    def _read_head(self) -> bool:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _HEAD_LIMIT:
                    raise ValueError("the response head is longer than 64 KiB")
                return False
            head = bytes(self._buffer[:end]).decode("latin-1")
            del self._buffer[: end + 4]
            self._parse_head(head)
            if self.status is not None and self.status >= 200:
                break
        self._choose_body()
        return True

    def _parse_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        version, _, rest = first.partition(" ")
        code = rest[:3]
        if not version.startswith("HTTP/1.") or not (code.isascii() and code.isdigit()):
            raise ValueError(f"not an HTTP/1 status line: {one_line(first, 60)}")
        self.status = int(code)
        self.headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise ValueError(f"not a header line: {one_line(line, 60)}")
            name, value = name.lower(), value.strip()
            if name in self.headers:
                value = f"{self.headers[name]}, {value}"
            self.headers[name] = value
        words = {word.strip().lower() for word in self.headers.get("connection", "").split(",")}
        self.keep_alive = "close" not in words and (version != "HTTP/1.0" or "keep-alive" in words)

    def _choose_body(self) -> None:
        encoding = self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        if self.method == "HEAD" or self.status in (204, 304):
            self._state, self._left, self.done = "length", 0, True
        elif encoding.endswith("chunked"):
            self._state = "chunked"
            self._left = -1
        elif encoding:
            raise ValueError(f"transfer encoding {one_line(encoding, 40)}")
        elif length is not None:
            sizes = {part.strip() for part in length.split(",")}
            size = sizes.pop()
            if sizes or not (size.isascii() and size.isdigit()):
                raise ValueError(f"content length {one_line(length, 40)}")
            self._state, self._left = "length", int(size)
        else:
            self._state = "eof"

    def _read_chunks(self) -> bytes:
        """`_left`: bytes of the running chunk with its line end; −1 a size line; −2 trailers."""
        body = bytearray()
        buffer = self._buffer
        at = 0
        while not self.done:
            if self._left == -1:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    if len(buffer) - at > 4096:
                        raise ValueError("a chunk size line longer than 4 KiB")
                    break
                size = bytes(buffer[at:end]).split(b";", 1)[0].strip()
                if not size or size.strip(b"0123456789abcdefABCDEF"):
                    raise ValueError(f"chunk size {one_line(size[:40].decode('latin-1'))}")
                at = end + 2
                self._left = int(size, 16) + 2
                if self._left == 2:
                    self._left = -2
            elif self._left == -2:
                end = buffer.find(b"\r\n", at)
                if end < 0:
                    if len(buffer) - at > _HEAD_LIMIT:
                        raise ValueError("trailers longer than 64 KiB")
                    break
                self.done = end == at
                at = end + 2
            else:
                have = len(buffer) - at
                if have >= self._left:
                    if buffer[at + self._left - 2 : at + self._left] != b"\r\n":
                        raise ValueError("a chunk is longer than its size says")
                    body += buffer[at : at + self._left - 2]
                    at += self._left
                    self._left = -1
                else:
                    take = max(0, min(have, self._left - 2))
                    body += buffer[at : at + take]
                    at += take
                    self._left -= take
                    break
        del buffer[:at]
        return bytes(body)


class Connection:
    """A connected socket (TLS done), ready for one exchange after the other."""

    def __init__(self, address: Address, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.sock = sock
        self.segments: int | None = None
        self.last_recv_ns = time.monotonic_ns()
        self.last_turn = -1
        self.stamped = False
        self._tls: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        if tls is not None:
            self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=address.host)

    def wants_handshake(self) -> bool:
        """Whether TLS has not been agreed yet."""
        return self._tls is not None and self._tls.version() is None

    def handshake(self) -> bytes:
        """Take a step of the handshake and return what has to be sent."""
        if self._tls is not None:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
        return self._outgoing.read()

    def feed_handshake(self, data: bytes) -> None:
        """Hand over what the server sent during the handshake."""
        self._incoming.write(data)

    def encrypt(self, data: bytes) -> bytes:
        """Return `data` as it goes over the socket."""
        if self._tls is None:
            return data
        self._tls.write(data)
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Return the text in `data` as it came from the socket."""
        if self._tls is None:
            return data
        self._incoming.write(data)
        plain = bytearray()
        try:
            while piece := self._tls.read(_RECV):
                plain += piece
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass
        return bytes(plain)

    def receive(self) -> tuple[bytes, int | None]:
        """One `recvmsg`: the bytes and the kernel's stamp. An empty result is the end."""
        if not self.stamped:
            return self.sock.recv(_RECV), None
        data, control, _flags, _peer = self.sock.recvmsg(_RECV, 64)
        for level, kind, value in control:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(value) >= 16:
                seconds, nanos = _TIMESPEC.unpack_from(value)
                return data, seconds * 1_000_000_000 + nanos
        return data, None

    def count_segments(self) -> int | None:
        """TCP data segments since the last call; None where the kernel does not tell."""
        if self.segments is None:
            return None
        raw = self.sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _DATA_SEGS_IN_OFFSET + 4)
        now: int = _DATA_SEGS_IN.unpack_from(raw, _DATA_SEGS_IN_OFFSET)[0]
        since, self.segments = (now - self.segments) & 0xFFFFFFFF, now
        return since

    def still_open(self) -> bool:
        """Whether an idle connection can carry another exchange."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # closed by the server, or bytes nobody asked for

    def close(self) -> None:
        """Close the socket; the server sees the client leave."""
        self.sock.close()

    def watch_arrivals(self) -> None:
        """Ask the kernel for receive stamps and segment counts where it has them."""
        if not _LINUX:
            return
        with contextlib.suppress(OSError):
            self.sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            self.stamped = True
        if self.sock.family != socket.AF_UNIX:
            self.segments = 0
            try:
                self.count_segments()
            except (OSError, struct.error):
                # A kernel whose tcp_info ends before that field.
                self.segments = None


@dataclass(frozen=True)
class Finished:
    """An exchange at its end: everything that was seen of it, nothing of the connection."""

    status: int | None
    headers: Mapping[str, str]
    failure: Failure | None
    write_start_ns: int
    write_end_ns: int
    end_ns: int
    offset_ns: int
    """Wall minus monotonic clock when the request was written."""
    reads: Sequence[Read]
    pieces: Sequence[tuple[int, bytes]]
    """(index of the read, body bytes it brought), in order."""
    raw: Sequence[bytes]

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(piece for _, piece in self.pieces)


class Exchange:
    """One request and its response as they happen."""

    def __init__(self, call: Call, connection: Connection) -> None:
        self.call = call
        self.connection = connection
        self.write_start_ns = 0
        self.write_end_ns = 0
        self.end_ns = 0
        self.offset_ns = 0
        """Wall minus monotonic clock when the request was written."""
        self.reads: list[Read] = []
        self.pieces: list[tuple[int, bytes]] = []
        """(index of the read, body bytes it brought), in order."""
        self.raw: list[bytes] = []
        self.failure: Failure | None = None
        self.body_size = 0
        self.data_lines = 0
        self._request = call.encode()
        self.framing = Framing(call.method)
        self.finished = False
        self.started = False
        self.keep_raw = False
        self.done_seen_ns = 0
        self._out = memoryview(b"")

    @property
    def status(self) -> int | None:
        """The response's status; None before its head came."""
        return self.framing.status

    @property
    def headers(self) -> dict[str, str]:
        """The response's headers, names in lower case."""
        return self.framing.headers

    @property
    def went_wrong(self) -> bool:
        """Whether it has ended without a good answer's head or body."""
        return self.finished and (self.failure is not None or self.status != 200)

    def result(self) -> Finished:
        """What was seen of it."""
        return Finished(
            self.status,
            self.headers,
            self.failure,
            self.write_start_ns,
            self.write_end_ns,
            self.end_ns,
            self.offset_ns,
            self.reads,
            self.pieces,
            self.raw,
        )

    def begin(self) -> bool:
        """Write the request; True where a part is left for later."""
        self._out = memoryview(self.connection.encrypt(self._request))
        self.started = True
        self.write_start_ns = time.monotonic_ns()
        return self.write()

    def write(self) -> bool:
        """Write on; True where a part is left."""
        try:
            while self._out:
                self._out = self._out[self.connection.sock.send(self._out) :]
        except BlockingIOError:
            return True
        except OSError as error:
            # The answer may lie in the buffer already (an early 4xx): the read decides.
            if not isinstance(error, BrokenPipeError | ConnectionResetError):
                self.fail("write", f"writing failed: {error.strerror}")
            self._out = memoryview(b"")
        self.write_end_ns = time.monotonic_ns()
        return False

    def take(self, data: bytes, read: Read) -> None:
        """Book one read."""
        index = len(self.reads)
        self.reads.append(read)
        if not data:
            if self.framing.eof():
                self._end(read.at_ns)
            else:
                kind = "no-response" if self.status is None else "cut"
                self.fail(kind, "the connection was closed before the response was whole")
            return
        try:
            plain = self.connection.decrypt(data)
            if self.keep_raw:
                self.raw.append(plain)
            body = self.framing.feed(plain)
        except (ValueError, ssl.SSLError) as error:
            self.fail("not-http", f"the answer is not HTTP: {one_line(str(error))}")
            return
        if body:
            self.pieces.append((index, body))
            self.body_size += len(body)
            self._bound(body, read.at_ns)
        if self.framing.done and not self.finished:
            self._end(read.at_ns)

    def _bound(self, body: bytes, now: int) -> None:
        limits = self.call.limits
        if self.body_size > limits.body:
            self.fail("too-long", f"the answer is longer than {limits.body} bytes: cut")
        if limits.events is not None:
            self.data_lines += body.count(b"data:")
            if self.data_lines > limits.events:
                self.fail("too-long", f"the answer has over {limits.events} events: cut")
            if body.rstrip().endswith((b"data: [DONE]", b"data:[DONE]")):
                self.done_seen_ns = now

    def _end(self, now: int) -> None:
        self.finished = True
        self.end_ns = now

    def fail(self, kind: str, message: str) -> None:
        """End the exchange with a reason; the first one stays."""
        if not self.finished:
            self.failure = Failure(kind, message)
            self._end(time.monotonic_ns())


Gate = Callable[[], bool]


class Loop:
    """Opens connections and moves exchanges forward, all from the calling thread."""

    def __init__(
        self,
        *,
        stop: threading.Event | None = None,
        context: ssl.SSLContext | None = None,
        realtime_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.stop = stop
        self.context = context
        self._realtime_ns = realtime_ns
        self._selector = selectors.DefaultSelector()
        self._turn = 0
        self._entered = time.monotonic_ns()
        self._returned = self._entered
        self._entered_before = self._entered
        self._away = False
        self._away_before = False
        self.offset_ns = self.sample_offset()

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection that is still in use."""
        for key in list(self._selector.get_map().values()):
            exchange = key.data
            if isinstance(exchange, Exchange):
                exchange.connection.close()
        self._selector.close()

    def sample_offset(self) -> int:
        """Wall clock minus monotonic clock now, in ns (the tightest of up to three tries)."""
        best = None
        offset = 0
        for _ in range(3):
            before = time.monotonic_ns()
            wall = self._realtime_ns()
            after = time.monotonic_ns()
            if best is None or after - before < best:
                best = after - before
                offset = wall - (before + after) // 2
            if best < 5_000:
                break
        return offset

    def connect(self, url: str, deadline_ns: int, *, unix: str | None = None) -> Connection:
        """Open a connection, with TLS where the URL says so; over the Unix socket `unix` if given.

        Raises:
            MeasurementRefused: kind `proxy`, when the environment puts a proxy in between.
            ConnectionError: refused, unreachable, TLS not agreed, or a name unknown.
            TimeoutError: not open at the deadline.
            InterruptedError: the stop event was set.
        """
        address = parse_url(url)
        if unix is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            return self._open(address, sock, unix, deadline_ns)
        _refuse_proxy(address.scheme, address.host)
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ConnectionError(f"{address.host}: {error.strerror or error}") from None
        last: OSError | None = None
        for family, kind, protocol, _name, target in found:
            sock = socket.socket(family, kind, protocol)
            try:
                return self._open(address, sock, target, deadline_ns)
            except (TimeoutError, InterruptedError):
                raise
            except OSError as error:
                last = error
        raise ConnectionError(
            f"{address.host}:{address.port}: {(last.strerror or last) if last else 'no address'}"
        ) from last

    def _open(
        self, address: Address, sock: socket.socket, target: object, deadline_ns: int
    ) -> Connection:
        try:
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = sock.connect_ex(target)  # type: ignore[arg-type]
            if code not in (0, 115, 36):  # EINPROGRESS on Linux, on BSD
                raise ConnectionError(code, os.strerror(code))
            self._wait_socket(sock, selectors.EVENT_WRITE, deadline_ns)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise ConnectionError(code, os.strerror(code))
            context = None
            if address.scheme == "https":
                context = self.context or ssl.create_default_context()
            connection = Connection(address, sock, context)
            self._shake(connection, deadline_ns)
            connection.watch_arrivals()
        except BaseException:
            sock.close()
            raise
        return connection

    def _shake(self, connection: Connection, deadline_ns: int) -> None:
        try:
            while connection.wants_handshake():
                out = connection.handshake()
                while out:
                    self._wait_socket(connection.sock, selectors.EVENT_WRITE, deadline_ns)
                    out = out[connection.sock.send(out) :]
                if not connection.wants_handshake():
                    break
                self._wait_socket(connection.sock, selectors.EVENT_READ, deadline_ns)
                data = connection.sock.recv(_RECV)
                if not data:
                    raise ConnectionError("the server closed the connection during TLS")
                connection.feed_handshake(data)
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error.reason or error}") from None

    def _wait_socket(self, sock: socket.socket, events: int, deadline_ns: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(sock, events)
            while True:
                self._check(deadline_ns)
                if selector.select(_POLL_S):
                    return

    def _check(self, deadline_ns: int) -> None:
        if self.stop is not None and self.stop.is_set():
            raise InterruptedError("stopped")
        if time.monotonic_ns() >= deadline_ns:
            raise TimeoutError("deadline")

    def start(self, exchange: Exchange) -> None:
        """Write the request and watch for the answer."""
        exchange.connection.last_recv_ns = time.monotonic_ns()
        self.offset_ns = exchange.offset_ns = self.sample_offset()
        pending = exchange.begin()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0)
        if not exchange.finished:
            self._selector.register(exchange.connection.sock, events, exchange)

    def turn(self, timeout: float = _POLL_S) -> None:
        """Wait up to `timeout` seconds and book what came."""
        self._away_before, self._entered_before = self._away, self._entered
        self._entered = time.monotonic_ns()
        between = self._entered - self._returned
        ready = self._selector.select(timeout)
        self._returned = time.monotonic_ns()
        self._turn += 1
        waited = self._returned - self._entered
        self._away = waited > timeout * 1e9 + _AWAY_NS or between > _AWAY_NS
        for key, events in ready:
            exchange: Exchange = key.data
            if events & selectors.EVENT_WRITE and not exchange.write():
                self._selector.modify(key.fileobj, selectors.EVENT_READ, exchange)
            if events & selectors.EVENT_READ:
                self._read(exchange)
            if exchange.finished:
                self._selector.unregister(key.fileobj)

    def _read(self, exchange: Exchange) -> None:
        connection = exchange.connection
        try:
            data, stamp = connection.receive()
        except BlockingIOError:
            return
        except OSError as error:
            exchange.fail("reset", f"the connection broke: {error.strerror or error}")
            return
        now = time.monotonic_ns()
        wall = self._realtime_ns()
        self.offset_ns = offset = (
            wall - now if time.monotonic_ns() - now < 5_000 else self.sample_offset()
        )
        segments = connection.count_segments()
        # The last moment at which the socket was seen empty. A poll that reports nothing looked
        # after it was entered; when it returned may be long after (a pause), so its entry counts.
        quiet = connection.last_turn != self._turn - 1
        floor = self._entered_before if quiet else connection.last_recv_ns
        connection.last_turn = self._turn
        floor = max(floor, connection.last_recv_ns)
        connection.last_recv_ns = now
        away = self._away or (quiet and self._away_before)
        exchange.take(data, Read(now, stamp, offset, len(data), segments, floor, away))

    def run(
        self,
        exchanges: Sequence[Exchange],
        *,
        deadline_ns: int,
        gates: Mapping[int, Gate] | None = None,
        tick: Callable[[], None] | None = None,
        together: bool = False,
    ) -> None:
        """Run exchanges to their end, a failure, the deadline or the stop event.

        `gates[i]` holds exchange i back until it returns True; the others start at once, in
        order. `tick` is called about five times a second. An exchange that a deadline or a stop
        ended has the failure `deadline` or `stopped`, and its socket is closed. With `together` the
        first one that fails ends the others, which have the failure `abandoned`.
        """
        waiting = dict(gates or {})
        for index, exchange in enumerate(exchanges):
            if index not in waiting:
                self.start(exchange)
        next_look = time.monotonic_ns() + 200_000_000
        while True:
            for index in [index for index, gate in waiting.items() if gate()]:
                del waiting[index]
                self.start(exchanges[index])
            if all(exchange.finished for exchange in exchanges):
                return
            self.turn()
            now = self._returned
            if together and any(exchange.went_wrong for exchange in exchanges):
                self._abandon(exchanges, "abandoned", "another request of the group failed")
                return
            if self.stop is not None and self.stop.is_set():
                self._abandon(exchanges, "stopped", "the measurement was stopped")
                return
            if now >= deadline_ns:
                self._abandon(exchanges, "deadline", "not finished at the deadline")
                return
            if now >= next_look:
                next_look = now + 200_000_000
                self._look(exchanges, now)
                if tick is not None:
                    tick()

    def _look(self, exchanges: Sequence[Exchange], now: int) -> None:
        """End what is silent for too long, and what said `[DONE]` but keeps its response open."""
        for exchange in exchanges:
            if exchange.finished or not exchange.reads:
                continue
            silent = now - exchange.reads[-1].at_ns
            if exchange.done_seen_ns and silent > _DONE_GRACE_NS:
                exchange.finished = True
                exchange.end_ns = exchange.done_seen_ns
            elif silent > exchange.call.limits.stall_s * 1e9:
                exchange.fail(
                    "stall", f"nothing came for {exchange.call.limits.stall_s:g} s in mid-stream"
                )
            else:
                continue
            self.drop(exchange)

    def _abandon(self, exchanges: Sequence[Exchange], kind: str, message: str) -> None:
        for exchange in exchanges:
            if not exchange.finished:
                exchange.fail(kind, message)
                self.drop(exchange)

    def drop(self, exchange: Exchange) -> None:
        """Close an exchange's connection, whatever it is doing."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(exchange.connection.sock)
        exchange.connection.close()
