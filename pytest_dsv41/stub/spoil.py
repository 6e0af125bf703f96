"""The fault `logprobs`: a whole answer whose log-probabilities are not to be believed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pytest_dsv41.stub.http import dumps

__all__ = ["spoil"]


def spoil(body: dict[str, Any], how: str, earlier: bytes | None) -> bytes:
    """Return the bytes of `body` spoiled: `how` is one of the fault's words.

    `earlier` is the answer to an earlier request, for `other`.
    """
    if how == "other":
        return earlier or dumps(body)
    if how == "cut":
        raw = dumps(body)
        return raw[: raw.find(b"top_logprobs") + 60]
    if how == "absent":
        for holder in (body, *body.get("choices", ())):
            for name in ("logprobs", "completion_probabilities"):
                if name in holder:
                    holder[name] = None
        return dumps(body)
    twice = []
    for top in _lists(body):
        entries = list(top.items()) if isinstance(top, dict) else top
        if how == "fewer":
            _keep(top, len(entries) - 5)
        elif how == "zeros":
            for index in range(len(entries)):
                _set(top, index, 0.0)
        elif how in ("nan", "positive"):
            _set(top, 1, float("nan") if how == "nan" else 0.5)
        elif isinstance(top, dict):
            names = list(top)
            twice.append((names[1], names[0]))
        else:
            top[1]["id"] = top[0]["id"]
    raw = dumps(body)
    for old, new in twice:
        # A dict cannot hold one name twice; the text of an object can.
        raw = raw.replace(json.dumps(old).encode() + b":", json.dumps(new).encode() + b":")
    return raw


def _lists(body: dict[str, Any]) -> Iterator[Any]:
    """Yield each token's candidates: a dict by name, or a list of objects."""
    for token in body.get("completion_probabilities") or ():
        yield token["top_logprobs"]
    for choice in body.get("choices", ()):
        told = choice.get("logprobs") or {}
        yield from told.get("top_logprobs", ())
        for token in told.get("content") or ():
            yield token["top_logprobs"]


def _set(top: Any, index: int, value: float) -> None:
    if isinstance(top, dict):
        top[list(top)[index]] = value
    else:
        top[index]["logprob"] = value


def _keep(top: Any, count: int) -> None:
    if isinstance(top, dict):
        for name in list(top)[count:]:
            del top[name]
    else:
        del top[count:]
