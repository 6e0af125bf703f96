"""A converter's recipe: the derived experts put between its markers, everything else as it was.

A recipe is ordered rules, `PATTERN QUANTISER OPTION=VALUE…`; `#` begins a comment, a pattern is a
glob over a weight's whole name, and the first rule that matches decides. Protected experts are
rules `blk.<layer>.ffn_*_exps.<expert>.weight cast dtype=bf16` between the lines

    # PROTECTED-BEGIN
    # PROTECTED-END

which stand before the experts' own rule. What the result would do is worked out before anything is
written: one layer's table of experts takes one encoding, and only a whole expert is kept beside it
(FRANK-ARCHON "The payload chain", step 6).
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_dsv41.durable import parse_json, write_atomic
from pytest_dsv41.errors import SpecError
from pytest_dsv41.payload.experts import EXPERTS_MOST, NAMES_SCHEMA, expert_name
from pytest_dsv41.text import counted, one_line
from pytest_dsv41.window.source import read_input

__all__ = ["Names", "Spliced", "read_names", "splice", "spliced_text"]

_BEGIN: Final = re.compile(rb"[ \t]*#[ \t]*PROTECTED-BEGIN(?![A-Za-z0-9_-])[^\n]*")
_END: Final = re.compile(rb"[ \t]*#[ \t]*PROTECTED-END(?![A-Za-z0-9_-])[^\n]*")
_NAME: Final = re.compile(r"blk\.(\d{1,6})\.ffn_(\*|down|gate_up)_exps\.(\d{1,6})(?:\.weight)?")
_BYTES_MOST: Final = 64 << 20
_PROJECTIONS: Final = ("gate_up", "down")
_WHOLE: Final = "cast dtype=bf16"
# The options that make the stored form; how the codes are found (calib, cd, rule) is not among
# them, nor is the value of a fixed second level.
_FORM: Final = frozenset(
    ("codes", "table", "group", "block", "scale", "scale2", "group2", "block2", "zero", "dtype")
) | {"transform"}


@dataclass(frozen=True)
class Names:
    """The experts to protect, by (layer, expert), in order.

    `layers` and `experts` are those of the recording; 0 experts: not known.
    """

    experts: tuple[tuple[int, int], ...]
    layers: tuple[int, ...] = ()
    per_layer: int = 0


@dataclass(frozen=True)
class Spliced:
    """A done splice: `names` experts stand between the markers, `before` stood there."""

    names: int
    before: int
    sha256: str


@dataclass(frozen=True)
class _Rule:
    line: int
    pattern: str
    """A regular expression."""
    form: str
    """The encoding it makes, in words."""


def read_names(path: Path) -> Names:
    """Read the experts: a derivation as JSON, or text with a name a line and `#` comments.

    Raises:
        SpecError: file and line, for a name of another form, one that is named twice, or an expert
            the recording has not.
    """
    raw = read_input(path, _BYTES_MOST)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = raw.count(b"\n", 0, error.start) + 1
        raise SpecError(f"{path}:{at}: not UTF-8 text") from None
    if text.lstrip().startswith("{"):
        return _derived(path, text)
    pairs = []
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if word:
            pairs.append((f"{path}:{number}", word))
    if not pairs:
        # A derivation may protect nothing, and says so; an empty file says nothing.
        raise SpecError(f"{path}: names no expert")
    return Names(_checked(pairs, (), 0))


def _derived(path: Path, text: str) -> Names:
    try:
        body: Any = parse_json(text)
    except ValueError as error:
        raise SpecError(f"{path}: not JSON: {one_line(str(error), 100)}") from None
    if not isinstance(body, dict) or body.get("schema") != NAMES_SCHEMA:
        raise SpecError(f"{path}: schema: valid: {NAMES_SCHEMA!r}, as of: dsv41 experts derive")
    layers, per_layer, rows = (body.get(key) for key in ("layers", "experts", "protected"))
    if not isinstance(layers, list) or not layers or not all(map(_number, layers)):
        raise SpecError(f"{path}: layers: valid: a list of numbers, as derive wrote it")
    if not _number(per_layer) or not per_layer:
        raise SpecError(f"{path}: experts: valid: 1 to {EXPERTS_MOST:,}, as derive wrote it")
    if not isinstance(rows, list):
        raise SpecError(f"{path}: protected: valid: a list, as derive wrote it")
    pairs = []
    for number, row in enumerate(rows):
        where = f"{path}: protected[{number}]"
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise SpecError(f"{where}: has no name")
        pairs.append((where, row["name"]))
    return Names(_checked(pairs, layers, per_layer), tuple(layers), per_layer)


def _number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= EXPERTS_MOST


def _checked(
    pairs: Sequence[tuple[str, str]], layers: Sequence[int], per_layer: int
) -> tuple[tuple[int, int], ...]:
    seen: dict[tuple[int, int], str] = {}
    for where, name in pairs:
        match = _NAME.fullmatch(name)
        if match is None or match[2] != "*":
            half = " (half an expert cannot be kept)" if match else ""
            raise SpecError(
                f"{where}: unknown name {one_line(name, 80)!r}{half}; "
                "valid: blk.<layer>.ffn_*_exps.<expert>.weight"
            )
        key = int(match[1]), int(match[3])
        if layers and (key[0] not in layers or key[1] >= per_layer):
            raise SpecError(
                f"{where}: unknown name {name!r}: the recording has {per_layer} experts "
                f"in layers {min(layers)} to {max(layers)}"
            )
        if key in seen:
            raise SpecError(f"{where}: {name} stands already at {seen[key]}")
        seen[key] = where
    return tuple(sorted(seen))


def splice(path: Path, names: Names, *, replace: bool = False) -> Spliced:
    """Put the names between the recipe's markers, in one step, and keep every other byte.

    The file's owner and permissions stay; a symbolic link keeps pointing to it.

    Raises:
        SpecError: see `spliced_text`; the file is untouched.
    """
    try:
        real = path.resolve()
    except RuntimeError:
        raise SpecError(f"{path}: a loop of symbolic links") from None
    raw = read_input(real, _BYTES_MOST, str(path))
    about = real.stat()
    new, before = spliced_text(raw, names, replace=replace, where=str(path))
    write_atomic(real, new, like=about)
    return Spliced(len(names.experts), before, hashlib.sha256(new).hexdigest())


def spliced_text(
    raw: bytes, names: Names, *, replace: bool = False, where: str = "recipe"
) -> tuple[bytes, int]:
    """Return the recipe's bytes with the names between its markers, and how many stood there.

    Raises:
        SpecError: the markers are missing, doubled or reversed; the block is filled and `replace`
            is off; a line is no rule; a protected expert would not be kept, because an earlier
            rule decides it; or the experts of one layer would take two encodings.
    """
    if raw.startswith(codecs.BOM_UTF8):
        raise SpecError(f"{where}:1: begins with a byte order mark; valid: UTF-8 without one")
    lines = _lines(raw)
    begin, end = _markers(lines, where)
    held = [line for line in lines[begin + 1 : end] if line.strip()]
    if held and not replace:
        raise SpecError(
            f"{where}:{begin + 2}: the block is filled ({counted(len(held), 'line')}); "
            "--replace puts the new names in their place"
        )
    newline = b"\r\n" if lines[begin].endswith(b"\r\n") else b"\n"
    block = [f"{expert_name(*key)} {_WHOLE}".encode() + newline for key in names.experts]
    rules = [
        *_rules(lines[: begin + 1], where),
        *_rules(block, where),
        *_rules(lines[end:], where, first=end + 1),
    ]
    _check(rules, names, where)
    return b"".join([*lines[: begin + 1], *block, *lines[end:]]), len(held)


def _lines(raw: bytes) -> list[bytes]:
    """Lines as `\\n` ends them: a lone `\\r` is a byte like any other."""
    return [line for line in re.split(rb"(?<=\n)", raw) if line]


def _markers(lines: Sequence[bytes], where: str) -> tuple[int, int]:
    found = []
    for name, form in (("PROTECTED-BEGIN", _BEGIN), ("PROTECTED-END", _END)):
        at = [n for n, line in enumerate(lines) if form.fullmatch(line.rstrip(b"\r\n"))]
        if not at:
            raise SpecError(f"{where}: has no line '# {name}'")
        if len(at) > 1:
            told = " and ".join(str(n + 1) for n in at)
            raise SpecError(f"{where}:{at[1] + 1}: '# {name}' stands twice, on lines {told}")
        found.append(at[0])
    begin, end = found
    if begin > end:
        raise SpecError(
            f"{where}:{end + 1}: '# PROTECTED-END' stands before '# PROTECTED-BEGIN' "
            f"on line {begin + 1}"
        )
    return begin, end


def _rules(lines: Sequence[bytes], where: str, *, first: int = 1) -> list[_Rule]:
    """The rules of some lines of the recipe, of which the first has the number `first`."""
    rules = []
    for number, line in enumerate(lines, first):
        try:
            words = line.decode("utf-8").partition("#")[0].split()
        except UnicodeDecodeError:
            raise SpecError(f"{where}:{number}: not UTF-8 text") from None
        if not words:
            continue
        if len(words) < 2:
            raise SpecError(f"{where}:{number}: no rule: valid: PATTERN QUANTISER [OPTION=VALUE…]")
        options: dict[str, str] = {}
        for word in words[2:]:
            key, equals, value = word.partition("=")
            if not equals or not key:
                raise SpecError(
                    f"{where}:{number}: option {one_line(word, 40)!r}; valid: OPTION=VALUE"
                )
            if key in options:
                raise SpecError(f"{where}:{number}: option {one_line(key, 40)!r} twice")
            options[key] = value
        kind = words[1] if words[1] == "cast" else "codes"
        form = " ".join([kind, *(f"{k}={options[k]}" for k in sorted(_FORM & options.keys()))])
        rules.append(_Rule(number, _glob(words[0]), form))
    return rules


def _glob(pattern: str) -> str:
    """`*` is any text, dots too, and `?` one character; everything else is itself.

    What stands between two stars is looked for once, at the first place where it fits: a later one
    can find nothing more, and trying them all takes exponential time.
    """
    fixed = [
        "".join("(?s:.)" if char == "?" else re.escape(char) for char in piece)
        for piece in re.split(r"\*+", pattern)
    ]
    if len(fixed) == 1:
        return fixed[0]
    first, *middle, last = fixed
    return f"{first}{''.join(f'(?>(?s:.*?){piece})' for piece in middle)}(?s:.*){last}"


def _check(rules: Sequence[_Rule], names: Names, where: str) -> None:
    """Refuse rules of which a layer's table would take two encodings, or lose a protected expert.

    A rule of the block itself is never named: it decides whole experts alone.
    """
    protected = set(names.experts)
    layers = names.layers or sorted({layer for layer, _ in protected})
    per_layer = names.per_layer or 2 + max((expert for _, expert in protected), default=0)
    if len(layers) * per_layer > EXPERTS_MOST:
        raise SpecError(
            f"{where}: {len(layers)} layers of {per_layer:,} experts: "
            f"at most {EXPERTS_MOST:,} in all"
        )

    # One expression for all rules: of its alternatives the first that matches whole is taken.
    first = re.compile("|".join(f"({rule.pattern})" for rule in rules) or "(?!)")

    def decides(weight: str) -> _Rule | None:
        found = first.fullmatch(weight)
        return rules[found.lastindex - 1] if found and found.lastindex else None

    for layer in layers:
        table = ""
        form = ""
        for expert in range(per_layer):
            told = []
            forms = []
            for projection in _PROJECTIONS:
                weight = f"blk.{layer}.ffn_{projection}_exps.{expert}.weight"
                rule = decides(weight)
                forms.append(rule.form if rule else "as the checkpoint has it")
                told.append(
                    f"{weight} is {forms[-1]} ({f'line {rule.line}' if rule else 'no rule'})"
                )
            if forms == [_WHOLE, _WHOLE]:
                continue
            if (layer, expert) in protected:
                lost = told[0] if forms[0] != _WHOLE else told[1]
                raise SpecError(
                    f"{where}: {lost}, which is decided before the block; "
                    "the markers must stand before it"
                )
            for one, text in zip(forms, told, strict=True):
                if table and one != form:
                    raise SpecError(
                        f"{where}: two encodings in layer {layer}'s table of experts: "
                        f"{table}; {text}"
                    )
                table, form = table or text, one
