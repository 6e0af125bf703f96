"""A TOML file with the line of every key, so that each error can name where it is.

`tomllib` gives the values; it keeps no positions. The scanner here walks the same text, which
`tomllib` has accepted already, and only notes on which line each key path begins.
"""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import difflib
import math
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..durable import read_regular
from ..errors import SpecError
from ..text import one_line

__all__ = [
    "MAX_BYTES",
    "KeyPath",
    "Source",
    "choices",
    "dotted",
    "first_slip",
    "read_input",
    "read_toml",
    "refuse_nulls",
    "shown",
    "slip_text",
]

MAX_BYTES = 1 << 20
_MAX_DEPTH = 32
_INT64 = 1 << 63
_NAMES_SHOWN = 40

KeyPath = tuple[str | int, ...]
"""Keys and array positions from the top of the file: `("cells", 0, "primary")`."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n]+|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}#\n]+")
_BASIC = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_LONG_BASIC = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""(?:"(?!")|""(?!"))?', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''(?:[^']|'(?!''))*'''(?:'(?!')|''(?!'))?")
_AT = re.compile(r"\s*\(at (?:line (\d+), column \d+|end of document)\)\s*$")


def dotted(path: KeyPath) -> str:
    """Return a key path as messages show it: `cells[0].primary`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if _BARE.fullmatch(part) else f"'{one_line(part, 60)}'"
            text += f".{word}" if text else word
    return text


def first_slip(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the one of pydantic's errors that says most.

    A mistyped key is also missing under its own name: the slip says more.
    """
    return next((one for one in found if one["type"] == "extra_forbidden"), found[0])


def slip_text(found: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Say one of pydantic's errors for a person: no pattern where its field has words for it.

    `fields` are the fields of the table that it is about; a field's description says its form.
    """
    if found["type"] == "missing":
        return "missing"
    if found["type"] == "extra_forbidden":
        return "unknown key"
    field = fields.get(str(found["loc"][-1])) if found["loc"] else None
    if found["type"] == "string_pattern_mismatch" and field is not None and field.description:
        return f"{shown(found['input'])}; valid: {field.description}"
    return one_line(found["msg"].removeprefix("Value error, "), 200)


def shown(value: Any) -> str:
    """Return a value as messages show it, with its TOML type; long ones are cut."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f"'{one_line(value, 60)}'"
        case int():
            return f"the integer {value}"
        case float():
            return f"the number {value}"
        case list() | tuple():
            return "an array"
        case dict():
            return "a table"
        case _:
            return "a date or time"


def choices(word: str, valid: Collection[str]) -> str:
    """Return `; did you mean 'x'?; valid: …` for a name that is none of `valid`."""
    names = list(valid)
    close = difflib.get_close_matches(word[:80], names, n=1, cutoff=0.6)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    listed = ", ".join(names[:_NAMES_SHOWN]) or "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{hint}; valid: {listed}{more}"


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the values of a file come from: its name in messages, and the line of each key."""

    name: str
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest table around it; 1 when nothing is nearer."""
        for size in range(len(path), 0, -1):
            if path[:size] in self.lines:
                return self.lines[path[:size]]
        return 1

    def error(self, path: KeyPath, message: str) -> SpecError:
        """The one-line error `file:line: key: message`."""
        where = f"{dotted(path)}: " if path else ""
        return SpecError(f"{self.name}:{self.line(path)}: {where}{message}")


def read_toml(file: Path, name: str) -> tuple[dict[str, Any], Source]:
    """Read a TOML file; `name` is what messages call it.

    Values are strings, 64-bit integers, finite numbers, booleans, arrays and tables; a byte order
    mark and CRLF line ends are accepted.

    Raises:
        SpecError: not a readable regular file, larger than 1 MiB, not UTF-8, not TOML, a date, a
            number that is not finite, or nesting deeper than 32.
    """
    label = one_line(name, 200)
    raw = read_input(file, MAX_BYTES, name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{label}:{line}: not UTF-8 text (byte {error.start})") from None
    text = text.replace("\r\n", "\n")
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _invalid(label, text, str(error)) from None
    except RecursionError:
        raise SpecError(f"{label}:1: nested too deeply; at most {_MAX_DEPTH} levels") from None
    except ValueError as error:
        # An integer of more digits than Python converts is not a TOMLDecodeError.
        raise SpecError(f"{label}:1: invalid TOML: {one_line(str(error))}") from None
    try:
        source = Source(label, _Scanner(text).scan())
    except RecursionError:
        raise SpecError(f"{label}:1: nested too deeply; at most {_MAX_DEPTH} levels") from None
    _check_plain(values, (), source)
    return values, source


def read_input(file: Path, limit: int, name: str = "") -> bytes:
    """Return the bytes of a file that the user names; `name` is what messages call it.

    Raises:
        SpecError: no such file, it cannot be read, is no regular file, or is larger than `limit`.
    """
    try:
        return read_regular(file, limit)
    except (FileNotFoundError, ValueError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error
        raise SpecError(f"{one_line(name or str(file), 200)}: {reason}") from None


def refuse_nulls(value: Any, source: Source, where: KeyPath = ()) -> None:
    """Refuse a null character in any text: no path, word or variable can hold one.

    Raises:
        SpecError: file, line and key of the first.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            refuse_nulls(key, source, (*where, key))
            refuse_nulls(inner, source, (*where, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            refuse_nulls(inner, source, (*where, position))
    elif isinstance(value, str) and "\0" in value:
        raise source.error(where, "holds a null character")


def _invalid(label: str, text: str, message: str) -> SpecError:
    found = _AT.search(message)
    what = message[: found.start()] if found else message
    line = int(found[1]) if found and found[1] else text.rstrip("\n").count("\n") + 1
    if what == "Cannot overwrite a value":
        what = "a key is given twice"
    elif twice := re.fullmatch(r"Cannot declare \((.*?),?\) twice", what):
        table = twice[1].translate({ord("'"): None}).replace(", ", ".")
        what = f"the table {table} is declared twice"
    return SpecError(f"{label}:{line}: invalid TOML: {one_line(what)}")


def _check_plain(value: Any, path: KeyPath, source: Source) -> None:
    """Refuse what could not go into JSON, or would make later work unbounded."""
    if len(path) > _MAX_DEPTH:
        raise source.error(path[:3], f"nested too deeply; at most {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_plain(inner, (*path, key), source)
    elif isinstance(value, list):
        for position, inner in enumerate(value):
            _check_plain(inner, (*path, position), source)
    elif isinstance(value, float) and not math.isfinite(value):
        raise source.error(path, f"{value} is not a finite number")
    elif isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise source.error(path, "the integer does not fit in 64 bits")
    elif isinstance(value, (datetime.date, datetime.time)):
        raise source.error(path, "dates and times are not used here; write a string")


class _Scanner:
    """Notes the line of every key path of a valid TOML text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._ends = [found.start() for found in re.finditer("\n", text)]
        self._lines: dict[KeyPath, int] = {}
        self._elements: dict[KeyPath, int] = {}
        """How many elements each array of tables has so far."""

    def scan(self) -> dict[KeyPath, int]:
        table: KeyPath = ()
        self._skip(_GAP)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_GAP)
        return self._lines

    def _skip(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise AssertionError(f"the scanner and tomllib disagree at character {self._at}")
        self._at = found.end()
        return found[0]

    def _note(self, path: KeyPath, at: int) -> None:
        self._lines.setdefault(path, bisect.bisect_left(self._ends, at) + 1)

    def _header(self) -> KeyPath:
        at = self._at
        array = self._text.startswith("[[", at)
        self._at += 2 if array else 1
        keys = self._key()
        self._at += 2 if array else 1
        path: KeyPath = ()
        for position, key in enumerate(keys):
            path = (*path, key)
            self._note(path, at)
            last = position == len(keys) - 1
            if last and array:
                self._elements[path] = self._elements.get(path, 0) + 1
            if path in self._elements:
                path = (*path, self._elements[path] - 1)
                self._note(path, at)
        return path

    def _key(self) -> list[str]:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            if self._text[self._at] == '"':
                keys.append(tomllib.loads("k=" + self._skip(_BASIC))["k"])
            elif self._text[self._at] == "'":
                keys.append(self._skip(_LITERAL)[1:-1])
            else:
                keys.append(self._skip(_BARE))
            self._skip(_BLANK)
            if self._text[self._at] != ".":
                return keys
            self._at += 1

    def _pair(self, table: KeyPath) -> None:
        at = self._at
        path = table
        for key in self._key():
            path = (*path, key)
            self._note(path, at)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        text, at = self._text, self._at
        if text[at] == "[":
            position = 0
            while self._inside("]"):
                self._note((*path, position), self._at)
                self._value((*path, position))
                position += 1
        elif text[at] == "{":
            while self._inside("}"):
                self._pair(path)
        elif text.startswith('"""', at):
            self._skip(_LONG_BASIC)
        elif text.startswith("'''", at):
            self._skip(_LONG_LITERAL)
        elif text[at] == '"':
            self._skip(_BASIC)
        elif text[at] == "'":
            self._skip(_LITERAL)
        else:
            self._skip(_SCALAR)

    def _inside(self, end: str) -> bool:
        """Step over an opening bracket or a comma; False once the closing one is passed."""
        self._skip(_GAP)
        if self._text[self._at] in "[{,":
            self._at += 1
        self._skip(_GAP)
        if self._text[self._at] == end:
            self._at += 1
            return False
        return True
