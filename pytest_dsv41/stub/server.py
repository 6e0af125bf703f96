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
from typing import TYPE_CHECKING, Any

from pytest_dsv41.errors import UsageError
from pytest_dsv41.stub.engine import Ask, Engine
from pytest_dsv41.stub.faults import NONE, Faults, faults_of
from pytest_dsv41.stub.faults import parse as parse_faults
from pytest_dsv41.stub.http import BadRequest, Request, dumps, read_request, respond
from pytest_dsv41.stub.language import encode
from pytest_dsv41.stub.loop import SO_TIMESTAMPNS, Connection, Gate, Loop, Task, Wait
from pytest_dsv41.stub.profile import Profile
from pytest_dsv41.stub.truth import Truth

if TYPE_CHECKING:
    from ssl import SSLContext

    from pytest_dsv41.stub.llamacpp import LlamaCpp
    from pytest_dsv41.stub.llamacpp_metrics import LlamaLedger
    from pytest_dsv41.stub.vllm import Vllm
    from pytest_dsv41.stub.vllm_metrics import VllmLedger

__all__ = ["Server", "serve_process"]

Handler = Callable[[Connection, Request], Generator[Wait, None, None] | None]


class Server:
    """One stub server. `run` serves until `stop`, which any thread may call."""

    def __init__(self, profile: Profile, *, keep_truth: bool = True) -> None:
        parse_faults(profile.fault)
        self.profile = profile
        self.truth = Truth(profile.truth, keep=keep_truth)
        self._tls: SSLContext | None = None
        self._not_yet: tuple[type[OSError], ...] = (BlockingIOError,)
        if profile.tls_cert:
            self._tls, self._not_yet = _tls(profile)
        self._listener = _listen(profile)
        self.loop = Loop()
        self.loop.when_idle = self.truth.flush_some
        self.loop.failed = self._failed
        self.errors: list[Exception] = []
        self.last_whole: bytes | None = None
        self._truth_on = keep_truth or bool(profile.truth)
        self.started = int(time.time())
        self.profiling = False
        self._ready_at = time.monotonic() + profile.loading_ms / 1000.0
        self._wall_offset = 0.0
        self._always: tuple[str, ...] = profile.fault
        self._refusals: dict[str, int] = {}
        self._scrapes = 0
        self.ledger: VllmLedger | LlamaLedger
        self.api: Vllm | LlamaCpp
        self._other_process: VllmLedger | LlamaLedger
        self._speak(profile)
        self.engine = Engine(profile, self.ledger)
        self.ledger.engine = self.engine
        self._own = {
            ("POST", "/stub/faults"): self._set_faults,
            ("POST", "/stub/restart"): self._restart,
            ("GET", "/stub/truth"): self._tell_truth,
        }
        self._listening = True
        self.loop.watch(self._listener.fileno(), select.EPOLLIN, self._accept)

    def _speak(self, profile: Profile) -> None:
        """Load the dialect that is spoken, and only that: a start must be quick."""
        if profile.engine == "vllm":
            from pytest_dsv41.stub.vllm import Vllm
            from pytest_dsv41.stub.vllm_metrics import VllmLedger

            self.ledger = vllm = VllmLedger(profile, self.wall, self._later)
            self._other_process = VllmLedger(profile, self.wall, self._later)
            self.api = Vllm(self, vllm)
        else:
            from pytest_dsv41.stub.llamacpp import LlamaCpp
            from pytest_dsv41.stub.llamacpp_metrics import LlamaLedger

            self.ledger = llama = LlamaLedger(profile, self._later)
            self._other_process = LlamaLedger(profile, self._later)
            self.api = LlamaCpp(self, llama)

    @property
    def port(self) -> int:
        """The port it listens on; 0 on a Unix socket."""
        return 0 if self.profile.uds else int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """`http://host:port` (or `https://…`), or `unix:PATH`."""
        if self.profile.uds:
            return f"unix:{self.profile.uds}"
        host = f"[{self.profile.host}]" if ":" in self.profile.host else self.profile.host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}"

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
        self.truth.close()

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
            if self._tls is not None:
                # The handshake happens at the first read, without blocking.
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            sent = self.truth.sent if self._truth_on else None
            connection = Connection(self.loop, sock, sent, self._not_yet)
            connection.start(self._serve(connection))

    def _serve(self, connection: Connection) -> Generator[Wait, None, None]:
        while True:
            try:
                request = yield from read_request(connection)
            except BadRequest as error:
                self.api.error(connection, error)
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
        own = self._own.get((request.method, request.path))
        if own is not None:
            own(connection, request)
            return
        handler = self.api.routes.get((request.method, request.path))
        if handler is None:
            known = any(path == request.path for _, path in self.api.routes)
            status, text = (405, "Method Not Allowed") if known else (404, "Not Found")
            self.api.error(connection, BadRequest(text, status, form="route"))
            return
        try:
            faults = self._faults(request)
            if "status" in faults and self._refuses(faults, request.path):
                status = faults.count("status")
                raise BadRequest("the stub was told to refuse", status)
            if "slow-headers" in faults:
                yield time.monotonic() + faults.seconds("slow-headers")
            steps = handler(connection, request._replace(faults=faults))
            if steps is not None:
                yield from steps
        except BadRequest as error:
            self.api.error(connection, error)

    # ---- faults ----------------------------------------------------------------------------

    def _faults(self, request: Request) -> Faults:
        header = request.headers.get("x-stub-fault", "")
        field: Any = None
        if b"x_stub_fault" in request.body:
            with contextlib.suppress(BadRequest):
                field = request.json().get("x_stub_fault")
        if not header and field is None and not self._always:
            return NONE
        return faults_of(header, field, self._always, request.path)

    def _refuses(self, faults: Faults, path: str) -> bool:
        parts = faults.parts("status")
        key = f"{path} {faults.text('status')}"
        left = self._refusals.setdefault(key, int(parts[1]))
        self._refusals[key] = left - 1
        return left > 0

    def set_faults(self, texts: tuple[str, ...]) -> None:
        """Let these faults hold for every request from now on. UsageError names a wrong one."""
        parse_faults(texts)
        self._refusals.clear()
        self._always = texts

    def _set_faults(self, connection: Connection, request: Request) -> None:
        """POST /stub/faults {"faults": [...]}: the faults that hold for every request from now."""
        try:
            texts = request.json().get("faults", [])
            if not isinstance(texts, list):
                raise BadRequest("faults must be a list of texts")
            self.set_faults(tuple(map(str, texts)))
        except (BadRequest, UsageError) as error:
            self.api.error(connection, BadRequest(str(error)))
            return
        respond(connection, 200, dumps({"faults": list(self._always)}))

    def _tell_truth(self, connection: Connection, _request: Request) -> None:
        """GET /stub/truth: the ground truth so far, one JSON line a write."""
        text = "".join(json.dumps(line) + "\n" for line in self.truth.lines())
        respond(connection, 200, text.encode(), "application/x-ndjson")

    def _restart(self, connection: Connection, _request: Request) -> None:
        """POST /stub/restart: the counters begin again, as after a restart of the engine."""
        self.restart_counters()
        respond(connection, 200, b"{}")

    def wall(self) -> float:
        """Return the server's wall clock, in seconds; a fault may have stepped it."""
        return time.time() + self._wall_offset

    def step_wall(self, seconds: float) -> None:
        """Step the server's wall clock (its own view of it: the machine's stays)."""
        self._wall_offset += seconds

    def restart_counters(self) -> None:
        """Reset every counter, with new `_created` stamps."""
        self.ledger.reset()

    def foreign(self, tokens: int, until: Gate | None = None) -> Generator[Wait, None, None]:
        """Run a request of somebody else: `tokens` long, or until the gate opens."""
        prompt = encode("somebody else asks")
        endless = until is not None
        ask = Ask(prompt, tokens, ignore_eos=True, use_cache=False, endless=endless)
        job = self.engine.submit(ask, arrival=time.monotonic(), wall=self.wall())
        yield job.gate
        when = time.monotonic()
        while True:
            step = self.engine.next_step(job)
            yield when
            self.engine.record(job, step, time.monotonic())
            if step.finish is not None or (until is not None and until.opened):
                break
            when += self.engine.round_seconds(job) if endless else 0.0005
        self.engine.leave(job, "length")

    def foreign_until(self, over: Gate, seconds: float) -> Generator[Wait, None, None]:
        """Run a request of somebody else until `seconds` after the gate `over` opened."""
        end = Gate()
        Task(self.loop, self.foreign(1, end))
        yield over
        yield time.monotonic() + seconds
        end.open()

    def exposition(self, faults: Faults) -> str:
        """Return the text of /metrics, as its faults have it."""
        ledger = self.ledger
        if not faults:
            return ledger.text()
        if "metrics-garbage" in faults:
            return "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine= 0\n"
        if "metrics-two-engines" in faults:
            ledger.add_engine()
        if "metrics-restart" in faults:
            ledger.reset()
        self._scrapes += 1
        if "metrics-alternate" in faults and self._scrapes % 2 == 0:
            return self._other_process.text()
        missing = [] if "metrics-missing" not in faults else [str(faults.text("metrics-missing"))]
        text = ledger.text(created="metrics-no-created" not in faults, without=missing)
        for name, value in (("metrics-nan", "NaN"), ("metrics-inf", "+Inf")):
            if name in faults:
                text = _with_value(text, str(faults.text(name)), value)
        return text

    def _failed(self, error: Exception) -> None:
        """Keep an error of the stub itself, and say it where that cannot block."""
        if len(self.errors) < 100:
            self.errors.append(error)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fd = sys.stderr.fileno()
            if select.select((), (fd,), (), 0)[1]:
                os.write(fd, f"dsv41 stub: {type(error).__name__}: {error}\n".encode())

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds <= 0:
            call()
        else:
            self.loop.call_at(time.monotonic() + seconds, call)


def _with_value(text: str, family: str, value: str) -> str:
    """Return the exposition with `value` in every sample whose name is `family`."""
    return "".join(
        line.rpartition(" ")[0] + f" {value}\n"
        if line.startswith((family + "{", family + " "))
        else line
        for line in text.splitlines(keepends=True)
    )


def _tls(profile: Profile) -> tuple[SSLContext, tuple[type[OSError], ...]]:
    """Return the TLS context and what its sockets raise when they must wait. UsageError."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(profile.tls_cert, profile.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"tls_cert {profile.tls_cert}: cannot be used ({error})") from None
    return context, (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


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
            with contextlib.suppress(OSError):
                # Every connection inherits it. Set only once one is accepted, a request that came
                # before would be stamped when it is read, and its wait count as the client's.
                listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        listener.listen(1024)
    except OSError as error:
        raise UsageError(f"cannot listen on {where}: {error.strerror}") from None
    listener.setblocking(False)
    return listener


def serve_process(profile: Profile) -> int:
    """Serve as this process's work until SIGTERM or SIGINT. Return the exit code.

    One JSON line with the URL goes to stdout when the port is open; nothing else is printed, so
    that a full pipe can never stop the server.
    """
    server = Server(profile, keep_truth=False)
    asked = 0

    def die() -> None:
        server.truth.flush()
        if profile.uds:
            with contextlib.suppress(OSError):
                os.unlink(profile.uds)  # noqa: PTH108 - pathlib is not loaded
        os._exit(0)

    def asked_to_end() -> None:
        if profile.on_term == "hang" and asked == 1 and server.engine.running:
            server.stop_listening()
        else:
            die()

    def end(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        asked += 1
        # In the loop, not here: the handler may have interrupted a write of the ground truth.
        server.loop.from_thread(asked_to_end)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    _keep_time(profile.realtime)
    gc.freeze()
    _announce({"url": server.url, "pid": os.getpid(), "model": profile.model})
    server.run()
    return 0


def _keep_time(realtime: bool) -> None:
    """Ask the kernel to wake this thread at its deadlines, on a busy machine too.

    Timer slack goes from 50 to 1 microsecond; real-time scheduling (where it is permitted) takes
    the wait for a core away: beside two busy loops on two cores the round time's SD went from
    1 to 4 % to 0.005 %. The loop never spins, and threads it starts do not inherit it.
    """
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as file:  # noqa: PTH123
        file.write("1000")
    if realtime:
        with contextlib.suppress(OSError):
            policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(0, policy, os.sched_param(1))


def _announce(facts: dict[str, Any]) -> None:
    with contextlib.suppress(OSError, ValueError):
        fd = sys.stdout.fileno()
        if select.select((), (fd,), (), 0)[1]:
            os.write(fd, (json.dumps(facts) + "\n").encode())
