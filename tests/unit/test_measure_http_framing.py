"""Where an HTTP/1.1 response ends: lengths, chunks, connections, and what is not HTTP."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_dsv41.errors import UsageError
from pytest_dsv41.measure.wire import Framing, parse_url

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def feed(data: bytes, size: int, method: str = "GET") -> tuple[bytes, Framing]:
    framing = Framing(method)
    body = b"".join(framing.feed(data[at : at + size]) for at in range(0, len(data), size))
    return body, framing


@settings(max_examples=120, deadline=None)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=60), max_size=8),
    size=st.integers(1, 50),
    trailer=st.booleans(),
    extension=st.booleans(),
)
def test_chunks_cut_anywhere_give_the_body(
    chunks: list[bytes], size: int, trailer: bool, extension: bool
) -> None:
    mark = b";a=b" if extension else b""
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    for chunk in chunks:
        data += f"{len(chunk):X}".encode() + mark + b"\r\n" + chunk + b"\r\n"
    data += b"0\r\n" + (b"X-Sum: 1\r\n" if trailer else b"") + b"\r\n"
    body, framing = feed(data, size)
    assert body == b"".join(chunks)
    assert framing.done
    assert not feed(data[:-1], size)[1].done


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_length_ends_the_body(size: int) -> None:
    body, framing = feed(HEAD + b"Content-Length: 5\r\n\r\nhello", size)
    assert (body, framing.done, framing.keep_alive) == (b"hello", True, True)


def test_no_length_ends_with_the_connection() -> None:
    body, framing = feed(HEAD + b"\r\nhello", 4)
    assert (body, framing.done) == (b"hello", False)
    assert framing.eof()
    assert not framing.keep_alive


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_connections_are_kept_as_the_server_says(head: bytes, kept: bool) -> None:
    assert feed(head + b"Content-Length: 0\r\n\r\n", 100)[1].keep_alive is kept


def test_interim_answers_are_skipped() -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 1\r\n\r\nx"
    body, framing = feed(data, 7)
    assert (framing.status, body) == (200, b"x")


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answers_without_a_body_are_whole_at_once(status: bytes) -> None:
    assert feed(b"HTTP/1.1 " + status + b"\r\n\r\n", 100)[1].done


def test_a_head_request_has_no_body() -> None:
    assert feed(HEAD + b"Content-Length: 5\r\n\r\n", 100, "HEAD")[1].done


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 1, 2\r\n\r\n",
        b"HTTP/1.2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
        HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        HEAD + b"Transfer-Encoding: unchunked\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n",
        HEAD + b"Transfer-Encoding:\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabcd\r\n",
        b"x" * 70000,
    ],
)
def test_what_is_not_http_is_said(data: bytes) -> None:
    with pytest.raises(ValueError):
        feed(data, 4096)


@settings(max_examples=60, deadline=None)
@given(
    body=st.binary(max_size=40),
    more=st.binary(min_size=1, max_size=8),
    cut=st.integers(0, 200),
    chunked=st.booleans(),
)
def test_bytes_behind_a_response_are_no_part_of_it(
    body: bytes, more: bytes, cut: int, chunked: bool
) -> None:
    chunk = f"{len(body):x}".encode() + b"\r\n" + body + b"\r\n" if body else b""
    data = (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"
        if chunked
        else HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    )
    assert feed(data, max(1, cut))[1].done
    framing = Framing("GET")
    framing.feed(data[:cut])
    with pytest.raises(ValueError, match="after the response's end"):
        framing.feed(data[cut:] + more)


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999", "http://h:x", "ftp://h", "h"])
def test_an_address_that_is_none_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError, match=re.escape(url)):
        parse_url(url)
