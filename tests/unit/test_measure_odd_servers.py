"""Whatever a server says, a request is measured, failed or refused by name: never an accident."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.durable import dump_json
from pytest_dsv41.engines import Snapshot, get_engine
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.measure.group import Endpoint, GroupResult, evaluate
from pytest_dsv41.measure.record import replay, write_record
from pytest_dsv41.measure.stream import read_pieces
from pytest_dsv41.measure.wire import Finished, Framing, Read

MS = 1_000_000
NOTHING = "nothing"
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 50),
    st.sampled_from([2**53, 2**64, -(10**30), 10**400, 0.5, -0.0, 1e300, "", "x", "12", "\ud800"]),
    st.sampled_from([[], {}, [1], ["x"], {"x": 1}, [[]], [{}], NOTHING]),
)
"""What may stand in the place of any value; `nothing` takes the key away."""


def chunks(engine: str) -> list[Any]:
    """Four tokens in three events, as each dialect sends them, with everything it can tell."""
    usage = {
        "prompt_tokens": 16, "completion_tokens": 4, "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    rows: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    for text, reached, accepted in (("a", 1, 0), ("b c", 3, 1), ("d", 4, 1)):
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}, "finish_reason": None}
        row: dict[str, Any] = {"choices": [choice]}
        if engine == "vllm":
            choice["token_ids"] = list(range(reached))[-2 if reached == 3 else -1 :]
            choice["logprobs"] = {"content": [{"token": "t"} for _ in choice["token_ids"]]}
            row["usage"] = {**usage, "completion_tokens": reached, "total_tokens": 16 + reached}
        else:
            row["timings"] = {
                "cache_n": 0, "prompt_n": 16, "predicted_n": reached,
                "predicted_ms": 10.0 * reached, "draft_n": 2 * accepted,
                "draft_n_accepted": accepted,
            }  # fmt: skip
        rows.append(row)
    rows[-1]["choices"][0]["finish_reason"] = "length"
    last: dict[str, Any] = {"choices": [], "usage": usage}
    if engine == "vllm":
        last["metrics"] = {
            "generation_time_ms": 20.0,
            "speculative_decoding": {"num_accepted_draft_tokens": 1},
        }
    else:
        last["timings"] = rows[-1]["timings"]
    return [*rows, last]


def counters(engine: str, done: int) -> Snapshot:
    """What the server counted before (0) and after (1) these tokens."""
    if engine == "llamacpp":
        names = {
            "tokens_predicted_total": 4, "prompt_tokens_total": 16, "n_decode_total": 3,
            "spec_decode_num_drafts_total": 1, "spec_decode_num_draft_tokens_total": 2,
            "spec_decode_num_accepted_tokens_total": 1,
        }  # fmt: skip
    else:
        names = {
            "request_success_total": 1, "generation_tokens_total": 4, "prompt_tokens_total": 16,
            "prefix_cache_hits_total": 0, "num_preemptions_total": 0,
            "request_decode_time_seconds_sum": 0.02, "request_decode_time_seconds_count": 1,
            "iteration_tokens_total_count": 3, "inter_token_latency_seconds_count": 2,
            "spec_decode_num_drafts_total": 1, "spec_decode_num_draft_tokens_total": 2,
            "spec_decode_num_accepted_tokens_total": 1,
            "spec_decode_num_accepted_tokens_per_pos_total": 1,
            "spec_decode_num_accepted_tokens_per_pos_total{0}": 1,
        }  # fmt: skip
    return Snapshot(done, {f"{engine}:{k}": 7.0 + done * v for k, v in names.items()}, 0.0, 0.0)


def finished(rows: list[Any]) -> Finished:
    """The exchange in which each of `rows` came as an event, 10 ms apart."""
    datas = [b"data: " + json.dumps(row).encode() + b"\n\n" for row in rows]
    datas.append(b"data: [DONE]\n\n")
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    raw = [f"{len(data):x}".encode() + b"\r\n" + data + b"\r\n" for data in datas]
    raw = [head, *raw[:-1], raw[-1] + b"0\r\n\r\n"]
    reads = [
        Read((at + 1) * 10 * MS, (at + 1) * 10 * MS, 0, len(data), 1, at * 10 * MS, False)
        for at, data in enumerate(raw)
    ]
    framing = Framing("POST")
    fed = [(index, framing.feed(data)) for index, data in enumerate(raw)]
    pieces = [(index, body) for index, body in fed if body]
    end = reads[-1].at_ns
    return Finished(200, framing.headers, None, 0, 1000, end, 0, reads, pieces, raw)


def judged(engine: str, rows: list[Any]) -> GroupResult:
    exchange = finished(rows)
    stream = read_pieces(
        exchange.pieces, exchange.reads, offset_ns=0, start_ns=0, send_ns=1000,
        end_ns=exchange.end_ns, prompt_sha256="0" * 64,
    )  # fmt: skip
    return evaluate(
        get_engine(engine), ["cold"], [stream], counters(engine, 0), counters(engine, 1)
    )


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value in a JSON document."""
    if path:
        yield path
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from leaves(inner, (*path, key))


def put(document: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy of `document` with `odd` in one place."""
    copy = json.loads(json.dumps(document))
    holder = copy
    for key in path[:-1]:
        holder = holder[key]
    if odd == NOTHING:
        del holder[path[-1]]
    else:
        holder[path[-1]] = odd
    return copy


ROWS = {engine: chunks(engine) for engine in ("vllm", "llamacpp")}


_Result = TypeVar("_Result")


def outcome(call: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """(what came of it, "") or (None, how it was refused in one line); anything else is raised."""
    try:
        return call(), ""
    except (MeasurementFailed, MeasurementRefused) as error:
        return None, f"{error.kind}: {error}"
    except UsageError as error:
        return None, f"usage error: {error}"


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_the_stream_is_one_that_is_measured(engine: str) -> None:
    result = judged(engine, ROWS[engine])
    assert (result.server.tokens, result.server.accepted, result.server.rounds) == (4, 1, 2)
    assert set(result.missing) == set()


@settings(max_examples=150, deadline=None)
@given(engine=st.sampled_from(["vllm", "llamacpp"]), data=st.data())
def test_an_odd_value_anywhere_in_a_stream_is_judged_by_name(
    engine: str, data: st.DataObject
) -> None:
    rows = ROWS[engine]
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(list(leaves(rows))))
        rows = put(rows, place, data.draw(ODD))
    result, why = outcome(lambda: judged(engine, rows))
    if result is None:
        assert not why.startswith("usage error")
        assert len(why.splitlines()) == 1
        assert len(why) < 2000
        return
    # What is measured can be kept, and is a number.
    dump_json(result.to_json())
    assert all(value.value >= 0 for value in result.values.values())


@pytest.fixture(scope="module", params=["vllm", "llamacpp"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The lines of a record, with bytes."""
    engine: str = request.param
    result = judged(engine, ROWS[engine])
    path = tmp_path_factory.mktemp("raw") / "item.jsonl"
    given = GroupResult(**{**vars(result), "exchanges": (finished(ROWS[engine]),)})
    write_record(path, Endpoint("http://h", engine), given, record="bytes")
    assert replay(path).same
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, lines: list[Any], *, redacted: bool) -> Path:
    if redacted:
        lines = json.loads(json.dumps(lines))
        if isinstance(lines[0], dict):
            lines[0]["record"] = "redacted"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@settings(max_examples=50, deadline=None)
@given(data=st.data(), redacted=st.booleans())
def test_an_edited_record_is_told_apart_or_refused(
    kept: list[Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, redacted: bool
) -> None:
    place = data.draw(st.sampled_from(list(leaves(kept))))
    path = tmp_path_factory.mktemp("edited") / "item.jsonl"
    written(path, put(kept, place, data.draw(ODD)), redacted=redacted)
    again, why = outcome(lambda: replay(path))
    if again is not None:
        assert again.same is (not again.differences)
        return
    assert len(why.splitlines()) == 1
    assert str(path) in why or not why.startswith("usage error")


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        (0, ("prompt_sha256",), "1" * 64),
        (0, ("prompt_members", 0), "1" * 64),
        (1, ("prompt_sha256",), "1" * 64),
        (1, ("output_sha256",), "1" * 64),
        (3, ("values", "ms_per_round", "value"), 9.0),
        (3, ("values", "ms_per_round", "unit"), "s"),
        (3, ("values", "ttft_ms", "parts", "largest_ms"), 1.0),
        (3, ("values", "ttft_ms"), NOTHING),
        (3, ("missing", "ttft_ms"), "a reason"),
    ],
)
def test_what_was_edited_is_named(
    kept: list[Any], tmp_path: Path, line: int, path: tuple[Any, ...], value: Any
) -> None:
    edited = put(kept, (line, *path), value)
    again = replay(written(tmp_path / "item.jsonl", edited, redacted=False))
    assert not again.same
    named = path[0] if line < 3 else path[1]
    assert any(str(named) in difference for difference in again.differences)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_record_cut_anywhere_is_no_whole_record(
    kept: list[Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = written(tmp_path_factory.mktemp("cut") / "item.jsonl", kept, redacted=False)
    whole = path.read_bytes()
    # Without its last line end it is whole.
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    with pytest.raises(UsageError, match="not a whole record"):
        replay(path)


@pytest.mark.parametrize(
    "lines", [[0, 1, 2], [0, 2, 3], [0, 1, 1, 2, 3], [0, 1, 2, 3, 3], [1, 2, 3]]
)
def test_lines_that_are_missing_or_there_twice_are_no_whole_record(
    kept: list[Any], tmp_path: Path, lines: list[int]
) -> None:
    path = written(tmp_path / "item.jsonl", [kept[line] for line in lines], redacted=False)
    with pytest.raises(UsageError, match="not a whole record"):
        replay(path)
