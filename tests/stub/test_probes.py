"""Every probe law as a fault of the stub, and the probes whole, over real sockets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from wire_groups import endpoint, stub

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure import Sampling, measure_group
from pytest_dsv41.measure.probes import (
    Capacity,
    PromptMaker,
    measure_capacity,
    obey,
    read_shape,
    rung_of,
)
from pytest_dsv41.measure.probes.capacity import capacity_requests
from pytest_dsv41.measure.probes.requests import ladder_requests, prefill_groups
from pytest_dsv41.stub import Serving

ENGINES = ("llamacpp", "vllm")
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# Long enough that the look at the gauge, every 50 ms, sees all of them.
SLOW: dict[str, Any] = {"prefill_ms": 600.0, "max_model_len": 512, "max_running": 3}


def probed(served: Serving, *faults: str, streams: int = 3, api: Any = "completions") -> Capacity:
    served.faults(*(f"{PATHS[api]}:{fault}" for fault in faults))
    here = endpoint(served)
    found, _ = measure_capacity(
        here, read_shape(here), streams, maker=PromptMaker.on(here, api=api), deadline_s=30
    )
    return found


def lacking(found: Capacity) -> list[str]:
    return [check.name for check in found.checks if check.passed is not True]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_shape_is_the_servers_own(engine: str) -> None:
    with stub(engine=engine, max_running=5, max_model_len=4096) as served:
        shape = read_shape(endpoint(served))
    assert (shape.slots, shape.window) == (5, 4096)
    assert shape.told["slots"] == {"llamacpp": "/props", "vllm": "/server_info"}[engine]


def test_what_a_server_does_not_tell_is_left_out() -> None:
    with stub(dev_mode=False, max_model_len=4096) as served:
        shape = read_shape(endpoint(served))
    assert (shape.slots, shape.window, shape.kv_dtype) == (None, 4096, "")


@pytest.mark.parametrize(
    ("engine", "api"),
    [("llamacpp", "completions"), pytest.param("vllm", "chat", marks=pytest.mark.slow)],
)
def test_full_slots_are_answered_exactly(engine: str, api: str) -> None:
    with stub(engine=engine, **SLOW) as served:
        found = probed(served, "recall", api=api)
    assert (found.verdict, found.reason) == ("PASS", "")
    assert [row["prompt"] for row in found.rows] == [480] * 3
    assert len({row["asked"].split("-")[0] for row in found.rows}) == 3
    assert found.refusal.refused
    assert (found.refusal.tokens, found.refusal.window) == (513, 512)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "faults", "names"),
    [
        ("llamacpp", ["recall=other"], ["exact answers"]),
        ("vllm", ["recall", "finish-early=1:repetition"], ["exact answers", "finish stop"]),
        ("vllm", ["recall", "preempt=2"], ["nothing preempted"]),
        ("llamacpp", ["recall", "truncate"], ["one token too many refused"]),
        ("vllm", ["recall", "truncate"], ["one token too many refused"]),
        (
            "vllm",
            ["recall", "truncate=100"],
            ["exact answers", "finish stop", "prompt tokens as sent", "one token too many refused"],
        ),
    ],
)  # fmt: skip
def test_each_broken_promise_is_named(engine: str, faults: list[str], names: list[str]) -> None:
    with stub(engine=engine, **SLOW) as served:
        found = probed(served, *faults)
    assert found.verdict == "FAIL"
    assert lacking(found) == names


@pytest.mark.slow
def test_streams_that_wait_for_a_slot_are_not_alive_together() -> None:
    with stub(**{**SLOW, "max_running": 2, "dev_mode": False}) as served:
        found = probed(served, "recall")
    assert lacking(found) == ["all alive together"]
    assert "2 of 3 ran" in found.reason


def test_more_streams_than_slots_are_refused_before_anything_is_sent() -> None:
    with stub(engine="llamacpp", **SLOW) as served:
        with pytest.raises(MeasurementRefused) as refused:
            probed(served, "recall", streams=4)
        served.faults()
    assert refused.value.kind == "shape"
    assert "4 streams at a time, and the server has 3 slots (/props)" in str(refused.value)


@pytest.mark.slow
def test_law_salt_a_cache_that_keeps_prompts_is_found() -> None:
    # The same prompts twice; the server uses its cache although each request forbids it.
    with stub(**SLOW) as served:
        assert probed(served, "recall").verdict == "PASS"
        served.faults("/v1/completions:no-salt")
        here = endpoint(served)
        _, (sent, *_) = capacity_requests(PromptMaker.on(here), read_shape(here), 1)
        measure_group(here, [replace(sent, sampling=Sampling(cache="any"))], deadline_s=20)
        with pytest.raises(MeasurementRefused) as refused:
            probed(served, "recall", "no-salt")
    assert refused.value.kind == "warm-cache"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_law_both_channels_an_answer_in_the_reasoning_counts(engine: str) -> None:
    with stub(engine=engine, **SLOW) as served:
        found = probed(served, "recall", "reasoning-only", streams=2, api="chat")
    assert found.verdict == "PASS"
    assert {row["channel"] for row in found.rows} == {"reasoning"}


@pytest.mark.parametrize("engine", ENGINES)
def test_law_thinking_a_spent_budget_is_no_answer(engine: str) -> None:
    with stub(engine=engine, **SLOW) as served, pytest.raises(MeasurementRefused) as refused:
        probed(served, "reasoning-only", streams=1, api="chat")
    assert refused.value.kind == "law-thinking"


@pytest.mark.slow
def test_law_rate_tokens_a_short_answer_has_no_rate() -> None:
    with stub(max_model_len=4096) as served:
        maker = PromptMaker.on(endpoint(served))
        (group,) = prefill_groups(maker, "prefill-cold", 256, salt="x")
        short = obey(measure_group(endpoint(served), group, deadline_s=20))
        sent = ladder_requests(maker, 2, 256, 100, salt="x")
        with pytest.raises(MeasurementRefused) as refused:
            rung_of(measure_group(endpoint(served), sent, deadline_s=20), depth=1, corpus="varied")
    assert "decode_tok_s" not in short.values
    assert short.missing["client_tok_s"].startswith("law-rate-tokens: 8 tokens")
    assert "prefill_tok_s" in short.values or "merged" in short.missing["prefill_tok_s"]
    assert refused.value.kind == "law-rate-tokens"


def test_law_corpus_class_a_repetitive_text_is_not_varied() -> None:
    with stub() as served:
        maker = PromptMaker.on(endpoint(served), own="one more rung of the ladder and " * 500)
        with pytest.raises(MeasurementRefused) as refused:
            maker.plain(256)
    assert refused.value.kind == "law-corpus-class"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_hit_must_come_from_the_cache_and_cold_must_not(engine: str) -> None:
    with stub(engine=engine, max_model_len=4096) as served:
        here = endpoint(served)
        maker = PromptMaker.on(here)
        cached = {}
        for probe in ("prefill-cold", "prefill-warm", "prefill-hit"):
            for group in prefill_groups(maker, probe, 512, salt=probe):
                cached[probe] = measure_group(here, group, deadline_s=20).server.cached_tokens
    assert (cached["prefill-cold"], cached["prefill-warm"]) == (0, 0)
    assert (cached["prefill-hit"] or 0) > 256


# -- the command -------------------------------------------------------------------------------


def test_the_command_says_what_it_saw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "capacity.json"
    with stub(engine="llamacpp", **SLOW) as served:
        served.faults("/v1/completions:recall")
        words = ["probe", served.url, "capacity", "--slots", "2", "--out", str(out)]
        assert main(words) == 0
        said = capsys.readouterr().out
        served.faults("/v1/completions:recall", "/v1/completions:truncate")
        assert main(words[:-2]) == 2
        worse = capsys.readouterr().out
        assert main(words) == 4  # never over an answer that lies there
    assert said.splitlines()[0] == ("shape: 3 slots, a window of 512 tokens, KV dtype not told")
    assert said.splitlines()[-1] == "capacity-2: PASS"
    assert "one token too many refused: yes, 513 tokens of a window of 512: HTTP 400" in said
    assert "one token too many refused: NO" in worse
    assert "cut in silence" in worse
    kept = json.loads(out.read_text())
    assert (kept["verdict"], kept["shape"]["window"]) == ("PASS", 512)


@pytest.mark.slow
def test_a_ladder_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(engine="llamacpp", max_running=2, max_model_len=1024, round_ms=1.0) as served:
        words = ["probe", served.url, "ladder", "--depth", "256", "--tokens", "128", "--json"]
        assert main(words) == 0
        told = json.loads(capsys.readouterr().out)
        assert main([*words[:-1], "--depth", "1k"]) == 4
        wide = capsys.readouterr().err
    assert [rung["streams"] for rung in told["rungs"]] == [1, 2]
    assert all(len(rung["rates"]) == rung["streams"] for rung in told["rungs"])
    assert "1,024 prompt tokens and 128 of answer; the server's window is 1,024" in wide


def test_a_ladder_too_short_for_a_rate_is_refused_before_it_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe", "http://127.0.0.1:9", "ladder", "--tokens", "127"]) == 4
    assert capsys.readouterr().err == "dsv41 probe: --tokens 127: a rate needs 128\n"


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "http://127.0.0.1:9", "shape", "--engine", "vllm"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(
        "dsv41 probe: REFUSED shape: http://127.0.0.1:9/v1/models did not answer"
    )
    assert len(said.splitlines()) == 1
    assert "[Errno" not in said
