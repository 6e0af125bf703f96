"""What others measured wrong, each with the right value: streams against the stub's truth."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator

import pytest
from stub_wire import post
from wire_groups import COMPLETIONS, at, endpoint, kind_of, left, measure, one, requests, stub

from pytest_dsv41.engines import Server
from pytest_dsv41.measure import Request, StreamRecord, measure_group
from pytest_dsv41.measure.metrics import values_of
from pytest_dsv41.measure.wire import Call, Exchange, Limits, Loop
from pytest_dsv41.stub import Serving


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with stub(round_ms=8.0) as running:
        yield running


_plain: dict[tuple[str, str], StreamRecord] = {}


def plainly(served: Serving, api: str) -> StreamRecord:
    """The stream without any fault, measured once."""
    key = (served.url, api)
    if key not in _plain:
        _plain[key] = one(served, api=api, tokens=6)
    return _plain[key]


def test_the_role_chunk_is_not_the_first_token(served: Serving) -> None:
    stream = one(served, "role-early=5", "at=60", api="chat")
    (role,), tokens = left(served, "role"), left(served)
    assert at(stream.role_ns, role)
    assert at(stream.first_token_ns, tokens[0])
    assert stream.first_token_ns - stream.start_ns >= 55_000_000


def test_a_role_after_the_first_prefill_piece_makes_no_gap_between_tokens(served: Serving) -> None:
    stream = one(served, "role-early=60", "at=150;152;154", tokens=3, api="chat")
    tokens = left(served)
    assert at(stream.first_token_ns, tokens[0])
    assert stream.ms_per_event is not None
    assert stream.ms_per_event < 45  # a role taken for a token would make it 45 and more


def test_per_event_and_per_token_are_told_apart(served: Serving) -> None:
    stream = one(served, "tokens-per-event=3", tokens=10)
    assert [event.tokens for event in stream.events if event.tokens] == [1, 3, 3, 3]
    assert stream.ms_per_event == pytest.approx(3 * (stream.ms_per_token or 0))


def test_ms_per_token_times_tokens_per_second_is_a_thousand() -> None:
    with stub(draft_tokens=3, acceptance=(0.9,), round_ms=25.0) as served:
        result = measure(served, tokens=32)
        (stream,) = result.streams
        assert stream.ms_per_token is not None
        assert stream.ms_per_token * result.values["decode_tok_s"].value == pytest.approx(1000)
        assert max(event.tokens or 0 for event in stream.events) > 1


def test_tokens_are_usage_and_not_the_number_of_chunks(served: Serving) -> None:
    result = measure(served, "tokens-per-event=4", tokens=17)
    (stream,) = result.streams
    assert stream.completion_tokens == 17
    span = (stream.last_token_ns - stream.start_ns) / 1e9
    assert result.values["client_tok_s"].value == pytest.approx(17 / span)


def test_a_first_event_of_five_tokens_leaves_the_divisor(served: Serving) -> None:
    stream = one(served, "step-tokens=5;1;1;1;1;1", "round-ms=30", tokens=10)
    assert stream.first_tokens == 5
    values, _ = values_of([stream], Server(requests=1, tokens=10))
    span = (stream.last_token_ns - stream.first_token_ns) / 1e9
    assert values["decode_tok_s"].value == pytest.approx(5 / span)


def test_five_tokens_in_a_step_of_a_server_without_drafts_are_refused(served: Serving) -> None:
    assert kind_of(served, "step-tokens=5;1;1;1;1;1", tokens=10) == "refused:identity"


def test_the_first_token_is_no_interval(served: Serving) -> None:
    stream = one(served, "prefill-ms=40", tokens=6)
    tokens = [event for event in stream.events if event.kind == "token"]
    assert len(tokens) == 6
    span = (stream.last_token_ns - stream.first_token_ns) / 1e6
    assert stream.ms_per_event == pytest.approx(span / 5)


def test_a_late_usage_chunk_prolongs_nothing(served: Serving) -> None:
    stream = one(served, "usage-late=80", tokens=4)
    assert at(stream.last_token_ns, left(served)[-1])
    assert stream.usage_ns is not None
    assert stream.usage_ns - stream.last_token_ns >= 70_000_000


def test_a_late_done_prolongs_nothing(served: Serving) -> None:
    stream = one(served, "done-late=60", tokens=4)
    assert at(stream.last_token_ns, left(served)[-1])
    assert stream.end_ns - stream.last_token_ns >= 50_000_000


def test_the_usage_chunk_does_not_overwrite_the_first_token(served: Serving) -> None:
    stream = one(served, "usage=final", "usage-late=40", tokens=4)
    assert at(stream.first_token_ns, left(served)[0])
    assert stream.completion_tokens == 4


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking", "both"])
def test_a_reasoning_token_is_a_token_whatever_its_field(served: Serving, field: str) -> None:
    stream = one(served, "reasoning=3", f"reasoning-field={field}", tokens=6, api="chat")
    tokens = left(served)
    assert at(stream.first_token_ns, tokens[0])
    assert at(stream.first_content_ns, tokens[3])
    assert stream.completion_tokens == 6


def test_a_stream_of_reasoning_only_has_tokens_and_no_content(served: Serving) -> None:
    stream = one(served, "reasoning-only", tokens=5, api="chat")
    assert at(stream.first_token_ns, left(served)[0])
    assert stream.first_content_ns is None
    assert stream.completion_tokens == 5


def test_no_usage_is_never_made_up_from_chunks_or_text(served: Serving) -> None:
    assert kind_of(served, "usage=absent") == "refused:no-usage"
    assert kind_of(served, "usage=null") == "refused:no-usage"


def test_logprobs_count_where_usage_is_missing(served: Serving) -> None:
    for api in ("completions", "chat"):
        stream = one(served, "usage=absent", "tokens-per-event=3", tokens=7, api=api, logprobs=1)
        assert (stream.completion_tokens, stream.count_source) == (7, "logprobs")


@pytest.mark.parametrize("api", ["completions", pytest.param("chat", marks=pytest.mark.slow)])
def test_large_chunks_are_stamped_at_the_read_and_not_after_parsing(
    served: Serving, api: str
) -> None:
    # Twenty alternatives a token, eight tokens an event: tens of kilobytes to parse.
    stream = one(served, "tokens-per-event=8", "round-ms=20", tokens=33, api=api, logprobs=20)
    tokens = [event for event in stream.events if event.kind == "token"]
    assert max(event.size for event in tokens) > 5_000
    for event, write in zip(tokens, left(served), strict=True):
        assert at(event.t_ns, write)
    assert stream.completion_tokens == 33


def test_prompt_tokens_are_the_servers(served: Serving) -> None:
    result = measure(served)
    (stream,) = result.streams
    assert stream.prompt_tokens == result.server.prompt_tokens
    assert stream.prompt_tokens


def test_prompt_tokens_of_a_conversation_are_the_servers_own(served: Serving) -> None:
    said = [("system", "Be brief."), ("user", "Hello, é."), ("assistant", "Hi."), ("user", "More?")]
    messages = tuple({"role": role, "content": content} for role, content in said)
    conversation = Request(6, messages=messages, api="chat", seed=1)
    result = measure_group(endpoint(served), [conversation], deadline_s=20)
    asked = {"messages": messages, "add_generation_prompt": True, "add_special_tokens": False}
    told = post(served.url, "/tokenize", asked).json()["count"]
    assert result.streams[0].prompt_tokens == result.server.prompt_tokens == told
    # Several messages are identified by their canonical JSON: sorted keys, no spaces.
    canonical = json.dumps(list(messages), sort_keys=True, separators=(",", ":"))
    assert result.prompt_sha256 == hashlib.sha256(canonical.encode()).hexdigest()


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_exactly_as_many_tokens_as_asked_come_where_the_model_would_end(api: str) -> None:
    with stub(eos_tokens=5) as served:
        assert measure(served, tokens=12, api=api).server.tokens == 12
        (ended,) = measure(served, tokens=12, api=api, ignore_eos=False).streams
        # The end-of-text token counts.
        assert (ended.completion_tokens, ended.finish_reason) == (6, "stop")


@pytest.mark.parametrize("place", ["continuous", "final", "last-choice"])
@pytest.mark.parametrize("finish", ["", "finish-own=10"])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_usage_is_the_last_cumulative_value_wherever_it_stands(
    served: Serving, place: str, finish: str, api: str
) -> None:
    faults = [f"usage={place}", *([finish] if finish else [])]
    stream = one(served, *faults, tokens=9, api=api)
    assert stream.completion_tokens == 9
    assert at(stream.first_token_ns, left(served)[0])
    last = left(served)[-1]
    if place == "final" and not finish:
        # The usage leaves right behind the last token and may share its read.
        last = last[0], left(served, "usage")[-1][1]
    assert at(stream.last_token_ns, last)


@pytest.mark.parametrize("wrong", ["nonmonotonic", "delta"])
def test_usage_that_is_not_cumulative_is_refused(served: Serving, wrong: str) -> None:
    assert kind_of(served, f"usage={wrong}") == "refused:usage"


def test_wrong_usage_is_refused_against_what_was_asked_and_counted(served: Serving) -> None:
    assert kind_of(served, "usage=wrong:1") in ("failed:delivered", "refused:usage")


@pytest.mark.parametrize("where", ["first", "mid:3", "after-finish"])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_an_error_event_in_a_200_stream_fails_it(served: Serving, where: str, api: str) -> None:
    assert kind_of(served, f"error={where}", api=api) == "failed:error-event"


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_fewer_tokens_than_asked_fail_under_ignore_eos(served: Serving, reason: str) -> None:
    assert kind_of(served, f"finish-early=3:{reason}") == "failed:delivered"


def test_a_finish_for_length_must_have_the_length(served: Serving) -> None:
    assert kind_of(served, "finish-early=3:length", ignore_eos=False) == "failed:delivered"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("eof=3", "failed:no-end"),
        ("no-done", "failed:no-end"),
        ("chunk-cut=3", "failed:cut"),
        ("reset=3", "failed:reset"),
        ("no-finish", "failed:no-finish"),
        ("finish-reason=abort", "failed:finish-abort"),
        ("json-body", "failed:not-a-stream"),
        ("status=429:1", "failed:http-429"),
        ("status=503:1", "failed:http-503"),
    ],
)
def test_what_does_not_end_well_fails_by_name(served: Serving, fault: str, kind: str) -> None:
    assert kind_of(served, fault) == kind


def test_nothing_is_retried(served: Serving) -> None:
    began = len(served.truth("head"))
    # Only the first request is turned away: a second try would have been a stream.
    assert kind_of(served, "status=429:1") == "failed:http-429"
    assert len(served.truth("head")) == began
    assert one(served).completion_tokens == 8


@pytest.mark.parametrize(
    "fault",
    [
        "data-spaces=0",
        "data-spaces=2",
        "crlf",
        "cr",
        "bom",
        "sse-event=message",
        "sse-id=before",
        "sse-id=after",
        "sse-retry=3000",
        "comment",
        "comment-in-block=before",
        "comment-in-block=after",
        "ping=1",
        "drip",
        "cut=10:1",
        "cut-utf8=1",
        "plain-body",
        "slow-headers=30",
        "double-done",
        "no-final-blank",
        "role-absent",
        "role-null",
        "role-bare",
        "role-with-token",
        "role-late",
    ],
)
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_another_way_to_write_the_same_stream_reads_the_same(
    served: Serving, fault: str, api: str
) -> None:
    plain = plainly(served, api)
    stream = one(served, fault, api=api, tokens=6)
    assert stream.text == plain.text
    assert stream.output_sha256 == plain.output_sha256
    assert [event.tokens for event in stream.events if event.kind == "token"] == [1] * 6
    assert stream.finish_reason == "length"


def test_crlf_cut_between_its_bytes_reads_the_same(served: Serving) -> None:
    assert one(served, "crlf", "cut-crlf=1").text == one(served).text


def test_events_of_one_packet_are_events_of_one_time(served: Serving) -> None:
    stream = one(served, "events-per-packet=5", tokens=10)
    tokens = [event for event in stream.events if event.kind == "token"]
    assert len(tokens) == 10
    assert tokens[0].t_ns == tokens[4].t_ns
    assert all(event.burst for event in tokens)


def test_a_finish_event_without_text_is_no_token(served: Serving) -> None:
    stream = one(served, "finish-own=50", tokens=5, api="chat")
    assert at(stream.last_token_ns, left(served)[-1])
    assert stream.finish_ns is not None
    assert stream.finish_ns - stream.last_token_ns >= 40_000_000


def test_tokens_without_text_are_counted_by_the_server(served: Serving) -> None:
    stream = one(served, "hold-text=3", tokens=8)
    tokens = [event for event in stream.events if event.kind == "token"]
    assert sum(event.tokens or 0 for event in tokens) == 8
    assert at(stream.first_token_ns, left(served)[0])


def test_swallowed_tokens_are_counted_with_the_next_event(served: Serving) -> None:
    stream = one(served, "swallow=2", tokens=8)
    assert stream.completion_tokens == 8
    assert [event.tokens for event in stream.events if event.kind == "token"][:2] == [1, 3]


def test_a_group_with_one_failure_has_no_value() -> None:
    with stub() as served:
        assert kind_of(served, "status=500:1", count=3) == "failed:http-500"


def test_the_first_failure_ends_the_whole_group_at_once() -> None:
    with stub(round_ms=50.0) as served:
        # 4,000 rounds of 50 ms would be 200 seconds.
        fault = "chunk-cut=3"
        assert kind_of(served, fault, count=3, tokens=4000, deadline_s=600) == "failed:cut"
        assert kind_of(served, "status=500:1", count=3, tokens=4000, deadline_s=600) == (
            "failed:http-500"
        )


def test_a_hundred_and_fifty_streams_run_at_once() -> None:
    with stub(max_running=150, prefill_ms=400.0) as served:
        result = measure(served, count=150, tokens=3)
        starts = [stream.start_ns for stream in result.streams]
        firsts = [stream.first_token_ns for stream in result.streams]
        # Every request was written before the first token of any came: nothing queued here.
        assert max(starts) < min(firsts)
        assert result.server.tokens == 450


def test_a_stall_ends_at_the_deadline(served: Serving) -> None:
    assert kind_of(served, "stall=30000:2", deadline_s=1.0) == "failed:deadline"


@pytest.mark.parametrize(
    ("fault", "failure"),
    [("prefill-ms=400", None), ("stall=400:1", None), ("stall=2000:3", "stall")],
)
def test_silence_is_a_stall_only_once_tokens_came(
    served: Serving, fault: str, failure: str | None
) -> None:
    # The head comes at once; a long prompt may then be read for minutes before the first token.
    (sent,) = requests(1)
    body = json.dumps({**sent.body("stub"), "stream": True}).encode()
    headers = {"Content-Type": "application/json", "x-stub-fault": fault}
    limits = Limits(events=999, stall_s=0.15)
    until = time.monotonic_ns() + 20 * 10**9
    with Loop() as loop:
        call = Call(served.url + COMPLETIONS, "POST", headers, body, limits)
        exchange = Exchange(call, loop.connect(call.url, until))
        loop.run([exchange], deadline_ns=until)
        exchange.connection.close()
    found = exchange.result().failure
    assert (found.kind if found else None) == failure


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_end_that_no_event_tells_is_counted_and_noted(api: str) -> None:
    # llama.cpp counts the token that ends an answer and sends no event of it.
    with stub(engine="llamacpp", eos_tokens=5) as served:
        result = measure(served, tokens=20, api=api, ignore_eos=False)
    (stream,) = result.streams
    assert (stream.finish_reason, stream.completion_tokens) == ("stop", 6)
    assert sum(event.tokens or 0 for event in stream.events) in (5, 6)


def test_silence_before_the_head_ends_at_the_deadline(served: Serving) -> None:
    assert kind_of(served, "slow-headers=30000", deadline_s=1.0) == "failed:deadline"


def test_an_answer_that_never_ends_is_cut() -> None:
    with stub(round_ms=0.2) as served:
        assert kind_of(served, "endless", deadline_s=8.0) in ("failed:too-long", "failed:deadline")


@pytest.mark.parametrize("how", ["long", "line"])
def test_a_flood_is_cut_at_the_bound(how: str) -> None:
    with stub() as served:
        assert kind_of(served, f"flood={how}:33554432") == "failed:too-long"
