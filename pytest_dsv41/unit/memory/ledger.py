"""The lines that a server prints about its memory as it starts, as typed facts with units.

A number is as exact as it was printed: each fact carries its rounding, and what must agree is held
together to the sum of both roundings, no closer and no wider. Lines that are not understood are
kept, facts that a ledger of this dialect always has are named where they are missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line

__all__ = [
    "DIALECTS",
    "SIZES",
    "Change",
    "Fact",
    "Ledger",
    "budget_ceiling",
    "check_ledger",
    "diff_ledgers",
    "parse_ledger",
]

_LINE_MOST: Final = 4096
"""Characters of a line that may be a fact: the patterns look for sizes anywhere in it."""
_NUMBER_MOST: Final = 1e15

SIZES: Final = {"KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
"""MiB of one."""


@dataclass(frozen=True)
class Fact:
    """One number or word of a ledger: of what, what it is, in which unit, from which line.

    Sizes are in MiB. `rounding` is half of the last printed digit, in the fact's unit.
    """

    subject: str
    name: str
    value: float | str
    unit: str
    rounding: float
    line: int

    def __str__(self) -> str:
        shown = self.value if isinstance(self.value, str) else f"{self.value:,.10g}"
        return f"{self.subject} {self.name}: {shown}{f' {self.unit}' if self.unit else ''}"


@dataclass(frozen=True)
class Ledger:
    """A boot ledger: its facts in order, the lines not understood, the facts that are missing."""

    dialect: str
    facts: tuple[Fact, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]

    def find(self, subject: str, name: str) -> Fact | None:
        """Return a fact; the last one where a server printed it twice."""
        found = [fact for fact in self.facts if (fact.subject, fact.name) == (subject, name)]
        return found[-1] if found else None

    def number(self, subject: str, name: str) -> float | None:
        """Return the number of a fact, None where there is none."""
        fact = self.find(subject, name)
        return None if fact is None or isinstance(fact.value, str) else fact.value

    def subjects(self, name: str) -> list[str]:
        """Return what has a fact of this name, in order, each once."""
        return list(dict.fromkeys(fact.subject for fact in self.facts if fact.name == name))


@dataclass(frozen=True)
class _Line:
    """One kind of line: its pattern, whose groups are facts; `subject` may be a group too.

    `facts` maps a group to (name, unit); of the unit `size` the group's number is followed by a
    group of the same name and `_u` with KiB, MiB or GiB.
    """

    pattern: re.Pattern[str]
    subject: str
    facts: Mapping[str, tuple[str, str]]


def _size(name: str) -> str:
    return rf"(?P<{name}>[\d.]+)\s*(?P<{name}_u>KiB|MiB|GiB)"


def _line(pattern: str, subject: str, **facts: tuple[str, str]) -> _Line:
    return _Line(re.compile(pattern), subject, facts)


_RADIANCE: Final = (
    _line(
        rf"^kv cache\s+{_size('size')}\s+(?:(?P<share>\d+)%\s+of it\s*)?"
        r"(?:--|—|…|\.\.\.)\s*backs\s+(?P<seqs>\d+)\s+sequences\s+all\s+at\s+(?P<each>\d+)\s+tokens\s+at\s+once"
        r"(?:, which is the worst case)?",
        "kv cache",
        size=("size", "size"),
        share=("share", "%"),
        seqs=("sequences", ""),
        each=("tokens each", "tokens"),
    ),
    _line(
        rf"^(?P<what>vram_weights|vram_kv)\s+{_size('size')}\s+stated by\s+(?P<flag>--\S+)",
        "what",
        size=("stated", "size"),
        flag=("flag", "word"),
    ),
    _line(rf"^unclaimed\s+{_size('size')}", "card", size=("unclaimed", "size")),
    _line(
        rf"{_size('size')}\s+is neither budgeted nor accounted"
        r"(?:\s+(?:--|—)\s+the driver's context, the activation arena and --gpu-headroom-mib "
        r"come out of it; anything past those is throughput on the floor)?",
        "card",
        size=("not accounted", "size"),
    ),
    _line(
        rf"^(?P<what>kv_\w+)\s+full\s+(?P<layers>\d+)\s+layers\s+block\s+(?P<block>\d+)\s+tok\s+page\s+"
        rf"{_size('page')}\s+(?P<blocks>\d+)\s+blocks\s*=\s*{_size('size')}\s*\((?P<tokens>\d+)\s+tokens\)",
        "what",
        layers=("layers", ""),
        block=("block", "tokens"),
        page=("page", "size"),
        blocks=("blocks", ""),
        size=("size", "size"),
        tokens=("tokens", "tokens"),
    ),
    _line(
        rf"^load:\s+(?P<what>rank \d+),\s+mover took\s+{_size('took')},\s+"
        rf"weights pool\s+{_size('free')}\s+free of\s+{_size('of')}",
        "what",
        took=("mover took", "size"),
        free=("weights pool free", "size"),
        of=("weights pool", "size"),
    ),
    _line(
        r"^mover:\s+(?P<slab>\d+)\s+slab slots\s+\((?P<shadow>\d+)\s+shadow\),\s+(?P<pinned>\d+)\s+"
        rf"pinned pool slots,\s+{_size('static')}\s+static vram",
        "mover",
        slab=("slab slots", "slots"),
        shadow=("shadow slots", "slots"),
        pinned=("pinned pool slots", "slots"),
        static=("static vram", "size"),
    ),
    _line(
        rf"(?P<slots>\d+)\s+slots can be lent out of the KV cache\s+\({_size('size')}\)",
        "mover",
        slots=("lendable slots", "slots"),
        size=("lendable", "size"),
    ),
    _line(
        rf"^(?P<what>card \d+)\s+settled at\s+{_size('free')}\s+free"
        rf"(?:\s+against\s+{_size('floor')}(?:\s+"
        rf"\(the\s+{_size('headroom')}\s+--gpu-headroom-mib\s+and\s+{_size('static')}\s+kept"
        r"(?: for the static region\))?)?)?",
        "what",
        free=("settled free", "size"),
        floor=("floor", "size"),
        headroom=("headroom", "size"),
        static=("static region", "size"),
    ),
    _line(r"^serving on\s+(?P<where>\S+)", "server", where=("serving on", "word")),
)
_LLAMACPP: Final = (
    _line(
        rf"llama_kv_cache:\s+size\s*=\s*{_size('size')}\s*\(\s*(?P<cells>\d+) cells,\s*"
        rf"(?P<layers>\d+) layers,\s*(?P<seqs>\d+)/\d+ seqs\),\s*"
        rf"K \((?P<kt>\w+)\):\s*{_size('k')},\s*V \((?P<vt>\w+)\):\s*{_size('v')}",
        "kv",
        size=("size", "size"),
        cells=("cells", "cells"),
        layers=("layers", ""),
        seqs=("sequences", ""),
        kt=("K dtype", "word"),
        k=("K", "size"),
        vt=("V dtype", "word"),
        v=("V", "size"),
    ),
    _line(
        rf"llama_kv_cache:\s+(?P<what>\S+) KV buffer size\s*=\s*{_size('size')}",
        "kv",
        size=("buffer", "size"),
    ),
    _line(r"llama_context:\s+n_ctx\s*=\s*(?P<n>\d+)", "context", n=("n_ctx", "tokens")),
    _line(r"llama_context:\s+n_ctx_seq\s*=\s*(?P<n>\d+)", "context", n=("n_ctx_seq", "tokens")),
    _line(
        rf"sched_reserve:\s+(?P<what>\S+) compute buffer size\s*=\s*{_size('size')}",
        "compute",
        size=("buffer", "size"),
    ),
    _line(
        rf"load_tensors:\s+(?P<what>\S+) model buffer size\s*=\s*{_size('size')}",
        "what",
        size=("model buffer", "size"),
    ),
    _line(r"creating\s+(?P<kind>non-SWA|SWA) KV cache", "kv", kind=("kind", "word")),
)
DIALECTS: Final[Mapping[str, tuple[_Line, ...]]] = {
    "radiance": _RADIANCE,
    "llamacpp": _LLAMACPP,
}
_ALWAYS: Final = {
    "radiance": (
        ("kv cache", "size"),
        ("vram_weights", "stated"),
        ("vram_kv", "stated"),
        ("kv_attn", "tokens"),
        ("card 0", "settled free"),
        ("server", "serving on"),
    ),
    "llamacpp": (("context", "n_ctx"), ("kv", "size")),
}
_JOURNAL: Final = re.compile(r"^[A-Z][a-z]{2}\s+\d+ [\d:]{8} \S+ [^\s:]+(?:\[\d+\])?:\s?")
_MOST_WRAPS: Final = 8
_STAMP: Final = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ")


def parse_ledger(text: str, dialect: str) -> Ledger:
    """Read a server's start log. A line that goes on, indented, on the next ones is put together.

    The prefixes of a system journal, and of llama.cpp's own log, are taken off.

    Raises:
        UsageError: no such dialect.
    """
    if dialect not in DIALECTS:
        valid = ", ".join(sorted(DIALECTS))
        raise UsageError(f"dialect {one_line(dialect, 40)!r}: not known; valid: {valid}")
    facts: list[Fact] = []
    unknown: list[str] = []
    kind = ""
    for number, line in _whole_lines(text, dialect):
        found = _facts(line, number, dialect)
        if not found:
            unknown.append(line)
            continue
        if dialect == "llamacpp":
            kind = next((str(f.value) for f in found if f.name == "kind"), kind)
            found = [_named(fact, kind) for fact in found if fact.name != "kind"]
        facts += found
    missing = [
        f"{subject} {name}"
        for subject, name in _ALWAYS[dialect]
        if not any(fact.name == name and fact.subject.split(" (")[0] == subject for fact in facts)
    ]
    return Ledger(dialect, tuple(facts), tuple(unknown), tuple(missing))


def _named(fact: Fact, kind: str) -> Fact:
    """llama.cpp prints one KV cache after the other: which it is stands in the line before."""
    if fact.subject != "kv" or not kind:
        return fact
    return Fact(f"kv ({kind})", fact.name, fact.value, fact.unit, fact.rounding, fact.line)


def _whole_lines(text: str, dialect: str) -> list[tuple[int, str]]:
    """Put wrapped lines together; return each with the number of its first one.

    An indented line goes on with the one above where the two together say more than that one alone:
    more facts, or more of its sentence. Any other one is a line of its own, and kept.
    """
    raw = [_STAMP.sub("", _JOURNAL.sub("", one)).rstrip() for one in text.splitlines()]
    lines: list[tuple[int, str]] = []
    at = 0
    while at < len(raw):
        first, whole = at, raw[at].strip()
        at += 1
        if not whole:
            continue
        more = []
        for one in raw[at : at + _MOST_WRAPS]:
            if (
                not one.startswith((" ", "\t"))
                or not one.strip()
                or _facts(one.strip(), 0, dialect)
            ):
                break
            more.append(one.strip())
        joined = [" ".join([whole, *more[:count]]) for count in range(len(more) + 1)]
        known = [_known(one, dialect) for one in joined]
        count = known.index(max(known))
        lines.append((first + 1, joined[count]))
        at += count
    return lines


def _known(line: str, dialect: str) -> tuple[int, int]:
    """How much of a line is understood: its facts, and how far the sentence is known."""
    if len(line) > _LINE_MOST:
        return 0, 0
    ends = (match.end() for kind in DIALECTS[dialect] if (match := kind.pattern.search(line)))
    return len(_facts(line, 0, dialect)), next(ends, 0)


def _facts(line: str, number: int, dialect: str) -> list[Fact]:
    if len(line) > _LINE_MOST:
        return []
    for kind in DIALECTS[dialect]:
        match = kind.pattern.search(line)
        if match is None:
            continue
        groups = match.groupdict()
        subject = groups.get(kind.subject) or kind.subject
        found = []
        for group, (name, unit) in kind.facts.items():
            printed = groups.get(group)
            if printed is None:
                continue
            if unit == "word":
                found.append(Fact(subject, name, printed, "", 0.0, number))
                continue
            try:
                value = float(printed)
            except ValueError:
                return []
            if value > _NUMBER_MOST:
                return []
            digits = len(printed.partition(".")[2])
            rounding = 0.5 * 10.0**-digits if digits else 0.0
            if unit == "size":
                factor = SIZES[groups[f"{group}_u"]]
                found.append(Fact(subject, name, value * factor, "MiB", rounding * factor, number))
            else:
                found.append(Fact(subject, name, value, unit, rounding, number))
        return found
    return []


def check_ledger(ledger: Ledger, flags: Mapping[str, float] | None = None) -> list[str]:
    """Return what does not agree, one line each.

    Blocks times their tokens are the tokens; blocks times their page are the size; what a card must
    keep free is the sum of its parts; keys and values are the cache; and where `flags` are given
    (`--name` to MiB), a stated size is its flag's.
    """
    found: list[str] = []
    for subject in ledger.subjects("blocks"):
        blocks, block = (ledger.number(subject, name) for name in ("blocks", "block"))
        tokens = ledger.number(subject, "tokens")
        if blocks is not None and block is not None and blocks * block != tokens:
            found.append(
                f"{subject}: {blocks:,.0f} blocks of {block:.0f} tokens are "
                f"{blocks * block:,.0f}, not {tokens or 0:,.0f}"
            )
        page, size = ledger.find(subject, "page"), ledger.find(subject, "size")
        if blocks is not None and page is not None and size is not None:
            _agree(found, f"{subject}: {blocks:,.0f} blocks of their page", [(page, blocks)], size)
    for subject in ledger.subjects("floor"):
        headroom = ledger.find(subject, "headroom")
        static, floor = ledger.find(subject, "static region"), ledger.find(subject, "floor")
        if headroom is not None and static is not None and floor is not None:
            _agree(
                found, f"{subject}: headroom and static region", [(headroom, 1), (static, 1)], floor
            )
    for subject in ledger.subjects("K"):
        k, v = ledger.find(subject, "K"), ledger.find(subject, "V")
        size = ledger.find(subject, "size")
        if k is not None and v is not None and size is not None:
            _agree(found, f"{subject}: K and V", [(k, 1), (v, 1)], size)
    for subject in ledger.subjects("stated"):
        stated, flag = ledger.find(subject, "stated"), ledger.find(subject, "flag")
        given = (flags or {}).get(str(flag.value)) if flag is not None else None
        if stated is None or given is None or isinstance(stated.value, str):
            continue
        if abs(stated.value - given) > stated.rounding:
            found.append(f"{subject}: states {stated.value:,.1f} MiB; the flag says {given:,.0f}")
    return found


def _agree(found: list[str], what: str, parts: list[tuple[Fact, float]], whole: Fact) -> None:
    total = slack = 0.0
    for fact, times in parts:
        assert not isinstance(fact.value, str)
        total += fact.value * times
        slack += fact.rounding * times
    assert not isinstance(whole.value, str)
    # A float's own rounding, beside that of the print.
    if abs(total - whole.value) > slack + whole.rounding + 1e-9 * abs(total):
        found.append(f"{what} are {total:,.2f} MiB, not {whole.value:,.2f}")


def budget_ceiling(
    ledger: Ledger, pair: tuple[float, float] | None = None
) -> tuple[float, float] | None:
    """Return what weights and pool may take together on a card, and its rounding; both MiB.

    The pair that the ledger was printed at, and what its tightest card had free above the engine's
    own floor. `pair` is that pair (weights, pool) exactly, by the flags; without it the printed
    one is taken. None where the ledger does not say.
    """
    claimable: list[tuple[float, float]] = []
    for card in ledger.subjects("settled free"):
        free, floor = ledger.find(card, "settled free"), ledger.find(card, "floor")
        if free is None or floor is None:
            return None
        assert not isinstance(free.value, str)
        assert not isinstance(floor.value, str)
        claimable.append((free.value - floor.value, free.rounding + floor.rounding))
    if not claimable:
        return None
    spare, rounding = min(claimable)
    if pair is not None:
        return sum(pair) + spare, rounding
    for subject in ("vram_weights", "vram_kv"):
        stated = ledger.find(subject, "stated")
        if stated is None or isinstance(stated.value, str):
            return None
        spare += stated.value
        rounding += stated.rounding
    return spare, rounding


@dataclass(frozen=True)
class Change:
    """A fact that differs between two ledgers; None: one of them does not have it."""

    subject: str
    name: str
    before: Fact | None
    after: Fact | None

    def __str__(self) -> str:
        what = f"{self.subject} {self.name}"
        if self.before is None or self.after is None:
            there = self.after or self.before
            return f"{what}: {'new' if self.before is None else 'gone'}: {_shown(there)}"
        more = ""
        if not isinstance(self.before.value, str) and not isinstance(self.after.value, str):
            delta = self.after.value - self.before.value
            more = f" ({delta:+,.10g})"
        return f"{what}: {_shown(self.before)} -> {_shown(self.after)}{more}"


def _shown(fact: Fact | None) -> str:
    assert fact is not None
    if isinstance(fact.value, str):
        return one_line(fact.value, 80)
    return f"{fact.value:,.10g}{f' {fact.unit}' if fact.unit else ''}"


def diff_ledgers(before: Ledger, after: Ledger) -> list[Change]:
    """Return every fact that differs, in the order of `before`, then what is new in `after`."""
    keys = dict.fromkeys(
        (fact.subject, fact.name) for ledger in (before, after) for fact in ledger.facts
    )
    changes = []
    for subject, name in keys:
        one, other = before.find(subject, name), after.find(subject, name)
        if one is None or other is None or one.value != other.value:
            changes.append(Change(subject, name, one, other))
    return changes
