"""Prompts by name, each pinned by the sha256 of its text.

A corpus is a folder with text files and a `cuts.json`: name to `{"file", "tokens", "sha256"}`
(`tokens` is null where no tokenizer has counted). A text that does not hash to its pin is
refused before the first request. The package brings a small corpus of its own; a folder named
by `DSV41_CORPUS` (several: joined by the path separator) comes before it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.text import one_line

__all__ = [
    "PACKAGED",
    "PROMPT_SHA256",
    "Corpus",
    "Prompt",
    "corpora",
    "find_prompt",
    "text_sha256",
]

PACKAGED: Final = Path(__file__).parent / "corpus"
"""The corpus that travels with the package."""

PROMPT_SHA256: dict[str, str] = {}
"""Prompts that are pinned by name whatever corpus brings them; add a name to pin it."""


def text_sha256(text: str) -> str:
    """The identity of one text: the sha256 of its UTF-8 bytes, 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Prompt:
    """A text with its name and identity; `tokens` as the corpus counted them."""

    name: str
    text: str
    sha256: str
    tokens: int | None


@dataclass(frozen=True)
class Corpus:
    """A folder of pinned texts."""

    folder: Path
    cuts: Mapping[str, Mapping[str, object]]

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Read a corpus's `cuts.json`; texts are read when asked for.

        Raises:
            UsageError: no such folder, or a `cuts.json` that is none.
        """
        file = folder / "cuts.json"
        try:
            data = json.loads(file.read_text())
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}; a corpus is a folder with one") from None
        except ValueError as error:
            raise UsageError(f"{file}: not JSON: {one_line(str(error), 100)}") from None
        if not isinstance(data, dict):
            raise UsageError(f"{file}: not an object of name to cut")
        for name, cut in data.items():
            digest = cut.get("sha256") if isinstance(cut, dict) else None
            if not isinstance(digest, str) or len(digest) != 64:
                raise UsageError(f"{file}: {one_line(name, 60)}: needs file, tokens, sha256")
            place = cut.get("file", f"{name}.txt")
            if not isinstance(place, str) or not place.isprintable():
                raise UsageError(f"{file}: {one_line(name, 60)}: file: not a file's name")
        return cls(folder, data)

    def prompt(self, name: str) -> Prompt:
        """Return the text called `name`.

        Raises:
            UsageError: the corpus has no such prompt, or its file is missing.
            MeasurementRefused: kind `prompt-pin`, when the text is not the pinned one.
        """
        cut = self.cuts.get(name)
        if cut is None:
            raise UsageError(f"prompt {one_line(name, 60)}: not in {self.folder}")
        file = self.folder / str(cut.get("file", f"{name}.txt"))
        if file.resolve().parent != self.folder.resolve():
            raise UsageError(f"{self.folder}/cuts.json: {name}: its file lies outside the folder")
        if file.exists() and not file.is_file():
            raise UsageError(f"{file}: no file")
        try:
            text = file.read_bytes().decode()
        except OSError as error:
            raise UsageError(f"{file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise MeasurementRefused("prompt-pin", f"{file} is not UTF-8") from None
        digest = text_sha256(text)
        for pin in (str(cut["sha256"]), PROMPT_SHA256.get(name, digest)):
            if digest != pin:
                raise MeasurementRefused(
                    "prompt-pin",
                    f"prompt {name}: {file} hashes to {digest[:12]}…, pinned is {pin[:12]}…",
                )
        tokens = cut.get("tokens")
        return Prompt(name, text, digest, tokens if isinstance(tokens, int) else None)


@lru_cache(maxsize=8)
def _load(folder: Path, _mtime: int) -> Corpus:
    return Corpus.load(folder)


def corpora() -> tuple[Corpus, ...]:
    """The corpora in the order they are asked: `DSV41_CORPUS` first, the packaged one last."""
    named = [Path(part) for part in os.environ.get("DSV41_CORPUS", "").split(os.pathsep) if part]
    found = []
    for folder in (*named, PACKAGED):
        file = folder / "cuts.json"
        found.append(_load(folder, file.stat().st_mtime_ns if file.exists() else 0))
    return tuple(found)


def find_prompt(name: str, among: Iterable[Corpus] | None = None) -> Prompt:
    """Return a prompt from the first corpus that has it.

    Raises:
        UsageError: none has it; the message says where to put it.
    """
    looked = tuple(corpora() if among is None else among)
    for corpus in looked:
        if name in corpus.cuts:
            return corpus.prompt(name)
    if name.startswith("dist-"):
        way = "cut one with `dsv41 dist-gate cuts`"
    else:
        there = sorted({one for corpus in looked for one in corpus.cuts if one[:5] != "dist-"})
        way = f"valid: {one_line(', '.join(there), 200)}; or cut one with `dsv41 corpus cut`"
    raise UsageError(
        f"prompt {one_line(name, 60)}: in no corpus ({', '.join(str(c.folder) for c in looked)}); "
        f"{way} and name its folder in DSV41_CORPUS"
    )
