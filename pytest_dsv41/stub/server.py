"""The server: listening, routing, ending."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

from pytest_dsv41.errors import UsageError
from pytest_dsv41.stub.engine import Engine
from pytest_dsv41.stub.http import BadRequest, Request, read_request
from pytest_dsv41.stub.loop import Connection, Loop, Wait
from pytest_dsv41.stub.profile import Profile
from pytest_dsv41.stub.truth import Truth
from pytest_dsv41.stub.vllm import Vllm
from pytest_dsv41.stub.vllm_metrics import VllmLedger

__all__ = ["Server", "serve_process"]

Handler = Callable[[Connection, Request], Generator[Wait, None, None] | None]


class Server:
    """One stub server. `run` serves until `stop`, which any thread may call."""

    def __init__(self, profile: Profile, *, keep_truth: bool = True) -> None:
        self.profile = profile
        self.loop = Loop()
        self.truth = Truth(profile.truth, keep=keep_truth)
        self._truth_on = keep_truth or bool(profile.truth)
        self.started = int(time.time())
        self.profiling = False
        self._ready_at = time.monotonic() + profile.loading_ms / 1000.0
        ledger = VllmLedger(profile)
        self.engine = Engine(profile, ledger)
        ledger.engine = self.engine
        self.api = Vllm(self, ledger)
        self._listener = _listen(profile)
        self._listening = True
        self.loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)

    @property
    def port(self) -> int:
        """The port it listens on; 0 on a Unix socket."""
        return 0 if self.profile.uds else int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """`http://host:port`, or `unix:PATH`."""
        if self.profile.uds:
            return f"unix:{self.profile.uds}"
        host = f"[{self.profile.host}]" if ":" in self.profile.host else self.profile.host
        return f"http://{host}:{self.port}"

    def run(self) -> None:
        """Serve until `stop`, then close everything."""
        try:
            self.loop.run()
        finally:
            self.close()

    def stop(self) -> None:
        """End `run`; connections are closed as they are."""
        self.loop.stop()

    def close(self) -> None:
        """Free the sockets and write the rest of the ground truth."""
        self.loop.close()
        self._listener.close()
        if self.profile.uds:
            with contextlib.suppress(OSError):
                os.unlink(self.profile.uds)  # noqa: PTH108 - pathlib is not loaded
        self.truth.flush()

    def stop_listening(self) -> None:
        """Close the port; streams that run go on."""
        if self._listening:
            self._listening = False
            self.loop.unwatch(self._listener.fileno())
            self._listener.close()

    def _accept(self, _events: int) -> None:
        for _ in range(64):
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                # No descriptors left: the client's connect waits in the backlog.
                return
            connection = Connection(self.loop, sock, self.truth.sent if self._truth_on else None)
            connection.start(self._serve(connection))

    def _serve(self, connection: Connection) -> Generator[Wait, None, None]:
        while True:
            try:
                request = yield from read_request(connection)
            except BadRequest as error:
                self.api.error(connection, error.status, str(error))
                return
            if request is None:
                return
            connection.answering = True
            yield from self._answer(connection, request)
            connection.answering = False
            if not request.keep_alive or connection.ended:
                return

    def _answer(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        if time.monotonic() < self._ready_at:
            self.api.not_ready(connection)
            return
        handler = self.api.routes.get((request.method, request.path))
        if handler is None:
            known = any(path == request.path for _, path in self.api.routes)
            status, text = (405, "Method Not Allowed") if known else (404, "Not Found")
            self.api.error(connection, status, text)
            return
        try:
            steps = handler(connection, request)
            if steps is not None:
                yield from steps
        except BadRequest as error:
            self.api.error(connection, error.status, str(error))


def _listen(profile: Profile) -> socket.socket:
    """Return the listening socket. UsageError when the address cannot be had."""
    try:
        if profile.uds:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            where = f"uds {profile.uds}"
            listener.bind(profile.uds)
        else:
            family = socket.AF_INET6 if ":" in profile.host else socket.AF_INET
            where = f"{profile.host} port {profile.port}"
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((profile.host, profile.port))
        listener.listen(1024)
    except OSError as error:
        raise UsageError(f"dsv41 stub: cannot listen on {where}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def serve_process(profile: Profile) -> int:
    """Serve as this process's work until SIGTERM or SIGINT. Return the exit code.

    One JSON line with the URL goes to stdout when the port is open; nothing else is printed, so
    that a full pipe can never stop the server.
    """
    server = Server(profile, keep_truth=False)
    hangs = profile.on_term == "hang"
    asked = 0

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        if hangs and asked == 1 and server.engine.running:
            server.loop.from_thread(server.stop_listening)
            return
        server.truth.flush()
        if profile.uds:
            with contextlib.suppress(OSError):
                os.unlink(profile.uds)  # noqa: PTH108 - pathlib is not loaded
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    _finer_timers()
    gc.freeze()
    _announce({"url": server.url, "pid": os.getpid(), "model": profile.model})
    server.run()
    return 0


def _finer_timers() -> None:
    """Ask the kernel to wake this thread within a microsecond of a deadline (default 50)."""
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as file:  # noqa: PTH123
        file.write("1000")


def _announce(facts: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, ValueError):
        fd = sys.stdout.fileno()
        if select.select((), (fd,), (), 0)[1]:
            os.write(fd, (json.dumps(facts) + "\n").encode())
