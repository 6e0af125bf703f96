"""Cutting prompts to a number of tokens, as the server that will be measured counts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_dsv41.durable import dump_json, write_atomic
from pytest_dsv41.errors import UsageError
from pytest_dsv41.measure.corpus import Corpus, Prompt, text_sha256

__all__ = ["cut_texts"]


def cut_texts(
    text: str,
    wanted: Sequence[tuple[str, int]],
    count: Callable[[str], int],
    folder: Path,
    *,
    start: int = 0,
) -> list[Prompt]:
    """Cut (name, tokens) after (name, tokens) out of `text` and add them to the corpus `folder`.

    `count` tells the tokens of a text, special tokens included. A cut is the longest piece, in
    whole characters, with at most that many tokens. The first begins at character `start`.
    Existing names are never overwritten.

    Raises:
        UsageError: the text is too short, or a name is taken or unfit for a file.
    """
    known: dict[str, dict[str, object]] = {}
    if (folder / "cuts.json").exists():
        known = {name: dict(cut) for name, cut in Corpus.load(folder).cuts.items()}
    cuts: list[Prompt] = []
    at = start
    for name, tokens in wanted:
        if name in known or any(cut.name == name for cut in cuts):
            raise UsageError(f"{name}: the corpus has a prompt of this name")
        if not name or not all(char.isalnum() or char in "-_." for char in name):
            raise UsageError(f"{name}: letters, digits, - _ . only")
        size = _longest(name, text, at, tokens, count)
        piece = text[at : at + size]
        cuts.append(Prompt(name, piece, text_sha256(piece), count(piece)))
        at += size
    folder.mkdir(parents=True, exist_ok=True)
    for cut in cuts:
        write_atomic(folder / f"{cut.name}.txt", cut.text)
        known[cut.name] = {"file": f"{cut.name}.txt", "tokens": cut.tokens, "sha256": cut.sha256}
    write_atomic(folder / "cuts.json", dump_json(known) + "\n")
    return cuts


def _longest(name: str, text: str, at: int, tokens: int, count: Callable[[str], int]) -> int:
    """Characters of the longest piece from `at` on that has at most `tokens` tokens."""
    left = len(text) - at
    low, high = 0, min(left, 4 * tokens + 64)
    while high < left and count(text[at : at + high]) <= tokens:
        low, high = high, min(left, 2 * high)
    if high == left and count(text[at:]) < tokens:
        raise UsageError(
            f"{name}: the text is too short: {tokens} tokens asked from character {at} of "
            f"{len(text)} on"
        )
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[at : at + middle]) <= tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise UsageError(f"{name}: no character of the text fits into {tokens} tokens")
    return low
