"""Requests measured as one group: streams, counters around them, and what they add up to.

Order of things: the server is proved idle and its counters still; all connections are open; the
requests are written; the streams end; the counters are proved still again and must have moved
by exactly these requests. Anything else refuses the group by name. Nothing is retried.
"""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx

from pytest_dsv41.engines import Engine, Server, Snapshot, base_url, get_engine, unix_path
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.identity import prompt_identity
from pytest_dsv41.measure.cell import Request
from pytest_dsv41.measure.endpoint import Endpoint
from pytest_dsv41.measure.metrics import Value, values_of
from pytest_dsv41.measure.progress import Progress, decodes, how_far
from pytest_dsv41.measure.reader import Reader
from pytest_dsv41.measure.stream import StreamRecord, check_answer, read_stream, whole
from pytest_dsv41.measure.transport import WireTransport
from pytest_dsv41.measure.wire import TRANSPORT, Call, Connection, Exchange, Finished, Limits, Loop
from pytest_dsv41.text import error_line

__all__ = [
    "Endpoint",
    "GroupResult",
    "Progress",
    "Reader",
    "evaluate",
    "measure_group",
    "stream_group",
]

_BUSY_S: Final = 3.0
_SETTLE_S: Final = 5.0
_LOOK_S: Final = 0.02
_SCRAPE_S: Final = 5.0
_COLD: Final = frozenset({"cold", "fill"})
_FEW: Final = 32
"""Descriptors for everything but the requests; so few requests are never too many."""


@dataclass(frozen=True)
class GroupResult:
    """A measured group: its values, what they were made of, and its prompts' identity."""

    values: dict[str, Value]
    missing: dict[str, str]
    """Metrics without a value here, each with the reason."""
    prompt_sha256: str
    prompt_members: tuple[str, ...]
    streams: tuple[StreamRecord, ...]
    server: Server
    before: Snapshot
    after: Snapshot
    notes: tuple[str, ...] = ()
    model: str = ""
    beside: int | None = None
    """Most requests seen running while every early stream was alive; None: not looked at."""
    exchanges: tuple[Finished, ...] = field(default=(), repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Return everything but text."""
        return {
            "values": {name: value.to_json() for name, value in self.values.items()},
            "missing": dict(self.missing),
            "prompt_sha256": self.prompt_sha256,
            "prompt_members": list(self.prompt_members),
            "streams": [stream.to_json() for stream in self.streams],
            "server": self.server.to_json(),
            "notes": list(self.notes),
            "beside": self.beside,
            "transport": dict(TRANSPORT),
        }


@contextlib.contextmanager
def control_client(
    endpoint: Endpoint,
    *,
    stop: threading.Event | None,
    deadline_ns: int,
    context: ssl.SSLContext | None = None,
) -> Iterator[httpx.Client]:
    """An httpx client over the project's own wire, ended by the stop event and the deadline.

    Raises:
        UsageError: a header of the endpoint's is none.
    """
    Call(base_url(endpoint.url), headers=endpoint.headers).encode()
    transport = WireTransport(
        stop=stop, deadline_ns=deadline_ns, context=context, unix=unix_path(endpoint.url)
    )
    with httpx.Client(
        transport=transport, trust_env=False, headers=dict(endpoint.headers), timeout=_SCRAPE_S
    ) as client:
        yield client


@contextlib.contextmanager
def ended_by(stop: threading.Event | None, deadline_ns: int) -> Iterator[None]:
    """Say `stopped` or `deadline` where that is why something inside failed or was refused."""
    try:
        yield
    except (MeasurementRefused, MeasurementFailed) as error:
        if stop is not None and stop.is_set():
            raise MeasurementFailed("stopped", "the measurement was stopped") from error
        if time.monotonic_ns() >= deadline_ns:
            raise MeasurementFailed("deadline", "not finished at the deadline") from error
        raise


def measure_group(
    endpoint: Endpoint,
    requests: Sequence[Request],
    *,
    deadline_s: float,
    stop: threading.Event | None = None,
    progress: Callable[[Progress], None] | None = None,
    require: Sequence[str] = (),
    context: ssl.SSLContext | None = None,
    keep_bytes: bool = False,
    reader: Reader | None = None,
    beside: bool = False,
) -> GroupResult:
    """Send `requests` at one time, wait for all of them, and judge what came.

    Args:
        endpoint: the server.
        requests: one or more; those marked `late` wait until all the others decode.
        deadline_s: everything (settling, streams, settling) is over by then.
        stop: ends the measurement within a fraction of a second once it is set.
        progress: called about ten times a second while streams run.
        require: metrics that must come out; a missing one refuses the group.
        context: TLS settings; None for the system's.
        keep_bytes: keep what came over the socket (in `exchanges`).
        reader: a process that reads the streams and does nothing else, so that no pause of this
            one can hold it up (without `context`); None: the calling thread reads.
        beside: look at how many run at a time (`GroupResult.beside`), also without a late one.

    Raises:
        UsageError: more requests than this process may open sockets.
        MeasurementFailed: a request did not deliver; nothing is averaged over it.
        MeasurementRefused: all delivered, and the values cannot be trusted.
    """
    refuse_too_many(len(requests))
    deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    engine = get_engine(endpoint.engine)
    with (
        ended_by(stop, deadline_ns),
        control_client(endpoint, stop=stop, deadline_ns=deadline_ns, context=context) as client,
    ):
        model = endpoint.model or engine.models(endpoint.url, client=client)[0]
        before = at_rest(
            engine, endpoint, client, stop, _BUSY_S, "before the first request", lambda _: None
        )
        watch = _Gauge(engine, endpoint, stop, deadline_ns, context, len(requests))
        exchanges, streams = stream_group(
            endpoint,
            model,
            requests,
            deadline_ns=deadline_ns,
            stop=stop,
            progress=progress,
            context=context,
            keep_bytes=keep_bytes,
            reader=reader,
            gauge=watch if beside or any(request.late for request in requests) else None,
        )
        done = [stream.in_band for stream in streams]

        def owed(now: Snapshot) -> str | None:
            engine.same_server(before, now)
            return engine.settled(before, now, done)

        after = at_rest(engine, endpoint, client, stop, _SETTLE_S, "after the last stream", owed)
        caches = [request.sampling.cache for request in requests]
        result = evaluate(engine, caches, streams, before, after, require=require)
        return replace(result, model=model, exchanges=tuple(exchanges), beside=watch.most_beside)


def refuse_too_many(count: int) -> None:
    """Each request is a socket: refuse more than this process may open, before any is.

    Raises:
        UsageError: they are too many.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if count > _FEW and most != resource.RLIM_INFINITY:
        used = sum(1 for _ in Path("/proc/self/fd").iterdir())
        room = max(0, most - used - _FEW)
        if count > room:
            raise UsageError(
                f"{count} requests at a time: this process may open {room} more sockets "
                f"(ulimit -n is {most})"
            )


def evaluate(
    engine: Engine,
    caches: Sequence[str],
    streams: Sequence[StreamRecord],
    before: Snapshot,
    after: Snapshot,
    *,
    require: Sequence[str] = (),
) -> GroupResult:
    """Put streams and counters together; pure, so that a record can be evaluated again.

    `caches` is each request's `Sampling.cache`.

    Raises:
        MeasurementRefused: kinds `foreign-request`, `reset`, `identity`, `warm-cache`,
            `cold-cache`, `cache-unproved`, `clocks`, or a metric's reason under `require`.
    """
    server = engine.account(before, after, [stream.in_band for stream in streams])
    notes = _check(caches, streams, server)
    values, missing = values_of(streams, server)
    for name in require:
        if name not in values:
            reason = missing.get(name, "not a metric")
            raise MeasurementRefused(f"no-{name}", f"{name}: {reason}")
    members = tuple(stream.prompt_sha256 for stream in streams)
    return GroupResult(
        values,
        missing,
        prompt_identity(members),
        members,
        tuple(streams),
        server,
        before,
        after,
        notes,
    )


def stream_group(
    endpoint: Endpoint,
    model: str,
    requests: Sequence[Request],
    *,
    deadline_ns: int,
    stop: threading.Event | None = None,
    progress: Callable[[Progress], None] | None = None,
    context: ssl.SSLContext | None = None,
    keep_bytes: bool = False,
    reader: Reader | None = None,
    gauge: _Gauge | None = None,
) -> tuple[list[Finished], list[StreamRecord]]:
    """Send the requests and read their streams; no counters are looked at.

    Raises:
        MeasurementFailed: kinds of `measure.wire` and `measure.stream`.
        MeasurementRefused: the streams contradict themselves.
    """
    engine = get_engine(endpoint.engine)
    calls = [_call(engine, endpoint, model, request) for request in requests]
    late = [request.late for request in requests]
    watching = gauge.watching() if gauge is not None else contextlib.nullcontext()
    if reader is not None:
        if context is not None:
            raise UsageError("TLS settings of one's own need streams read in the calling thread")
        with watching:
            finished = reader.read(
                calls,
                unix=unix_path(endpoint.url),
                deadline_ns=deadline_ns,
                stop=stop,
                late=late,
                keep_bytes=keep_bytes,
                progress=progress,
            )
    else:
        with watching:
            finished = _read_here(
                endpoint, calls, late, deadline_ns, stop, progress, context, keep_bytes
            )
    for exchange in finished:
        # What ended the group is said, not that it ended the others.
        if exchange.status != 200 or (exchange.failure and exchange.failure.kind != "abandoned"):
            check_answer(exchange)
    streams = [
        read_stream(
            exchange,
            prompt_sha256=request.prompt_sha256,
            max_tokens=request.max_tokens,
            exact=request.sampling.ignore_eos,
        )
        for exchange, request in zip(finished, requests, strict=True)
    ]
    if gauge is not None:
        ends = [one.end_ns for one, waits in zip(finished, late, strict=True) if not waits]
        gauge.judge(min(ends), must=any(late))
    return finished, streams


def _read_here(
    endpoint: Endpoint,
    calls: Sequence[Call],
    late: Sequence[bool],
    deadline_ns: int,
    stop: threading.Event | None,
    progress: Callable[[Progress], None] | None,
    context: ssl.SSLContext | None,
    keep_bytes: bool,
) -> list[Finished]:
    exchanges: list[Exchange] = []
    with Loop(stop=stop, context=context) as loop:
        try:
            for call in calls:
                exchange = Exchange(call, _connect(loop, endpoint, call.url, deadline_ns))
                exchange.keep_raw = keep_bytes
                exchanges.append(exchange)
            early = [one for one, waits in zip(exchanges, late, strict=True) if not waits]
            gates = {
                index: lambda: all(map(decodes, early)) for index, waits in enumerate(late) if waits
            }
            started = time.monotonic_ns()
            loop.run(
                exchanges,
                deadline_ns=deadline_ns,
                gates=gates,
                tick=None if progress is None else lambda: progress(how_far(exchanges, started)),
                together=True,
            )
        finally:
            for exchange in exchanges:
                exchange.connection.close()
    return [exchange.result() for exchange in exchanges]


def _call(engine: Engine, endpoint: Endpoint, model: str, request: Request) -> Call:
    body = request.body(model)
    body["stream"] = True
    cache = request.sampling.cache
    salt = request.salt
    if cache == "cold":
        # A salt is never used twice: a second window on the same server must be cold again.
        salt = f"{salt or 'cold'}-{secrets.token_hex(8)}"
    body = engine.dress(body, cache=cache, salt=salt)
    path = "/v1/chat/completions" if request.api == "chat" else "/v1/completions"
    return Call(
        base_url(endpoint.url) + path,
        "POST",
        {"Content-Type": "application/json", "Accept": "text/event-stream", **endpoint.headers},
        json.dumps(body, ensure_ascii=False).encode(),
        Limits(
            body=(8 << 20) + request.max_tokens * (16 << 10),
            events=4 * request.max_tokens + 1000,
        ),
    )


def _connect(loop: Loop, endpoint: Endpoint, url: str, deadline_ns: int) -> Connection:
    try:
        return loop.connect(url, deadline_ns, unix=unix_path(endpoint.url))
    except TimeoutError:
        raise MeasurementFailed("connect", "no connection at the deadline") from None
    except InterruptedError:
        raise MeasurementFailed("stopped", "the measurement was stopped") from None
    except OSError as error:
        raise MeasurementFailed("connect", f"no connection: {error_line(error)}") from None


def _look(engine: Engine, endpoint: Endpoint, client: httpx.Client) -> Snapshot:
    return engine.scrape(endpoint.url, _SCRAPE_S, client)


def _pause(stop: threading.Event | None) -> None:
    if stop is None:
        time.sleep(_LOOK_S)
    elif stop.wait(_LOOK_S):
        raise MeasurementFailed("stopped", "the measurement was stopped")


def at_rest(
    engine: Engine,
    endpoint: Endpoint,
    client: httpx.Client,
    stop: threading.Event | None,
    seconds: float,
    when: str,
    owed: Callable[[Snapshot], str | None],
) -> Snapshot:
    """Look until two looks at an idle server say the same and it owes nothing; refuse in time."""
    until = time.monotonic() + seconds
    last = _look(engine, endpoint, client)
    while True:
        _pause(stop)
        now = _look(engine, endpoint, client)
        missing = owed(now)
        if now.still(last) and missing is None:
            return now
        if time.monotonic() > until:
            if not now.idle:
                raise MeasurementRefused(
                    "foreign-request",
                    f"the server is not idle {when}: {now.running:g} running, "
                    f"{now.waiting:g} waiting",
                )
            if missing is None:
                raise MeasurementRefused(
                    "foreign-request",
                    f"the counters keep moving {when} although nothing of this group runs",
                )
            raise MeasurementRefused("unsettled", missing)
        last = now


def _check(
    caches: Sequence[str], streams: Sequence[StreamRecord], server: Server
) -> tuple[str, ...]:
    notes = [note for stream in streams for note in stream.notes] + list(server.notes)
    _check_caches(caches, streams, server)
    _check_in_band(streams, server)
    _check_clocks(streams, server)
    return tuple(dict.fromkeys(notes))


def _check_caches(caches: Sequence[str], streams: Sequence[StreamRecord], server: Server) -> None:
    """Each stream by what it tells; those that tell nothing by what the counters leave for them."""
    untold: set[str] = set()
    rest = server.cached_tokens or 0
    for cache, stream in zip(caches, streams, strict=True):
        cached, prompt = stream.cached_tokens, stream.prompt_tokens
        if cached is None:
            untold.add(cache)
            continue
        rest -= cached
        if cached and cache in _COLD:
            raise _not_cold(cached)
        # A shared first token (llama.cpp keeps that much of any prompt) is no warm prefix.
        if cache == "warm" and (cached == 0 or (prompt is not None and 2 * cached < prompt)):
            raise MeasurementRefused(
                "cold-cache", f"{cached} of {prompt} prompt tokens came from the warm prefix"
            )
    if untold <= {"any"}:
        return
    if server.cached_tokens is None or (rest and len(untold) > 1 and not untold <= _COLD):
        raise MeasurementRefused(
            "cache-unproved",
            "neither the streams nor the counters tell how many prompt tokens were cached",
        )
    if rest and untold <= _COLD:
        raise _not_cold(rest)
    if not rest and "warm" in untold:
        raise MeasurementRefused("cold-cache", "no prompt token came from the warm prefix")


def _not_cold(cached: int) -> MeasurementRefused:
    return MeasurementRefused("warm-cache", f"{cached} prompt tokens came from a cache: not cold")


def _check_in_band(streams: Sequence[StreamRecord], server: Server) -> None:
    """Hold what every stream told of itself against the counters (vLLM's per-request metrics)."""
    tables = [stream.metrics.get("speculative_decoding") for stream in streams]
    told = [
        whole(row, "num_accepted_draft_tokens") if isinstance(row, dict) else None for row in tables
    ]
    accepted = sum(count for count in told if count is not None)
    counted = (server.accepted or 0) + server.accepted_cut
    if None not in told and accepted != counted:
        raise MeasurementRefused(
            "identity", f"the streams tell {accepted} accepted, the counters {counted}"
        )
    times = [stream.metrics.get("generation_time_ms") for stream in streams]
    decoding = [float(ms) for ms in times if isinstance(ms, int | float) and abs(ms) < 1e15]
    counted_ms = server.decode_ms
    if counted_ms is None or len(decoding) < len(streams):
        return
    # One clock, two ways: they differ by no more than printing does.
    if abs(sum(decoding) - counted_ms) > 1.0 + 0.001 * counted_ms:
        raise MeasurementRefused(
            "clocks",
            f"the streams tell {sum(decoding):.1f} ms of decoding, the counters "
            f"{counted_ms:.1f} ms",
        )


def _check_clocks(streams: Sequence[StreamRecord], server: Server) -> None:
    """The server's decode time lies between the client's own bounds of it.

    At most as long as each stream as a whole; at least, with a quarter and 50 ms a request to
    spare, the time from first to last token. (A busy frontend hands several steps over at one
    time: the client then sees a shorter decode than there was, and a later first token.)
    """
    if server.decode_ms is None:
        return
    slack = 50.0 * len(streams)
    most = sum((s.last_token_ns - s.start_ns) / 1e6 for s in streams) + slack
    least = 0.75 * sum((s.last_token_ns - s.first_token_ns) / 1e6 for s in streams) - slack
    if not least <= server.decode_ms <= most:
        raise MeasurementRefused(
            "clocks",
            f"the server says {server.decode_ms:.0f} ms of decoding, to the client it took "
            f"{max(least, 0):.0f} to {most:.0f} ms",
        )


class _Gauge:
    """Watches the running gauge while late requests join: all must run beside each other."""

    def __init__(
        self,
        engine: Engine,
        endpoint: Endpoint,
        stop: threading.Event | None,
        deadline_ns: int,
        context: ssl.SSLContext | None,
        wanted: int,
    ) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._stop = stop
        self._deadline_ns = deadline_ns
        self._context = context
        self._wanted = wanted
        self._over = threading.Event()
        self._looks: list[tuple[int, float]] = []
        self._error: MeasurementRefused | None = None
        self.most_beside: int | None = None
        """What `judge` found; None before."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the gauge every 50 ms from a thread of its own while the block runs."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        try:
            with control_client(
                self._endpoint,
                stop=self._over,
                deadline_ns=self._deadline_ns,
                context=self._context,
            ) as client:
                while not self._over.wait(0.05):
                    look = self._engine.scrape(self._endpoint.url, _SCRAPE_S, client)
                    self._looks.append((look.at_ns, look.running))
                    if look.running >= self._wanted:
                        return  # in time or not: a later look cannot be in better time
        except MeasurementRefused as error:
            if not self._over.is_set():
                self._error = error

    def judge(self, first_end_ns: int, *, must: bool = True) -> None:
        """Tell how many were seen running while every early stream was alive.

        `first_end_ns` is when the first of those ended; `must` refuses unless all were.

        Raises:
            MeasurementRefused: kind `not-admitted`, or why the gauge could not be read.
        """
        if self._error is not None:
            raise self._error
        seen = [running for at, running in self._looks if at < first_end_ns]
        most = max(seen, default=0.0)
        self.most_beside = round(most) if seen else None
        if must and most < self._wanted:
            raise MeasurementRefused(
                "not-admitted",
                f"at most {most:g} requests ran while every decoder was alive, "
                f"{self._wanted} must: the late one was not admitted beside them",
            )
