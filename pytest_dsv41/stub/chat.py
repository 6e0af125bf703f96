"""What both dialects read alike: chats, token ids, numbers; and long texts beside the loop."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from pytest_dsv41.stub.faults import Faults
from pytest_dsv41.stub.http import BadRequest
from pytest_dsv41.stub.language import EOS, VOCABULARY, encode
from pytest_dsv41.stub.loop import Loop, Wait

__all__ = [
    "check_stop",
    "cut_prompt",
    "encode_beside",
    "integer",
    "real",
    "render_chat",
    "token_list",
]

_LONG_TEXT = 64 << 10


def render_chat(body: dict[str, Any], *, generate: bool = True) -> str:
    """Return the prompt text of a chat: the stub's template over `messages`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    parts = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest("a message must have a role")
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(str(p.get("text", "")) for p in content if isinstance(p, dict))
        parts.append(f"<|{message['role']}|>{content}\n")
    if generate:
        parts.append("<|assistant|>")
        options = body.get("chat_template_kwargs") or {}
        if isinstance(options, dict) and options:
            # Template switches are part of the prompt, as they are in a real template.
            switches = ",".join(f"{key}={options[key]}" for key in sorted(options))
            parts.append(f"<|{switches}|>")
    return "".join(parts)


def encode_beside(loop: Loop, text: str) -> Generator[Wait, None, list[int]]:
    """Return the token ids of `text`; a long one must not hold up the streams beside it."""
    if len(text) < _LONG_TEXT:
        return encode(text)
    gate = loop.in_thread(lambda: encode(text))
    yield gate
    tokens, error = gate.value
    if error is not None:
        raise BadRequest(str(error), 500)
    return list(tokens)


def cut_prompt(tokens: list[int], window: int, faults: Faults) -> list[int]:
    """Return the prompt, cut in silence where a fault says so."""
    if "truncate" not in faults:
        return tokens
    return tokens[: faults.count("truncate") or window - 1]


def check_stop(body: dict[str, Any]) -> None:
    """Refuse stop strings that could stand in an answer of the stub: it would not stop there."""
    stop = body.get("stop") or []
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequest("stop must be text or a list of texts")
    if any(not text or any(char.isalnum() or char == " " for char in text) for text in texts):
        raise BadRequest("the stub knows no stop strings with letters, digits or blanks")


def integer(body: dict[str, Any], name: str, default: int, *, low: int) -> int:
    """Return a whole number of the body; BadRequest when it is none, or below `low`."""
    value = body.get(name)
    if value is None or value is False:
        return default
    if value is True or not isinstance(value, int):
        text = f"{name} must be a whole number, got {json.dumps(value)}"
        raise BadRequest(text, param=f"body.{name}", form="type")
    if value < low:
        raise BadRequest(f"{name} must be at least {low}, got {value}", param=name)
    return value


def real(body: dict[str, Any], name: str, default: float) -> float:
    """Return a number of the body that is not negative; BadRequest when it is none."""
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = f"{name} must be a number, got {json.dumps(value)}"
        raise BadRequest(text, param=f"body.{name}", form="type")
    if value < 0:
        raise BadRequest(f"{name} must be at least 0, got {value}", param=name)
    return float(value)


def token_list(value: Any) -> list[int]:
    """Return `value`, a list of token ids of the vocabulary; BadRequest when it is none."""
    if not isinstance(value, list) or not all(
        type(token) is int and EOS <= token < VOCABULARY for token in value
    ):
        raise BadRequest(f"expected text or a list of token ids below {VOCABULARY}")
    return list(value)
