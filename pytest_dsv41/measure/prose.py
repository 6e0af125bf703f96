"""Made-up prose of any length: something long to cut prompts from where no book is at hand.

The same number of words and seed give the same text everywhere, so a cell may also name it as a
builder and pin it by its hash:

    Builder("pytest_dsv41.measure.prose:prose", sha256, {"words": 20_000, "seed": 1})

It says nothing, and a drafter finds it easier or harder than what people write: for rehearsals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from pytest_dsv41.errors import UsageError

__all__ = ["nouns", "prose"]


def _split(text: str, by: str | None = None) -> list[str]:
    return text.split(by)


_NOUNS: Final = _split(
    "harbour lantern orchard ferry copper bell valley winter archive sailor garden clock "
    "bridge letter mountain river paper glass stone engine market window forest island "
    "kitchen ladder mirror needle ocean pepper quarry ribbon saddle tunnel umbrella village "
    "wagon yard canal basket "
)
_VERBS: Final = _split(
    "carries follows keeps turns opens paints remembers lifts counts answers crosses divides "
    "mends gathers measures borrows lights hides names repairs watches weighs "
)
_QUALITIES: Final = _split(
    "quiet narrow early bright patient hollow distant warm crooked simple heavy silver slow "
    "plain curious ordinary green northern careful late "
)
_PLACES: Final = _split(
    "near the sea|under the old roof|before the rain|across the square|after the harvest|"
    "in the hills|behind the mill|along the road|at the edge of town|without a word|"
    "on the third day|by the gate",
    "|",
)


def nouns() -> tuple[str, ...]:
    """Return the nouns of the prose, each once."""
    return tuple(dict.fromkeys(_NOUNS))


def prose(words: int, seed: int = 0) -> str:
    """Return at least so many words of prose, ending with a whole sentence.

    Raises:
        UsageError: less than one word was asked for.
    """
    if words < 1:
        raise UsageError(f"{words} words: at least 1")
    draws = _draws(seed)
    sentences: list[str] = []
    count = 0
    while count < words:
        sentence = _sentence(draws)
        count += sentence.count(" ") + 1
        sentences.append(sentence)
    paragraphs = (" ".join(sentences[at : at + 6]) for at in range(0, len(sentences), 6))
    return "\n\n".join(paragraphs) + "\n"


def _sentence(draws: Iterator[int]) -> str:
    def of(choices: list[str]) -> str:
        return choices[next(draws) % len(choices)]

    parts = ["The", of(_QUALITIES), of(_NOUNS), of(_VERBS), "a", of(_NOUNS)]
    if next(draws) % 2:
        parts += ["and the", of(_NOUNS), of(_VERBS), "the", of(_QUALITIES), of(_NOUNS)]
    if next(draws) % 3:
        parts.append(of(_PLACES))
    return " ".join(parts) + "."


def _draws(seed: int) -> Iterator[int]:
    """Numbers that depend on the seed alone, whatever Python's own generator does."""
    block = 0
    while True:
        yield from hashlib.sha256(f"{seed}-{block}".encode()).digest()
        block += 1
