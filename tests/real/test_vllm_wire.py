"""The client against a real vLLM: its counts equal the server's own, whatever is asked.

Needs a Python with vLLM, named by DSV41_VLLM_PYTHON; the servers are started here, without and with
speculation, and with the figures of each request in its stream:

    python3 -m venv vllm && vllm/bin/pip install vllm
    DSV41_VLLM_PYTHON=vllm/bin/python pytest -m slow tests/real/test_vllm_wire.py

Or DSV41_VLLM_URL names a server that nobody else uses, with --enable-prompt-tokens-details.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pytest_dsv41.engines import detect_engine
from pytest_dsv41.measure import (
    Cell,
    Endpoint,
    GroupResult,
    Request,
    Sampling,
    greedy_answers,
    measure_group,
)
from pytest_dsv41.measure.seeded import SeededCell, run_seeded_cell, streams_identical
from tests.real_vllm import NGRAM, serving

PYTHON, URL = os.environ.get("DSV41_VLLM_PYTHON", ""), os.environ.get("DSV41_VLLM_URL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PYTHON or URL),
        reason="set DSV41_VLLM_PYTHON to a Python with: pip install vllm",
    ),
]
KINDS = {
    "plain": (),
    "ngram": NGRAM,
    "figures": (
        *NGRAM,
        "--enable-per-request-metrics",
        "--per-request-spec-decode-metrics",
        "summary",
    ),
}


@pytest.fixture(scope="module", params=["given"] if URL else list(KINDS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    if URL:
        yield Endpoint(URL, "vllm")
        return
    with serving(PYTHON, tmp_path_factory.mktemp("vllm"), *KINDS[request.param]) as url:
        yield Endpoint(url, "vllm")


PROMPTS = (
    "Redistribution and use in source and binary forms",
    "one two three one two three one two three one two",
    "A letter from the coast begins: Dear",
)


def ask(
    server: Endpoint, count: int, *, tokens: int = 40, api: str = "completions", **sampling: object
) -> GroupResult:
    requests = [
        Request(
            max_tokens=tokens,
            prompt=PROMPTS[member],
            api=api,  # type: ignore[arg-type]
            sampling=Sampling(**sampling),  # type: ignore[arg-type]
            seed=40 + member,
        )
        for member in range(count)
    ]
    return measure_group(server, requests, deadline_s=120)


def test_the_dialect_is_found(server: Endpoint) -> None:
    assert detect_engine(server.url) == "vllm"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_equal_the_servers_own(
    server: Endpoint, count: int, api: str, temperature: float
) -> None:
    # That the counters moved by exactly the streams' own counts is checked inside.
    result = ask(server, count, api=api, temperature=temperature)
    assert result.server.tokens == 40 * count
    assert [stream.completion_tokens for stream in result.streams] == [40] * count
    assert result.server.cached_tokens == 0
    assert result.server.rounds == 40 * count - (result.server.accepted or 0) - count
    for stream in result.streams:
        tokens = [event for event in stream.events if event.kind == "token"]
        assert sum(event.tokens or 0 for event in tokens) == 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tokens", [93, 94, 95, 96, 97])
def test_rounds_are_the_engines_own_steps(
    server: Endpoint, temperature: float, tokens: int
) -> None:
    alone = ask(server, 1, tokens=1, temperature=temperature)
    result = ask(server, 1, tokens=tokens, temperature=temperature)
    assert result.server.steps is not None
    assert alone.server.steps is not None
    assert result.server.steps - alone.server.steps == result.server.rounds


def test_what_the_streams_tell_of_themselves_agrees_with_the_counters(
    server: Endpoint, request: pytest.FixtureRequest
) -> None:
    # That it agrees is checked inside; here, that it was there to be checked.
    streams = ask(server, 2, tokens=60, temperature=0.0).streams
    kind = request.node.callspec.params["server"]
    if kind == "given":
        pytest.skip("what a given server tells of itself is not known")
    told = kind == "figures"
    assert all(("generation_time_ms" in stream.metrics) is told for stream in streams)
    assert all(("speculative_decoding" in stream.metrics) is told for stream in streams)


def test_fill_is_cold_warm_is_warm_and_cold_stays_cold(server: Endpoint) -> None:
    cell = Cell("warm", ("short",), 8)
    cached = []
    for cache in ("fill", "warm", "cold"):
        sampling = Sampling(cache=cache)  # type: ignore[arg-type]
        sent = replace(cell, sampling=sampling).requests(seed=1, salt=f"w{os.getpid()}")
        cached.append(measure_group(server, sent, deadline_s=60).server.cached_tokens or 0)
    assert cached[0] == cached[2] == 0
    assert cached[1] > 50


def test_greedy_answers_repeat_themselves(server: Endpoint) -> None:
    first = greedy_answers(server, PROMPTS, max_tokens=12, deadline_s=60)
    assert first == greedy_answers(server, PROMPTS, max_tokens=12, deadline_s=60)


@pytest.mark.parametrize("prompts", [("short",), ("short", "demo-1")], ids=["b1", "b2"])
def test_a_seeded_cell_runs_whole(server: Endpoint, prompts: tuple[str, ...]) -> None:
    cell = SeededCell("seeded", prompts, 32, seed_base=300)
    one = run_seeded_cell(server, cell, salt=f"one{len(prompts)}-{os.getpid()}", deadline_s=120)
    two = run_seeded_cell(server, cell, salt=f"two{len(prompts)}-{os.getpid()}", deadline_s=120)
    assert len(one.pairs) == len(two.pairs) == 6
    print("streams identical:", streams_identical(one, two))
