"""When the reader is held up: what the kernel's stamps survive, and what is named instead."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from wire_groups import off_by

from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.measure import Endpoint, Progress, Reader, Request, measure_group
from pytest_dsv41.measure.record import replay
from pytest_dsv41.measure.stream import read_stream
from pytest_dsv41.measure.wire import Call, Exchange, Finished, Limits, Loop
from pytest_dsv41.stub import spawn

MS = 1_000_000


def hold_interpreter(seconds: float) -> Callable[[], object]:
    """A call that keeps the interpreter's lock for about so long."""
    size, took = 1 << 16, 0.0
    while took < seconds:
        size *= 2
        began = time.thread_time()
        sum(range(size))
        took = time.thread_time() - began
    return lambda: sum(range(size))


def collect_garbage(seconds: float) -> Callable[[], object]:
    """A real collection that takes about so long, over objects that stay alive."""
    kept: list[list[object]] = []
    took = 0.0
    gc.disable()
    try:
        while took < seconds:
            kept += [[] for _ in range(500_000)]
            began = time.thread_time()
            gc.collect()
            took = time.thread_time() - began
    finally:
        gc.enable()

    def collect() -> int:
        return gc.collect() + 0 * len(kept)

    return collect


@contextmanager
def pauses(pause: Callable[[], object]) -> Iterator[None]:
    """Pause the interpreter again and again, from another thread, while the block runs."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.05):
            pause()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def truth(file: Path, kind: str = "") -> list[tuple[int, int]]:
    """(before, after) of the newest request's writes: those with tokens, or of a kind."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    wanted = max(row["request"] for row in rows)
    return [
        (row["before_ns"], row["after_ns"])
        for row in rows
        if row["request"] == wanted and (row["kind"] == kind if kind else row["tokens"])
    ]


@pytest.mark.parametrize("pause", [hold_interpreter, collect_garbage])
def test_an_event_in_a_pause_keeps_its_time(
    tmp_path: Path, pause: Callable[[float], Callable[[], object]]
) -> None:
    file = tmp_path / "truth.jsonl"
    late: list[int] = []
    # Rounds far longer than a pause: one event in it.
    with (
        spawn(truth=str(file), round_ms=600.0, prefill_ms=500.0, draft_tokens=0) as server,
        pauses(pause(0.2)),
    ):
        # Once, unless the machine is so busy that every pause outlasts a round.
        for _ in range(5):
            late += _lateness_of_right_stamps(server.url, file)
            if max(late, default=0) > 50 * MS:
                break
    assert max(late) > 50 * MS  # one did come in a pause: a stamp of ours would be that wrong


def _lateness_of_right_stamps(url: str, file: Path) -> list[int]:
    """Measure once; hold every stamp against the truth, and say how late each was read."""
    result = measure_group(Endpoint(url), [Request(4, prompt="hello", seed=1)], deadline_s=60)
    (stream,) = result.streams
    tokens = [event for event in stream.events if event.kind == "token"]
    late = []
    for event, write in zip(tokens, truth(file), strict=True):
        if event.merged:
            continue  # two events in one pause: named, and not used
        assert event.source == "kernel"
        assert off_by(event.t_ns, write) < 1 * MS
        late.append(read_at(result.exchanges[0], event.t_ns) - event.t_ns)
    return late


def read_at(exchange: Finished, stamp: int) -> int:
    """When the bytes with that stamp were read."""
    read = min(exchange.reads, key=lambda r: abs((r.kernel_ns or 0) - r.offset_ns - stamp))
    return read.at_ns


def test_a_reader_of_its_own_gets_every_event_right_under_the_same_pauses(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    with (
        spawn(truth=str(file), round_ms=120.0, draft_tokens=0) as server,
        pauses(hold_interpreter(0.3)),
    ):
        request = Request(20, prompt="hello", seed=1)
        endpoint = Endpoint(server.url)
        with Reader() as reader:
            result = measure_group(endpoint, [request], deadline_s=120, reader=reader)
    (stream,) = result.streams
    tokens = [event for event in stream.events if event.kind == "token"]
    left = truth(file)
    # (The last token's event and the usage after it may share a read that was late.)
    assert not any(event.merged for event in tokens[:-1])
    for event, write in zip(tokens, left, strict=True):
        assert event.merged or off_by(event.t_ns, write) < 1 * MS


def test_a_reader_process_ends_with_the_stop_event_and_says_what_failed() -> None:
    stop = threading.Event()
    with spawn(round_ms=50.0) as server, Reader() as reader:
        timer = threading.Timer(0.8, stop.set)
        timer.start()
        with pytest.raises(MeasurementFailed) as failed:
            measure_group(
                Endpoint(server.url), [Request(9000, prompt="a")], deadline_s=600, stop=stop,
                reader=reader,
            )  # fmt: skip
        timer.join()
        assert failed.value.kind == "stopped"
        # It takes the next group all the same; the server has seen the stopped one leave.
        again = measure_group(
            Endpoint(server.url), [Request(3, prompt="a")], deadline_s=60, reader=reader
        )
        assert again.server.tokens == 3
        deadline_ns = time.monotonic_ns() + 10**10
        with pytest.raises(MeasurementFailed) as failed:
            reader.read(
                [Call("http://127.0.0.1:1/")], unix=None, deadline_ns=deadline_ns, stop=None
            )
        assert failed.value.kind == "connect"


def test_a_reader_process_gives_back_what_a_thread_would_and_tells_how_far_it_is() -> None:
    sent = [Request(40, prompt=f"hello {n}", seed=n, late=n == 2) for n in range(3)]
    seen: list[Progress] = []
    with spawn(round_ms=20.0) as server, Reader() as reader:
        one, two = (
            measure_group(
                Endpoint(server.url), sent, deadline_s=60, reader=chosen, keep_bytes=True,
                progress=seen.append if chosen else None,
            )
            for chosen in (None, reader)
        )  # fmt: skip
    assert [s.output_sha256 for s in one.streams] == [s.output_sha256 for s in two.streams]
    assert [len(s.events) for s in one.streams] == [len(s.events) for s in two.streams]
    for exchange, stream in zip(two.exchanges, two.streams, strict=True):
        assert stream.text.encode() in b"".join(
            json.loads(line[6:])["choices"][0]["text"].encode()
            for line in exchange.body.split(b"\n")
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"]
        )
        assert exchange.raw
    *early, late = two.streams
    assert late.start_ns > max(stream.first_token_ns for stream in early)
    assert seen
    assert [now.tokens for now in seen] == sorted(now.tokens for now in seen)
    assert seen[-1].streams == 3


def test_a_reader_process_ends_with_its_parent() -> None:
    code = """
import os, sys
from pytest_dsv41.measure import Endpoint, Reader, Request, measure_group
reader = Reader()
measure_group(Endpoint(sys.argv[1]), [Request(2, prompt="a")], deadline_s=30, reader=reader)
print(reader._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    with spawn(round_ms=5.0) as server:
        parent = subprocess.run(
            [sys.executable, "-c", code, server.url], capture_output=True, timeout=60, check=False
        )
    assert parent.returncode == -signal.SIGKILL
    child = psutil.Process(int(parent.stdout)) if psutil.pid_exists(int(parent.stdout)) else None
    if child is not None:
        child.wait(30)


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
    assert off_by(stream["start_ns"] + stream["first_token_ns"], left[0]) < 1 * MS
    # The usage leaves right behind the last token and may share its read.
    last = left[-1][0], truth(file, "usage")[-1][1]
    assert off_by(stream["start_ns"] + stream["last_token_ns"], last) < 1 * MS
    tokens = [event for event in stream["events"] if event[3] == "token"]
    merged = [index for index, event in enumerate(tokens) if event[6] & 2]
    assert len(merged) >= 15  # a second of 40 ms rounds, all but the last of a read
    for index, event in enumerate(tokens):
        if index not in merged:
            assert off_by(stream["start_ns"] + event[0], left[index]) < 1 * MS
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
    # Nothing is anywhere near the step's three seconds, and nothing came before it left.
    for event, (before, _) in zip(tokens, truth(file), strict=True):
        assert -1 * MS < event.t_ns - before < 1_000 * MS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["long", "drip", "line"])
def test_a_gigabyte_is_cut_with_flat_memory(how: str) -> None:
    code = """
import resource, sys
from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.measure import Endpoint, Request, measure_group
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
