"""The probe laws: what a figure must have behind it, each by name (FRANK-ARCHON).

Every one was learned from a probe that was believed and wrong: an answer that stood in the other
channel, a rate read from 8 tokens, a drafter that guessed a repetitive text. A figure that breaks a
law is refused under its name, `law-<name>`; it is never reported with a footnote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure.group import GroupResult
from pytest_dsv41.measure.stream import StreamRecord

__all__ = [
    "LAWS",
    "MIN_RATE_TOKENS",
    "RATES",
    "VISION_TOKENS",
    "check_class",
    "check_rates",
    "check_vision",
    "obey",
    "repetition",
    "said",
]

LAWS: Final[Mapping[str, str]] = {
    "thinking": "a chat forbids thinking; a budget spent inside it is no answer",
    "both-channels": "the answer is read from the content and, where that is empty, the reasoning",
    "rate-tokens": "a rate is read from at least 128 generated tokens",
    "corpus-class": "the class of the corpus is part of the cell: a drafter guesses repetition",
    "salt": "every cold request has a salt of its own, and proves that nothing was cached",
    "vision-budget": "a vision probe has at least 256 tokens: thinking spends 64",
}
"""Name to what it says."""

MIN_RATE_TOKENS: Final = 128
VISION_TOKENS: Final = 256

RATES: Final[tuple[str, ...]] = (
    "decode_tok_s",
    "client_tok_s",
    "ms_per_round",
    "accepted_per_round",
)
"""The metrics that law `rate-tokens` is about."""

_WINDOW: Final = 8
_REPETITIVE: Final = 0.5


def obey(result: GroupResult) -> GroupResult:
    """Return a group without the rates that its answers are too short for (law `rate-tokens`)."""
    fewest = min(stream.completion_tokens for stream in result.streams)
    if fewest >= MIN_RATE_TOKENS:
        return result
    reason = f"law-rate-tokens: {fewest} tokens; a rate needs {MIN_RATE_TOKENS}"
    lost = {name: reason for name in RATES if name in result.values}
    kept = {name: value for name, value in result.values.items() if name not in lost}
    return replace(result, values=kept, missing={**result.missing, **lost})


def check_rates(streams: Sequence[StreamRecord]) -> None:
    """Refuse streams that a rate cannot be read from.

    Raises:
        MeasurementRefused: kind `law-rate-tokens`.
    """
    for place, stream in enumerate(streams):
        if stream.completion_tokens < MIN_RATE_TOKENS:
            raise MeasurementRefused(
                "law-rate-tokens",
                f"stream {place} ended after {stream.completion_tokens} tokens "
                f"({stream.finish_reason}); a rate needs {MIN_RATE_TOKENS}",
            )


def check_vision(tokens: int) -> None:
    """Refuse a budget in which a vision probe's answer may never come.

    Raises:
        MeasurementRefused: kind `law-vision-budget`.
    """
    if tokens < VISION_TOKENS:
        raise MeasurementRefused(
            "law-vision-budget",
            f"{tokens} tokens for a vision probe; it needs {VISION_TOKENS}: thinking spends 64 "
            "and more before an answer",
        )


def said(stream: StreamRecord) -> tuple[str, str]:
    """Return a chat's answer and the channel that it came in (law `both-channels`).

    Raises:
        MeasurementRefused: kind `law-thinking`: thinking was off, and the whole budget was spent
            in it.
    """
    if stream.text.strip() or not stream.reasoning.strip():
        return stream.text, "content"
    if stream.finish_reason == "length":
        raise MeasurementRefused(
            "law-thinking",
            f"all {stream.completion_tokens} tokens are reasoning and the content is empty, "
            "although thinking was forbidden: the budget was spent before an answer",
        )
    return stream.reasoning, "reasoning"


def repetition(words: Sequence[object]) -> float:
    """Return the share of places at which 8 words, or tokens, stand that stood before: 0 to 1."""
    places = len(words) - _WINDOW + 1
    if places < 1:
        return 0.0
    distinct = {tuple(words[at : at + _WINDOW]) for at in range(places)}
    return 1.0 - len(distinct) / places


def check_class(text: str, corpus: str) -> None:
    """Refuse a text that is not of the class its cell names (law `corpus-class`).

    Raises:
        MeasurementRefused: kind `law-corpus-class`.
    """
    share = repetition(text.split())
    found = "repetitive" if share >= _REPETITIVE else "varied"
    if found != corpus:
        raise MeasurementRefused(
            "law-corpus-class",
            f"the text is {found} ({100 * share:.0f} % of its 8-word runs stood before), "
            f"the cell says {corpus}",
        )
