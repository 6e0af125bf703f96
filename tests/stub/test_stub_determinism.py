"""What an answer depends on, and what it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_wire import Reply, chat, complete

from pytest_dsv41.stub import Serving, serve, spawn
from pytest_dsv41.stub.draws import gauss, key_of, mix, uniform
from pytest_dsv41.stub.engine import Ask, Engine
from pytest_dsv41.stub.language import (
    CANDIDATES,
    EOS,
    VOCABULARY,
    Model,
    Sampling,
    _bytes_to_ids,
    decode,
    encode,
    token_bytes,
)
from pytest_dsv41.stub.profile import make_profile


@pytest.fixture(scope="module")
def stub() -> Iterator[Serving]:
    with serve(round_ms=0.5, prefill_ms=0.5, seed=1) as running:
        yield running


@pytest.fixture(scope="module")
def other() -> Iterator[Serving]:
    """Another seed, another speed, other drafts."""
    with serve(round_ms=1.5, prefill_ms=0, seed=99, noise=0.1, draft_tokens=0) as running:
        yield running


def events(reply: Reply) -> list[list[int]]:
    return [c["token_ids"] for c in reply.choices if c.get("token_ids")]


def test_greedy_answers_depend_on_the_prompt_and_the_model_only(
    stub: Serving, other: Serving
) -> None:
    prompts = [f"Question {i}: what is light?" for i in range(6)]
    here = [complete(stub.url, prompt=p, max_tokens=24).answer for p in prompts]
    again = [complete(stub.url, prompt=p, max_tokens=24).answer for p in reversed(prompts)]
    there = [complete(other.url, prompt=p, max_tokens=24).answer for p in prompts]
    assert here == again[::-1] == there
    assert len(set(here)) == 6
    with serve(model="another", round_ms=0.5, prefill_ms=0) as another:
        assert complete(another.url, prompt=prompts[0], max_tokens=24).answer != here[0]


def test_a_longer_answer_begins_as_the_shorter_one(stub: Serving) -> None:
    short = complete(stub.url, max_tokens=10).answer
    assert complete(stub.url, max_tokens=40).answer.startswith(short)


def test_seeded_streams_are_identical_across_processes_and_neighbours(stub: Serving) -> None:
    ask: dict[str, Any] = {
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 12345,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    first = events(chat(stub.url, **ask))
    chat(stub.url, temperature=1.0)
    assert events(chat(stub.url, **ask)) == first
    assert events(chat(stub.url, **{**ask, "seed": 12346})) != first
    with spawn(round_ms=0.3, prefill_ms=0, seed=77) as process:
        assert events(chat(process.url, **ask)) == first


def test_unseeded_samples_draw_from_the_process_seed_and_the_request_counter() -> None:
    def three(seed: int) -> list[str]:
        with serve(round_ms=0.3, prefill_ms=0, seed=seed) as running:
            return [complete(running.url, temperature=1.0).answer for _ in range(3)]

    first = three(5)
    assert len(set(first)) == 3
    assert three(5) == first
    assert three(6) != first


class Silent:
    """A ledger that wants to know nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def engine_of(**settings: Any) -> Engine:
    return Engine(make_profile(settings), Silent())  # type: ignore[arg-type]


def test_noise_is_one_draw_a_request_from_the_process_seed() -> None:
    def paces(count: int, **settings: Any) -> list[float]:
        engine = engine_of(**settings)
        out = []
        for _ in range(count):
            job = engine.submit(Ask([5], 1), arrival=0.0, wall=0.0)
            out.append(job.pace)
            engine.leave(job, "length")
        return out

    drawn = paces(2000, noise=0.05, seed=3)
    assert drawn == paces(2000, noise=0.05, seed=3)
    assert drawn[:10] != paces(10, noise=0.05, seed=4)
    mean = sum(drawn) / 2000
    deviation = (sum((d - mean) ** 2 for d in drawn) / 1999) ** 0.5
    assert mean == pytest.approx(1, abs=4 * 0.05 / 2000**0.5)
    assert deviation == pytest.approx(0.05, rel=4 / (2 * 2000) ** 0.5)
    assert paces(3, noise=0.0) == [1.0, 1.0, 1.0]


def test_drift_and_batch_cost_change_the_round_time() -> None:
    engine = engine_of(round_ms=10, drift=0.01, batch_cost=0.25)
    seen = []
    for _ in range(3):
        job = engine.submit(Ask([5], 1), arrival=0.0, wall=0.0)
        seen.append(engine.round_seconds(job))
        engine.leave(job, "length")
    assert seen == pytest.approx([0.010, 0.0101, 0.0102])
    jobs = [engine.submit(Ask([5], 1), arrival=0.0, wall=0.0) for _ in range(3)]
    assert engine.round_seconds(jobs[0]) == pytest.approx(0.0103 * 1.5)


@given(st.text(max_size=40))
def test_texts_split_into_tokens_and_join_again(text: str) -> None:
    tokens = encode(text)
    assert decode(tokens) == text.encode("utf-8", "replace").decode()
    assert all(EOS < token < VOCABULARY for token in tokens)


@given(st.binary(max_size=64))
def test_tokens_of_any_bytes_have_bytes(raw: bytes) -> None:
    assert b"".join(map(token_bytes, _bytes_to_ids(raw))) == raw


def test_a_character_can_be_cut_by_a_token() -> None:
    pieces = [decode([token]) for token in encode("龘")]
    assert len(pieces) == 2
    assert any("\ufffd" in piece for piece in pieces)


@given(st.integers(0, 2**64 - 1), st.booleans())
def test_candidates_are_distinct_ranked_and_a_distribution(seed: int, perturbed: bool) -> None:
    model = Model("m", [seed % VOCABULARY], Sampling(1.0, 1.0, 0, seed), 0.3 if perturbed else 0.0)
    for _ in range(5):
        choice = model.next(True)
        tokens = [token for token, _ in choice.top]
        values = [value for _, value in choice.top]
        assert len(set(tokens)) == CANDIDATES
        assert values == sorted(values, reverse=True)
        assert math.isclose(sum(map(math.exp, values)), 1.0, rel_tol=1e-9)
        assert dict(choice.top)[choice.token] == choice.logprob


def test_sampling_follows_the_probabilities() -> None:
    counts: dict[int, int] = {}
    for seed in range(4000):
        choice = Model("m", [300], Sampling(1.0, 1.0, 0, seed)).next(True)
        counts[choice.token] = counts.get(choice.token, 0) + 1
    for token, value in choice.top[:4]:
        chance = math.exp(value)
        error = 4 * math.sqrt(chance * (1 - chance) / 4000)
        assert counts[token] / 4000 == pytest.approx(chance, abs=error)


def test_top_k_and_top_p_cut_the_tail() -> None:
    best = Model("m", [300], Sampling(0, 1.0, 0, 0)).next(False).token
    for seed in range(200):
        assert Model("m", [300], Sampling(2.0, 1.0, 1, seed)).next(False).token == best
        assert Model("m", [300], Sampling(2.0, 0.01, 0, seed)).next(False).token == best


def test_a_perturbed_model_answers_nearly_alike() -> None:
    def answers(perturb: float) -> list[int]:
        return [
            Model("m", [300 + i], Sampling(0, 1.0, 0, 0), perturb).next(False).token
            for i in range(400)
        ]

    same = sum(a == b for a, b in zip(answers(0.0), answers(0.1), strict=True))
    assert 300 < same < 400


def test_draws_are_the_same_on_every_machine() -> None:
    # SplitMix64's published first two outputs for the seed 1234567
    assert mix(1234567) == 6457827717110365317
    assert mix(1234567 + 0x9E3779B97F4A7C15) == 3203168211198807973
    assert key_of(3, 2, 1) != key_of(1, 2, 3)
    values = [uniform(key_of(7, i)) for i in range(4000)]
    assert all(0 <= value < 1 for value in values)
    assert sum(values) / 4000 == pytest.approx(0.5, abs=4 * (1 / 12 / 4000) ** 0.5)
    normal = [gauss(key_of(8, i)) for i in range(4000)]
    assert sum(v * v for v in normal) / 4000 == pytest.approx(1, abs=4 * (2 / 4000) ** 0.5)
