"""One archive row: its fields, their rules, and its line in the file (schema v4).

A line is one JSON object whose fields stand in a fixed order, so that everything the chain needs
lies at a known place and verification never has to parse JSON:

    {"schema":…,"seq":…,"prev_sha256":…,   the chain: version, line number from 1, hash before it
     "cell":…,"metric":…,"max_tokens":…,"clock_cap_mhz":…,"commit":…,"prompt_sha256":…,
                                           the definition: only equal ones are ever pooled
     "value":…,"window":…,"start":…,"repeat":…,"date":…,   the measurement
     ["clock_source":…,"clock_caps_mhz":…,"prompt_members":…,]   audit, optional
     "batch":…,                            rows of this append on its first line, 0 on the others
     "sha256":…}                           sha256 of all bytes of the line before `,"sha256":`

`batch` makes an append all or nothing (see `store`) and shows a cut inside a batch for ever.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from datetime import date as _date
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from pytest_dsv41.archive.errors import ChainBroken, RowRefused
from pytest_dsv41.identity import prompt_identity
from pytest_dsv41.text import one_line

__all__ = [
    "DEFINITION",
    "FIELDS",
    "GENESIS",
    "KEY",
    "MIGRATED",
    "OPTIONAL",
    "REQUIRED",
    "SCHEMA",
    "encode",
    "line_fields",
    "normalise",
    "parse_line",
    "row_key",
]

SCHEMA = "dsv41-control-archive-v4"
MIGRATED = ("dsv41-control-archive-v1", "dsv41-control-archive-v3")
"""The older versions that `migrate` rebuilds."""
GENESIS = "0" * 64

DEFINITION = ("cell", "metric", "max_tokens", "clock_cap_mhz", "commit", "prompt_sha256")
REQUIRED = (*DEFINITION, "value", "window", "start", "repeat", "date")
OPTIONAL = ("clock_source", "clock_caps_mhz", "prompt_members")
FIELDS = (*REQUIRED, *OPTIONAL)
KEY = ("window", "cell", "metric", "start", "repeat")

CLOCK_SOURCES = ("start-log", "clock-log", "none")

# Names end up in messages, file names and tables: long ones and control characters are a mistake.
_NAME_LIMIT = 200
_MEMBERS_LIMIT = 4096
_INTEGER_LIMIT = 2**53  # beyond it JSON readers round
_HEX40 = re.compile(r"[0-9a-f]{40}")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_CHAIN = ("seq", "prev_sha256", "batch", "sha256")


_key_of = itemgetter(*KEY)


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what makes a row the same row: window, cell, metric, start, repeat."""
    key: tuple[Any, ...] = _key_of(row)
    return key


def _show(value: object) -> str:
    # A refused value can be 10 MB long: cut it before it is formatted, not after.
    if isinstance(value, str):
        shown = repr(value[:60]) + (f" … ({len(value)} characters)" if len(value) > 60 else "")
    elif isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        shown = f"an integer of {value.bit_length()} bits"
    elif isinstance(value, Mapping | list | tuple | set) and len(value) > 8:
        shown = f"a {type(value).__name__} of {len(value)} entries"
    else:
        shown = repr(value)
    return one_line(shown, 120)


def _name(value: object) -> str | None:
    if not isinstance(value, str):
        return "must be a string"
    if not 0 < len(value) <= _NAME_LIMIT:
        return f"must have 1 to {_NAME_LIMIT} characters"
    if value != value.strip() or not value.isprintable():
        return "must be printable, without spaces at either end"
    return None


def _positive(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _INTEGER_LIMIT:
        return "must be a positive integer"
    return None


def _natural(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _INTEGER_LIMIT:
        return "must be an integer from 0"
    return None


def _number(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "must be a number"
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    return None if finite else "must be finite"


def _commit(value: object) -> str | None:
    if not isinstance(value, str) or not _HEX40.fullmatch(value):
        return "must be 40 lower-case hex digits"
    return None


def _hash(value: object) -> str | None:
    if not isinstance(value, str) or not _HEX64.fullmatch(value):
        return "must be 64 lower-case hex digits"
    return None


def _day(value: object) -> str | None:
    wrong = "must be a date YYYYMMDD"
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{8}", value):
        return wrong
    try:
        _date(int(value[:4]), int(value[4:6]), int(value[6:]))
    except ValueError:
        return f"{wrong} that exists"
    return None


def _source(value: object) -> str | None:
    if value not in CLOCK_SOURCES:
        return f"must be one of {', '.join(CLOCK_SOURCES)}"
    return None


def _caps(value: object) -> str | None:
    if value == "unknown":
        return None
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MEMBERS_LIMIT:
        return "must be a list of MHz, or 'unknown'"
    if any(_positive(item) for item in value):
        return "must list positive integers (MHz)"
    return None


def _members(value: object) -> str | None:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= _MEMBERS_LIMIT:
        return "must be a list of prompt hashes"
    if any(_hash(item) for item in value):
        return "must list hashes of 64 lower-case hex digits"
    return None


_RULES = {
    "cell": _name,
    "metric": _name,
    "max_tokens": _positive,
    "clock_cap_mhz": _positive,
    "commit": _commit,
    "prompt_sha256": _hash,
    "value": _number,
    "window": _name,
    "start": _name,
    "repeat": _natural,
    "date": _day,
    "clock_source": _source,
    "clock_caps_mhz": _caps,
    "prompt_members": _members,
}


class _Wrong(Exception):
    """A field breaks its rule."""


def _refuse(field: str, value: object) -> None:
    wrong = _RULES[field](value)
    if wrong is not None:
        raise _Wrong(wrong)


def _plain(value: Any) -> Any:
    """Return the value as JSON's own types, so that equal rows have equal bytes."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    return float(value)


def normalise(row: Mapping[str, Any], where: str = "row") -> dict[str, Any]:
    """Return a checked copy of `row` with its fields in the archive's order.

    Args:
        row: the fields of the module docstring, without the chain's own ones. `schema` may be
            given and must then be v4. Optional fields may be left out, not None.
        where: how a message names the row.

    Raises:
        RowRefused: a field is missing, unknown, or breaks its rule.
    """
    if not isinstance(row, Mapping):
        raise RowRefused(f"{where}: must be an object with fields, not {type(row).__name__}")
    schema = row.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise RowRefused(f"{where}: schema: {_show(schema)} is not {SCHEMA}; migrate it first")
    plain: dict[str, Any] = {}
    for field in FIELDS:
        if field in row:
            value = row[field]
            try:
                _refuse(field, value)
                plain[field] = _plain(value)
            except _Wrong as wrong:
                raise RowRefused(f"{where}: {field}: {wrong}, got {_show(value)}") from None
    if len(plain) + ("schema" in row) != len(row):
        raise _unknown(row, where)
    missing = [field for field in REQUIRED if field not in plain]
    if missing:
        raise RowRefused(f"{where}: missing {', '.join(missing)}")
    if plain.get("clock_source") == "none" and plain["clock_cap_mhz"] != 1:
        raise RowRefused(
            f"{where}: clock_cap_mhz: must be 1 where clock_source is 'none', "
            f"got {plain['clock_cap_mhz']}"
        )
    if "prompt_members" in plain:
        identity = prompt_identity(plain["prompt_members"])
        if identity != plain["prompt_sha256"]:
            raise RowRefused(
                f"{where}: prompt_sha256: is not the identity of its "
                f"{len(plain['prompt_members'])} prompt_members ({identity[:12]}…), "
                f"got {plain['prompt_sha256'][:12]}…"
            )
    return plain


def _unknown(row: Mapping[str, Any], where: str) -> RowRefused:
    field = next(name for name in row if name not in _RULES and name != "schema")
    if field in _CHAIN:
        return RowRefused(f"{where}: {field}: the chain's own field, the archive writes it")
    return RowRefused(f"{where}: {_show(field)}: unknown field; valid: {', '.join(FIELDS)}")


class Prepared(NamedTuple):
    """A checked row, its key, and its fields as they stand in the line."""

    row: dict[str, Any]
    key: tuple[Any, ...]
    text: str


# What the rows of a window repeat is checked and written once.
_REPEATED = (*DEFINITION, "window", "start", "date")
_repeated_of = itemgetter(*_REPEATED)
_PLAIN_ROWS = {len(REQUIRED): False, len(REQUIRED) + 1: True}


@lru_cache(maxsize=4096, typed=True)
def _checked_text(field: str, value: object) -> str:
    # What does not pass raises and is therefore not kept, however long it is.
    _refuse(field, value)
    return _field(field, value)


@lru_cache(maxsize=2048, typed=True)
def _repeated(*values: Any) -> tuple[str, str, str]:
    """Return the texts before the value, between it and the repeat, and behind the repeat."""
    texts = {}
    for field, value in zip(_REPEATED, values, strict=True):
        if type(value) is not str and type(value) is not int:
            raise _Wrong
        texts[field] = _checked_text(field, value)
    definition = ",".join(texts[field] for field in DEFINITION)
    return (
        f'{definition},"value":',
        f',{texts["window"]},{texts["start"]},"repeat":',
        f",{texts['date']}",
    )


def prepare(row: Mapping[str, Any], number: int) -> Prepared:
    """Return a row ready to be written; the same as `normalise`, `row_key` and `fields_text`.

    `number` is the row's place in its batch, by which a message names it.

    A batch of a window's rows takes a short way; whatever is unusual goes the long one, which
    also names what is wrong.

    Raises:
        RowRefused: as `normalise`.
    """
    try:
        before, between, behind = _repeated(*_repeated_of(row))
        value, repeat = row["value"], row["repeat"]
        sourced = _PLAIN_ROWS[len(row)]
        if sourced:
            source = row["clock_source"]
            if source not in CLOCK_SOURCES or (source == "none" and row["clock_cap_mhz"] != 1):
                raise _Wrong
            behind += f',"clock_source":"{source}"'
        if type(value) is not float or not math.isfinite(value):
            raise _Wrong
        if type(repeat) is not int or not 0 <= repeat <= _INTEGER_LIMIT:
            raise _Wrong
    except (KeyError, TypeError, _Wrong):
        plain = normalise(row, f"row {number}")
        return Prepared(plain, row_key(plain), fields_text(plain))
    return Prepared(dict(row), _key_of(row), f"{before}{value!r}{between}{repeat}{behind}")


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


NUMBERED = b'{"schema":"' + SCHEMA.encode() + b'","seq":%d,'
PREFIX = NUMBERED + b'"prev_sha256":"%s",'
SUFFIX = b',"sha256":"'
END = b'"}\n'
PREFIX_TEXT = PREFIX.decode()
_END_OF_LINE = SUFFIX + b"%s" + END
TAIL = len(SUFFIX) + 64 + len(END)
CONTINUES = b',"batch":0'


def encode(row: Mapping[str, Any], *, seq: int, prev: str, batch: int) -> tuple[bytes, str]:
    """Return the line of a normalised row, with its newline, and the line's sha256."""
    return encode_text(fields_text(row), seq=seq, prev=prev, batch=batch)


def encode_text(text: str, *, seq: int, prev: str, batch: int) -> tuple[bytes, str]:
    """Return the line of a row whose fields stand in `text`, and the line's sha256."""
    body = (PREFIX_TEXT % (seq, prev) + text + f',"batch":{batch}').encode()
    sha = hashlib.sha256(body).hexdigest()
    return body + _END_OF_LINE % sha.encode(), sha


def fields_text(row: Mapping[str, Any]) -> str:
    """Return the fields of a normalised row as they stand in its line."""
    return ",".join([_field(field, row[field]) for field in FIELDS if field in row])


def _field(field: str, value: Any) -> str:
    # A finite float's JSON is its repr; asking for that directly is several times faster.
    return f'"{field}":{value!r}' if type(value) is float else f'"{field}":{_json(value)}'


def definition_bytes(row: Mapping[str, Any]) -> bytes:
    """Return the bytes with which the definition stands in a line, right after the prefix."""
    return b"".join(field_bytes(field, row[field]) for field in DEFINITION)


def field_bytes(field: str, value: Any) -> bytes:
    """Return the bytes with which a field stands in a line, with the comma behind it."""
    return _field(field, value).encode() + b","


def line_fields(line: bytes) -> dict[str, Any]:
    """Return the row of a line of ours without the chain's fields."""
    row: dict[str, Any] = json.loads(line)
    return {field: row[field] for field in FIELDS if field in row}


def parse_line(line: bytes, where: str, seq: int) -> dict[str, Any]:
    """Return the row of a line that may be forged, every field checked.

    Raises:
        ChainBroken: the line is linked, but no append of this version would have written it.
    """
    try:
        row: Any = json.loads(line)
        return normalise({key: row[key] for key in row if key not in _CHAIN}, where)
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error) if isinstance(error, RowRefused) else f"{where}: is no archive row"
        raise ChainBroken(f"{reason} (forged)", line=seq, change="forged") from None
