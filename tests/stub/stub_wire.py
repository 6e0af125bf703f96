"""A client that keeps everything: each chunk as it came, each event as the standard reads it."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    """One answer: its head, the chunks of its body, and how the connection ended."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes]
    complete: bool
    reset: bool = False
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.body.decode("utf-8", "replace")

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def data(self) -> list[str]:
        """The data of every event, read after the WHATWG rules."""
        return [event["data"] for event in sse(self.body)]

    @property
    def chunk_objects(self) -> list[dict[str, Any]]:
        """Every event's JSON, without `[DONE]`."""
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [c for chunk in self.chunk_objects for c in chunk.get("choices", [])]

    @property
    def answer(self) -> str:
        """The text of the content, of chat and completions."""
        out = []
        for choice in self.choices:
            out.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
        return "".join(out)


def sse(raw: bytes) -> list[dict[str, str]]:
    """Read a whole event stream as https://html.spec.whatwg.org (9.2.6) has it."""
    text = raw.decode("utf-8", "replace").removeprefix("\ufeff")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    events: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    data: list[str] = []
    for line in lines[:-1]:
        if not line:
            if data:
                events.append({**fields, "data": "\n".join(data)})
            fields, data = {}, []
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                data.append(value)
            else:
                fields[name] = value
    return events


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=90)


def request_bytes(
    method: str, path: str, body: Any = None, fault: str = "", headers: dict[str, str] | None = None
) -> bytes:
    payload = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: stub", f"content-length: {len(payload)}"]
    if fault:
        lines.append(f"x-stub-fault: {fault}")
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + payload


def call(
    url: str,
    method: str,
    path: str,
    body: Any = None,
    fault: str = "",
    headers: dict[str, str] | None = None,
) -> Reply:
    """Send one request on a connection of its own and read its answer to the end."""
    with connect(url) as sock:
        sock.sendall(
            request_bytes(method, path, body, fault, {"connection": "close", **(headers or {})})
        )
        raw, reset = b"", False
        while True:
            try:
                data = sock.recv(1 << 16)
            except ConnectionResetError:
                reset = True
                break
            if not data:
                break
            raw += data
    return parse_reply(raw, reset)


def parse_reply(raw: bytes, reset: bool = False) -> Reply:
    head, _, rest = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1]) if lines[0] else 0
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    if headers.get("transfer-encoding") != "chunked":
        length = int(headers.get("content-length", len(rest)))
        return Reply(status, headers, [rest], len(rest) == length, reset)
    chunks: list[bytes] = []
    while rest:
        size_text, found, rest = rest.partition(b"\r\n")
        size = int(size_text, 16) if found else -1
        if size == 0:
            return Reply(status, headers, chunks, rest == b"\r\n", reset)
        chunks.append(rest[: max(0, size)])
        if size < 0 or len(rest) < size + 2:
            break
        rest = rest[size + 2 :]
    return Reply(status, headers, chunks, False, reset)


def get(url: str, path: str, fault: str = "") -> Reply:
    return call(url, "GET", path, fault=fault)


def post(url: str, path: str, body: Any, fault: str = "", **headers: str) -> Reply:
    return call(url, "POST", path, body, fault, headers)


def chat(url: str, fault: str = "", **fields: Any) -> Reply:
    """Stream a chat answer of 12 tokens, greedy, with usage, unless `fields` say otherwise."""
    body = {
        "messages": [{"role": "user", "content": "Say something."}],
        "max_tokens": 12,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return post(url, "/v1/chat/completions", body, fault)


def complete(url: str, fault: str = "", **fields: Any) -> Reply:
    """Stream a completion of 12 tokens, greedy, with usage, unless `fields` say otherwise."""
    body = {
        "prompt": "Say something.",
        "max_tokens": 12,
        "stream": True,
        "temperature": 0,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return post(url, "/v1/completions", body, fault)


def samples(url: str, fault: str = "") -> dict[str, dict[str, float]]:
    """Scrape /metrics: sample name → label text → value."""
    out: dict[str, dict[str, float]] = {}
    for line in get(url, "/metrics", fault).text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        out.setdefault(name, {})[labels.rstrip("}")] = float(value)
    return out


def total(scrape: dict[str, dict[str, float]], name: str) -> float:
    return sum(scrape[name].values())


def linger_reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
