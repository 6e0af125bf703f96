"""The stub's tokenizer and its "model": exact, invertible, and a pure function of its input.

Token ids: 0 end of text, 1 unused, 2…257 one byte, 258…65793 two bytes, then known pieces (a
word with or without its space). Any text splits into ids that join to the same text again. A
character of three bytes becomes two ids, so that an id can be a part of a character, as in real
byte-level vocabularies.
"""

from __future__ import annotations

import math
import re
import sys
import zlib
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from pytest_dsv41.stub.draws import gauss, key_of, mix, uniform

__all__ = [
    "CANDIDATES",
    "EOS",
    "Choice",
    "Model",
    "Sampling",
    "decode",
    "encode",
    "recalled",
    "token_bytes",
]

EOS = 0
CANDIDATES = 32
_BYTE = 2
_PAIR = 258
_WORD = _PAIR + 65536


def _words() -> list[str]:
    """Return the words the stub knows, each once: those it answers with."""
    with open(__file__.rpartition("/")[0] + "/words.txt", encoding="utf-8") as file:  # noqa: PTH123
        return file.read().split()


_PIECE = re.compile(r" ?[^\W\d_]+| ?\d{1,2}|\s+| ?[^\w\s]+|.", re.DOTALL)


def _vocabulary() -> tuple[tuple[bytes, ...], dict[str, int]]:
    pieces: dict[str, None] = {}
    for word in _words():
        for form in (word, word.capitalize()):
            pieces[" " + form] = None
            pieces[form] = None
    for letter in "aAIi":
        pieces[" " + letter] = None
    names = tuple(pieces)
    return tuple(n.encode() for n in names), {n: _WORD + i for i, n in enumerate(names)}


_KNOWN, _IDS = _vocabulary()
VOCABULARY = _WORD + len(_KNOWN)
_ANSWER = tuple(_IDS[" " + word] for word in _words())
_memo: dict[str, tuple[int, ...]] = {}


def _bytes_to_ids(raw: bytes) -> tuple[int, ...]:
    ids = [_PAIR + raw[i] * 256 + raw[i + 1] for i in range(0, len(raw) - 1, 2)]
    if len(raw) % 2:
        ids.append(_BYTE + raw[-1])
    return tuple(ids)


def encode(text: str) -> list[int]:
    """Return the token ids of `text`. Lone surrogates become the replacement character."""
    ids: list[int] = []
    known, memo = _IDS, _memo
    for piece in _PIECE.findall(text):
        one = known.get(piece)
        if one is not None:
            ids.append(one)
            continue
        several = memo.get(piece)
        if several is None:
            several = _bytes_to_ids(piece.encode("utf-8", "replace"))
            if len(memo) < 20000 and len(piece) < 40:
                memo[piece] = several
        ids.extend(several)
    return ids


def token_bytes(token: int) -> bytes:
    """Return the bytes one token stands for; none for the end of text and unknown ids."""
    if token >= _WORD:
        return _KNOWN[token - _WORD] if token < VOCABULARY else b""
    if token >= _PAIR:
        return bytes(divmod(token - _PAIR, 256))
    return bytes((token - _BYTE,)) if token >= _BYTE else b""


def decode(tokens: Sequence[int]) -> str:
    """Return the text of `tokens`; a part of a character becomes U+FFFD."""
    return b"".join(map(token_bytes, tokens)).decode("utf-8", "replace")


def recalled(prompt: Sequence[int], *, other: bool = False) -> tuple[int, ...]:
    """Return what followed the prompt's last three words where they stood before.

    To the end of that sentence or line; nothing where they did not stand before. `other`: with
    another ending. A chat's prompt ends before the mark of the assistant.
    """
    text = decode(prompt).rpartition("\n<|assistant|>")
    asked = (text[0] or text[2]).rstrip()
    words = re.findall(r"\S+", asked)[-3:]
    found = re.search(r"\s+".join(map(re.escape, words)) + r"([^.\n]*)", asked)
    if not words or found is None or found.end() >= len(asked):
        return ()
    return tuple(encode(found[1] + ("x" if other else "")))


class Sampling(NamedTuple):
    """How a request wants its tokens chosen. `seed` is the request's own or one given to it."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class Choice(NamedTuple):
    """One generated token; `top` holds the candidates (token, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def _shape(slope: float) -> tuple[float, ...]:
    """Return the log probabilities of the candidates for one steepness."""
    logits = [-slope * i for i in range(CANDIDATES)]
    total = math.log(sum(map(math.exp, logits)))
    return tuple(value - total for value in logits)


# A model is sure of one token and unsure of the next: eight steepnesses take turns by chance.
_SHAPES = tuple(_shape(0.25 + 0.2 * i) for i in range(8))


class Model:
    """Generates the answer to one prompt, token after token.

    Every choice is a function of (model name, all ids so far, whether they were asked or
    answered) and, when sampled, of the seed and the position. `perturb` is the SD of a
    disturbance of the logits, for a server that is nearly, but not quite, the same model.
    """

    __slots__ = ("_chances", "_count", "_hashes", "_length", "_name", "_perturb", "_sampling")

    def __init__(
        self, name: str, prompt: Sequence[int], sampling: Sampling, perturb: float = 0.0
    ) -> None:
        raw = array("Q", prompt).tobytes()
        self._name = zlib.crc32(name.encode())
        self._hashes = (zlib.crc32(raw), zlib.adler32(raw))
        self._length = len(raw)
        self._count = 0
        self._sampling = sampling
        self._perturb = perturb
        self._chances: dict[int, list[float]] = {}

    @property
    def key(self) -> int:
        """A number that stands for the prompt (and, later, the answer so far)."""
        return key_of(self._name, *self._hashes, self._length)

    def next(self, want_top: bool) -> Choice:
        """Return the next token; with `want_top` the candidates' log probabilities too."""
        state = self.key
        start = mix(state)
        # 32 steps of at most 7 stay inside one turn of the list: the candidates are distinct.
        size = len(_ANSWER)
        stride = 1 + (start >> 32) % 7
        offset = start % size
        shape = (start >> 48) & 7
        order: Sequence[int] = range(CANDIDATES)
        logs: Sequence[float] = _SHAPES[shape]
        if self._perturb:
            order, logs = self._disturbed(state, logs)
        index = 0 if self._sampling.temperature <= 0 else self._sample(shape, logs)
        token = _ANSWER[(offset + stride * order[index]) % size]
        top: tuple[tuple[int, float], ...] = ()
        if want_top:
            top = tuple(
                (_ANSWER[(offset + stride * place) % size], value)
                for place, value in zip(order, logs, strict=True)
            )
        # As if the token had stood at the prompt's end: an answer goes on as its prefix would.
        raw = token.to_bytes(8, sys.byteorder)
        crc, adler = self._hashes
        self._hashes = (zlib.crc32(raw, crc), zlib.adler32(raw, adler))
        self._length += 8
        self._count += 1
        return Choice(token, logs[index], top)

    def _disturbed(self, state: int, logs: Sequence[float]) -> tuple[list[int], list[float]]:
        moved = [
            value + self._perturb * gauss(key_of(state, 77, i)) for i, value in enumerate(logs)
        ]
        total = math.log(sum(map(math.exp, moved)))
        order = sorted(range(CANDIDATES), key=lambda i: -moved[i])
        return order, [moved[i] - total for i in order]

    def _sample(self, shape: int, logs: Sequence[float]) -> int:
        chances = None if self._perturb else self._chances.get(shape)
        if chances is None:
            chances = self._cumulated(logs)
            self._chances[shape] = chances
        drawn = uniform(key_of(self._sampling.seed, self._count)) * chances[-1]
        for index, edge in enumerate(chances):
            if drawn < edge:
                return index
        return len(chances) - 1

    def _cumulated(self, logs: Sequence[float]) -> list[float]:
        """Return the cumulated chances after temperature, top_k and top_p, best first."""
        sampling = self._sampling
        weights = [math.exp((value - logs[0]) / sampling.temperature) for value in logs]
        if sampling.top_k > 0:
            del weights[sampling.top_k :]
        edges = list(accumulate(weights))
        if sampling.top_p < 1.0:
            limit = sampling.top_p * edges[-1]
            kept = next(i for i, edge in enumerate(edges) if edge >= limit * (1 - 1e-12))
            del edges[kept + 1 :]
        return edges
