"""How far from the truth each client's times are, beside what they cost.

    python tests/benchmarks/bench_wire.py [--quick] [--burn] [--widths 1,4,16,64] [--json]

One stub server, in a process of its own, logs when each write left. Every client streams the same
requests, so many at a time, and reports when it started its clock and when the first and the last
token came. TTFT error = the client's TTFT minus (first token left - request sent), where "sent"
is when the request's last bytes went into the socket. Clients that are not installed are left
out. Not a test: nothing is asserted; `--burn` adds a process that burns one core.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_dsv41.stub import spawn

TOKENS = 30
SETTINGS = {"round_ms": 20.0, "prefill_ms": 60.0, "draft_tokens": 0, "max_running": 256}


@dataclass
class Seen:
    """What a client says of one request, in ns of the monotonic clock."""

    seed: int
    number: int
    start: int
    first: int
    last: int
    events: int
    refused: bool = False
    """The client itself says that its first token has no trustworthy time."""


sent: dict[int, int] = {}
_seed = re.compile(rb'"seed": ?(\d+)')


def note_sends() -> None:
    """Note when the bytes with a request's seed go into a socket, whoever sends them."""

    def noting(name: str) -> None:
        real = getattr(socket.socket, name)

        def call(self: socket.socket, data: Any, *rest: Any) -> Any:
            found = _seed.search(bytes(data))
            if found:
                sent[int(found[1])] = time.monotonic_ns()
            return real(self, data, *rest)

        setattr(socket.socket, name, call)

    noting("send")
    noting("sendall")


def body(seed: int) -> bytes:
    return json.dumps(
        {
            "model": "stub", "prompt": "Tell me a story.", "max_tokens": TOKENS, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}, "seed": seed,
        }
    ).encode()  # fmt: skip


HEADERS = {"Content-Type": "application/json"}
_number = re.compile(r'"id": ?"cmpl-([0-9a-f]+)"')


class Lines:
    """What every naive client does: a stamp a line, tokens where there is text."""

    def __init__(self, seed: int) -> None:
        self.seed, self.start = seed, time.monotonic_ns()
        self.first = self.last = self.events = self.number = 0

    def line(self, text: str) -> None:
        now = time.monotonic_ns()
        if not text.startswith("data: {"):
            return
        data = json.loads(text[6:])
        if data["choices"] and data["choices"][0]["text"]:
            if not self.first:
                self.first, self.number = now, int(data["id"].removeprefix("cmpl-"), 16)
            self.last = now
            self.events += 1

    def seen(self) -> Seen:
        return Seen(self.seed, self.number, self.start, self.first, self.last, self.events)


def ours(url: str, seeds: list[int], *, kernel: bool = True) -> list[Seen]:
    from pytest_dsv41.measure.stream import read_stream
    from pytest_dsv41.measure.wire import Call, Exchange, Limits, Loop

    deadline = time.monotonic_ns() + 60 * 10**9
    with Loop() as loop:
        exchanges = [
            Exchange(
                Call(f"{url}/v1/completions", "POST", HEADERS, body(seed), Limits(events=9999)),
                loop.connect(url, deadline),
            )
            for seed in seeds
        ]
        loop.run(exchanges, deadline_ns=deadline)
        for exchange in exchanges:
            exchange.connection.close()
    out = []
    for seed, exchange in zip(seeds, exchanges, strict=True):
        if not kernel:
            exchange.reads = [read._replace(kernel_ns=None) for read in exchange.reads]
        record = read_stream(exchange.result(), prompt_sha256="", max_tokens=TOKENS, exact=True)
        found = _number.search(exchange.result().body.decode())
        assert found
        tokens = sum(1 for event in record.events if event.kind == "token")
        out.append(
            Seen(seed, int(found[1], 16), record.start_ns, record.first_token_ns,
                 record.last_token_ns, tokens, record.first_merged)
        )  # fmt: skip
    return out


def in_threads(one: Callable[[str, int], Seen]) -> Callable[[str, list[int]], list[Seen]]:
    def run(url: str, seeds: list[int]) -> list[Seen]:
        out: list[Seen] = []
        gate = threading.Barrier(len(seeds))

        def work(seed: int) -> None:
            gate.wait()
            out.append(one(url, seed))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out

    return run


def http_client(url: str, seed: int) -> Seen:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    connection.connect()
    lines = Lines(seed)
    connection.request("POST", "/v1/completions", body(seed), HEADERS)
    answer = connection.getresponse()
    while line := answer.readline():
        lines.line(line.decode().rstrip())
    connection.close()
    return lines.seen()


def httpx_sync(url: str, seed: int) -> Seen:
    import httpx

    with httpx.Client(timeout=60, trust_env=False) as client:
        lines = Lines(seed)
        with client.stream(
            "POST", f"{url}/v1/completions", content=body(seed), headers=HEADERS
        ) as answer:
            for line in answer.iter_lines():
                lines.line(line)
    return lines.seen()


def httpx_async(url: str, seeds: list[int]) -> list[Seen]:
    import httpx

    async def one(client: httpx.AsyncClient, seed: int) -> Seen:
        lines = Lines(seed)
        async with client.stream(
            "POST", f"{url}/v1/completions", content=body(seed), headers=HEADERS
        ) as answer:
            async for line in answer.aiter_lines():
                lines.line(line)
        return lines.seen()

    async def run() -> list[Seen]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=60, limits=limits, trust_env=False) as client:
            return await asyncio.gather(*(one(client, seed) for seed in seeds))

    return asyncio.run(run())


def aiohttp_client(url: str, seeds: list[int]) -> list[Seen]:
    import aiohttp

    async def one(session: aiohttp.ClientSession, seed: int) -> Seen:
        lines = Lines(seed)
        async with session.post(
            f"{url}/v1/completions", data=body(seed), headers=HEADERS
        ) as answer:
            async for line in answer.content:
                lines.line(line.decode().rstrip())
        return lines.seen()

    async def run() -> list[Seen]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            return list(await asyncio.gather(*(one(session, seed) for seed in seeds)))

    return asyncio.run(run())


CLIENTS: dict[str, Callable[[str, list[int]], list[Seen]]] = {
    "dsv41, kernel stamps": ours,
    "dsv41, read stamps": lambda url, seeds: ours(url, seeds, kernel=False),
    "http.client in threads": in_threads(http_client),
    "aiohttp": aiohttp_client,
    "httpx sync in threads": in_threads(httpx_sync),
    "httpx async": httpx_async,
}


def burn() -> None:
    while True:
        pass


def truth(file: Path) -> dict[int, tuple[int, int, int]]:
    """Request number to (first token left, last token left, writes with tokens)."""
    left: dict[int, list[int]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row["tokens"]:
            left.setdefault(row["request"], []).append(row["before_ns"])
    return {number: (min(times), max(times), len(times)) for number, times in left.items()}


def run(widths: list[int], quick: bool) -> list[dict[str, Any]]:
    """Let every client stream at every width, then hold what they saw against the truth."""
    runs: list[tuple[str, int, list[Seen], float]] = []
    seed = 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "truth.jsonl"
        with spawn(truth=str(file), **SETTINGS) as server:
            for name, client in CLIENTS.items():
                try:
                    client(server.url, [seed])
                except ImportError as missing:
                    print(f"{name}: left out ({missing})", file=sys.stderr)
                    continue
                seed += 1
                for width in widths:
                    times = max(2 if quick else 4, (12 if quick else 60) // width)
                    seen: list[Seen] = []
                    gc.collect()
                    cpu = time.process_time()
                    for _ in range(times):
                        seen += client(server.url, list(range(seed, seed + width)))
                        seed += width
                    runs.append((name, width, seen, time.process_time() - cpu))
        true = truth(file)
    return [judge(name, width, seen, true, cpu) for name, width, seen, cpu in runs]


def judge(
    name: str, width: int, seen: list[Seen], true: dict[int, tuple[int, int, int]], cpu: float
) -> dict[str, Any]:
    ttft, rounds = [], []
    for one in seen:
        if one.refused:
            continue
        first, last, count = true[one.number]
        ttft.append(((one.first - one.start) - (first - sent[one.seed])) / 1e3)
        mine = (one.last - one.first) / (count - 1)
        right = (last - first) / (count - 1)
        rounds.append((mine / right - 1) * 100)
    ttft.sort()
    return {
        "client": name,
        "streams": width,
        "requests": len(seen),
        "refused": sum(one.refused for one in seen),
        "ttft_error_us_p50": statistics.median(ttft),
        "ttft_error_us_p99": ttft[min(len(ttft) - 1, int(0.99 * len(ttft)))],
        "ms_per_round_error_pct_p50": statistics.median(rounds),
        "ms_per_round_error_pct_worst": max(rounds, key=abs),
        "cpu_ms_per_1000_events": cpu * 1e6 / sum(one.events for one in seen),
    }


def show(row: dict[str, Any]) -> str:
    return (
        f"{row['client']:<24}{row['streams']:>4} streams  TTFT error p50 "
        f"{row['ttft_error_us_p50']:>8.0f} us  p99 {row['ttft_error_us_p99']:>8.0f} us   "
        f"ms/round {row['ms_per_round_error_pct_p50']:>+7.4f} % "
        f"(worst {row['ms_per_round_error_pct_worst']:>+7.3f} %)   "
        f"CPU {row['cpu_ms_per_1000_events']:>6.0f} ms per 1,000 events"
        + (f"   {row['refused']} refused" if row["refused"] else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--burn", action="store_true", help="another process burns one core")
    parser.add_argument("--widths", default="1,4,16,64")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    note_sends()
    other = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
    if args.burn:
        other.start()
    try:
        rows = run([int(width) for width in args.widths.split(",")], args.quick)
    finally:
        if args.burn:
            other.terminate()
            other.join()
    print(json.dumps(rows, indent=1) if args.json else "\n".join(map(show, rows)))


if __name__ == "__main__":
    main()
