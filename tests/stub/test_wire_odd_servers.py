"""Servers that keep to no rule, over real sockets: each ends by name, nothing waits for ever."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from wire_groups import requests

from pytest_dsv41.engines import get_engine
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused
from pytest_dsv41.measure import Endpoint, measure_group, wire
from pytest_dsv41.measure.stream import check_answer
from pytest_dsv41.measure.wire import Call, Exchange, Limits, Loop
from pytest_dsv41.stub import spawn

Script = Callable[[socket.socket, threading.Event], None]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}".encode() + b"\r\n" + data + b"\r\n"


def event(text: str) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """A server that runs `script` for every connection; the event is set when it is over."""
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            script(connection, over)

    def accept() -> None:
        while not over.is_set():
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=talk, args=(listener.accept()[0],)))
                threads[-1].start()

    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            for thread in threads:
                thread.join()


def stream(url: str, seconds: float = 20.0) -> Exchange:
    """One streamed request, by itself."""
    deadline = time.monotonic_ns() + int(seconds * 1e9)
    with Loop() as loop:
        call = Call(f"{url}/v1/completions", "POST", body=b"{}", limits=Limits(events=100))
        exchange = Exchange(call, loop.connect(call.url, deadline))
        loop.run([exchange], deadline_ns=deadline)
        exchange.connection.close()
    return exchange


def test_a_server_that_speaks_before_it_is_asked_has_given_no_answer() -> None:
    spoke = threading.Event()

    def early(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(CHUNKED + chunk(event("a")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        spoke.set()
        over.wait(20)

    deadline = time.monotonic_ns() + 20 * 10**9
    with serving(early) as url, Loop() as loop:
        call = Call(f"{url}/v1/completions", "POST", body=b"{}", limits=Limits(events=100))
        exchange = Exchange(call, loop.connect(call.url, deadline))
        assert spoke.wait(20)
        loop.run([exchange], deadline_ns=deadline)
        exchange.connection.close()
    assert exchange.failure is not None
    assert exchange.failure.kind == "not-http"
    assert "before it was asked" in exchange.failure.message


def test_a_stream_that_is_done_and_only_pings_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_DONE_GRACE_NS", 150_000_000)

    def ping(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(CHUNKED + chunk(event("a")) + chunk(b"data: [DONE]\n\n"))
        while not over.wait(0.02):
            connection.sendall(chunk(b": ping\n\n"))

    with serving(ping) as url:
        exchange = stream(url)
    assert exchange.failure is None
    assert exchange.done_seen_ns == exchange.end_ns


def test_text_that_is_cut_behind_the_words_of_the_end_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_DONE_GRACE_NS", 50_000_000)
    data = event("data: [DONE]")
    cut = data.index(b"[DONE]") + len(b"[DONE]")

    def pause(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(CHUNKED + chunk(data[:cut]))
        over.wait(0.4)
        connection.sendall(chunk(data[cut:]) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    with serving(pause) as url:
        exchange = stream(url)
    assert exchange.failure is None
    assert exchange.result().body == data + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (CHUNKED + chunk(event("a")) + b"0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", "not-http"),
        (HEAD + b"Content-Length: 3\r\n\r\ndata: more", "not-http"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "not-http"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Length: 0\r\n\r\n", "encoded"),
        (HEAD + b"Content-Encoding: x, identity\r\nContent-Length: 0\r\n\r\n", "encoded"),
        (HEAD + b"Content-Encoding: Identity\r\nContent-Length: 0\r\n\r\n", ""),
    ],
)
def test_framing_that_cannot_be_trusted_fails_by_name(answer: bytes, kind: str) -> None:
    def reply(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(answer)
        over.wait(20)

    with serving(reply) as url:
        finished = stream(url).result()
    if not kind:
        check_answer(finished)
        return
    with pytest.raises(MeasurementFailed) as failed:
        check_answer(finished)
    assert failed.value.kind == kind


@pytest.mark.parametrize("drip", [b"", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n"])
def test_counters_that_never_end_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    monkeypatch.setattr("pytest_dsv41.measure.group._SCRAPE_S", 0.3)

    def slowly(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(drip)
        while not over.wait(0.02):
            connection.sendall(b"x")

    with serving(slowly) as url, pytest.raises(MeasurementRefused) as refused:
        measure_group(Endpoint(url, "vllm", "m"), requests(), deadline_s=20)
    assert refused.value.kind == "no-counters"


def test_a_server_that_is_killed_in_mid_cell_and_comes_back_is_no_measurement() -> None:
    """Its port answers again before the counters are looked at."""
    with spawn(round_ms=20.0, draft_tokens=0) as first:
        port = int(first.url.rpartition(":")[2])
        kinds: list[str] = []

        def ask() -> None:
            try:
                measure_group(Endpoint(first.url), requests(tokens=2000), deadline_s=30)
            except (MeasurementFailed, MeasurementRefused) as error:
                kinds.append(error.kind)

        thread = threading.Thread(target=ask)
        thread.start()
        until = time.monotonic() + 20
        while not get_engine("vllm").scrape(first.url).running:
            assert time.monotonic() < until
        first.process.kill()
        first.process.wait()
        with spawn(port=port, draft_tokens=0):
            thread.join(20)
    assert kinds
    assert kinds[0] in ("reset", "cut", "no-response")
