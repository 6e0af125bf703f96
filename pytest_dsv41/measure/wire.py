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
import re
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from pytest_dsv41.address import Address, parse_url
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
_POLL_S: Final = 0.1
"""How long a stop may take to be seen; nothing else waits for it."""
_LOOK_NS: Final = 100_000_000
_RECV: Final = 65536
_HEAD_LIMIT: Final = 65536
_AWAY_NS: Final = 1_000_000
_PROMPT_NS: Final = 300_000
"""A read this soon after its packets came cannot have let many of them queue."""
_LAST_CHUNK: Final = b"0\r\n\r\n"
_AFTER_THE_END: Final = "bytes after the response's end"
_LATER_MAX: Final = 1 << 20
_DONE_GRACE_NS: Final = 2_000_000_000
_TOKEN: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_DONE_LINE: Final = re.compile(rb"(?:\A|[\r\n])data: *\[DONE\]\s*\Z")


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
    """At most so many TCP data segments are in it; None where they were not counted (a read of
    one event) or the kernel cannot say."""
    floor_ns: int
    """The socket was seen empty at this time: every byte of the read came later."""
    away: bool
    """The reader may have been held up between that moment and the read: nothing proves that the
    first packet in it was met as promptly as the last."""


_Noted = TypeVar("_Noted", bound=tuple[Any, ...])


# What a named tuple's own constructor does, without its cost in the loop that must be prompt.
_noted = cast("Callable[[type[_Noted], tuple[Any, ...]], _Noted]", tuple.__new__)


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
    """Longest silence after the response's first byte; of a stream, once its tokens come: many
    servers send the head at once and then read a long prompt for minutes."""


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
            if not _TOKEN.fullmatch(name) or not (value.isascii() and value.isprintable()):
                # Its value may be a secret.
                raise UsageError(f"header {one_line(name)}: name or value is none of HTTP's")
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

    @property
    def chunked(self) -> bool:
        """Whether the head has come and the body comes in chunks."""
        return self._state == "chunked"

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes in `data`; raise ValueError where it is not HTTP."""
        if self._state == "eof":
            return data
        if self._state == "length":
            return self._take_length(data)
        if self.done and data:
            raise ValueError(_AFTER_THE_END)
        if self._state == "chunked" and self._left == -1 and not self._buffer:
            whole = _one_chunk(data)
            if whole is not None:
                return whole
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
        if self._left < len(data):
            raise ValueError(_AFTER_THE_END)
        self._left -= len(data)
        self.done = self._left == 0
        return data

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
        code = rest.partition(" ")[0]
        known = version in ("HTTP/1.0", "HTTP/1.1")
        if not known or len(code) != 3 or not (code.isascii() and code.isdigit()):
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
        encoding = self.headers.get("transfer-encoding")
        length = self.headers.get("content-length")
        if self.method == "HEAD" or self.status in (204, 304):
            self._state, self._left, self.done = "length", 0, True
        elif encoding is not None:
            # Nothing else was asked for (no TE header), and a length beside it is a contradiction.
            if encoding.lower() != "chunked" or length is not None:
                beside = "" if length is None else " beside a content length"
                raise ValueError(f"transfer encoding {one_line(encoding, 40)!r}{beside}")
            self._state = "chunked"
            self._left = -1
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
                if self.done and at < len(buffer):
                    raise ValueError(_AFTER_THE_END)
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


def _one_chunk(data: bytes) -> bytes | None:
    """The content of `data` where it is exactly one chunk, as nearly every read of a stream is."""
    at = data.find(b"\r\n", 0, 12)
    digits = data[:at] if at > 0 else b""
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        return None
    size = int(digits, 16)
    if size and len(data) == at + size + 4 and data.endswith(b"\r\n"):
        return data[at + 2 : -2]
    return None


class Connection:
    """A connected socket (TLS done), ready for one exchange after the other."""

    def __init__(self, address: Address, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.address = address
        self.sock = sock
        self.counts_segments = False
        self.segments = 0
        self.last_recv_ns = time.monotonic_ns()
        self.last_turn = -1
        self.stamped = False
        self._tls: ssl.SSLObject | None = None
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        if tls is not None:
            self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_hostname=address.host)

    @property
    def plain(self) -> bool:
        """Whether what goes over the socket is the text itself."""
        return self._tls is None

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

    def count_segments(self) -> int | None:
        """TCP data segments that have come so far; None where the kernel does not tell."""
        if not self.counts_segments:
            return None
        account = self.sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _DATA_SEGS_IN_OFFSET + 4)
        if len(account) < _DATA_SEGS_IN_OFFSET + 4:
            return None  # a kernel older than 4.6
        count: int = _DATA_SEGS_IN.unpack_from(account, _DATA_SEGS_IN_OFFSET)[0]
        return count

    def still_open(self) -> bool:
        """Whether an idle connection can carry another exchange."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # closed by the server, or bytes nobody asked for

    def spoke_first(self) -> bool:
        """Whether bytes lie there that nobody asked for: no answer to what is written next."""
        if not self.plain:
            return False  # TLS hands out tickets of its own accord
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

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
            with contextlib.suppress(OSError):
                self.counts_segments = True
                self.counts_segments = self.count_segments() is not None


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


class _Note(NamedTuple):
    """What is noted of one read while others may be waiting."""

    turn: int
    began_ns: int
    at_ns: int
    offset_ns: int
    control: Sequence[tuple[int, int, bytes]]
    segments: int | None
    """TCP data segments of the connection so far; None: not counted."""
    prompt: bool


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
        self.turns: Sequence[_Turn] = ()
        self._later: list[tuple[bytes, _Note]] = []
        self._later_size = 0
        self._can_wait = False

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

    def take(self, data: bytes, note: _Note) -> None:
        """Keep one read. What it says is worked out later, unless it may be the last one."""
        self._later.append((data, note))
        self._later_size += len(data)
        if (
            not self._can_wait
            or len(data) < 5
            or data.endswith(_LAST_CHUNK)
            or self._later_size > _LATER_MAX
        ):
            self.digest()

    @property
    def under_way(self) -> bool:
        """Whether silence is a stall: of a stream after two events, one of them a role's."""
        return self.call.limits.events is None or self.data_lines >= 2

    def digest(self) -> bool:
        """Work out what came: when it came, how long it is, how many events it has.

        Return whether the exchange has ended with it.
        """
        later, self._later, self._later_size = self._later, [], 0
        for data, note in later:
            if not self.finished:
                read = self._read(len(data), note)
                self.reads.append(read)
                self._look_into(data, len(self.reads) - 1, read.at_ns)
        # The end of a chunked stream shows in its bytes as they come; any other is looked for.
        self._can_wait = (
            self.framing.chunked and self.call.limits.events is not None and self.connection.plain
        )
        return self.finished

    def _read(self, size: int, note: _Note) -> Read:
        connection = self.connection
        turn, before = self.turns[note.turn], self.turns[note.turn - 1] if note.turn else None
        stamp = None
        for level, kind, value in note.control:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(value) >= 16:
                seconds, nanos = _TIMESPEC.unpack_from(value)
                stamp = seconds * 1_000_000_000 + nanos
        # A read that was not counted had one segment at least.
        connection.segments = (connection.segments + 1) & 0xFFFFFFFF
        segments = None
        if note.segments is not None:
            segments = ((note.segments - connection.segments) & 0xFFFFFFFF) + 1
            connection.segments = note.segments
        # The last moment at which the socket was seen empty. A poll that reports nothing looked
        # after it was entered; when it returned may be long after (a pause), so its entry counts.
        quiet = connection.last_turn != note.turn - 1
        connection.last_turn = note.turn
        floor = connection.last_recv_ns
        if quiet and before is not None:
            floor = max(floor, before.entered_ns)
        connection.last_recv_ns = note.at_ns
        # Behind other sockets' reads this one waited too.
        behind = note.began_ns - turn.returned_ns > _PROMPT_NS
        away = behind or not note.prompt or turn.away(before)
        if quiet and not away and note.turn > 1:
            away = self.turns[note.turn - 1].away(self.turns[note.turn - 2])
        return Read(note.at_ns, stamp, note.offset_ns, size, segments, floor, away)

    def _look_into(self, data: bytes, index: int, now: int) -> None:
        if not data:
            if self.framing.eof():
                self._end(now)
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
            self._bound(body, now)
        if self.framing.done and not self.finished:
            self._end(now)

    def _bound(self, body: bytes, now: int) -> None:
        limits = self.call.limits
        if self.body_size > limits.body:
            self.fail("too-long", f"the answer is longer than {limits.body} bytes: cut")
        if limits.events is not None:
            lines = body.count(b"data:")
            self.data_lines += lines
            if self.data_lines > limits.events:
                self.fail("too-long", f"the answer has over {limits.events} events: cut")
            if lines:
                # Text that was cut behind these words is no end: more data follows it.
                self.done_seen_ns = now if _DONE_LINE.search(body[-32:]) else 0

    def _end(self, now: int) -> None:
        self.finished = True
        self.end_ns = now

    def fail(self, kind: str, message: str) -> None:
        """End the exchange with a reason; the first one stays."""
        if not self.finished:
            self.failure = Failure(kind, message)
            self._end(time.monotonic_ns())


Gate = Callable[[], bool]


class _Turn(NamedTuple):
    """One wait of the loop, as it was noted; what it means is worked out when a read needs it."""

    entered_ns: int
    returned_ns: int
    allowed_ns: int

    def away(self, before: _Turn | None) -> bool:
        """Whether the loop was held up on its way into the wait or out of it."""
        return (
            before is None
            or self.returned_ns - self.entered_ns > self.allowed_ns + _AWAY_NS
            or self.entered_ns - before.returned_ns > _AWAY_NS
        )


class _Seat(NamedTuple):
    """How long a thread has waited for a core so far, how often it was given one, and when.

    Given one as often as it waited for packets, and at once: whatever woke it was met promptly.
    More often: it lost its core meanwhile, or waited for the interpreter, however soon it then
    came to the read.
    """

    waited_ns: int
    runs: int
    turn: int

    def prompt(self, since: _Seat | None) -> bool:
        """Whether every wait since that look ended as soon as something came."""
        return (
            since is not None
            and self.runs - since.runs <= self.turn - since.turn
            and self.waited_ns - since.waited_ns <= _PROMPT_NS
        )


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
        self._poll = select.epoll()
        self._running: dict[int, Exchange] = {}
        self._turns: list[_Turn] = []
        self._returned = time.monotonic_ns()
        self._statistics = -1
        self._seat: _Seat | None = None
        self._room = memoryview(bytearray(_RECV))
        self._ended = 0

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection that is still in use."""
        for exchange in self._running.values():
            exchange.connection.close()
        self._running.clear()
        self._poll.close()

    def sample_offset(self) -> int:
        """Wall clock minus monotonic clock now, in ns (the tightest of up to ten tries)."""
        best = None
        offset = 0
        for _ in range(10):
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
            self._wait_socket(sock, select.EPOLLOUT, deadline_ns)
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
                    self._wait_socket(connection.sock, select.EPOLLOUT, deadline_ns)
                    out = out[connection.sock.send(out) :]
                if not connection.wants_handshake():
                    break
                self._wait_socket(connection.sock, select.EPOLLIN, deadline_ns)
                data = connection.sock.recv(_RECV)
                if not data:
                    raise ConnectionError("the server closed the connection during TLS")
                connection.feed_handshake(data)
        except ssl.SSLError as error:
            raise ConnectionError(f"TLS: {error.reason or error}") from None

    def _wait_socket(self, sock: socket.socket, events: int, deadline_ns: int) -> None:
        with select.epoll() as poll:
            poll.register(sock, events)
            while True:
                self._check(deadline_ns)
                if poll.poll(_POLL_S):
                    return

    def _check(self, deadline_ns: int) -> None:
        if self.stop is not None and self.stop.is_set():
            raise InterruptedError("stopped")
        if time.monotonic_ns() >= deadline_ns:
            raise TimeoutError("deadline")

    def start(self, exchange: Exchange) -> None:
        """Write the request and watch for the answer."""
        if not self._running:
            self._turns.clear()
        exchange.turns, exchange.connection.last_turn = self._turns, -1
        exchange.connection.last_recv_ns = time.monotonic_ns()
        exchange.offset_ns = self.sample_offset()
        if exchange.connection.spoke_first():
            exchange.fail("not-http", "the server spoke before it was asked")
        pending = not exchange.finished and exchange.begin()
        if exchange.finished:
            self._ended += 1
            return
        sock = exchange.connection.sock
        self._poll.register(sock, select.EPOLLIN | (select.EPOLLOUT if pending else 0))
        self._running[sock.fileno()] = exchange

    def turn(self, timeout: float = _POLL_S) -> None:
        """Wait up to `timeout` seconds and keep what came.

        After a wait the processor has forgotten this code, and every line costs many times what it
        costs a moment later: here is noted only what cannot be known afterwards.
        """
        now = time.monotonic_ns
        entered = now()
        ready = self._poll.poll(timeout)
        self._returned = returned = now()
        turn = len(self._turns)
        self._turns.append(_noted(_Turn, (entered, returned, int(timeout * 1e9))))
        for descriptor, events in ready:
            exchange = self._running[descriptor]
            if events & select.EPOLLOUT and not exchange.write():
                self._poll.modify(descriptor, select.EPOLLIN)
            if events & ~select.EPOLLOUT:
                self._read(exchange, turn)
            if exchange.finished:
                self._forget(exchange)

    def _read(self, exchange: Exchange, turn: int) -> None:
        connection, now = exchange.connection, time.monotonic_ns
        control: Sequence[tuple[int, int, bytes]] = ()
        began = now()
        try:
            if connection.stamped:
                size, control, _flags, _peer = connection.sock.recvmsg_into((self._room,), 64)
            else:
                size = connection.sock.recv_into(self._room)
        except BlockingIOError:
            return
        except OSError as error:
            exchange.digest()
            exchange.fail("reset", f"the connection broke: {error.strerror or error}")
            return
        at = now()
        wall = self._realtime_ns()
        offset = wall - at if now() - at < 5_000 else self.sample_offset()
        data = self._room[:size].tobytes()
        segments, prompt = None, True
        if data.count(b"\n\n") != 1:
            # Perhaps several events: did they come together, and was the first met at once?
            segments = connection.count_segments()
            prompt = self._sit().prompt(self._seat)
        exchange.take(data, _noted(_Note, (turn, began, at, offset, control, segments, prompt)))

    def _sit(self) -> _Seat:
        """Ask the scheduler about this thread; it never waits promptly where nothing is told."""
        try:
            _ran, waited, runs = os.pread(self._statistics, 96, 0).split()[:3]
        except OSError:
            return _Seat(0, 1 << 62, 0)
        return _Seat(int(waited), int(runs), len(self._turns))

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
        order. `tick` is called about ten times a second. An exchange that a deadline or a stop
        ended has the failure `deadline` or `stopped`, and its socket is closed. With `together` the
        first one that fails ends the others, which have the failure `abandoned`.
        """
        waiting = dict(gates or {})
        try:
            with contextlib.suppress(OSError):
                path = "/proc/thread-self/schedstat"
                self._statistics = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._seat = self._sit()
            self._run(exchanges, waiting, deadline_ns, tick, together)
        finally:
            if self._statistics >= 0:
                os.close(self._statistics)
                self._statistics, self._seat = -1, None

    def _run(
        self,
        exchanges: Sequence[Exchange],
        waiting: dict[int, Gate],
        deadline_ns: int,
        tick: Callable[[], None] | None,
        together: bool,
    ) -> None:
        for index, exchange in enumerate(exchanges):
            if index not in waiting:
                self.start(exchange)
        next_look = min(time.monotonic_ns() + _LOOK_NS, deadline_ns)
        ended = -1
        while True:
            if waiting:
                for index in [index for index, gate in waiting.items() if gate()]:
                    del waiting[index]
                    self.start(exchanges[index])
            if self._ended != ended:
                ended = self._ended
                if together and any(exchange.went_wrong for exchange in exchanges):
                    self._abandon(exchanges, "abandoned", "another request of the group failed")
                    return
                if all(exchange.finished for exchange in exchanges):
                    return
            self.turn()
            now = self._returned
            if now < next_look:
                continue
            next_look = min(now + _LOOK_NS, deadline_ns)
            if self.stop is not None and self.stop.is_set():
                self._abandon(exchanges, "stopped", "the measurement was stopped")
                return
            if now >= deadline_ns:
                self._abandon(exchanges, "deadline", "not finished at the deadline")
                return
            self._look(exchanges, now)
            if tick is not None and self._ended == ended:
                tick()
            if self._statistics >= 0:
                self._seat = self._sit()

    def _look(self, exchanges: Sequence[Exchange], now: int) -> None:
        """End what is silent for too long, and what said `[DONE]` but keeps its response open."""
        for exchange in exchanges:
            if exchange.finished:
                continue
            if exchange.digest():
                self._forget(exchange)
                continue
            if not exchange.reads:
                continue
            silent = now - exchange.reads[-1].at_ns
            if exchange.done_seen_ns and now - exchange.done_seen_ns > _DONE_GRACE_NS:
                exchange.finished = True
                exchange.end_ns = exchange.done_seen_ns
            elif exchange.under_way and silent > exchange.call.limits.stall_s * 1e9:
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
        self._forget(exchange)
        exchange.connection.close()

    def _forget(self, exchange: Exchange) -> None:
        self._ended += 1
        descriptor = exchange.connection.sock.fileno()
        if self._running.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
