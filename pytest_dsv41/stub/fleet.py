"""What a chat may ask beside plain text: images, tools, JSON, reasoning efforts.

By default the stub takes such requests and answers with its plain text, as a server does that
ignores what it does not know. `offer` makes it do what was asked, `deny` makes it say no.
"""

from __future__ import annotations

import json
import re
import struct
import time
from typing import Any

from pytest_dsv41.stub.http import BadRequest
from pytest_dsv41.stub.profile import Profile

__all__ = ["chat_body", "fleet_answer", "with_effort"]

_EFFORTS = ("low", "medium", "high", "xhigh")
_COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "white": (1, 1, 1)}
_NO = {
    "vision": "image input is not supported",
    "tools": "tools are not supported by this server",
    "json": "response_format is not supported by this server",
    "efforts": "reasoning_effort is not supported by this server",
}


def fleet_answer(profile: Profile, body: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return message and finish reason of a chat that asks for something the stub offers.

    None: the chat is answered as plain text. BadRequest where it asks for what is denied.
    """
    image = _image(body)
    tools = body.get("tools")
    form = body.get("response_format")
    wants = {
        "vision": image is not None,
        "tools": bool(tools),
        "json": isinstance(form, dict) and form.get("type") == "json_object",
        "efforts": body.get("reasoning_effort") is not None,
    }
    for name, wanted in wants.items():
        if wanted and name in profile.deny:
            raise BadRequest(_NO[name], 500 if profile.engine == "llamacpp" else 400)
    if image is not None and "vision" in profile.offer:
        return {"role": "assistant", "content": _colour(image).capitalize()}, "stop"
    if tools and "tools" in profile.offer:
        return _call(tools, body), "tool_calls"
    if wants["json"] and "json" in profile.offer:
        return {"role": "assistant", "content": json.dumps(_object(body))}, "stop"
    return None


def chat_body(model: str, prompt: int, message: dict[str, Any], finish: str) -> dict[str, Any]:
    """Return the body of a chat answer that no engine made; it counts as one token."""
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 1,
            "total_tokens": prompt + 1,
        },
    }


def with_effort(profile: Profile, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with its reasoning effort among the template's switches, where offered."""
    effort = body.get("reasoning_effort")
    if effort is None or "efforts" not in profile.offer:
        return body
    if effort not in _EFFORTS:
        raise BadRequest(f"reasoning_effort must be one of {', '.join(_EFFORTS)}")
    options = body.get("chat_template_kwargs")
    options = options if isinstance(options, dict) else {}
    return {**body, "chat_template_kwargs": {**options, "reasoning_effort": effort}}


def _parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else {}
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [p for p in content if isinstance(p, dict)] if isinstance(content, list) else []


def _text(body: dict[str, Any]) -> str:
    return " ".join(str(part.get("text", "")) for part in _parts(body))


def _image(body: dict[str, Any]) -> str | None:
    for part in _parts(body):
        link = part.get("image_url")
        if part.get("type") == "image_url" and isinstance(link, dict):
            return str(link.get("url", ""))
    return None


def _colour(link: str) -> str:
    """The nearest colour name of a PNG's first pixel."""
    import base64
    import binascii
    import zlib

    head, _, data = link.partition(",")
    try:
        raw = base64.b64decode(data, validate=True)
        if not head.startswith("data:image/png") or raw[:8] != b"\x89PNG\r\n\x1a\n":
            raise ValueError(head)
        at, pixels = 8, b""
        while at < len(raw):
            size, kind = struct.unpack_from(">I4s", raw, at)
            if kind == b"IDAT":
                pixels += raw[at + 8 : at + 8 + size]
            at += 12 + size
        first = tuple(zlib.decompress(pixels)[1:4])
    except (ValueError, binascii.Error, struct.error, zlib.error):
        raise BadRequest("the image is no PNG") from None
    return min(
        _COLOURS,
        key=lambda name: sum(
            (a - 255 * b) ** 2 for a, b in zip(first, _COLOURS[name], strict=True)
        ),
    )


def _call(tools: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A call of the first tool, its one argument the arithmetic in the question."""
    try:
        function = tools[0]["function"]
        name = str(function["name"])
        key = str(next(iter(function["parameters"]["properties"])))
    except (KeyError, TypeError, IndexError, StopIteration):
        raise BadRequest("tools must be a list of functions with properties") from None
    found = re.search(r"\d+\s*[-+*/]\s*\d+", _text(body))
    arguments = json.dumps({key: found[0] if found else ""})
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _object(body: dict[str, Any]) -> dict[str, str]:
    """An object with the keys the question names."""
    found = re.search(r"\bkeys? (\w+(?:(?:, | and )\w+)*)", _text(body))
    names = re.split(r", | and ", found[1]) if found else ["answer"]
    return dict.fromkeys(names, "stub")
