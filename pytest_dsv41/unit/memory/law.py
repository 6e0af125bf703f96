"""A dialect's memory law: what one token, one sequence and the pool itself take, from a data file.

    pool >= tokens x KiB per token + per sequence + fixed

The law is linear in tokens but for groups that hold a bounded number of cells a sequence (sliding
windows), which count as part of the sequence once the bound is reached (FRANK-ARCHON "The dtype
law").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_dsv41.text import one_line
from pytest_dsv41.unit.memory.ledger import DIALECTS

__all__ = ["Group", "KeyPath", "Knob", "Law", "Part", "law_from"]

KeyPath = tuple[str | int, ...]
Fault = Callable[[KeyPath, str], Exception]


@dataclass(frozen=True)
class Part:
    """A named size in MiB, `times` over."""

    name: str
    mib: float
    times: int = 1

    @property
    def total(self) -> float:
        """The size of all of them, MiB."""
        return self.mib * self.times


@dataclass(frozen=True)
class Group:
    """Layers that keep blocks of `block_tokens` tokens in pages of `page_kib` KiB, by dtype.

    A sequence has at most `cells_most` cells (0: as many as tokens), in steps of `cells_multiple`.
    """

    name: str
    block_tokens: int
    page_kib: Mapping[str, float]
    cells_multiple: int = 1
    cells_most: int = 0

    def kib_per_token(self, dtype: str) -> float:
        """KiB that one token takes."""
        return self.page_kib[dtype] / self.block_tokens

    def cells(self, window: int) -> int:
        """Cells that one sequence of `window` tokens takes."""
        rounded = -(-window // self.cells_multiple) * self.cells_multiple
        return min(rounded, self.cells_most) if self.cells_most else rounded


@dataclass(frozen=True)
class Knob:
    """A flag with a bound, and why."""

    name: str
    least: float | None
    most: float | None
    reason: str


@dataclass(frozen=True)
class Law:
    """A dialect's law. Sizes in MiB unless said."""

    dialect: str
    about: str
    dtypes: tuple[str, ...]
    flags: Mapping[str, str]
    groups: tuple[Group, ...]
    per_sequence: tuple[Part, ...]
    fixed: tuple[Part, ...]
    knobs: tuple[Knob, ...]
    rows_per_sequence: int | None
    rows_most: int | None
    rows_reason: str
    ranks: int | None
    pinned: tuple[Part, ...]
    pinned_floor: float | None

    def kib_per_token(self, dtype: str) -> float:
        """KiB that one more token of every sequence takes."""
        return sum(group.kib_per_token(dtype) for group in self.groups if not group.cells_most)

    def sequence_mib(self, dtype: str, window: int) -> float:
        """What one sequence takes beside its tokens: its state, and groups with bounded cells."""
        bounded = sum(
            group.cells(window) * group.kib_per_token(dtype) / 1024
            for group in self.groups
            if group.cells_most
        )
        return bounded + sum(part.total for part in self.per_sequence)

    @property
    def fixed_mib(self) -> float:
        """What the pool holds whatever the sequences."""
        return sum(part.total for part in self.fixed)

    def need_mib(self, dtype: str, seqs: int, window: int) -> float:
        """The pool that backs `seqs` sequences of `window` tokens each."""
        tokens = sum(
            seqs * group.cells(window) * group.kib_per_token(dtype) / 1024
            for group in self.groups
            if not group.cells_most
        )
        return tokens + seqs * self.sequence_mib(dtype, window) + self.fixed_mib

    def backed_tokens(self, dtype: str, seqs: int, window: int, pool_mib: float) -> int:
        """How many tokens a pool backs beside `seqs` sequences, rounded down; at least 0."""
        left = pool_mib - seqs * self.sequence_mib(dtype, window) - self.fixed_mib
        return max(0, math.floor(left * 1024 / self.kib_per_token(dtype)))

    @property
    def pinned_mib(self) -> float:
        """What is pinned in host memory."""
        return sum(part.total for part in self.pinned)


_TABLES = {
    "dialect", "about", "dtypes", "flags", "groups", "per_sequence", "fixed", "knobs", "rows",
    "prefix", "pinned",
}  # fmt: skip
_FLAGS = ("dtype", "pool", "weights", "seqs", "window")
# Of sizes and counts: far from what a float can hold, far above any machine.
_LEAST, _MOST = 1e-9, 1 << 40


def law_from(values: Mapping[str, Any], fault: Fault) -> Law:
    """Build a law from a file's values; `fault(path, what)` makes the error that names a key.

    Raises:
        Exception: what `fault` made: a key is missing, unknown or wrong.
    """
    read = _Read(fault)
    read.known(values, (), _TABLES)
    dtypes = tuple(read.texts(values, (), "dtypes"))
    if not dtypes:
        raise fault(("dtypes",), "at least one is needed")
    _once(("dtypes",), dtypes, fault)
    groups = []
    for number, table in enumerate(read.tables(values, (), "groups")):
        at: KeyPath = ("groups", number)
        read.known(table, at, {"name", "block_tokens", "page_kib", "cells_multiple", "cells_most"})
        groups.append(
            Group(
                read.text(table, at, "name"),
                read.count(table, at, "block_tokens"),
                read.sizes(table, at, "page_kib", dtypes),
                read.count(table, at, "cells_multiple", 1),
                read.count(table, at, "cells_most", 0),
            )
        )
    if not any(not group.cells_most for group in groups):
        raise fault(("groups",), "one group must grow with the tokens")
    _once(("groups",), [group.name for group in groups], fault)
    for dtype in dtypes:
        if not sum(group.page_kib[dtype] for group in groups if not group.cells_most):
            raise fault(("groups",), f"at dtype {dtype} a token takes nothing; page_kib above 0")
    flags = read.table(values, (), "flags")
    read.known(flags, ("flags",), set(_FLAGS))
    rows = read.table(values, (), "rows")
    read.known(rows, ("rows",), {"per_sequence", "most", "reason"})
    prefix = read.table(values, (), "prefix")
    read.known(prefix, ("prefix",), {"ranks"})
    pinned = read.table(values, (), "pinned")
    read.known(pinned, ("pinned",), {"floor_mib", "parts"})
    knobs = []
    for number, table in enumerate(read.tables(values, (), "knobs")):
        at = ("knobs", number)
        read.known(table, at, {"name", "least", "most", "reason"})
        knobs.append(
            Knob(
                read.text(table, at, "name"),
                read.number(table, at, "least") if "least" in table else None,
                read.number(table, at, "most") if "most" in table else None,
                read.text(table, at, "reason"),
            )
        )
        least, most = knobs[-1].least, knobs[-1].most
        if least is not None and most is not None and least > most:
            raise fault((*at, "most"), f"{most:g}, below the least of {least:g}")
    _once(("knobs",), [knob.name for knob in knobs], fault)
    dialect = read.text(values, (), "dialect")
    if dialect not in DIALECTS:
        raise fault(("dialect",), f"not known; valid: {', '.join(sorted(DIALECTS))}")
    return Law(
        dialect=dialect,
        about=read.text(values, (), "about"),
        dtypes=dtypes,
        flags={key: read.text(flags, ("flags",), key) for key in flags},
        groups=tuple(groups),
        per_sequence=read.parts(values, (), "per_sequence"),
        fixed=read.parts(values, (), "fixed"),
        knobs=tuple(knobs),
        rows_per_sequence=read.count(rows, ("rows",), "per_sequence") if rows else None,
        rows_most=read.count(rows, ("rows",), "most") if rows else None,
        rows_reason=read.text(rows, ("rows",), "reason") if rows else "",
        ranks=read.count(prefix, ("prefix",), "ranks") if prefix else None,
        pinned=read.parts(pinned, ("pinned",), "parts"),
        pinned_floor=read.number(pinned, ("pinned",), "floor_mib") if pinned else None,
    )


def _once(at: KeyPath, names: Sequence[str], fault: Fault) -> None:
    for position, name in enumerate(names):
        if name in names[:position]:
            raise fault((*at, position), f"{one_line(name, 60)!r} stands there twice")


class _Read:
    """Reads typed values out of tables, and names the key of what is wrong."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def known(self, table: Mapping[str, Any], at: KeyPath, keys: set[str]) -> None:
        for key in table:
            if key not in keys:
                raise self._fault((*at, key), f"unknown key; valid: {', '.join(sorted(keys))}")

    def text(self, table: Mapping[str, Any], at: KeyPath, key: str) -> str:
        value = table.get(key)
        if not isinstance(value, str) or not value:
            raise self._fault((*at, key), "a text is needed")
        return value

    def texts(self, table: Mapping[str, Any], at: KeyPath, key: str) -> list[str]:
        value = table.get(key)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._fault((*at, key), "a list of texts is needed")
        return value

    def number(self, table: Mapping[str, Any], at: KeyPath, key: str) -> float:
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._fault((*at, key), "a number is needed")
        if value != 0 and not _LEAST <= value <= _MOST:
            raise self._fault((*at, key), f"{value:g}; valid: 0, or {_LEAST:g} to {_MOST:,}")
        return float(value)

    def count(
        self, table: Mapping[str, Any], at: KeyPath, key: str, default: int | None = None
    ) -> int:
        if default is not None and key not in table:
            return default
        value = table.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise self._fault((*at, key), f"an integer is needed, 1 to {_MOST:,}")
        return value

    def sizes(
        self, table: Mapping[str, Any], at: KeyPath, key: str, dtypes: tuple[str, ...]
    ) -> dict[str, float]:
        """One number for every dtype, or one for each by name."""
        value = table.get(key)
        if not isinstance(value, Mapping):
            return dict.fromkeys(dtypes, self.number(table, at, key))
        here = (*at, key)
        self.known(value, here, set(dtypes))
        return {dtype: self.number(value, here, dtype) for dtype in dtypes}

    def table(self, values: Mapping[str, Any], at: KeyPath, key: str) -> Mapping[str, Any]:
        value = values.get(key, {})
        if not isinstance(value, Mapping):
            raise self._fault((*at, key), "a table is needed")
        return value

    def tables(self, values: Mapping[str, Any], at: KeyPath, key: str) -> list[Mapping[str, Any]]:
        value = values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
            raise self._fault((*at, key), "a list of tables is needed")
        return value

    def parts(self, values: Mapping[str, Any], at: KeyPath, key: str) -> tuple[Part, ...]:
        found = []
        for number, table in enumerate(self.tables(values, at, key)):
            here = (*at, key, number)
            self.known(table, here, {"name", "mib", "times"})
            found.append(
                Part(
                    self.text(table, here, "name"),
                    self.number(table, here, "mib"),
                    self.count(table, here, "times", 1),
                )
            )
        return tuple(found)
