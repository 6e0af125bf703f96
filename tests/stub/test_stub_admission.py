"""Admission: a limit, a queue in order of priority, gauges that tell both, and who leaves."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from stub_wire import complete, connect, get, linger_reset, request_bytes, samples, total

from pytest_dsv41.stub import Serving, serve

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"


def begin(stub: Serving, **fields: Any) -> socket.socket:
    """Start an endless stream and return its connection."""
    sock = connect(stub.url)
    body = {"prompt": "a", "max_tokens": 1, "stream": True, **fields}
    sock.sendall(request_bytes("POST", "/v1/completions", body, "endless"))
    return sock


def until(stub: Serving, said: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Scrape until the metrics say it; the test's own timeout is the bound."""
    for _ in range(20_000):
        scrape = samples(stub.url)
        if said(scrape):
            return scrape
    raise AssertionError(f"never said; last {scrape[RUNNING]} {scrape[WAITING]}")


def counts(running: int, waiting: int) -> Callable[[dict[str, Any]], bool]:
    return lambda scrape: (total(scrape, RUNNING), total(scrape, WAITING)) == (running, waiting)


@pytest.mark.parametrize(("limit", "running", "waiting"), [(4, 4, 0), (3, 3, 1)])
def test_a_late_arrival_is_admitted_beside_three_decoders_or_waits(
    limit: int, running: int, waiting: int
) -> None:
    with serve(round_ms=5, prefill_ms=1, max_running=limit) as stub:
        decoders = [begin(stub, prompt=f"decoder {i}") for i in range(3)]
        until(stub, counts(3, 0))
        late = begin(stub, prompt="late " * 200)
        scrape = until(stub, counts(running, waiting))
        by_reason = scrape["vllm:num_requests_waiting_by_reason"]
        assert sum(v for k, v in by_reason.items() if 'reason="capacity"' in k) == waiting
        assert sum(v for k, v in by_reason.items() if 'reason="deferred"' in k) == 0
        linger_reset(decoders.pop())
        until(stub, counts(3, 0))
        for sock in [*decoders, late]:
            linger_reset(sock)
        until(stub, counts(0, 0))


def test_the_queue_goes_by_priority_then_arrival() -> None:
    with serve(round_ms=1, prefill_ms=1, max_running=1) as stub:
        first = begin(stub)
        until(stub, counts(1, 0))
        socks = []
        for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
            sock = connect(stub.url)
            body = {"prompt": name, "max_tokens": 3, "stream": True, "priority": priority}
            sock.sendall(
                request_bytes(
                    "POST",
                    "/v1/completions",
                    body,
                    "",
                    {"connection": "close", "x-request-id": name},
                )
            )
            socks.append(sock)
            until(stub, counts(1, len(socks)))
        linger_reset(first)
        for sock in socks:
            with sock:
                while sock.recv(65536):
                    pass
        order = [line["request"] for line in stub.truth("finish")]
    # requests 2 to 5 came in the order c a d b
    assert order == [3, 5, 2, 4]


def test_who_leaves_the_queue_never_runs() -> None:
    with serve(round_ms=1, prefill_ms=1, max_running=1) as stub:
        first = begin(stub)
        until(stub, counts(1, 0))
        linger_reset(begin(stub))
        until(stub, counts(1, 0))
        linger_reset(first)
        until(stub, counts(0, 0))
        complete(stub.url)
        reasons = samples(stub.url)["vllm:request_success_total"]
        assert sum(v for k, v in reasons.items() if 'finished_reason="abort"' in k) == 2
        assert sum(v for k, v in reasons.items() if 'finished_reason="length"' in k) == 1


def test_load_counts_requests_when_it_is_tracked() -> None:
    with serve(round_ms=5, max_running=1, load_tracking=True) as stub:
        socks = [begin(stub), begin(stub)]
        until(stub, counts(1, 1))
        assert get(stub.url, "/load").json() == {"server_load": 2}
        for sock in socks:
            linger_reset(sock)


def test_the_prefix_cache_is_not_reset_while_a_request_runs() -> None:
    with serve(round_ms=5) as stub:
        sock = begin(stub)
        until(stub, counts(1, 0))
        assert samples(stub.url)["vllm:kv_cache_usage_perc"]
        with connect(stub.url) as other:
            other.sendall(
                request_bytes("POST", "/reset_prefix_cache", {}, "", {"connection": "close"})
            )
            answer = b"".join(iter(lambda: other.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert answer.endswith(b'{"success":false}')
        linger_reset(sock)


def test_queue_time_is_counted_apart() -> None:
    with serve(round_ms=1, prefill_ms=1, max_running=1) as stub:
        complete(stub.url, "at=80", max_tokens=1)
        first = begin(stub)
        until(stub, counts(1, 0))
        waiting = connect(stub.url)
        body = {"prompt": "b", "max_tokens": 1}
        waiting.sendall(request_bytes("POST", "/v1/completions", body, "", {"connection": "close"}))
        until(stub, counts(1, 1))
        linger_reset(first)
        with waiting:
            while waiting.recv(65536):
                pass
        scrape = samples(stub.url)
    assert total(scrape, "vllm:request_queue_time_seconds_count") == 3
    assert total(scrape, "vllm:request_queue_time_seconds_sum") > 0
