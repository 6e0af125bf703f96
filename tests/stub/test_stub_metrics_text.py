"""/metrics: prometheus_client's text, vLLM's families, counters equal to what was streamed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as RealCounter
from prometheus_client import Gauge as RealGauge
from prometheus_client import Histogram as RealHistogram
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.utils import floatToGoString
from stub_wire import chat, complete, get, samples, total

from pytest_dsv41.stub import Serving, serve
from pytest_dsv41.stub.metrics import Counter, Gauge, Histogram, Registry, number

NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "cache_config_info",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "external_prefix_cache_queries_total",
    "external_prefix_cache_hits_total",
    "mm_cache_queries_total",
    "mm_cache_hits_total",
    "prompt_tokens_total",
    "prompt_tokens_by_source_total",
    "prompt_tokens_cached_total",
    "prompt_tokens_cached_by_source_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "request_success_total",
    "admission_rejections_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_num_preemptions",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
)


@pytest.fixture
def stub() -> Iterator[Serving]:
    with serve(model='m "x"\\y', round_ms=1, prefill_ms=1) as running:
        yield running


def types(text: str) -> dict[str, str]:
    words = (line.split(" ") for line in text.splitlines() if line.startswith("# TYPE "))
    return {word[2]: word[3] for word in words}


def test_text_is_what_prometheus_client_prints() -> None:
    real, ours = CollectorRegistry(), Registry()
    labels = {"engine": "0", "model_name": 'a "b"\\c\nd'}
    names = ["model_name", "engine"]
    counter = RealCounter("vllm:a", "Text a.", names, registry=real)
    counter.labels(**labels).inc(12345678)
    histogram = RealHistogram("vllm:h", "Text h.", names, registry=real, buckets=[0.001, 1, 2e6])
    gauge = RealGauge("vllm:g", "Text g.", names, registry=real)
    gauge.labels(**labels).set(0.25)
    RealCounter("vllm:empty", "Text e.", names, registry=real)
    mine = Counter("vllm:a", "Text a.")
    mine.inc(12345678, labels)
    mine.at(labels).created = counter.labels(**labels)._created
    my_histogram = Histogram("vllm:h", "Text h.", (0.001, 1, 2e6))
    for value in (0.0005, 0.001, 0.5, 1.5, 1e9):
        histogram.labels(**labels).observe(value)
        my_histogram.observe(value, labels)
    my_histogram.at(labels).created = histogram.labels(**labels)._created
    my_gauge = Gauge("vllm:g", "Text g.")
    my_gauge.bind(labels, lambda: 0.25)
    for family in (mine, my_histogram, my_gauge, Counter("vllm:empty", "Text e.")):
        ours.add(family)
    assert ours.text() == generate_latest(real).decode()


@pytest.mark.parametrize(
    "value",
    [0, 1, 7.0, 0.1, 999999, 1000000, 1234567, 1.7959759874674995e9, 1e16, 1e22, 1e-7, math.inf],
)
def test_numbers_are_printed_as_prometheus_client_prints_them(value: float) -> None:
    assert number(value) == floatToGoString(value)
    assert number(math.nan) == "NaN"


def test_every_family_is_there_from_the_start(stub: Serving) -> None:
    reply = get(stub.url, "/metrics")
    assert reply.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    found = types(reply.text)
    families = {n for n in found if not n.endswith("_created") and "estimated" not in n}
    assert {f"vllm:{name}" for name in NAMES} == families
    for name, kind in found.items():
        if name.endswith("_created"):
            assert kind == "gauge"
        elif kind in ("counter", "histogram"):
            created = name.removesuffix("_total") if kind == "counter" else name
            assert f"{created}_created" in found
    assert found["vllm:iteration_tokens_total"] == "histogram"


def test_text_is_read_by_the_reference_parser(stub: Serving) -> None:
    complete(stub.url)
    families = {f.name: f for f in text_string_to_metric_families(get(stub.url, "/metrics").text)}
    success = families["vllm:request_success"]
    reasons = {s.labels["finished_reason"]: s.value for s in success.samples}
    assert reasons == {"stop": 0, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    assert success.samples[0].labels["model_name"] == 'm "x"\\y'


def test_labels_are_in_alphabetical_order(stub: Serving) -> None:
    for name, series in samples(stub.url).items():
        for labels in series:
            names = [part.split("=")[0] for part in labels.replace('\\"', "").split('",')]
            assert names == sorted(names), name


def test_no_speculation_no_speculative_families() -> None:
    with serve(draft_tokens=0, round_ms=1, prefill_ms=1) as plain:
        reply = complete(plain.url, return_token_ids=True)
        assert not any("spec_decode" in name for name in samples(plain.url))
    assert all(len(c["token_ids"]) == 1 for c in reply.choices)


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_counters_equal_what_was_streamed(stub: Serving, ask: object, temperature: float) -> None:
    before = samples(stub.url)
    counts: list[list[int]] = []
    prompts = 0
    for seed in range(3):
        reply = ask(  # type: ignore[operator]
            stub.url,
            max_tokens=30 + seed,
            temperature=temperature,
            seed=seed,
            return_token_ids=True,
        )
        counts.append([len(c["token_ids"]) for c in reply.choices if c.get("token_ids")])
        prompts += reply.chunk_objects[-1]["usage"]["prompt_tokens"]
    after = samples(stub.url)

    def moved(name: str) -> float:
        return total(after, name) - total(before, name)

    tokens = sum(map(sum, counts))
    rounds = sum(len(one) - 1 for one in counts)
    accepted = sum(n - 1 for one in counts for n in one[1:])
    assert tokens == 30 + 31 + 32 == moved("vllm:generation_tokens_total")
    assert moved("vllm:prompt_tokens_total") == prompts
    assert moved("vllm:request_success_total") == 3
    assert moved("vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert moved("vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert moved("vllm:spec_decode_num_drafts_total") == rounds == tokens - accepted - 3
    assert moved("vllm:spec_decode_num_draft_tokens_total") == 3 * rounds
    assert moved("vllm:inter_token_latency_seconds_count") == rounds
    assert moved("vllm:iteration_tokens_total_count") == rounds + 3
    for name in ("request_decode_time_seconds", "time_to_first_token_seconds"):
        assert moved(f"vllm:{name}_count") == 3
        assert moved(f"vllm:{name}_sum") > 0


def test_positions_do_not_increase() -> None:
    with serve(round_ms=0.2, prefill_ms=0, draft_tokens=4, acceptance=(0.9, 0.5, 0.2)) as stub:
        complete(stub.url, max_tokens=400, ignore_eos=True)
        series = samples(stub.url)["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    values = [series[key] for key in sorted(series)]
    assert len(values) == 4
    assert values == sorted(values, reverse=True)
    assert values[0] > values[1] > values[2]


def test_acceptance_is_what_the_profile_says() -> None:
    with serve(round_ms=0.1, prefill_ms=0, draft_tokens=2, acceptance=(0.8, 0.5)) as stub:
        complete(stub.url, max_tokens=3000, ignore_eos=True)
        scrape = samples(stub.url)
    drafts = total(scrape, "vllm:spec_decode_num_drafts_total")
    series = scrape["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    first, second = (series[key] for key in sorted(series))
    # 4 standard errors of a proportion over about 1,300 rounds
    assert first / drafts == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / drafts))
    assert second / first == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / first))


def test_decode_time_is_the_truth_between_first_and_last_token(stub: Serving) -> None:
    complete(stub.url, max_tokens=50)
    tokens = stub.truth("token", "finish")
    assert sum(line["tokens"] for line in tokens) == 50
    truth_s = (tokens[-1]["before_ns"] - tokens[0]["before_ns"]) / 1e9
    counted = total(samples(stub.url), "vllm:request_decode_time_seconds_sum")
    # both from CLOCK_MONOTONIC, a few Python lines apart; a busy machine may stop between them
    assert counted == pytest.approx(truth_s, abs=0.25)


def test_an_aborted_stream_counts_as_abort_and_what_it_made(stub: Serving) -> None:
    reply = complete(stub.url, "reset=3", max_tokens=1000)
    assert reply.reset
    for _ in range(200):
        scrape = samples(stub.url)
        if total(scrape, "vllm:request_success_total"):
            break
    series = scrape["vllm:request_success_total"]
    aborted = [value for labels, value in series.items() if 'finished_reason="abort"' in labels]
    assert aborted == [1]
    assert total(scrape, "vllm:num_requests_running") == 0
