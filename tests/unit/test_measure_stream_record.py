"""What a stream's bytes mean: tokens, times, channels, ends. Times are given, none is taken."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_dsv41.engines import Server
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused
from pytest_dsv41.measure.metrics import values_of
from pytest_dsv41.measure.stream import StreamRecord, read_pieces
from pytest_dsv41.measure.wire import Read

MS = 1_000_000


def chunk(text: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text or "", "finish_reason": more.pop("finish", None)}
    choice |= {key: more.pop(key) for key in ("logprobs", "token_ids") if key in more}
    return {"choices": [choice], **more}


def delta(finish: str | None = None, usage: Any = None, **fields: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}
    return body if usage is None else {**body, "usage": {"completion_tokens": usage}}


def total(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


def record(*groups: list[Any] | dict[str, Any], done: bool = True, **spread: Any) -> StreamRecord:
    """One read a group, 10 ms apart from 10 ms on; an event is a JSON object or bytes."""
    pieces: list[tuple[int, bytes]] = []
    reads: list[Read] = []
    for index, group in enumerate([*groups, *([[b"data: [DONE]\n\n"]] if done else [])]):
        events = group if isinstance(group, list) else [group]
        data = b"".join(
            event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
            for event in events
        )
        at = (index + 1) * 10 * MS
        pieces.append((index, data))
        late = spread.get("late") == index
        floor = at - 9 * MS if late else at - MS // 2
        reads.append(Read(at, at - (MS if late else 0), 0, len(data), 5, floor, late))
    return read_pieces(
        pieces, reads, offset_ns=0, start_ns=0, send_ns=0, end_ns=10**9, prompt_sha256="0" * 64
    )


def test_text_that_looks_like_the_protocol_stays_text() -> None:
    text = 'data: x\n\ndata: [DONE]\n\n: {"error": 1}'
    assert record(chunk(text, finish="stop"), total(5)).text == text


def test_final_usage_alone_tells_no_first_event() -> None:
    stream = record(chunk("a b"), chunk("c", finish="length"), total(3))
    assert (stream.completion_tokens, stream.first_tokens) == (3, None)


def test_usage_in_the_last_choice_is_a_total_and_not_that_events_tokens() -> None:
    last = chunk("c", finish="length", usage={"completion_tokens": 3})
    stream = record(chunk("a"), chunk("b"), last)
    assert [event.tokens for event in stream.events] == [None, None, None]
    assert stream.completion_tokens == 3


def test_token_ids_count_where_usage_does_not() -> None:
    stream = record(chunk("a b", token_ids=[1, 2]), chunk("", token_ids=[3], finish="length"))
    assert (stream.completion_tokens, stream.count_source) == (3, "token_ids")
    assert [event.tokens for event in stream.events] == [2, 1]


def test_a_token_without_text_is_the_first_token() -> None:
    stream = record(chunk("", token_ids=[1]), chunk("é", token_ids=[2], finish="length"))
    assert stream.first_token_ns == 10 * MS


def test_token_ids_that_contradict_usage_are_refused() -> None:
    with pytest.raises(MeasurementRefused) as refused:
        record(chunk("a", token_ids=[1]), chunk("b", token_ids=[2], finish="length"), total(3))
    assert refused.value.kind == "usage"


@pytest.mark.parametrize("logprobs", [
    {"content": [{"token": "a"}, {"token": "b"}]},
    {"tokens": ["a", "b"], "token_logprobs": [-1, -2]},
])  # fmt: skip
def test_logprobs_entries_count_in_each_of_their_forms(logprobs: dict[str, Any]) -> None:
    stream = record(chunk("ab", logprobs=logprobs, finish="length"))
    assert (stream.completion_tokens, stream.count_source) == (2, "logprobs")


def test_both_names_of_one_reasoning_text_count_once() -> None:
    both = delta(reasoning="hm", reasoning_content="hm", usage=1)
    stream = record(delta(role="assistant", content="", usage=0), both,
                    delta(content="x", finish="stop", usage=2))  # fmt: skip
    assert stream.events[1].channels == ("reasoning",)
    assert stream.first_content_ns == 30 * MS


def test_any_field_with_text_is_a_channel() -> None:
    stream = record(delta(inner_voice="psst", usage=1), delta(finish="stop", usage=1))
    assert stream.events[0].channels == ("inner_voice",)
    assert stream.first_token_ns == 10 * MS


def test_a_tool_call_is_tokens_without_content() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    stream = record(delta(tool_calls=call, usage=4), delta(finish="tool_calls", usage=4))
    assert stream.first_content_ns is None
    assert stream.completion_tokens == 4


def test_the_output_hash_depends_on_every_channel_and_on_no_cut() -> None:
    one = record(delta(content="ab", usage=2), delta(finish="stop", usage=2))
    two = record(delta(content="a", usage=1), delta(content="b", usage=2, finish="stop"))
    other = record(delta(reasoning="ab", usage=2), delta(finish="stop", usage=2))
    assert one.output_sha256 == two.output_sha256 != other.output_sha256


def test_the_first_token_among_merged_events_has_no_time_of_its_own() -> None:
    events = [
        chunk("a", usage={"completion_tokens": 1}),
        chunk("b", usage={"completion_tokens": 2}),
    ]
    rest = chunk("c", finish="length", usage={"completion_tokens": 3})
    stream = record(events, rest, late=0)
    assert stream.first_merged
    assert [event.merged for event in stream.events] == [True, False, False]
    assert not record(events, rest).first_merged


def test_the_last_event_of_a_merged_read_keeps_its_time() -> None:
    role = delta(role="assistant", content="", usage=0)
    stream = record([role, delta(content="a", usage=1)], delta(finish="stop", usage=1), late=0)
    assert not stream.first_merged
    assert stream.first_token_ns == 9 * MS


@pytest.mark.parametrize(
    ("groups", "kind"),
    [
        ([chunk("a", finish="stop"), total(1), b"x"], "no-end"),
        ([chunk("a"), {"error": {"message": "boom", "code": 500}}], "error-event"),
        ([{"object": "error", "message": "boom"}], "error-event"),
        ([[b"data: {oops\n\n"]], "bad-event"),
        ([[b"data: 3\n\n"]], "bad-event"),
        ([chunk("", finish="stop"), total(0)], "no-token"),
        ([chunk("a"), total(1)], "no-finish"),
        ([chunk("a", finish="abort"), total(1)], "finish-abort"),
        ([{"choices": [{"index": 1, "text": "a"}]}], "choices"),
        ([chunk("a", finish="stop"), total(1), [b"data: [DONE]\n\n"], chunk("b")], "after-done"),
    ],
)
def test_what_fails_a_stream(groups: list[Any], kind: str) -> None:
    done = kind != "no-end"
    given = [[group] if isinstance(group, bytes) else group for group in groups]
    with pytest.raises(MeasurementFailed) as failed:
        record(*given, done=done)
    assert failed.value.kind == kind


def test_a_record_comes_back_from_json_and_holds_no_text() -> None:
    stream = record(delta(role="assistant", content="", usage=0), delta(content="secret", usage=1),
                    delta(finish="stop", usage=1))  # fmt: skip
    data = json.loads(json.dumps(stream.to_json()))
    assert "secret" not in json.dumps(data)
    assert StreamRecord.from_json(data) == stream


def test_llamacpp_counts_each_event_by_its_timings() -> None:
    def token(text: str, n: int) -> dict[str, Any]:
        return chunk(text, timings={"predicted_n": n, "predicted_ms": 1.0, "cache_n": 4})

    end = chunk("", finish="length", usage={"completion_tokens": 3},
                timings={"predicted_n": 3, "predicted_ms": 9.0, "cache_n": 4})  # fmt: skip
    stream = record(token("a", 1), [token("b", 2), token("c", 3)], end)
    assert [event.tokens for event in stream.events] == [1, 1, 1, 0]
    assert (stream.last_token_ns, stream.cached_tokens) == (20 * MS, 4)


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": ["x"]}\n\n',
        b"data: " + b"[" * 99999 + b"\n\n",
        b'data: {"choices": [], "usage": {"completion_tokens": NaN}}\n\n',
        b'data: {"choices": [], "timings": {"predicted_ms": 1e999}}\n\n',
        b'data: {"choices": [], "metrics": {"generation_time_ms": -Infinity}}\n\n',
    ],
    ids=["number", "string", "deep", "nan", "too-large", "infinity"],
)
def test_an_event_of_another_shape_fails_by_name(event: bytes) -> None:
    with pytest.raises(MeasurementFailed) as failed:
        record([event])
    assert failed.value.kind == "bad-event"


def usage(**more: Any) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, **more},
    }


def cached(count: Any) -> dict[str, Any]:
    return usage(prompt_tokens_details={"cached_tokens": count})


WRONG_COUNTS = [True, -1, 2.5, 2**53 + 1, 10**400, "3", [3]]


@pytest.mark.parametrize("value", WRONG_COUNTS, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "total_tokens", "cached"])
def test_a_count_that_counts_no_tokens_is_refused_by_name(name: str, value: Any) -> None:
    last = cached(value) if name == "cached" else usage(**{name: value})
    with pytest.raises(MeasurementRefused, match=f"^{name}.* is not a whole number") as refused:
        record(chunk("a b", finish="stop"), last)
    assert refused.value.kind == "usage"


@pytest.mark.parametrize(
    "last",
    [
        usage(total_tokens=6),
        cached(4),
        usage(prompt_tokens_details=[1]),
        usage(prompt_tokens_details="none"),
        {"choices": [], "usage": [3, 2]},
        {"choices": [], "usage": 5},
        {**usage(), "timings": {"cache_n": 10**400}},
        {**usage(), "timings": {"predicted_n": 10**400}},
    ],
    ids=["total", "cached", "list", "text", "usage-list", "usage-number", "cache_n", "predicted_n"],
)
def test_usage_that_contradicts_itself_or_has_another_shape_is_refused(last: Any) -> None:
    with pytest.raises(MeasurementRefused) as refused:
        record(chunk("a b", finish="stop"), last)
    assert refused.value.kind == "usage"


def test_counts_at_their_bounds_and_absent_details_are_taken() -> None:
    stream = record(chunk("a b", finish="stop"), cached(3))
    assert (stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens) == (3, 2, 3)
    large = record(chunk("a", finish="stop"), usage(prompt_tokens=2**53, total_tokens=None))
    assert large.prompt_tokens == 2**53
    absent = record(chunk("a", finish="stop", usage=None), usage(prompt_tokens_details=None))
    assert absent.cached_tokens is None


def test_an_error_that_is_null_is_none() -> None:
    assert record(chunk("a", finish="stop", error=None), total(1)).completion_tokens == 1


def test_a_value_says_whose_stamps_it_rests_on() -> None:
    stream = record(
        chunk("a", usage={"completion_tokens": 1}),
        chunk("b", finish="stop", usage={"completion_tokens": 2}),
        total(2),
    )
    sources = ("kernel", "read")
    events = tuple(
        replace(event, source=source)
        for event, source in zip(stream.events, (*sources, "kernel"), strict=True)
    )
    given = replace(stream, events=events, first_source="kernel")
    server = Server(requests=1, tokens=2, decode_ms=10.0, accepted=0, cached_tokens=0)
    values, _ = values_of([given], server)
    assert {name: value.parts.get("stamps") for name, value in values.items()} == {
        "ttft_ms": ["kernel"],
        "prefill_tok_s": ["kernel"],
        "decode_tok_s": ["kernel", "read"],
        "client_tok_s": ["read"],
        "ms_per_round": None,
        "rounds": None,
    }


@pytest.mark.parametrize("reason", [0, 1.5, True, {"type": "stop"}, []])
def test_a_finish_reason_that_is_no_string_fails_by_name(reason: Any) -> None:
    with pytest.raises(MeasurementFailed, match="finish_reason") as failed:
        record(chunk("a", finish=reason), total(1))
    assert failed.value.kind == "bad-event"


@pytest.mark.parametrize(
    "data", [b'{"message": "out of memory"}', b"out of memory", b'"out of memory"']
)
def test_an_event_named_error_is_an_error_whatever_it_holds(data: bytes) -> None:
    with pytest.raises(MeasurementFailed, match=r"^out of memory$") as failed:
        record(chunk("a"), [b"event: error\ndata: " + data + b"\n\n"])
    assert failed.value.kind == "error-event"
