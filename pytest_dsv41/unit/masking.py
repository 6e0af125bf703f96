"""What of an environment or a command line may be shown: a secret stands in no artefact (SAFETY).

Nobody can tell a secret by its name, so the rule is the other way round: a value is shown where it
is plainly none (a path, a number, a switch), and by its sha256 otherwise. Command lines, which
every process of a machine may read, are shown but for the words that carry keys.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from typing import Final

from pytest_dsv41.text import one_line

__all__ = ["masked_argv", "masked_value", "masked_words"]

_PLAIN: Final = re.compile(
    r"/[A-Za-z0-9/._@+-]*"
    r"|[+-]?\d{1,12}(\.\d{1,6})?"
    r"|true|false|yes|no|on|off|TRUE|FALSE|YES|NO|ON|OFF|"
)
# As a word of its own: `--api-key` carries one, `--max-num-batched-tokens` does not.
_SECRET: Final = re.compile(
    r"(?i)(?<![a-z])(api_?key|key|token|secret|password|passwd|passphrase|credentials?|auth|cookie)"
    r"(?![a-z])"
)
_LOGIN: Final = re.compile(r"(://)[^/@\s]*@")


def masked_value(name: str, value: str) -> str:
    """Return what may be shown of the environment variable `name`: its value, or its sha256."""
    if _PLAIN.fullmatch(value) and not _SECRET.search(name):
        return one_line(value, 200)
    digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    return f"sha256:{digest[:12]}"


def masked_argv(argv: Sequence[str]) -> str:
    """Return a command line, quoted, without the values of flags that carry keys or logins."""
    return one_line(shlex.join(masked_words(argv)), 600)


def masked_words(argv: Sequence[str]) -> list[str]:
    """Return the words of a command line, without the values of flags that carry keys or logins."""
    shown: list[str] = []
    hide = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        if hide:
            word = "***"
        elif equals and _SECRET.search(flag):
            word = f"{flag}=***"
        shown.append(_LOGIN.sub(r"\1***@", word))
        hide = not hide and not equals and word.startswith("-") and bool(_SECRET.search(word))
    return shown
