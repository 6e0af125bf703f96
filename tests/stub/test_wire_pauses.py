"""When the reader is held up: what the kernel's stamps survive, and what is named instead."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.measure import Endpoint, Request, measure_group
from pytest_dsv41.measure.reader import read_elsewhere
from pytest_dsv41.measure.record import replay
from pytest_dsv41.measure.stream import read_stream
from pytest_dsv41.measure.wire import Call, Exchange, Finished, Limits, Loop
from pytest_dsv41.stub import spawn

MS = 1_000_000
LATE = 50 * MS


def hold_interpreter(seconds: float) -> None:
    """Keep the interpreter's lock for about so long in one call."""
    size, took = 1 << 20, 0.0
    while took < seconds:
        began = time.perf_counter()
        sum(range(size))
        took = time.perf_counter() - began
        size *= 2


def truth(file: Path, request: int | None = None) -> list[int]:
    """When each token-bearing write of the newest (or this) request left."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    wanted = request or max(row["request"] for row in rows)
    return [row["before_ns"] for row in rows if row["request"] == wanted and row["tokens"]]


def test_an_event_in_a_pause_keeps_its_time(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    over = threading.Event()

    def pauses() -> None:
        while not over.wait(0.05):
            hold_interpreter(0.2)

    # Rounds far longer than a pause: never two events in one.
    with spawn(truth=str(file), round_ms=500.0, prefill_ms=500.0, draft_tokens=0) as server:
        thread = threading.Thread(target=pauses)
        thread.start()
        try:
            request = Request(6, prompt="hello", seed=1)
            result = measure_group(Endpoint(server.url), [request], deadline_s=60)
        finally:
            over.set()
            thread.join()
    (stream,) = result.streams
    left = truth(file)
    tokens = [event for event in stream.events if event.kind == "token"]
    stamps = [event.t_ns for event in tokens]
    assert len(stamps) == len(left) == 6
    wrong = [abs(stamp - true) for stamp, true in zip(stamps, left, strict=True)]
    alone = [error for error, event in zip(wrong, tokens, strict=True) if not event.merged]
    assert statistics.median(alone) < 1 * MS
    # Far below the pause; a stub that is itself held up between its note and its write is not us.
    assert sorted(alone)[-2] < LATE
    late = [read.at_ns - stamp for read, stamp in _reads(result.exchanges[0], stamps)]
    assert max(late) > 20 * MS  # the pauses did hit: a stamp of ours would be that wrong


def _reads(exchange: Finished, stamps: list[int]) -> list[tuple[Any, int]]:
    """Each stamp with the read it came from."""
    found = []
    for stamp in stamps:
        read = min(exchange.reads, key=lambda r: abs((r.kernel_ns or 0) - r.offset_ns - stamp))
        found.append((read, stamp))
    return found


def test_a_reader_of_its_own_gets_every_event_right_under_the_same_pauses(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    over = threading.Event()

    def pauses() -> None:
        while not over.wait(0.05):
            hold_interpreter(0.3)

    with spawn(truth=str(file), round_ms=120.0, draft_tokens=0) as server:
        thread = threading.Thread(target=pauses)
        thread.start()
        try:
            request = Request(20, prompt="hello", seed=1)
            endpoint = Endpoint(server.url)
            result = measure_group(endpoint, [request], deadline_s=120, reader="process")
        finally:
            over.set()
            thread.join()
    (stream,) = result.streams
    tokens = [event for event in stream.events if event.kind == "token"]
    # (The last token's event and the usage after it may share a read that was late.)
    assert not any(event.merged for event in tokens[:-1])
    wrong = [abs(event.t_ns - t) for event, t in zip(tokens, truth(file), strict=True)]
    assert statistics.median(wrong) < 1 * MS
    assert sorted(wrong)[-2] < LATE


def test_a_reader_process_ends_with_the_stop_event_and_says_what_failed() -> None:
    stop = threading.Event()
    with spawn(round_ms=50.0) as server:
        timer = threading.Timer(0.8, stop.set)
        timer.start()
        with pytest.raises(MeasurementFailed) as failed:
            measure_group(
                Endpoint(server.url), [Request(9000, prompt="a")], deadline_s=600, stop=stop,
                reader="process",
            )  # fmt: skip
        timer.join()
        assert failed.value.kind == "stopped"
    deadline_ns = time.monotonic_ns() + 10**10
    calls = [Call("http://127.0.0.1:1/")]
    with pytest.raises(MeasurementFailed) as failed:
        read_elsewhere(calls, unix=None, deadline_ns=deadline_ns, stop=None, keep_bytes=False)
    assert failed.value.kind == "connect"


def test_a_stopped_reader_names_what_it_missed(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    with spawn(truth=str(file), round_ms=40.0, prefill_ms=40.0, draft_tokens=0) as server:
        client = subprocess.Popen(
            [sys.executable, "-m", "pytest_dsv41", "measure", server.url, "--max-tokens", "60",
             "--record", str(tmp_path), "--json"],
            stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            _wait_for_tokens(server.url)
            client.send_signal(signal.SIGSTOP)
            threading.Event().wait(1.0)  # the pause itself is what is tested
            client.send_signal(signal.SIGCONT)
            out, _ = client.communicate(timeout=60)
        finally:
            client.kill()
            client.wait()
    assert client.returncode == 0
    again = replay(tmp_path / "measure-r0.jsonl")
    assert again.same
    rows = [json.loads(x) for x in (tmp_path / "measure-r0.jsonl").read_text().splitlines()]
    (stream,) = [row for row in rows if row["kind"] == "stream"]
    left = truth(file)
    assert abs(stream["start_ns"] + stream["first_token_ns"] - left[0]) < LATE
    assert abs(stream["start_ns"] + stream["last_token_ns"] - left[-1]) < LATE
    tokens = [event for event in stream["events"] if event[3] == "token"]
    merged = [index for index, event in enumerate(tokens) if event[6] & 2]
    assert len(merged) >= 15  # a second of 40 ms rounds, all but the last of a read
    wrong = [
        abs(stream["start_ns"] + event[0] - left[index])
        for index, event in enumerate(tokens)
        if index not in merged
    ]
    assert statistics.median(wrong) < 1 * MS
    assert json.loads(out)["repeats"][0]["values"]["ttft_ms"]["parts"]["stamps"] == ["kernel"]


def _wait_for_tokens(url: str) -> None:
    """Return once the server has a running request that has decoded for a while."""
    import httpx

    until = time.monotonic() + 30
    while time.monotonic() < until:
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_t")]
        if float(lines[0].split()[-1]) >= 8:
            return
    pytest.fail("the request never ran")


def test_a_stepped_wall_clock_is_noticed_and_the_reads_own_time_used(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    step_at = 0.35
    began = time.monotonic()

    def stepped() -> int:
        gone = time.monotonic() - began
        return time.time_ns() - (3_000 * MS if gone > step_at else 0)

    body = json.dumps(
        {"model": "stub", "prompt": "a", "max_tokens": 20, "stream": True, "ignore_eos": True,
         "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    ).encode()  # fmt: skip
    with spawn(truth=str(file), round_ms=40.0, draft_tokens=0) as server:
        began = time.monotonic()
        deadline = time.monotonic_ns() + 30 * 10**9
        with Loop(realtime_ns=stepped) as loop:
            url = f"{server.url}/v1/completions"
            headers = {"Content-Type": "application/json"}
            call = Call(url, "POST", headers, body, Limits(events=999))
            exchange = Exchange(call, loop.connect(url, deadline))
            loop.run([exchange], deadline_ns=deadline)
            exchange.connection.close()
    stream = read_stream(exchange.result(), prompt_sha256="0" * 64, max_tokens=20, exact=True)
    assert "clock-stepped" in stream.notes
    tokens = [event for event in stream.events if event.kind == "token"]
    assert {event.source for event in tokens} == {"kernel", "read"}
    # Nothing is anywhere near the step's three seconds.
    for event, true in zip(tokens, truth(file), strict=True):
        assert -1 * MS < event.t_ns - true < 1_000 * MS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["long", "drip", "line"])
def test_a_gigabyte_is_cut_with_flat_memory(how: str) -> None:
    code = """
import resource, sys
from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.measure import Endpoint, Request, measure_group
from pytest_dsv41.measure.reader import read_elsewhere
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    measure_group(Endpoint(sys.argv[1]), [Request(8, prompt="a")], deadline_s=40)
except MeasurementFailed as error:
    kind = error.kind
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(kind, (after - before) // 1024)
"""
    with spawn(fault=(f"/v1/completions:flood={how}:1073741824",)) as server:
        out = subprocess.run(
            [sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=120,
            check=True,
        ).stdout.split()  # fmt: skip
    assert out[0] in ("too-long", "deadline")
    assert int(out[1]) < 64
