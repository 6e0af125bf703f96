"""The SSE parser against an independent reading of the standard, over every cut and line end."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.measure.sse import SseParser, TooLongError

TEXT = 'data: {"a": "é中🌳"}\n\n: ping\n\nevent: x\ndata:one\ndata:  two\nid: 3\n\ndata\n\n'


def whole(data: bytes) -> list[bytes]:
    """Split by the standard, from the whole text at once (no shared code with the parser)."""
    text = data.removeprefix(b"\xef\xbb\xbf")
    lines = re.split(rb"\r\n|\n|\r", text)[:-1]
    events: list[bytes] = []
    values: list[bytes] = []
    for line in lines:
        if not line:
            if values:
                events.append(b"\n".join(values))
            values = []
        elif line == b"data":
            values.append(b"")
        elif line.startswith(b"data:"):
            value = line[5:]
            values.append(value[1:] if value.startswith(b" ") else value)
    return events


def fed(pieces: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event.data for piece in pieces for event in parser.feed(piece)]


def fed_within(bound: int, pieces: list[bytes]) -> None:
    parser = SseParser(max_event=bound)
    for piece in pieces:
        parser.feed(piece)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_cut_in_two_reads_the_same(end: str) -> None:
    data = TEXT.replace("\n", end).encode()
    expected = whole(data)
    assert expected == ['{"a": "é中🌳"}'.encode(), b"one\n two", b""]
    for cut in range(len(data) + 1):
        assert fed([data[:cut], data[cut:]]) == expected
    assert fed([data[i : i + 1] for i in range(len(data))]) == expected


lines = st.lists(
    st.sampled_from(
        [b"data: x", b"data:y", b"data:  z", b"data", b": c", b"id: 1", b"retry: 5", b"event: e",
         b"", b"", b"data: \xc3\xa9", b"other: v", b"data: [DONE]", b"datax: no"]
    ),
    max_size=20,
)  # fmt: skip
ends = st.lists(st.sampled_from([b"\n", b"\r\n", b"\r"]), min_size=20, max_size=20)


@settings(max_examples=120, deadline=None)
@given(lines=lines, ends=ends, bom=st.booleans(), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_any_stream_cut_anywhere_reads_as_the_standard_says(
    lines: list[bytes], ends: list[bytes], bom: bool, cuts: list[int]
) -> None:
    data = b"".join(line + end for line, end in zip(lines, ends, strict=False))
    data = (b"\xef\xbb\xbf" if bom else b"") + data
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert fed(pieces) == whole(data)


def test_sizes_add_up_to_the_bytes_of_the_events() -> None:
    data = b"data: a\n\ndata: bb\r\n\r\n"
    parser = SseParser()
    assert [event.size for event in parser.feed(data)] == [9, 12]


def test_comments_are_counted_and_are_no_events() -> None:
    parser = SseParser()
    assert parser.feed(b": one\n\n: two\n\n") == []
    assert parser.comments == 2


@pytest.mark.parametrize("line", [b"data: " + b"x" * 2000, b"x" * 2000])
def test_a_line_over_the_bound_is_cut_while_it_comes(line: bytes) -> None:
    with pytest.raises(TooLongError):
        fed_within(1000, [line[at : at + 100] for at in range(0, len(line), 100)])


def test_many_lines_of_one_event_are_bounded_too() -> None:
    with pytest.raises(TooLongError):
        fed_within(1000, [b"data: 12345\n"] * 200)


def test_an_event_without_its_blank_line_is_the_tail() -> None:
    parser = SseParser()
    assert parser.feed(b"data: [DONE]") == []
    assert parser.tail() == b"[DONE]"
