"""Every named fault does what its name says, and the undisturbed stream has none of it."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_wire import (
    chat,
    complete,
    connect,
    get,
    linger_reset,
    parse_reply,
    post,
    request_bytes,
    samples,
    sse,
    total,
)

from pytest_dsv41.errors import UsageError
from pytest_dsv41.stub import Serving, serve
from pytest_dsv41.stub.faults import FAULTS, describe, parse


@pytest.fixture(scope="module")
def stub() -> Iterator[Serving]:
    with serve(round_ms=1, prefill_ms=1) as running:
        yield running


@pytest.fixture
def fresh() -> Iterator[Serving]:
    """A server of the test's own: its counters and clock are changed."""
    with serve(round_ms=1, prefill_ms=1) as running:
        yield running


def times(stub: Serving, request: int, *kinds: str) -> list[float]:
    """Milliseconds at which the writes of these kinds left, from the head on."""
    lines = [line for line in stub.truth() if line["request"] == request]
    start = next(line["before_ns"] for line in lines if line["kind"] == "head")
    return [(line["before_ns"] - start) / 1e6 for line in lines if line["kind"] in kinds]


def last_request(stub: Serving) -> int:
    return max(int(line["request"]) for line in stub.truth())


# ---- roles, channels, events ----------------------------------------------------------------


def roles(reply: Any) -> list[int]:
    return [i for i, c in enumerate(reply.choices) if "role" in c["delta"]]


def test_an_undisturbed_stream(stub: Serving) -> None:
    reply = chat(stub.url)
    assert roles(reply) == [0]
    assert reply.choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert reply.data[-1] == "[DONE]"
    assert reply.data.count("[DONE]") == 1
    assert reply.complete
    assert len(reply.chunks) == len(reply.data)
    assert all(c.startswith(b"data: ") and c.endswith(b"\n\n") for c in reply.chunks)


def test_role_early_comes_before_the_first_token(stub: Serving) -> None:
    reply = chat(stub.url, "role-early=1,prefill-ms=60")
    assert roles(reply) == [0]
    (role,) = times(stub, last_request(stub), "role")
    token, *_ = times(stub, last_request(stub), "token")
    assert role < token
    assert token >= 59


def test_role_late_comes_after_the_first_token(stub: Serving) -> None:
    assert roles(chat(stub.url, "role-late")) == [1]


def test_role_absent_null_bare_and_with_the_token(stub: Serving) -> None:
    assert roles(chat(stub.url, "role-absent")) == []
    assert chat(stub.url, "role-null").choices[0]["delta"] == {"role": "assistant", "content": None}
    assert chat(stub.url, "role-bare").choices[0]["delta"] == {"role": "assistant"}
    together = chat(stub.url, "role-with-token").choices[0]["delta"]
    assert together["role"] == "assistant"
    assert together["content"]


def test_reasoning_under_each_name(stub: Serving) -> None:
    plain = chat(stub.url).answer

    def texts(fault: str, name: str) -> str:
        return "".join(c["delta"].get(name) or "" for c in chat(stub.url, fault).choices)

    thought = texts("reasoning=4", "reasoning")
    assert thought
    assert thought + texts("reasoning=4", "content") == plain
    assert texts("reasoning=4,reasoning-field=reasoning_content", "reasoning_content") == thought
    assert texts("reasoning=4,reasoning-field=reasoning_content", "reasoning") == ""
    assert texts("reasoning=4,reasoning-field=thinking", "thinking") == thought
    for name in ("reasoning", "reasoning_content"):
        assert texts("reasoning=4,reasoning-field=both", name) == thought
    assert texts("reasoning-only", "reasoning") == plain
    assert texts("reasoning-only", "content") == ""
    usage = chat(stub.url, "reasoning-only").chunk_objects[-1]["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 12}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_tokens_per_event(stub: Serving, size: int) -> None:
    reply = chat(stub.url, f"tokens-per-event={size}", return_token_ids=True)
    counts = [len(c["token_ids"]) for c in reply.choices if c.get("token_ids")]
    assert counts[0] == 1
    assert set(counts[1:-1]) <= {size}
    assert sum(counts) == 12
    assert reply.answer == chat(stub.url).answer
    assert reply.choices[-1]["finish_reason"] == "length"


def test_hold_text_carries_tokens_before_text(stub: Serving) -> None:
    reply = complete(stub.url, "hold-text=3", return_token_ids=True)
    assert [bool(c["text"]) for c in reply.choices[:4]] == [False, False, False, True]
    assert all(c["token_ids"] for c in reply.choices)
    assert reply.answer == complete(stub.url).answer


def test_swallowed_tokens_have_no_event_but_count(stub: Serving) -> None:
    reply = chat(stub.url, "swallow=3", max_tokens=30, return_token_ids=True)
    told = sum(len(c["token_ids"]) for c in reply.choices if c.get("token_ids"))
    assert 3 <= 30 - told <= 6
    assert reply.chunk_objects[-1]["usage"]["completion_tokens"] == 30


def test_finish_own_is_an_empty_event_later(stub: Serving) -> None:
    reply = chat(stub.url, "finish-own=40")
    assert reply.choices[-1]["delta"] == {"content": ""}
    assert reply.choices[-1]["finish_reason"] == "length"
    assert reply.choices[-2]["finish_reason"] is None
    last = times(stub, last_request(stub), "token")[-1]
    (finish,) = times(stub, last_request(stub), "finish")
    assert finish - last >= 40
    text = complete(stub.url, "finish-own")
    assert text.choices[-1]["text"] == ""
    assert text.answer == complete(stub.url).answer


def test_finish_early_and_other_reasons(stub: Serving) -> None:
    early = chat(stub.url, "finish-early=5:stop", ignore_eos=True)
    assert early.choices[-1]["finish_reason"] == "stop"
    assert early.chunk_objects[-1]["usage"]["completion_tokens"] == 5
    assert chat(stub.url, "finish-reason=abort").choices[-1]["finish_reason"] == "abort"
    assert all(c["finish_reason"] is None for c in chat(stub.url, "no-finish").choices)


def test_endless_answers_go_on_until_the_client_leaves(fresh: Serving) -> None:
    sock = connect(fresh.url)
    sock.sendall(
        request_bytes(
            "POST",
            "/v1/completions",
            {"prompt": "a", "max_tokens": 2, "stream": True},
            "endless,round-ms=0",
        )
    )
    read = 0
    while read < 100_000:
        read += len(sock.recv(65536))
    linger_reset(sock)
    assert total_when(fresh, "vllm:num_requests_running", 0) == 0


def total_when(stub: Serving, name: str, value: float) -> float:
    """Scrape until the sum is `value`, at most for ten seconds; return the last sum."""
    end = time.monotonic() + 10
    while (found := total(samples(stub.url), name)) != value and time.monotonic() < end:
        pass
    return found


# ---- usage --------------------------------------------------------------------------------------


def usages(reply: Any) -> list[int | None]:
    return [
        chunk["usage"]["completion_tokens"] if chunk.get("usage") else None
        for chunk in reply.chunk_objects
        if "usage" in chunk
    ]


def test_usage_in_every_place(stub: Serving) -> None:
    assert usages(chat(stub.url)) == [12]
    assert usages(chat(stub.url, "usage=final", stream_options=None)) == [12]
    assert usages(chat(stub.url, "usage=absent")) == []
    last = chat(stub.url, "usage=last-choice")
    assert usages(last) == [12]
    assert last.chunk_objects[-1]["choices"][0]["finish_reason"] == "length"
    null = chat(stub.url, "usage=null")
    assert set(usages(null)) == {None}
    assert len(usages(null)) == len(null.chunk_objects)
    continuous = usages(chat(stub.url, "usage=continuous"))
    assert len(continuous) > 3
    assert continuous == sorted(continuous)  # type: ignore[type-var]
    assert usages(chat(stub.url, "usage=wrong:-2")) == [10]
    assert usages(chat(stub.url, "usage=wrong")) == [13]
    odd = usages(chat(stub.url, "usage=nonmonotonic", max_tokens=30))
    assert odd != sorted(odd)  # type: ignore[type-var]
    parts = usages(chat(stub.url, "usage=delta"))
    assert sum(filter(None, parts[:-1])) == 12
    assert max(filter(None, parts[:-1])) <= 4


def test_usage_late(stub: Serving) -> None:
    chat(stub.url, "usage-late=40")
    (usage,) = times(stub, last_request(stub), "usage")
    (finish,) = times(stub, last_request(stub), "finish")
    assert usage - finish >= 40


# ---- errors and ends ----------------------------------------------------------------------------


def test_errors_come_as_events_in_a_200_stream_and_done_follows(fresh: Serving) -> None:
    for place, tokens in (("first", 0), ("mid:2", 2), ("after-finish", 12)):
        reply = chat(fresh.url, f"error={place},step-tokens=1;1;1")
        assert reply.status == 200
        errors = [chunk["error"] for chunk in reply.chunk_objects if "error" in chunk]
        assert errors == [
            {
                "message": "the stub was told to fail",
                "type": "InternalServerError",
                "param": None,
                "code": 500,
            }
        ]
        assert reply.data[-1] == "[DONE]"
        told = sum(1 for c in reply.choices if c["delta"].get("content"))
        if tokens < 12:
            assert told == tokens
            assert all(c["finish_reason"] is None for c in reply.choices)
        else:
            assert reply.choices[-1]["finish_reason"] == "length"
    reasons = samples(fresh.url)["vllm:request_success_total"]
    counted = {k.split('finished_reason="')[1].split('"')[0]: v for k, v in reasons.items()}
    assert (counted["error"], counted["length"]) == (2, 1)


def test_done_missing_twice_late(stub: Serving) -> None:
    assert "[DONE]" not in chat(stub.url, "no-done").data
    assert chat(stub.url, "double-done").data[-2:] == ["[DONE]", "[DONE]"]
    chat(stub.url, "done-late=30")
    (usage,) = times(stub, last_request(stub), "usage")
    (done,) = times(stub, last_request(stub), "done")
    assert done - usage >= 30


def test_clean_end_after_n_events(stub: Serving) -> None:
    reply = complete(stub.url, "eof=2")
    assert reply.complete
    assert len(reply.choices) == 2
    assert "[DONE]" not in reply.data


def test_chunk_cut_and_reset(stub: Serving) -> None:
    cut = complete(stub.url, "chunk-cut=2")
    assert not cut.complete
    assert not cut.reset
    assert len(cut.choices) == 2
    reset = complete(stub.url, "reset=2")
    assert reset.reset


def test_stall_moves_everything_after_it(stub: Serving) -> None:
    complete(stub.url, "stall=60:2,step-tokens=1;1;1;1")
    tokens = times(stub, last_request(stub), "token")
    # Since the head, for a write before the stall may itself have been late.
    assert tokens[2] >= 60


def test_hold_lets_the_engine_go_on(stub: Serving) -> None:
    complete(stub.url, "hold=60:1,at=10;20;30;100", max_tokens=4, ignore_eos=True)
    tokens = times(stub, last_request(stub), "token", "finish")
    assert tokens[1] - tokens[0] >= 60
    assert tokens[-1] >= 99 if len(tokens) == 4 else tokens[-1] >= 70


def test_slow_headers(stub: Serving) -> None:
    start = time.monotonic()
    get(stub.url, "/health", "slow-headers=50")
    assert time.monotonic() - start >= 0.05


def test_steps_at_given_times_with_given_tokens(stub: Serving) -> None:
    reply = complete(stub.url, "at=30;50;90,step-tokens=5;3;4", return_token_ids=True)
    assert [len(c["token_ids"]) for c in reply.choices] == [5, 3, 4]
    tokens = times(stub, last_request(stub), "token", "finish")
    for found, asked in zip(tokens, (30, 50, 90), strict=True):
        assert found >= asked - 1


def test_pace_of_one_request(stub: Serving) -> None:
    reply = complete(stub.url, "draft-tokens=0,round-ms=0", return_token_ids=True)
    assert [len(c["token_ids"]) for c in reply.choices] == [1] * 12
    reply = complete(stub.url, "acceptance=1,draft-tokens=5", return_token_ids=True)
    assert [len(c["token_ids"]) for c in reply.choices] == [1, 6, 5]


@pytest.mark.parametrize("kind", ["long", "drip", "line"])
def test_flood_sends_so_many_bytes_before_the_answer(stub: Serving, kind: str) -> None:
    reply = complete(stub.url, f"flood={kind}:300000")
    assert len(reply.body) > 300000
    assert reply.complete
    blocks = reply.body.count(b"\n\n")
    assert blocks > 1000 if kind == "drip" else blocks < 40
    assert reply.data[-1] == "[DONE]"


# ---- before the stream --------------------------------------------------------------------------


def test_status_then_good(fresh: Serving) -> None:
    assert [complete(fresh.url, "status=429:2").status for _ in range(3)] == [429, 429, 200]
    refused = complete(fresh.url, "status=503:1:again")
    assert refused.json()["error"]["code"] == 503
    assert complete(fresh.url, "status=503:1:again").status == 200


def test_json_and_plain_bodies(stub: Serving) -> None:
    whole = complete(stub.url, "json-body")
    assert whole.headers["content-type"] == "application/json"
    assert whole.json()["choices"][0]["text"] == complete(stub.url).answer
    plain = complete(stub.url, "plain-body")
    assert "transfer-encoding" not in plain.headers
    assert plain.headers["connection"] == "close"
    assert plain.answer == complete(stub.url).answer


# ---- framing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "sign"),
    [
        ("crlf", b"\r\n\r\n"),
        ("cr", b"\r\r"),
        ("data-spaces=0", b"data:{"),
        ("data-spaces=2", b"data:  {"),
        ("sse-event=delta", b"event: delta\ndata: "),
        ("sse-id", b"id: 1\ndata: "),
        ("sse-id=after", b"\nid: 1\n\n"),
        ("sse-retry=5", b"retry: 5\ndata: "),
        ("comment", b": keep-alive\n\ndata: "),
        ("comment-in-block", b": keep-alive\ndata: "),
        ("comment-in-block=after", b"\n: keep-alive\n\n"),
        ("bom", b"\xef\xbb\xbfdata: "),
    ],
)
def test_framing_changes_the_bytes_and_not_the_events(
    stub: Serving, fault: str, sign: bytes
) -> None:
    reply = chat(stub.url, fault)
    assert sign in reply.body
    assert sign not in chat(stub.url).body
    assert [_timeless(d) for d in reply.data] == [_timeless(d) for d in chat(stub.url).data]


def _timeless(data: str) -> Any:
    if data.strip() == "[DONE]":
        return data.strip()
    chunk = json.loads(data)
    usage = chunk.get("usage") or {}
    usage.pop("prompt_tokens_details", None)
    return {key: value for key, value in chunk.items() if key not in ("id", "created")}


def test_cr_only_has_no_line_feed_between_events(stub: Serving) -> None:
    assert b"\n" not in chat(stub.url, "cr").body


def test_the_last_blank_line_may_be_missing(stub: Serving) -> None:
    assert chat(stub.url, "no-final-blank").body.endswith(b"data: [DONE]\n")
    assert not chat(stub.url, "no-final-blank").body.endswith(b"\n\n")


def test_pings_come_while_nothing_else_does(stub: Serving) -> None:
    reply = chat(stub.url, "ping=10,stall=65:2")
    assert 1 <= reply.body.count(b": ping\n\n") <= 7
    assert reply.data[-1] == "[DONE]"


# ---- packets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [1, 5, 6, 7, 20, 100, 239])
def test_cut_splits_each_event_at_a_byte(stub: Serving, byte: int) -> None:
    reply = chat(stub.url, f"cut={byte}:0")
    whole = chat(stub.url)
    assert len(reply.chunks) > len(whole.chunks)
    assert len(reply.chunks[0]) == byte
    assert [_timeless(d) for d in reply.data] == [_timeless(d) for d in whole.data]


def test_cut_inside_a_character(stub: Serving) -> None:
    reply = complete(stub.url, "cut-utf8=0", max_tokens=400, ignore_eos=True)
    broken = 0
    for part in reply.chunks:
        try:
            part.decode()
        except UnicodeDecodeError:
            broken += 1
    assert broken >= 2
    assert "\ufffd" not in reply.text


def test_cut_between_cr_and_lf(stub: Serving) -> None:
    reply = chat(stub.url, "crlf,cut-crlf=0")
    assert any(part.endswith(b"\r") for part in reply.chunks)
    assert any(part.startswith(b"\n") for part in reply.chunks)
    assert reply.data[-1] == "[DONE]"


def test_drip_is_a_byte_a_write(stub: Serving) -> None:
    reply = complete(stub.url, "drip", max_tokens=2)
    assert all(len(part) == 1 for part in reply.chunks)
    assert reply.data[-1] == "[DONE]"


def test_events_per_packet_and_burst(stub: Serving) -> None:
    assert len(chat(stub.url).chunks) > 5
    reply = chat(stub.url, "events-per-packet=3")
    sizes = [len(sse(part)) for part in reply.chunks]
    assert set(sizes[:-1]) == {3}
    burst = chat(stub.url, "burst")
    assert len(burst.chunks) == 1
    assert len(burst.data) == len(chat(stub.url).data)


LINES = st.sampled_from(["", "crlf", "cr"])
FRAMING = st.sets(
    st.sampled_from(
        [
            "data-spaces=0",
            "sse-event",
            "sse-id",
            "sse-id=after",
            "sse-retry",
            "comment",
            "comment-in-block",
            "comment-in-block=after",
            "bom",
        ]
    ),
    max_size=5,
)
PACKETS = st.one_of(
    st.just("plain-body"),
    st.just("drip"),
    st.just("cut-utf8=0"),
    st.integers(1, 400).map("cut={}:0".format),
    st.integers(1, 9).map("events-per-packet={}".format),
    st.just("burst"),
)


@settings(max_examples=40, deadline=None)
@given(lines=LINES, framing=FRAMING, packets=st.sets(PACKETS, max_size=2))
def test_framing_and_packets_never_change_the_events(
    stub: Serving, lines: str, framing: set[str], packets: set[str]
) -> None:
    faults = [fault for fault in (lines, *framing, *packets) if fault]
    reply = chat(stub.url, ",".join(faults), max_tokens=9)
    assert [_timeless(d) for d in reply.data] == [
        _timeless(d) for d in chat(stub.url, max_tokens=9).data
    ]


@settings(max_examples=40, deadline=None)
@given(
    usage=st.sampled_from(["", "final", "last-choice", "continuous", "null", "absent", "wrong"]),
    finish=st.sampled_from(["", "finish-own", "no-finish", "finish-reason=abort"]),
    end=st.sampled_from(["", "no-done", "double-done"]),
    ask=st.sampled_from([chat, complete]),
)
def test_usage_finish_and_end_combine(
    stub: Serving, usage: str, finish: str, end: str, ask: Any
) -> None:
    faults = [f for f in (f"usage={usage}" if usage else "", finish, end) if f]
    reply = ask(stub.url, ",".join(faults), max_tokens=7, return_token_ids=True)
    told = [chunk["usage"] for chunk in reply.chunk_objects if chunk.get("usage")]
    assert bool(told) == (usage not in ("null", "absent"))
    if told:
        assert told[-1]["completion_tokens"] == 7 + (usage == "wrong")
    reasons = [c["finish_reason"] for c in reply.choices if c["finish_reason"]]
    assert reasons == {"no-finish": [], "finish-reason=abort": ["abort"]}.get(finish, ["length"])
    assert reply.data.count("[DONE]") == {"no-done": 0, "double-done": 2}.get(end, 1)
    assert sum(len(c.get("token_ids") or ()) for c in reply.choices) == 7
    assert reply.complete


# ---- metrics ------------------------------------------------------------------------------------


def test_two_engines_share_the_counters(fresh: Serving) -> None:
    complete(fresh.url, "engine=1")
    complete(fresh.url)
    series = samples(fresh.url)["vllm:generation_tokens_total"]
    assert sorted(series.values()) == [12, 12]
    queries = samples(fresh.url)["vllm:prefix_cache_queries_total"]
    assert len(set(queries.values())) == 1
    assert {labels.split(",")[0] for labels in series} == {'engine="0"', 'engine="1"'}


def test_a_second_engine_appears_when_asked(fresh: Serving) -> None:
    assert len(samples(fresh.url)["vllm:num_requests_running"]) == 1
    assert len(samples(fresh.url, "metrics-two-engines")["vllm:num_requests_running"]) == 2


def test_restart_resets_counters_and_created(fresh: Serving) -> None:
    complete(fresh.url)
    before = samples(fresh.url)
    complete(fresh.url, "metrics-restart=2,step-tokens=1;1")
    after = samples(fresh.url)
    assert total(before, "vllm:generation_tokens_total") == 12
    assert total(after, "vllm:generation_tokens_total") == 10
    name = "vllm:generation_tokens_created"
    assert total(after, name) > total(before, name)
    assert post(fresh.url, "/stub/restart", {}).status == 200
    assert total(samples(fresh.url), "vllm:generation_tokens_total") == 0


def test_missing_broken_and_infinite_families(fresh: Serving) -> None:
    name = "vllm:generation_tokens_total"
    assert name not in samples(fresh.url, f"metrics-missing={name}")
    nan = total(samples(fresh.url, f"metrics-nan={name}"), name)
    assert nan != nan
    assert total(samples(fresh.url, f"metrics-inf={name}"), name) == float("inf")
    bare = samples(fresh.url, "metrics-no-created")
    assert name in bare
    assert not any(n.endswith("_created") for n in bare)
    assert "engine= 0" in get(fresh.url, "/metrics", "metrics-garbage").text


def test_every_second_scrape_comes_from_another_process(fresh: Serving) -> None:
    complete(fresh.url)
    fresh.faults("/metrics:metrics-alternate")
    seen = [total(samples(fresh.url), "vllm:generation_tokens_total") for _ in range(4)]
    assert seen == [12, 0, 12, 0]
    fresh.faults()
    assert total(samples(fresh.url), "vllm:generation_tokens_total") == 12


def test_counters_lag(fresh: Serving) -> None:
    complete(fresh.url, "metrics-lag=400")
    assert total(samples(fresh.url), "vllm:generation_tokens_total") == 0
    assert total_when(fresh, "vllm:generation_tokens_total", 12) == 12


def test_cut_drafts_may_be_counted(fresh: Serving) -> None:
    fault = "acceptance=1,draft-tokens=3"
    complete(fresh.url, fault, max_tokens=7)  # 1, 4 and 2 of 4 tokens
    name = "vllm:spec_decode_num_accepted_tokens_total"
    assert total(samples(fresh.url), name) == 3 + 1
    complete(fresh.url, fault + ",count-cut-drafts", max_tokens=7)
    scrape = samples(fresh.url)
    assert total(scrape, name) == 4 + 3 + 3
    assert total(scrape, "vllm:generation_tokens_total") == 14


def test_foreign_requests(fresh: Serving) -> None:
    complete(fresh.url, "foreign=4,stall=60:1")
    scrape = samples(fresh.url)
    assert total(scrape, "vllm:request_success_total") == 2
    assert total(scrape, "vllm:generation_tokens_total") == 16
    complete(fresh.url, "foreign-running=400")
    scrape = samples(fresh.url)
    assert total(scrape, "vllm:num_requests_running") == 1
    assert total(scrape, "vllm:request_success_total") == 3
    assert total_when(fresh, "vllm:num_requests_running", 0) == 0
    assert total_when(fresh, "vllm:request_success_total", 4) == 4


def test_the_wall_clock_steps_and_the_decode_time_does_not(fresh: Serving) -> None:
    name = "vllm:e2e_request_latency_seconds_sum"
    complete(fresh.url, "wall-step=100:2")
    scrape = samples(fresh.url)
    assert total(scrape, name) > 99
    assert total(scrape, "vllm:request_decode_time_seconds_sum") < 10
    complete(fresh.url)
    assert abs(fresh.server.wall() - time.time() - 100) < 1


# ---- other endpoints ----------------------------------------------------------------------------


def test_tokenize_and_reset(stub: Serving) -> None:
    body = {"prompt": "Say something."}
    count = post(stub.url, "/tokenize", body).json()["count"]
    assert post(stub.url, "/tokenize", body, "tokenize-404").status == 404
    assert post(stub.url, "/tokenize", body, "tokenize-count=3").json()["count"] == count + 3
    reset = post(stub.url, "/reset_prefix_cache", {}, "reset-false")
    assert (reset.status, reset.json()) == (200, {"success": False})


# ---- switching ----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_drafts_of_one_request_need_a_server_that_drafts(engine: str) -> None:
    with serve(engine=engine, draft_tokens=0, round_ms=1, prefill_ms=1, realtime=False) as plain:
        answer = complete(plain.url, "draft-tokens=2")
        assert (answer.status, "without drafts" in answer.text) == (400, True)
        assert complete(plain.url).status == 200


def test_a_fault_comes_by_header_field_profile_or_for_a_path(stub: Serving) -> None:
    assert "[DONE]" not in complete(stub.url, x_stub_fault="no-done").data
    assert "[DONE]" not in complete(stub.url, x_stub_fault=["no-done", "crlf"]).data
    with serve(round_ms=1, prefill_ms=1, fault=["/v1/completions:no-done"]) as always:
        assert "[DONE]" not in complete(always.url).data
        assert "[DONE]" in chat(always.url).data
        assert post(always.url, "/stub/faults", {"faults": ["double-done"]}).json() == {
            "faults": ["double-done"]
        }
        assert complete(always.url).data.count("[DONE]") == 2
        assert post(always.url, "/stub/faults", {"faults": ["nonsense"]}).status == 400


def test_unknown_faults_are_refused_with_the_valid_ones(stub: Serving) -> None:
    reply = complete(stub.url, "no-such")
    assert reply.status == 400
    assert "no-done" in reply.json()["error"]["message"]
    assert complete(stub.url, "cut=abc").status == 400
    for wrong in ("usage=sideways", "error=mid:x", "flood=long:x", "cut=1:2:3", "at=1;x"):
        assert complete(stub.url, wrong).status == 400
    with pytest.raises(UsageError, match="takes no argument"):
        parse(["crlf=1"])
    with pytest.raises(UsageError, match="unknown fault"):
        serve(fault=["nonsense"]).__enter__()


def test_every_fault_is_described() -> None:
    lines = describe().splitlines()
    assert len(lines) == len(FAULTS)
    for name, fault in FAULTS.items():
        assert fault.help
        assert bool(fault.arg) >= bool(fault.default)
        assert any(line.startswith(name) for line in lines)


# ---- the ground truth ---------------------------------------------------------------------------


def test_the_truth_holds_every_byte_in_order(fresh: Serving, tmp_path: Path) -> None:
    body = {"prompt": "a", "max_tokens": 20, "stream": True}
    with connect(fresh.url) as sock:
        sock.sendall(request_bytes("POST", "/v1/completions", body, "", {"connection": "close"}))
        raw = b"".join(iter(lambda: sock.recv(65536), b""))
    lines = fresh.truth()
    assert [line["offset"] for line in lines] == [
        sum(before["bytes"] for before in lines[:i]) for i in range(len(lines))
    ]
    assert sum(line["bytes"] for line in lines) == len(raw)
    stamps = [stamp for line in lines for stamp in (line["before_ns"], line["after_ns"])]
    assert stamps == sorted(stamps)
    assert sum(line["tokens"] for line in lines) == 20
    for line in lines:
        piece = raw[line["offset"] : line["offset"] + line["bytes"]]
        if line["kind"] == "token":
            assert parse_reply(b"HTTP/1.1 200 OK\r\n\r\n" + piece).body.count(b"data: ") == 1
    assert [json.loads(row) for row in get(fresh.url, "/stub/truth").text.splitlines()] == lines


def test_the_truth_goes_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "truth.jsonl"
    with serve(round_ms=1, prefill_ms=1, truth=str(file)) as stub:
        complete(stub.url)
        kept = stub.truth()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[: len(kept)] == kept
    assert {"head", "token", "finish", "usage", "done", "end"} <= {row["kind"] for row in rows}


def test_what_the_kernel_does_not_take_at_once_is_noted_when_it_goes(fresh: Serving) -> None:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = fresh.url.removeprefix("http://").split(":")
    sock.connect((host, int(port)))
    sock.sendall(
        request_bytes(
            "POST",
            "/v1/completions",
            {"prompt": "a", "max_tokens": 1, "stream": True},
            "flood=line:8000000",
            {"connection": "close"},
        )
    )
    read = 0
    while data := sock.recv(65536):
        read += len(data)
    sock.close()
    lines = fresh.truth()
    assert read == sum(line["bytes"] for line in lines)
    assert any(line["kind"] == "rest" for line in lines)
