"""Environment files, as systemd reads them and as a shell sources them: some values changed.

Only the line that assigns a name is written anew; every other byte stays, comments included.
Written is what both readers understand alike: a plain word, or one in single quotes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line

__all__ = ["check_changes", "variant"]

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:=,+@%-]+")
_UNQUOTABLE: Final = re.compile(r"['\\\x00-\x1f\x7f]")


def check_changes(changes: Mapping[str, str], where: str) -> None:
    """Refuse names and values that the two readers of such a file would take for different ones.

    Raises:
        UsageError: a name is none, or a value holds a quote, a backslash or a control character.
    """
    for name, value in changes.items():
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{where}.{one_line(name, 60)}: no environment name; valid: letters, digits, '_'"
            )
        if _UNQUOTABLE.search(value):
            raise UsageError(
                f"{where}.{name}: {one_line(repr(value), 80)}; valid: no single quote, backslash "
                "or control character"
            )


def variant(data: bytes, changes: Mapping[str, str], *, header: str, where: str) -> bytes:
    """Return the file's bytes with `header` as its first line and `changes` in place.

    A name that the file does not assign is added at its end. `where` names the file in messages.

    Raises:
        UsageError: the file assigns one of the names twice, or over several lines.
    """
    check_changes(changes, "env")
    lines = data.split(b"\n")
    added: list[bytes] = []
    for name, value in changes.items():
        assign = re.compile(rb"\s*(export\s+)?" + name.encode() + rb"=")
        found = [number for number, line in enumerate(lines) if assign.match(line)]
        written = f"{name}={value if _PLAIN.fullmatch(value) else _quoted(value)}".encode()
        if not found:
            added.append(written)
            continue
        if len(found) > 1:
            raise UsageError(
                f"{where}:{found[1] + 1}: {name} is assigned here and in line {found[0] + 1}; "
                "an arm that changes it needs one assignment"
            )
        match = assign.match(lines[found[0]])
        assert match is not None
        if not _whole(lines[found[0]][match.end() :]):
            raise UsageError(
                f"{where}:{found[0] + 1}: {name} goes on over several lines; an arm that changes "
                "it needs it on one"
            )
        lines[found[0]] = (b"export " if match[1] else b"") + written
    body = b"\n".join(lines)
    if added:
        body += (b"" if not body or body.endswith(b"\n") else b"\n") + b"\n".join(added) + b"\n"
    return f"# {header}\n".encode() + body


def _quoted(value: str) -> str:
    return f"'{value}'"


def _whole(value: bytes) -> bool:
    """Whether an assignment's value ends on its line: no open quote, no backslash at its end."""
    quote = b""
    index = 0
    while index < len(value):
        char = value[index : index + 1]
        if char == b"\\" and quote != b"'":
            if index + 1 == len(value):
                return False
            index += 1
        elif quote and char == quote:
            quote = b""
        elif not quote and char in (b"'", b'"'):
            quote = char
        index += 1
    return not quote
