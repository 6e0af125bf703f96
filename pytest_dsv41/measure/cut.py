"""Cutting prompts to a number of tokens, as the server that will be measured counts them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Final

from pytest_dsv41.durable import FileLock, create_exclusive, dump_json, write_atomic
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure.corpus import Corpus, Prompt, text_sha256
from pytest_dsv41.text import one_line

__all__ = ["cut_texts"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def cut_texts(
    text: str,
    wanted: Sequence[tuple[str, int]],
    count: Callable[[str], int],
    folder: Path,
    *,
    start: int = 0,
    told: Callable[[str], None] = lambda _: None,
) -> list[Prompt]:
    """Cut (name, tokens) after (name, tokens) out of `text` and add them to the corpus `folder`.

    `count` tells the tokens of a text, special tokens included. A cut is the longest piece, in
    whole characters, with at most that many tokens. The first begins at character `start`. Nothing
    that is there is overwritten, and nothing is written before all is cut. `told` hears how far it
    is.

    Raises:
        UsageError: the text is too short, a name is taken or unfit for a file, a file of another
            content has its place, or the folder cannot be written to.
        MeasurementRefused: kind `tokenize`: one text was counted twice and differently.
    """
    _refuse_place(folder)
    known = _cuts(folder)
    names = [name for name, _ in wanted]
    for place, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{one_line(name, 80)}: no name; valid: up to 64 letters, digits, - _ . of ASCII"
            )
        _refuse_taken(name, {*known, *names[:place]})
    cuts: list[Prompt] = []
    at = start
    for name, tokens in wanted:
        size, found = _longest(name, text, at, tokens, _heard(name, count, told))
        piece = text[at : at + size]
        again = count(piece)
        if again != found:
            raise MeasurementRefused(
                "tokenize", f"{name}: the same text was counted as {found} and as {again} tokens"
            )
        cuts.append(Prompt(name, piece, text_sha256(piece), found))
        at += size
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".cuts.lock"):
        # Somebody else may have cut meanwhile.
        known = _cuts(folder)
        for cut in cuts:
            _refuse_taken(cut.name, known)
            _write_text(folder / f"{cut.name}.txt", cut.text)
        for cut in cuts:
            known[cut.name] = {
                "file": f"{cut.name}.txt", "tokens": cut.tokens, "sha256": cut.sha256,
            }  # fmt: skip
        write_atomic(folder / "cuts.json", dump_json(known) + "\n")
    return cuts


def _cuts(folder: Path) -> dict[str, dict[str, object]]:
    if not (folder / "cuts.json").exists():
        return {}
    return {name: dict(cut) for name, cut in Corpus.load(folder).cuts.items()}


def _refuse_taken(name: str, known: Container[str]) -> None:
    if name in known:
        raise UsageError(f"{name}: the corpus has a prompt of this name")


def _refuse_place(folder: Path) -> None:
    """Counting a long text takes minutes: what cannot be written is said before."""
    above = (folder, *folder.absolute().parents)
    there = next(path for path in above if path.exists() or path.is_symlink())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{there}: no folder that can be written to")


def _write_text(file: Path, text: str) -> None:
    """Write a new file; one that a cut which was ended has left there is the same."""
    try:
        create_exclusive(file, text.encode())
    except FileExistsError:
        if not file.is_file() or file.read_bytes() != text.encode():
            raise UsageError(f"{file}: exists and is another text; not overwritten") from None


def _heard(
    name: str, count: Callable[[str], int], told: Callable[[str], None]
) -> Callable[[str], int]:
    """`count` that says what it is about to count."""

    def counted(piece: str) -> int:
        told(f"{name}: {len(piece)} characters")
        return count(piece)

    return counted


def _longest(
    name: str, text: str, at: int, tokens: int, count: Callable[[str], int]
) -> tuple[int, int]:
    """(characters, tokens) of the longest piece from `at` on that has at most `tokens` tokens."""
    left = len(text) - at
    seen: dict[int, int] = {}

    def size(characters: int) -> int:
        seen[characters] = count(text[at : at + characters])
        return seen[characters]

    low, high = 0, min(left, 4 * tokens + 64)
    while high < left and size(high) <= tokens:
        low, high = high, min(left, 2 * high)
    if high == left and size(left) < tokens:
        raise UsageError(
            f"{name}: the text is too short: {tokens} tokens asked from character {at} of "
            f"{len(text)} on"
        )
    while low < high:
        middle = (low + high + 1) // 2
        if size(middle) <= tokens:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise UsageError(f"{name}: no character of the text fits into {tokens} tokens")
    return low, seen[low]
