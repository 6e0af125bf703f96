"""Prompts of an exact height, made and counted by the tokenizer of the server under probe.

A prompt begins with its own password and ends by asking for it: whoever answers has read the whole
of it. The first word of each password is another one, so that no two prompts share a prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Literal

from pytest_dsv41.engines import get_engine
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure.cell import Request, Sampling
from pytest_dsv41.measure.group import Endpoint
from pytest_dsv41.measure.probes.laws import check_class
from pytest_dsv41.measure.probes.shape import asking
from pytest_dsv41.measure.prose import nouns, prose

__all__ = ["CORPUS_CLASSES", "Fitted", "PromptMaker", "filler", "fit", "marker"]

CORPUS_CLASSES: Final = ("varied", "repetitive")
"""What a drafter makes of a text: little, or nearly everything."""

Corpus = Literal["varied", "repetitive"]

_FORBIDDEN: Final = {"enable_thinking": False}
_PAD: Final = " a"
_NEAR: Final = 8
"""Tokens that are filled up one by one."""
_TRIES: Final = 24
_RUNGS: Final = "The ladder has one rung more, and the next rung is above this one.\n"

# A phrase that prose has nowhere: a small model then goes on with what stood after it before.
_HEAD: Final = "THE PASSWORD IS: {marker}\n\n"
_ASKED: Final = "\n\nTHE PASSWORD IS:"
_ASKED_IN_CHAT: Final = (
    "\n\nWhat is the password that stands at the head of this text? "
    "Answer with the password alone, without any other word. THE PASSWORD IS:"
)


@dataclass(frozen=True)
class Fitted:
    """One prompt and its size: `tokens` as the server's own tokenizer counts it, template included.

    `marker` is what it asks for; empty where it asks for nothing.
    """

    text: str
    tokens: int
    marker: str = ""


def marker(member: int, seed: int = 0) -> str:
    """Return the password of one stream: `word-NNNN`, its first word that stream's alone."""
    words = nouns()
    if member >= len(words) ** 2:
        raise UsageError(f"{member + 1} streams: at most {len(words) ** 2}")
    again, first = divmod(member, len(words))
    word = words[first] + (words[again - 1] if again else "")
    digits = int.from_bytes(hashlib.sha256(f"{seed}-{member}".encode()).digest()[:4])
    return f"{word}-{1000 + digits % 9000}"


def filler(corpus: Corpus, tokens: int, seed: int = 0) -> str:
    """Return a text of a class that has at least so many tokens in any vocabulary of words."""
    if corpus == "varied":
        return prose(max(1, tokens), seed)
    return _RUNGS * (1 + tokens // 13)


def fit(
    make: Callable[[str], str], text: str, tokens: int, count: Callable[[str], int]
) -> tuple[str, int]:
    """Return (`make` of a piece of `text`, its tokens) with `tokens` tokens, or hardly fewer.

    The piece is found by interpolation and filled up token by token; where a vocabulary joins
    what was added, the nearest size below is taken.

    Raises:
        UsageError: even the empty piece is too long, or all of the text is too short.
    """
    least = count(make(""))
    if least > tokens:
        raise UsageError(f"{tokens} tokens hold no prompt; it has {least} without any filler")
    low, high = (0, least), (len(text) + 1, 0)
    ratio = 4.0
    for _ in range(_TRIES):
        if tokens - low[1] <= _NEAR or high[0] - low[0] <= 1:
            break
        at = low[0] + max(1, int((tokens - low[1]) * ratio))
        at = min(max(at, low[0] + 1), high[0] - 1)
        now = count(make(text[:at]))
        if now <= tokens:
            if now > low[1]:
                ratio = (at - low[0]) / (now - low[1])
            low = (at, now)
        else:
            high = (at, now)
            ratio = (high[0] - low[0]) / (high[1] - low[1])
    if low[0] == len(text) and low[1] < tokens:
        raise UsageError(f"the text is too short: {low[1]} tokens of {tokens}")
    best = make(text[: low[0]]), low[1]
    pads = tokens - low[1]
    for _ in range(_TRIES):
        if best[1] == tokens or pads < 1:
            break
        padded = make(text[: low[0]] + _PAD * pads)
        now = count(padded)
        if best[1] < now <= tokens:
            best = padded, now
        pads += tokens - now
    return best


@dataclass(frozen=True)
class PromptMaker:
    """Makes prompts for one server: completions of a text, or chats of one message.

    `own` is a text of the user's to fill prompts with, which must be of the class that is named.
    """

    endpoint: Endpoint
    model: str
    api: Literal["completions", "chat"] = "completions"
    corpus: Corpus = "varied"
    own: str = ""

    @classmethod
    def on(
        cls,
        endpoint: Endpoint,
        *,
        api: Literal["completions", "chat"] = "completions",
        corpus: Corpus = "varied",
        own: str = "",
    ) -> PromptMaker:
        """Make one for a server, whose first model it is where the endpoint names none."""
        model = endpoint.model
        if not model:
            with asking(endpoint) as client:
                model = get_engine(endpoint.engine).models(endpoint.url, client=client)[0]
        return cls(endpoint, model, api, corpus, own)

    def count(self, text: str) -> int:
        """Return how many tokens the server makes of a prompt with this text."""
        if self.api == "completions":
            return len(self.tokens(text))
        messages = [{"role": "user", "content": text}]
        engine, url = get_engine(self.endpoint.engine), self.endpoint.url
        with asking(self.endpoint) as client:
            return engine.chat_tokens(url, self.model, messages, _FORBIDDEN, client=client)

    def tokens(self, text: str) -> list[int]:
        """Return the token ids that the server makes of a text."""
        engine, url = get_engine(self.endpoint.engine), self.endpoint.url
        with asking(self.endpoint) as client:
            return engine.tokenize(url, self.model, text, client=client)

    def text(self, tokens: int, seed: int = 0) -> str:
        """Return the filler for a prompt of so many tokens, proved to be of its class.

        Raises:
            MeasurementRefused: kind `law-corpus-class`.
        """
        found = self.own or filler(self.corpus, tokens, seed)
        check_class(found, self.corpus)
        return found

    def plain(self, tokens: int, *, seed: int = 0) -> Fitted:
        """Return a prompt of so many tokens that asks for nothing; each seed's begins otherwise."""
        head = f"Chapter {marker(seed)}.\n\n"
        text, size = fit(lambda piece: head + piece, self.text(tokens, seed), tokens, self.count)
        return Fitted(text, size)

    def marked(self, tokens: int, member: int, *, seed: int = 0) -> Fitted:
        """Return a prompt of so many tokens with a password at its head."""
        own = marker(member, seed)
        asked = _ASKED if self.api == "completions" else _ASKED_IN_CHAT

        def make(piece: str) -> str:
            return f"{_HEAD.format(marker=own)}{piece}{asked}"

        text, size = fit(make, self.text(tokens, seed + member), tokens, self.count)
        return Fitted(text, size, own)

    def exactly(self, tokens: int) -> Fitted:
        """Return a prompt of so many tokens and not one less.

        Raises:
            MeasurementRefused: kind `height`: this vocabulary makes no text of that size.
        """
        made = self.marked(tokens, 0)
        if made.tokens != tokens:
            raise MeasurementRefused(
                "height", f"no text of exactly {tokens} tokens was found; the nearest {made.tokens}"
            )
        return made

    def request(
        self,
        prompt: Fitted,
        max_tokens: int,
        *,
        sampling: Sampling,
        stop: tuple[str, ...] = (),
        salt: str | None = None,
    ) -> Request:
        """Return the request that sends a prompt; a chat forbids thinking (law `thinking`)."""
        if self.api == "chat":
            sampling = replace(sampling, thinking=False)
        return Request(
            max_tokens=max_tokens,
            prompt=prompt.text,
            api=self.api,
            sampling=sampling,
            stop=stop,
            salt=salt,
        )
