"""Command lines as a target file writes them: words in which `{name}` stands for a value."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ..errors import SpecError

__all__ = ["PLACEHOLDER", "fill", "same_command"]

PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def fill(words: Sequence[str], values: Mapping[str, str], where: str) -> list[str]:
    """Put the values in; each word stays one word, whatever stands in a value.

    Raises:
        SpecError: a placeholder has no value; `where` says where it stands.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise SpecError(
                f"{where}: unknown placeholder {match[0]}; valid: "
                + ", ".join(f"{{{name}}}" for name in sorted(values))
            )
        return values[match[1]]

    return [PLACEHOLDER.sub(replace, word) for word in words]


def same_command(running: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether two command lines are one; a script's runs behind its interpreter's name."""
    if list(running[-(len(expected) - 1) :] if len(expected) > 1 else []) != list(expected[1:]):
        return False
    names = {os.path.realpath(word) for word in running[: len(running) - len(expected) + 1]}
    names |= {Path(word).name for word in running[: len(running) - len(expected) + 1]}
    return os.path.realpath(expected[0]) in names or Path(expected[0]).name in names
