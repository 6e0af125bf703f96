"""Making untrusted text safe to show: what a server says never reaches a terminal as it came."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["counted", "error_line", "one_line", "visible"]

_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def visible(text: str, limit: int = 2000) -> str:
    """Return `text` with every control, format and surrogate character written as an escape.

    Newlines and tabs stay; anything a terminal could obey (ESC, CR, bidi marks) does not. More
    than `limit` characters are cut, and the cut is said.
    """
    shown = "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in _HIDDEN
        else char.encode("unicode_escape").decode("ascii")
        for char in text[:limit]
    )
    if len(text) > limit:
        shown += f" … ({len(text) - limit} more characters)"
    return shown


def one_line(text: str, limit: int = 300) -> str:
    """Return `visible(text)` on a single line."""
    return " ".join(visible(text, limit).split())


def error_line(error: BaseException, limit: int = 300) -> str:
    """Return what an error says on a single line, without the number that Python puts before it."""
    said = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    return one_line(said or type(error).__name__, limit)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 row`, `1,204 rows`; `plural` where an s is not enough."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"
