"""The client against a real vLLM: its counts equal the server's own, whatever is asked.

Needs a running server that nobody else uses, with prompt token details on, named by
DSV41_VLLM_URL; with and without speculation it is another test:

    python -m vllm.entrypoints.openai.api_server --model MODEL --enable-prompt-tokens-details
    DSV41_VLLM_URL=http://127.0.0.1:8000 pytest -m slow tests/real/test_vllm_wire.py
"""

from __future__ import annotations

import os
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

URL = os.environ.get("DSV41_VLLM_URL", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not URL,
        reason="set DSV41_VLLM_URL to a running server: python -m "
        "vllm.entrypoints.openai.api_server --model MODEL --enable-prompt-tokens-details",
    ),
]

PROMPTS = (
    "Redistribution and use in source and binary forms",
    "one two three one two three one two three one two",
    "A letter from the coast begins: Dear",
)
SERVER = Endpoint(URL, "vllm")


def ask(
    count: int, *, tokens: int = 40, api: str = "completions", **sampling: object
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
    return measure_group(SERVER, requests, deadline_s=120)


def test_the_dialect_is_found() -> None:
    assert detect_engine(URL) == "vllm"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_equal_the_servers_own(count: int, api: str, temperature: float) -> None:
    # That the counters moved by exactly the streams' own counts is checked inside.
    result = ask(count, api=api, temperature=temperature)
    assert result.server.tokens == 40 * count
    assert [stream.completion_tokens for stream in result.streams] == [40] * count
    assert result.server.cached_tokens == 0
    assert result.server.rounds == 40 * count - (result.server.accepted or 0) - count
    for stream in result.streams:
        tokens = [event for event in stream.events if event.kind == "token"]
        assert sum(event.tokens or 0 for event in tokens) == 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tokens", [93, 94, 95, 96, 97])
def test_rounds_are_the_engines_own_steps(temperature: float, tokens: int) -> None:
    alone = ask(1, tokens=1, temperature=temperature)
    result = ask(1, tokens=tokens, temperature=temperature)
    assert result.server.steps is not None
    assert alone.server.steps is not None
    assert result.server.steps - alone.server.steps == result.server.rounds


def test_fill_is_cold_warm_is_warm_and_cold_stays_cold() -> None:
    cell = Cell("warm", ("short",), 8)
    cached = []
    for cache in ("fill", "warm", "cold"):
        sampling = Sampling(cache=cache)  # type: ignore[arg-type]
        sent = replace(cell, sampling=sampling).requests(seed=1, salt=f"w{os.getpid()}")
        cached.append(measure_group(SERVER, sent, deadline_s=60).server.cached_tokens or 0)
    assert cached[0] == cached[2] == 0
    assert cached[1] > 50


def test_greedy_answers_repeat_themselves() -> None:
    first = greedy_answers(SERVER, PROMPTS, max_tokens=12, deadline_s=60)
    assert first == greedy_answers(SERVER, PROMPTS, max_tokens=12, deadline_s=60)


@pytest.mark.parametrize("prompts", [("short",), ("short", "demo-1")], ids=["b1", "b2"])
def test_a_seeded_cell_runs_whole(prompts: tuple[str, ...]) -> None:
    cell = SeededCell("seeded", prompts, 32, seed_base=300)
    one = run_seeded_cell(SERVER, cell, salt=f"one{len(prompts)}-{os.getpid()}", deadline_s=120)
    two = run_seeded_cell(SERVER, cell, salt=f"two{len(prompts)}-{os.getpid()}", deadline_s=120)
    assert len(one.pairs) == len(two.pairs) == 6
    print("streams identical:", streams_identical(one, two))
