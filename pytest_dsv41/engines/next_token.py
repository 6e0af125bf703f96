"""What a server says of the one token after a prompt: its likeliest candidates, by token id.

The prompt goes as token ids, so that both arms see the same one whatever their tokenizers do, and
the server's echo of it is held against what was sent. An answer that is not whole is refused; it
is never filled up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.text import one_line

if TYPE_CHECKING:
    from pytest_dsv41.engines.base import InBand

__all__ = [
    "Greedy",
    "NextToken",
    "aligned",
    "read_chosen",
    "read_ids",
    "read_indexed",
    "read_model",
    "read_object",
    "read_prefixed",
]

_PREFIX: Final = "token_id:"
_IDS: Final = 1 << 31
"""Token ids are 32-bit in every engine and format (FORMATS): what is larger is none."""


@dataclass(frozen=True)
class NextToken:
    """The candidates for one token as the server gave them, (id, natural log-probability).

    `echoed` says whether the server repeated the prompt, so that it could be compared; `model` is
    who answered, and `chosen` the token that was taken with its log-probability, where it tells.
    """

    top: tuple[tuple[int, float], ...]
    in_band: InBand
    echoed: bool
    model: str | None = None
    chosen: tuple[int, float] | None = None


@dataclass(frozen=True)
class Greedy:
    """An answer at temperature 0: its token ids, and the candidates for each of them.

    An entry of `tops` is None where the server tells none for that token. `finish` is the
    server's reason, `length` or `stop`.
    """

    tokens: tuple[int, ...]
    tops: tuple[tuple[tuple[int, float], ...] | None, ...]
    finish: str
    in_band: InBand
    echoed: bool
    model: str | None = None


def aligned(tokens: Sequence[int], told: Sequence[int]) -> list[int | None]:
    """Return, for each of `told`, its place in `tokens`; None where that is not certain.

    `told` are those of `tokens`, in order, that the server has something to say about (llama.cpp
    is silent about parts of a character and about verified drafts). A place is certain when
    matching from the front and from the back find the same one.
    """
    front = _match(tokens, told)
    back = _match(tokens[::-1], told[::-1])
    last = len(tokens) - 1
    mirrored = [None if place is None else last - place for place in reversed(back)]
    return [
        one if one is not None and one == two else None
        for one, two in zip(front, mirrored, strict=True)
    ]


def _match(tokens: Sequence[int], told: Sequence[int]) -> list[int | None]:
    at = 0
    out: list[int | None] = []
    for token in told:
        while at < len(tokens) and tokens[at] != token:
            at += 1
        out.append(at if at < len(tokens) else None)
        at += 1
    return out


def read_object(content: bytes, where: str) -> dict[str, Any]:
    """Return the JSON object of an answer.

    Raises:
        MeasurementRefused: kind `bad-answer` for anything else, kind `duplicate-id` where an
            object has one name twice: two entries of one token would become one in silence.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise MeasurementRefused(
                    "duplicate-id", f"{where}: the answer has {one_line(name, 60)} twice"
                )
            found[name] = value
        return found

    try:
        data = json.loads(content, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise MeasurementRefused(
            "bad-answer", f"{where}: no JSON: {one_line(str(error), 100)}"
        ) from None
    if not isinstance(data, dict):
        raise MeasurementRefused("bad-answer", f"{where}: not a JSON object")
    return data


def read_prefixed(entries: object, where: str) -> tuple[tuple[int, float], ...]:
    """Read `{"token_id:N": log-probability}`, the form of the OpenAI completions.

    Raises:
        MeasurementRefused: kinds `no-logprobs`, `bad-answer`.
    """
    if not isinstance(entries, Mapping):
        raise MeasurementRefused("no-logprobs", f"{where}: the answer has no log-probabilities")
    found = []
    for name, value in entries.items():
        digits = str(name).removeprefix(_PREFIX)
        numeric = digits != name and digits.isascii() and digits.isdigit()
        if numeric and (len(digits) > 18 or int(digits) >= _IDS):
            raise MeasurementRefused(
                "bad-answer", f"{where}: {one_line(str(name), 60)!r} is beyond any vocabulary"
            )
        if not numeric:
            raise MeasurementRefused(
                "bad-answer",
                f"{where}: {one_line(str(name), 60)!r} names no token id: the server does not "
                "know return_tokens_as_token_ids",
            )
        found.append((int(digits), _number(value, where)))
    return tuple(found)


def read_chosen(told: Mapping[str, Any], where: str) -> tuple[int, float] | None:
    """Read the one token that was chosen, of the `logprobs` object of the OpenAI completions.

    None where it is not told by id, or its log-probability is not told.

    Raises:
        MeasurementRefused: kind `bad-answer`.
    """
    names, values = told.get("tokens"), told.get("token_logprobs")
    if not (isinstance(names, list) and isinstance(values, list)):
        return None
    if len(names) != 1 or len(values) != 1 or values[0] is None:
        return None
    if not isinstance(names[0], str) or not names[0].startswith(_PREFIX):
        return None
    return read_prefixed({names[0]: values[0]}, where)[0]


def read_model(data: Mapping[str, Any]) -> str | None:
    """Return the name of the model that answered; None where the answer does not tell."""
    model = data.get("model")
    return model if isinstance(model, str) and model else None


def read_indexed(entries: object, where: str) -> tuple[tuple[int, float], ...]:
    """Read `[{"id": N, "logprob": …}]`, llama.cpp's form.

    Raises:
        MeasurementRefused: kinds `no-logprobs`, `bad-answer`.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise MeasurementRefused("no-logprobs", f"{where}: the answer has no log-probabilities")
    found = []
    for entry in entries:
        token = entry.get("id") if isinstance(entry, Mapping) else None
        if not _is_token(token):
            raise MeasurementRefused("bad-answer", f"{where}: an entry without a token id")
        assert isinstance(token, int)
        found.append((token, _number(entry.get("logprob"), where)))
    return tuple(found)


def read_ids(tokens: object, where: str) -> tuple[int, ...]:
    """Read a list of token ids.

    Raises:
        MeasurementRefused: kind `bad-answer` for anything else.
    """
    if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
        raise MeasurementRefused("bad-answer", f"{where}: no list of token ids")
    return tuple(tokens)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _IDS


def _number(value: object, where: str) -> float:
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
    if isinstance(value, float) or (whole and isinstance(value, int)):
        return float(value)
    raise MeasurementRefused(
        "bad-answer", f"{where}: {one_line(repr(value), 40)} is no log-probability"
    )
