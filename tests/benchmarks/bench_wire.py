"""How far from the truth each client's times are, beside what they cost.

    python tests/benchmarks/bench_wire.py [--quick] [--burn] [--widths 1,4,16,64] [--only NAME]
                                          [--peers PYTHON] [--json]

One stub server, in a process of its own, logs when each request arrived (by the kernel's stamp) and
when each write left. Every client streams the same requests, so many at a time, and reports when it
started its clock and when the first and the last token came. TTFT error = the client's TTFT minus
(first token left - request arrived): what its own sending, waiting and reading added. Clients that
are not installed are left out. Not a test: nothing is asserted; `--burn` adds a process that burns
one core.

Two whole tools run as processes of their own where `--peers` (or DSV41_BENCH_PEERS) names the
Python of an environment that has them:

    python3 -m venv peers && peers/bin/pip install guidellm==0.8.1 aiperf==0.13.0
    python tests/benchmarks/bench_wire.py --peers peers/bin/python

Their CPU includes their start, and so does that of our reader in a process of its own. Never part
of CI: together they weigh gigabytes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import json
import multiprocessing
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pytest_dsv41.measure.reader import Reader
from pytest_dsv41.measure.stream import read_stream
from pytest_dsv41.measure.wire import Call, Exchange, Finished, Limits, Loop
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
    id: str = ""
    """The request's x-request-id, of a client that does not tell the server's number of it."""


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


def calls(url: str, seeds: list[int]) -> list[Call]:
    return [
        Call(f"{url}/v1/completions", "POST", HEADERS, body(seed), Limits(events=9999))
        for seed in seeds
    ]


def ours(url: str, seeds: list[int], *, kernel: bool = True) -> list[Seen]:
    deadline = time.monotonic_ns() + 60 * 10**9
    with Loop() as loop:
        exchanges = [Exchange(call, loop.connect(url, deadline)) for call in calls(url, seeds)]
        loop.run(exchanges, deadline_ns=deadline)
        for exchange in exchanges:
            exchange.connection.close()
            if not kernel:
                exchange.reads = [read._replace(kernel_ns=None) for read in exchange.reads]
    return told(seeds, [exchange.result() for exchange in exchanges])


class InAProcess:
    """This client as windows use it: the streams are read by a process that does nothing else."""

    def __init__(self) -> None:
        self._reader = Reader()

    def __call__(self, url: str, seeds: list[int]) -> list[Seen]:
        deadline = time.monotonic_ns() + 60 * 10**9
        sent = calls(url, seeds)
        return told(seeds, self._reader.read(sent, unix=None, deadline_ns=deadline, stop=None))

    def close(self) -> None:
        """End the process, so that its CPU time is counted."""
        self._reader.close()


def told(seeds: list[int], finished: list[Finished]) -> list[Seen]:
    out = []
    for seed, exchange in zip(seeds, finished, strict=True):
        record = read_stream(exchange, prompt_sha256="", max_tokens=TOKENS, exact=True)
        found = _number.search(exchange.body.decode())
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
    "dsv41, in a process": InAProcess(),
    "dsv41, read stamps": lambda url, seeds: ours(url, seeds, kernel=False),
    "http.client in threads": in_threads(http_client),
    "aiohttp": aiohttp_client,
    "httpx sync in threads": in_threads(httpx_sync),
    "httpx async": httpx_async,
}


Peer = Callable[[str, int, int, Path], list[Seen]]

_TOKENIZER = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2TokenizerFast
words = {"<s>": 0}
for char in sorted(pre_tokenizers.ByteLevel.alphabet()):
    words[char] = len(words)
made = Tokenizer(models.BPE(vocab=words, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
tokenizer = GPT2TokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="<s>")
tokenizer.save_pretrained(sys.argv[1])
(Path(sys.argv[1]) / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
"""
"""Both tools load a tokenizer although the server counts: one token a byte, made on the spot."""


def _tool(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(argv[:2])} ended with {done.returncode}: {done.stdout[-2000:]}"
        )


def _tokenizer(python: Path, folder: Path) -> Path:
    made = folder / "tokenizer"
    if not made.exists():
        _tool([str(python), "-c", _TOKENIZER, str(made)])
    return made


def _prompts(folder: Path, key: str, count: int) -> Path:
    file = folder / f"prompts-{key}-{count}.jsonl"
    file.write_text(f'{{"{key}": "Tell me a story."}}\n' * count)
    return file


def guidellm(python: Path) -> Peer:
    """GuideLLM: its own report has the response's id and wall-clock times of every request."""

    def run(url: str, width: int, count: int, folder: Path) -> list[Seen]:
        out = folder / "guidellm.json"
        _tool(
            [
                str(python.parent / "guidellm"), "run", "--disable-console",
                "--backend", f"kind=openai_http,target={url},model=stub,"
                "request_format=/v1/completions",
                "--profile", f"kind=concurrent,streams={width}",
                "--constraint", f"kind=max_requests,count={count}",
                "--data", f"kind=json_file,path={_prompts(folder, 'prompt', count)}",
                "--tokenizer", f"kind=huggingface_auto,model={_tokenizer(python, folder)}",
                "--output", f"kind=json,path={out}",
            ]
        )  # fmt: skip
        seen = []
        for row in json.loads(out.read_text())["benchmarks"][0]["requests"]["successful"]:
            times = row["info"]["timings"]
            start, first, last = (
                round(times[key] * 1e9)
                for key in ("request_start", "first_token_iteration", "last_token_iteration")
            )
            number = int(row["response_id"].removeprefix("cmpl-"), 16)
            seen.append(Seen(0, number, start, first, last, times["token_iterations"]))
        return seen

    return run


def aiperf(python: Path) -> Peer:
    """AIPerf: its record of a request has the x-request-id that it sent, and durations."""

    def run(url: str, width: int, count: int, folder: Path) -> list[Seen]:
        out = folder / f"aiperf-{width}"
        _tool(
            [
                str(python.parent / "aiperf"), "profile", "-m", "stub", "--url", url,
                "--endpoint-type", "completions", "--streaming", "--ui", "none",
                "--input-file", str(_prompts(folder, "text", count)),
                "--custom-dataset-type", "single_turn", "--use-server-token-count",
                "--concurrency", str(width), "--request-count", str(count),
                "--tokenizer", str(_tokenizer(python, folder)), "--artifact-dir", str(out),
                "--extra-inputs", f"max_tokens:{TOKENS}", "--extra-inputs", "ignore_eos:true",
            ]
        )  # fmt: skip
        seen = []
        for line in (out / "profile_export.jsonl").read_text().splitlines():
            row = json.loads(line)
            gaps = row["metrics"]["inter_chunk_latency"]["value"]
            first = round(row["metrics"]["time_to_first_token"]["value"] * 1e6)
            last = first + round(sum(gaps) * 1e6)
            name = row["metadata"]["x_request_id"]
            seen.append(Seen(0, 0, 0, first, last, len(gaps) + 1, id=name))
        return seen

    return run


def find_peers(python: str) -> dict[str, Peer]:
    """The tools beside that Python, in the order they run."""
    if not python:
        told = "  ".join(line.strip() for line in str(__doc__).splitlines() if "-m venv" in line)
        print(f"guidellm, aiperf: left out; {told}; --peers peers/bin/python", file=sys.stderr)
        return {}
    made = {"guidellm": guidellm, "aiperf": aiperf}
    here = Path(python)
    return {name: make(here) for name, make in made.items() if (here.parent / name).exists()}


def burn() -> None:
    while True:
        pass


@dataclass
class Happened:
    """What happened to one request, in ns of the server's monotonic clock."""

    arrived: int
    left: list[int]
    """When each write with tokens left."""


def truth(file: Path) -> tuple[dict[int, Happened], dict[str, int]]:
    """(what happened by request number, request number by x-request-id)."""
    found: dict[int, Happened] = {}
    names: dict[str, int] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "arrived":
            found[row["request"]] = Happened(row["before_ns"], [])
            names[row.get("id", "")] = row["request"]
        elif row["tokens"]:
            found[row["request"]].left.append(row["before_ns"])
    return found, names


def run(widths: list[int], quick: bool, only: str, peers: dict[str, Peer]) -> list[dict[str, Any]]:
    """Let every client stream at every width, then hold what they saw against the truth."""
    runs: list[tuple[str, int, list[Seen], float]] = []
    seed = 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "truth.jsonl"
        with spawn(truth=str(file), **SETTINGS) as server:
            for name, client in CLIENTS.items():
                if only not in name:
                    continue
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
                    cpu = time.process_time() + _children()
                    for _ in range(times):
                        seen += client(server.url, list(range(seed, seed + width)))
                        seed += width
                    if isinstance(client, InAProcess):
                        client.close()
                    cpu = time.process_time() + _children() - cpu
                    runs.append((name, width, seen, cpu))
            for name, peer in peers.items():
                if only not in name:
                    continue
                for width in widths:
                    print(f"{name}: {width} streams", file=sys.stderr)
                    count = width * max(2 if quick else 4, (12 if quick else 60) // width)
                    cpu = _children()
                    seen = peer(server.url, width, count, Path(folder))
                    runs.append((name, width, seen, _children() - cpu))
        true, names = truth(file)
    return [judge(name, width, seen, true, names, cpu) for name, width, seen, cpu in runs]


def _children() -> float:
    """CPU seconds of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def judge(
    name: str,
    width: int,
    seen: list[Seen],
    true: dict[int, Happened],
    names: dict[str, int],
    cpu: float,
) -> dict[str, Any]:
    ttft, rounds, events = [], [], 0
    for one in seen:
        right = true[one.number or names[one.id]]
        events += len(right.left)
        if one.refused:
            continue
        ttft.append(((one.first - one.start) - (right.left[0] - right.arrived)) / 1e3)
        rounds.append(((one.last - one.first) / (right.left[-1] - right.left[0]) - 1) * 100)
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
        "cpu_ms_per_1000_events": cpu * 1e6 / events,
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
    parser.add_argument(
        "--only", default="", metavar="NAME", help="clients with this in their name"
    )
    parser.add_argument(
        "--peers",
        default=os.environ.get("DSV41_BENCH_PEERS", ""),
        metavar="PYTHON",
        help="the Python of an environment with guidellm and aiperf",
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    other = multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
    if args.burn:
        other.start()
    try:
        widths = [int(width) for width in args.widths.split(",")]
        rows = run(widths, args.quick, args.only, find_peers(args.peers))
    finally:
        if args.burn:
            other.terminate()
            other.join()
    print(json.dumps(rows, indent=1) if args.json else "\n".join(map(show, rows)))


if __name__ == "__main__":
    main()
