"""Counters around a group: settled, complete, the group's own, or refused by name."""

from __future__ import annotations

import functools
from dataclasses import replace

import httpx
import pytest
from wire_groups import endpoint, kind_of, measure, requests, stub

from pytest_dsv41.engines import detect_engine, get_engine
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure import GroupResult, Sampling, measure_group
from pytest_dsv41.measure.group import evaluate


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_values_come_from_the_servers_own_counts(engine: str, count: int) -> None:
    with stub(engine=engine, draft_tokens=3, acceptance=(0.8, 0.6, 0.4)) as served:
        assert detect_engine(served.url) == engine
        result = measure(served, count=count, tokens=40)
        server = result.server
        assert server.tokens == 40 * count
        assert server.rounds == 40 * count - (server.accepted or 0) - count
        parts = result.values["ms_per_round"].parts
        assert parts["tokens"] == 40 * count
        assert parts["cached_tokens"] == 0
        assert result.values["ms_per_round"].value == pytest.approx(
            parts["server_decode_ms"] / parts["rounds"]
        )
        assert result.values["accepted_per_round"].value == pytest.approx(
            parts["accepted"] / parts["rounds"]
        )
        assert result.values["ms_per_round"].source == "server"
        assert result.values["client_tok_s"].source == "client"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("tokens", [10, 13])
def test_drafts_that_the_limit_cuts_off_are_no_lost_rounds(count: int, tokens: int) -> None:
    # 1, then 4 a step: with 10 tokens the last step has room for 1 of its 4, with 13 for all.
    with stub(draft_tokens=3, round_ms=4.0) as served:
        faults = ("count-cut-drafts", "step-tokens=1;4;4;4")
        result = measure(served, *faults, count=count, tokens=tokens)
        server = result.server
    assert server.accepted_cut == count * (13 - tokens)
    assert server.rounds == count * 3
    assert server.accepted == count * (tokens - 1 - 3)
    assert result.values["accepted_per_round"].value == pytest.approx((tokens - 4) / 3)


def test_rounds_that_the_servers_own_outputs_contradict_are_refused() -> None:
    with stub(draft_tokens=3, acceptance=(0.9,)) as served:
        result = measure(served, tokens=30)
        name = "vllm:inter_token_latency_seconds_count"
        for wrong in (-1.0, 4.0):
            after = {**result.after.values, name: result.after.values[name] + wrong}
            with pytest.raises(MeasurementRefused, match="inter_token") as refused:
                evaluate(
                    get_engine("vllm"),
                    ["cold"],
                    result.streams,
                    result.before,
                    replace(result.after, values=after),
                )
            assert refused.value.kind == "identity"


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_without_speculation_a_round_is_a_token(engine: str) -> None:
    with stub(engine=engine, draft_tokens=0) as served:
        result = measure(served, count=2, tokens=20)
        assert result.server.rounds == 2 * 19
        assert "accepted_per_round" in result.missing


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_foreign_request_refuses(engine: str, count: int) -> None:
    with stub(engine=engine) as served:
        assert kind_of(served, "foreign=4", count=count, tokens=20) == "refused:foreign-request"


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_foreign_request_that_still_runs_at_the_end_refuses(engine: str) -> None:
    with stub(engine=engine) as served:
        assert kind_of(served, "foreign-running=300", tokens=20) == "refused:foreign-request"


@pytest.mark.parametrize("engine", ["vllm", pytest.param("llamacpp", marks=pytest.mark.slow)])
def test_a_foreign_request_that_runs_before_refuses_and_nothing_is_sent(engine: str) -> None:
    with stub(engine=engine, round_ms=50.0) as served, httpx.Client(trust_env=False) as client:
        body = {"model": "stub", "prompt": "x", "max_tokens": 4000, "stream": True}
        with client.stream("POST", f"{served.url}/v1/completions", json=body) as other:
            lines = other.iter_lines()
            next(lines)
            with pytest.raises(MeasurementRefused, match="before the first request") as refused:
                measure_group(endpoint(served), requests(), deadline_s=20)
            assert refused.value.kind == "foreign-request"
            assert {line["request"] for line in served.truth() if line["tokens"]} == {1}


def test_counters_that_lag_are_waited_for() -> None:
    with stub(draft_tokens=3) as served:
        assert measure(served, "metrics-lag=200", tokens=20).server.tokens == 20


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("metrics-restart=3", "refused:reset"),
        ("/metrics:metrics-missing=vllm:generation_tokens_total", "refused:missing-family"),
        ("/metrics:metrics-missing=vllm:request_success_total", "refused:missing-family"),
        ("/metrics:metrics-missing=vllm:request_decode_time_seconds", "refused:missing-family"),
        ("/metrics:metrics-missing=vllm:prompt_tokens_total", "refused:missing-family"),
        ("/metrics:metrics-nan=vllm:generation_tokens_total", "refused:bad-counter"),
        ("/metrics:metrics-inf=vllm:request_success_total", "refused:bad-counter"),
        ("/metrics:metrics-garbage", "refused:"),
        ("/metrics:status=404:99", "refused:no-counters"),
    ],
)
def test_counters_that_cannot_be_trusted_refuse(fault: str, kind: str) -> None:
    with stub() as served:
        assert kind_of(served, fault, tokens=20).startswith(kind)


def test_a_restart_without_creation_times_is_seen_by_the_fall() -> None:
    with stub() as served:
        measure(served, tokens=30)
        faults = ("metrics-restart=3", "/metrics:metrics-no-created")
        assert kind_of(served, *faults, tokens=20) == "refused:reset"


@pytest.mark.slow
def test_two_processes_behind_one_address_refuse() -> None:
    with stub() as served:
        measure(served, tokens=20)
        assert kind_of(served, "/metrics:metrics-alternate").startswith("refused:")


def test_engines_are_added_up() -> None:
    with stub(draft_tokens=3) as served:
        for faults in (
            ["/metrics:metrics-two-engines"],
            ["/metrics:metrics-two-engines", "engine=1"],
        ):
            assert measure(served, *faults, tokens=20).server.tokens == 20


def test_cold_is_cold_again_and_again() -> None:
    with stub() as served:
        for _ in range(3):
            result = measure(served, tokens=4)
            assert result.server.cached_tokens == 0


def test_warm_is_proved_warm_and_never_passes_as_cold() -> None:

    with stub() as served:
        prompt = "A garden wall runs along the river. " * 8
        (request,) = requests(tokens=4)
        warm = replace(request, prompt=prompt, salt="s", sampling=Sampling(cache="warm"))
        with pytest.raises(MeasurementRefused) as cold:
            measure_group(endpoint(served), [warm], deadline_s=10)
        assert cold.value.kind == "cold-cache"
        result = measure_group(endpoint(served), [warm], deadline_s=10)
        assert (result.server.cached_tokens or 0) > 0
        with pytest.raises(MeasurementRefused) as refused:
            evaluate(get_engine("vllm"), ["cold"], result.streams, result.before, result.after)
        assert refused.value.kind == "warm-cache"


def test_prefix_hits_prove_it_where_usage_has_no_details() -> None:
    with stub(prompt_tokens_details=False) as served:
        result = measure(served, tokens=4)
        assert result.streams[0].cached_tokens is None
        assert result.server.cached_tokens == 0


def test_a_cache_that_nothing_tells_of_is_refused_unless_it_does_not_matter() -> None:
    gone = "/metrics:metrics-missing=vllm:prefix_cache_hits_total"
    with stub(prompt_tokens_details=False) as served:
        for cache in ("cold", "fill", "warm"):
            assert kind_of(served, gone, tokens=4, cache=cache) == "refused:cache-unproved"
        assert kind_of(served, gone, tokens=4, cache="any") == "measured"


@functools.cache
def two_requests() -> GroupResult:
    with stub() as served:
        return measure(served, count=2, tokens=4)


@pytest.mark.parametrize(
    ("caches", "told", "hits", "kind"),
    [
        (("cold", "any"), (0, 40), 40, ""),
        (("cold", "any"), (3, 0), 3, "warm-cache"),
        (("fill", "warm"), (0, 20), 20, ""),
        (("fill", "warm"), (0, 1), 1, "cold-cache"),
        (("cold", "warm"), (None, 20), 20, ""),
        (("cold", "warm"), (None, 20), 21, "warm-cache"),
        (("cold", "warm"), (None, None), 20, "cache-unproved"),
        (("cold", "any"), (None, None), 20, "cache-unproved"),
        (("cold", "any"), (None, None), 0, ""),
        (("warm", "any"), (None, 5), 5, "cold-cache"),
        (("warm", "any"), (None, 5), 25, ""),
        (("cold", "cold"), (None, None), None, "cache-unproved"),
        (("any", "any"), (None, None), None, ""),
    ],
)
def test_each_request_of_a_group_is_judged_by_its_own_cache(
    caches: tuple[str, str], told: tuple[int | None, int | None], hits: int | None, kind: str
) -> None:
    result = two_requests()
    streams = [
        replace(stream, cached_tokens=cached)
        for stream, cached in zip(result.streams, told, strict=True)
    ]
    name = "vllm:prefix_cache_hits_total"
    after = {**result.after.values, name: result.before.values[name] + (hits or 0)}
    before = dict(result.before.values)
    if hits is None:
        del after[name], before[name]
    given = (replace(result.before, values=before), replace(result.after, values=after))
    if not kind:
        assert evaluate(get_engine("vllm"), caches, streams, *given).server.tokens == 8
        return
    with pytest.raises(MeasurementRefused) as refused:
        evaluate(get_engine("vllm"), caches, streams, *given)
    assert refused.value.kind == kind


@pytest.mark.parametrize("name", ["drafts", "draft_tokens", "accepted_tokens"])
def test_a_speculative_family_that_is_gone_makes_no_plain_server(name: str) -> None:
    with stub(draft_tokens=3) as served:
        gone = f"/metrics:metrics-missing=vllm:spec_decode_num_{name}_total"
        assert kind_of(served, gone, tokens=20) == "refused:missing-family"


def test_what_the_streams_tell_of_themselves_is_held_against_the_counters() -> None:
    with stub(draft_tokens=3, per_request_metrics=True, per_request_spec="summary") as served:
        result = measure(served, count=2, tokens=20)
        judged = (get_engine("vllm"), ["cold"] * 2)
        for metrics, kind in (
            ({"generation_time_ms": 1e6}, "clocks"),
            ({"speculative_decoding": {"num_accepted_draft_tokens": 99}}, "identity"),
            ({"speculative_decoding": {"num_accepted_draft_tokens": "x"}}, "usage"),
        ):
            first, second = result.streams
            told = [replace(first, metrics={**first.metrics, **metrics}), second]
            with pytest.raises(MeasurementRefused) as refused:
                evaluate(*judged, told, result.before, result.after)
            assert refused.value.kind == kind


def test_server_time_that_contradicts_the_clients_refuses() -> None:

    with stub() as served:
        result = measure(served, tokens=30)
        name = "vllm:request_decode_time_seconds_sum"
        wrong = {**result.after.values, name: result.after.values[name] + 2.0}
        with pytest.raises(MeasurementRefused) as refused:
            evaluate(
                get_engine("vllm"),
                ["cold"],
                result.streams,
                result.before,
                replace(result.after, values=wrong),
            )
        assert refused.value.kind == "clocks"


def test_a_server_whose_wall_clock_steps_is_measured_all_the_same() -> None:
    with stub(round_ms=6.0) as served:
        result = measure(served, "wall-step=-3000:3", tokens=20)
    assert result.server.tokens == 20
    # 19 rounds of 6 ms, whatever time of day the server thinks it is (the first may start late).
    assert 18 * 6 <= (result.server.decode_ms or 0) < 2000
    assert 0 < result.values["ttft_ms"].value < 2000


def test_a_required_metric_that_has_no_value_refuses() -> None:

    with stub() as served, pytest.raises(MeasurementRefused) as refused:
        measure_group(endpoint(served), requests(), deadline_s=10, require=["accepted_per_round"])
    assert refused.value.kind == "no-accepted_per_round"
