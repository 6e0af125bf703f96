"""One thread, one selector, timers on the monotonic clock: what everything in the stub runs on.

A request handler is a generator that yields what it waits for:

- a float: the absolute monotonic second to go on at (never "so long from now", so that an error
  of one wait does not move the next)
- a `Gate`: until somebody opens it
- `READ`: until more bytes came from the client, or the end of them
- `DRAIN`: until the client has taken enough of what was written

A client that goes away raises `Gone` in the handler, at whatever it waits for. One thread means
that nothing else runs between a deadline and its write: with threads the interpreter's lock would
stand between them.
"""

from __future__ import annotations

import collections
import contextlib
import heapq
import itertools
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

__all__ = ["DRAIN", "READ", "SO_TIMESTAMPNS", "Connection", "Gate", "Gone", "Loop", "Task", "Wait"]

_CHUNK = 1 << 18
_MOST_UNREAD = 64 << 20
_MOST_UNSENT = 4 << 20
_IDLE = 0.003
SO_TIMESTAMPNS = 35  # asm-generic; the constant is not in every Python
_TIMESPEC = struct.Struct("@ll")
_PACKET = bytes(512)
_COLD_NS = 1_000_000
_numbers = itertools.count(1)


class Gone(Exception):
    """The client closed its connection while its request was being answered."""


class _Mark:
    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


READ = _Mark("read")
DRAIN = _Mark("drain")


class Gate:
    """Something a task waits for until another part of the program opens it, with a value."""

    __slots__ = ("_task", "opened", "value")

    def __init__(self) -> None:
        self.opened = False
        self.value: Any = None
        self._task: Task | None = None

    def open(self, value: Any = None) -> None:
        """Let the waiting task go on (or the one that comes to wait later)."""
        if self.opened:
            return
        self.opened, self.value = True, value
        task, self._task = self._task, None
        if task is not None:
            task.wake(self)


Wait = float | Gate | _Mark
Steps = Generator[Wait, None, None]


class Task:
    """A running generator, and what it waits for."""

    __slots__ = ("_loop", "_steps", "connection", "done", "waits")

    def __init__(self, loop: Loop, steps: Steps, connection: Connection | None = None) -> None:
        self._loop = loop
        self._steps = steps
        self.connection = connection
        self.waits: Wait | None = None
        self.done = False
        loop.soon(self._go_on)

    def wake(self, reason: Wait) -> None:
        """Go on, if `reason` is still what the task waits for."""
        if self.waits is reason and not self.done:
            self._go_on()

    def cancel(self) -> None:
        """Raise Gone in the generator at once."""
        if not self.done:
            self.waits = None
            self._advance(self._throw_gone)

    def _go_on(self) -> None:
        if not self.done:
            self.waits = None
            self._advance(self._steps.__next__)

    def _advance(self, step: Callable[[], Wait]) -> None:
        while True:
            try:
                wait = step()
            except StopIteration:
                self._finish()
                return
            except Gone:
                self._finish()
                return
            except Exception:
                self._finish()
                raise
            if self.connection is not None and self.connection.closed:
                step = self._throw_gone
            elif self._must_wait(wait):
                return
            else:
                step = self._steps.__next__

    def _throw_gone(self) -> Wait:
        return self._steps.throw(Gone())

    def _finish(self) -> None:
        self.done = True
        if self.connection is not None:
            self.connection.task_ended()

    def _must_wait(self, wait: Wait) -> bool:
        connection = self.connection
        if isinstance(wait, float):
            if wait <= time.monotonic():
                return False
            self.waits = wait
            self._loop.call_at(wait, lambda: self.wake(wait))
        elif isinstance(wait, Gate):
            if wait.opened:
                return False
            self.waits = wait
            wait._task = self
        elif connection is None:
            return False
        else:
            if wait is READ and connection.ended:
                return False
            if wait is DRAIN and connection.unsent <= _MOST_UNSENT:
                return False
            self.waits = wait
        return True


class Loop:
    """The selector, the timers and the tasks. `run` returns after `stop`.

    `when_idle` does a small piece of work (well under a millisecond) when no deadline is near,
    and says whether there is more. `failed` is told of every error that nobody caught.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self._ready: collections.deque[Callable[[], None]] = collections.deque()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._stopped = False
        self.when_idle: Callable[[], bool] = lambda: False
        self.failed: Callable[[Exception], None] = lambda _error: None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self.watch(self._wake_in.fileno(), select.EPOLLIN, self._woken)
        self.connections: set[Connection] = set()
        self._own = _own_pair()
        self._sent_ns = 0

    def warm_up(self) -> int:
        """Make the next write a prompt one, and return the monotonic nanosecond after it.

        After a wait the processor has forgotten the kernel's way of a packet: the first one takes
        some 40 µs from the call to the wire, the next one 5. So one goes to ourselves first, and
        the time before a write is the time when its bytes leave.
        """
        now = time.monotonic_ns()
        if now - self._sent_ns > _COLD_NS and self._own:
            out, back = self._own
            with contextlib.suppress(OSError):
                out.send(_PACKET)
                back.recv(_CHUNK)
            now = time.monotonic_ns()
        self._sent_ns = now
        return now

    def soon(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop's next turn. Only from the loop's own thread."""
        self._ready.append(call)

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        """Run `call` at the monotonic second `when`."""
        self._sequence += 1
        heapq.heappush(self._timers, (when, self._sequence, call))

    def from_thread(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop; from any thread."""
        self._ready.append(call)
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b".")

    def in_thread(self, work: Callable[[], Any]) -> Gate:
        """Run long `work` beside the loop; the gate opens with (result, None) or (None, error)."""
        gate = Gate()

        def run() -> None:
            outcome: tuple[Any, Exception | None]
            try:
                outcome = (work(), None)
            except Exception as error:  # noqa: BLE001 - handed to the task that waits
                outcome = (None, error)
            self.from_thread(lambda: gate.open(outcome))

        threading.Thread(target=run, daemon=True).start()
        return gate

    def stop(self) -> None:
        """End `run`; from any thread."""
        self._stopped = True
        self.from_thread(lambda: None)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` when `fd` is ready; a second call changes the events."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """Forget `fd`."""
        if self._handlers.pop(fd, None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._stopped:
            self._turn()

    def close(self) -> None:
        """Close every connection and the selector. After `run`."""
        for connection in tuple(self.connections):
            connection.close()
        self._wake_in.close()
        self._wake_out.close()
        for own in self._own:
            own.close()
        self._epoll.close()

    def _turn(self) -> None:
        now = time.monotonic()
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= now:
            self._call(heapq.heappop(timers)[2])
        while ready:
            self._call(ready.popleft())
        if ready or self._stopped:
            return
        timeout = max(0.0, timers[0][0] - time.monotonic()) if timers else 60.0
        if timeout > _IDLE and self.when_idle():
            timeout = 0.0
        for fd, events in self._wait(timeout):
            handler = self._handlers.get(fd)
            if handler is not None:
                try:
                    handler(events)
                except Exception as error:  # noqa: BLE001 - one client's bug must not end all
                    self.failed(error)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - one client's bug must not end all
            self.failed(error)

    def _wait(self, timeout: float) -> list[tuple[int, int]]:
        # epoll rounds its timeout up to whole milliseconds; select over it does not.
        if self._epoll.fileno() < 1024:
            if not select.select((self._epoll,), (), (), timeout)[0]:
                return []
            timeout = 0
        return self._epoll.poll(timeout)

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)


def _own_pair() -> tuple[socket.socket, ...]:
    """Two ends of a connection to ourselves over loopback TCP; none where that cannot be."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as listener:
        out = socket.create_connection(listener.getsockname(), timeout=1.0)
        listener.settimeout(1.0)
        with contextlib.suppress(OSError):
            back, peer = listener.accept()
            if peer == out.getsockname():
                out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                out.setblocking(False)
                back.setblocking(False)
                return out, back
            back.close()
        out.close()
    return ()


Sent = Callable[["Connection", object, int, int, int, int], None]


class Connection:
    """One client: what came and was not yet read, what is written and was not yet sent.

    `sent` is called for every write that reached the kernel, with the connection, what the writer
    called it, its monotonic stamps in nanoseconds before and after the call, the offset in the
    connection's bytes (with TLS: of the clear text) and the length. `not_yet` are the errors by
    which the socket says that it must wait: TLS has its own.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        sent: Sent | None,
        not_yet: tuple[type[OSError], ...] = (BlockingIOError,),
    ) -> None:
        self._not_yet = not_yet
        self._loop = loop
        self._sock = sock
        self._sent = sent
        self._unsent = bytearray()
        self._linger = False
        self._pending: Callable[[], int] | None = getattr(sock, "pending", None)
        self.unread = bytearray()
        self.ended = False
        self.closed = False
        self.answering = False
        self.offset = 0
        self.arrived_ns = self.read_ns = time.monotonic_ns()
        """When the last packet that was read came (by the kernel's stamp), and when it was read."""
        self.number = next(_numbers)
        self.task: Task | None = None
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stamped = False
        if self._pending is None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self._stamped = True
        self._fd = sock.fileno()
        loop.connections.add(self)
        self._watch()

    @property
    def unsent(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return len(self._unsent)

    def start(self, steps: Steps) -> None:
        """Serve the connection with `steps`."""
        self.task = Task(self._loop, steps, self)

    def consume(self, count: int) -> bytes:
        """Take `count` bytes from what came."""
        data = bytes(self.unread[:count])
        del self.unread[:count]
        if not self.closed:
            self._watch()
        return data

    def send(self, data: bytes | bytearray, mark: object = None) -> int:
        """Write `data`, called `mark` in the ground truth.

        Return the monotonic nanosecond right before it left, or was queued behind other bytes.
        """
        if self._unsent or self.closed:
            if not self.closed:
                self._unsent += data
            return time.monotonic_ns()
        before = self._loop.warm_up()
        try:
            count = self._sock.send(data)
        except self._not_yet:
            count = 0
        except OSError:
            self._lost()
            return before
        self._note(before, count, mark)
        if count < len(data):
            self._unsent += data[count:]
            self._watch()
        return before

    def finish(self) -> None:
        """Close when everything written was sent."""
        self._linger = True
        if not self._unsent:
            self.close()

    def reset(self) -> None:
        """Close with a TCP reset; what was not sent is lost."""
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.close()

    def close(self) -> None:
        """Close now."""
        if self.closed:
            return
        self.closed = True
        self._unsent.clear()
        self._loop.unwatch(self._fd)
        self._loop.connections.discard(self)
        self._sock.close()

    def task_ended(self) -> None:
        """The handler is through with this connection."""
        self.finish()

    def _note(self, before: int, count: int, mark: object) -> None:
        if self._sent is not None:
            self._sent(self, mark, before, time.monotonic_ns(), self.offset, count)
        self.offset += count

    def _watch(self) -> None:
        events = 0
        if not self.ended and len(self.unread) < _MOST_UNREAD:
            events |= select.EPOLLIN
        if self._unsent:
            events |= select.EPOLLOUT
        self._loop.watch(self._fd, events, self._happened)

    def _happened(self, events: int) -> None:
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not self.ended:
            self._receive()
        if events & select.EPOLLOUT and not self.closed:
            self._flush()
        if events & (select.EPOLLHUP | select.EPOLLERR) and not self.closed:
            self._lost()

    def _receive(self) -> None:
        try:
            data = self._take()
        except self._not_yet:
            return
        except OSError:
            self._lost()
            return
        if data:
            self.unread += data
            if self._pending is not None:
                # TLS decrypts whole records: what is left of one wakes no selector.
                while left := self._pending():
                    self.unread += self._sock.recv(left)
            self._watch()
        else:
            self.ended = True
            self._watch()
            if self.answering:
                self._lost()
                return
        if self.task is not None:
            self.task.wake(READ)

    def _take(self) -> bytes:
        if not self._stamped:
            data = self._sock.recv(_CHUNK)
            self.arrived_ns = self.read_ns = time.monotonic_ns()
            return data
        data, control, _flags, _peer = self._sock.recvmsg(_CHUNK, 64)
        self.arrived_ns = self.read_ns = time.monotonic_ns()
        for level, kind, value in control:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(value) >= 16:
                seconds, nanos = _TIMESPEC.unpack_from(value)
                lay = time.time_ns() - (seconds * 1_000_000_000 + nanos)
                self.arrived_ns = self.read_ns - max(0, lay)
        return data

    def _flush(self) -> None:
        before = time.monotonic_ns()
        try:
            count = self._sock.send(self._unsent)
        except self._not_yet:
            return
        except OSError:
            self._lost()
            return
        del self._unsent[:count]
        self._note(before, count, None)
        if not self._unsent:
            self._watch()
            if self._linger:
                self.close()
                return
        if self.task is not None and len(self._unsent) <= _MOST_UNSENT // 2:
            self.task.wake(DRAIN)

    def _lost(self) -> None:
        """The client is gone: tell the handler, then close."""
        self.ended = True
        task = self.task
        if task is not None and not task.done and task.waits is not None:
            task.cancel()
        self.close()
