"""Environment files, as systemd reads them or as a shell sources them: some values changed.

Only the line that assigns a name is written anew; every other byte stays, comments included.
Written is what both readers understand alike: a plain word, or one in single quotes. Where a line
begins is the reader's own business: a quote or a backslash carries a value over to the next one.
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


def variant(
    data: bytes, changes: Mapping[str, str], *, header: str, where: str, sourced: bool
) -> bytes:
    """Return the file's bytes with `header` as its first line and `changes` in place.

    A name that the file does not assign is added at its end. `sourced`: a shell reads the file;
    else systemd does. `where` names the file in messages.

    Raises:
        UsageError: the file assigns one of the names twice, or over several lines; or one has to be
            added, and the file's last line is not closed.
    """
    check_changes(changes, "env")
    lines = data.split(b"\n")
    text = data.decode("latin-1")
    begins = _begun_in_a_shell(text) if sourced else _begun_in_systemd(text)
    export = rb"(export\s+)?" if sourced else rb"()"
    added: list[bytes] = []
    for name, value in changes.items():
        assign = re.compile(rb"\s*" + export + name.encode() + rb"=")
        found = [n for n, line in enumerate(lines) if begins[n] and assign.match(line)]
        word = value if _PLAIN.fullmatch(value) else f"'{value}'"
        written = f"{name}={word}".encode()
        if not found:
            added.append(written)
            continue
        if len(found) > 1:
            raise UsageError(
                f"{where}:{found[1] + 1}: {name} is assigned here and in line {found[0] + 1}; "
                "an arm that changes it needs one assignment"
            )
        if not begins[found[0] + 1]:
            raise UsageError(
                f"{where}:{found[0] + 1}: {name} goes on over several lines; an arm that changes "
                "it needs it on one"
            )
        match = assign.match(lines[found[0]])
        assert match is not None
        lines[found[0]] = (b"export " if match[1] else b"") + written
    body = b"\n".join(lines)
    if added and not begins[-1]:
        raise UsageError(
            f"{where}:{len(lines)}: the file ends in an open quote or a backslash; an arm that "
            "adds a variable needs its last line closed"
        )
    if added:
        body += (b"" if not body or body.endswith(b"\n") else b"\n") + b"\n".join(added) + b"\n"
    return f"# {header}\n".encode() + body


def _begun_in_a_shell(text: str) -> list[bool]:
    """Whether each line begins a command; last, whether one could be added at the end."""
    begins, state, word = [True], "", False
    for char in text:
        ends = char == "\n" and state in ("", "#")
        if ends:
            state, word = "", False
        elif state.endswith("\\"):
            state, word = state[:-1], True
        elif char == "\\" and state in ("", '"'):
            state += char
        elif state in ("'", '"'):
            state, word = ("", True) if char == state else (state, word)
        elif not state and (char in "'\"" or (char == "#" and not word)):
            state = char
        else:
            word = char not in " \t;&|()"
        if char == "\n":
            begins.append(ends)
    return [*begins, state in ("", "#")]


_CLOSED: Final = ("", "key", "=", "value", "#")


def _begun_in_systemd(text: str) -> list[bool]:
    """Whether each line begins an assignment; last, whether one could be added at the end.

    A backslash carries a comment over to the next line too (before systemd 254).
    """
    begins, state = [True], ""
    for char in text:
        ends = char in "\n\r" and state in _CLOSED
        if ends:
            state = ""
        elif state == "":
            state = "#" if char in "#;" else state if char in " \t" else "key"
        elif state == "key":
            state = "=" if char == "=" else state
        elif state.endswith("\\"):
            state = state[:-1]
        elif char == "\\" and state != "'":
            state = ("value" if state == "=" else state) + char
        elif state == "=":
            state = char if char in "'\"" else state if char in " \t" else "value"
        elif state in ("'", '"') and char == state:
            state = "="
        if char == "\n":
            begins.append(ends)
    return [*begins, state in _CLOSED]
