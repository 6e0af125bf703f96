"""A wanted shape, held against the law and the newest ledger before anything is restarted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line
from pytest_dsv41.unit.memory.law import Law
from pytest_dsv41.unit.memory.ledger import Ledger, budget_ceiling

__all__ = [
    "Alternative",
    "LawCheck",
    "MemoryPlan",
    "Shape",
    "alternatives",
    "law_against",
    "make_plan",
    "printed_dtype",
]


_SEQS_MOST: Final = 1 << 16
_WINDOW_MOST: Final = 1 << 40
# Beyond any machine; what is far above it would overflow in the law.
_MIB_MOST: Final = 1 << 40


@dataclass(frozen=True)
class Shape:
    """What a server is to be started with; sizes in MiB, None: not set by a flag."""

    dtype: str
    seqs: int
    window: int
    pool: float | None = None
    weights: float | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """The answer: `refused` says why not, one line each; empty: it fits as far as is known."""

    shape: Shape
    need: float
    backed: int | None
    ceiling: float | None
    refused: tuple[str, ...]
    consequences: tuple[str, ...]


@dataclass(frozen=True)
class Alternative:
    """Another dtype or number of sequences: its pool, and the weights that are left beside it."""

    dtype: str
    seqs: int
    need: float
    weights_left: float | None


def make_plan(
    law: Law,
    shape: Shape,
    *,
    ledger: Ledger | None = None,
    pair: tuple[float, float] | None = None,
    knobs: Mapping[str, float] | None = None,
) -> MemoryPlan:
    """Hold a shape against a law, a ledger and the bounds of other knobs.

    Args:
        law: the dialect's.
        shape: what is wanted.
        ledger: the newest one of this host: the budget's ceiling comes from it alone.
        pair: (weights, pool) in MiB that the ledger was printed at, by the flags.
        knobs: other flags by name, to be held against the law's bounds.

    Raises:
        UsageError: a dtype or knob that the law does not know, or a number that is none.
    """
    _check(law, shape, knobs or {}, pair)
    refused: list[str] = []
    need = law.need_mib(shape.dtype, shape.seqs, shape.window)
    backed = None
    if shape.pool is not None:
        backed = law.backed_tokens(shape.dtype, shape.seqs, shape.window, shape.pool)
        if shape.pool < need:
            windows = backed / shape.window
            refused.append(
                f"a pool of {shape.pool:,.0f} MiB backs {backed:,} tokens = {windows:.2f} windows; "
                f"{shape.seqs} of {shape.window:,} tokens need {math.ceil(need):,} MiB"
            )
    ceiling = budget_ceiling(ledger, pair) if ledger is not None else None
    if ceiling is not None and shape.weights is not None and shape.pool is not None:
        total = shape.weights + shape.pool
        if total > ceiling[0]:
            refused.append(
                f"weights and pool take {total:,.0f} MiB; the ledger leaves {ceiling[0]:,.0f}"
            )
    for name, value in (knobs or {}).items():
        knob = next(one for one in law.knobs if one.name == name)
        if knob.least is not None and value < knob.least:
            refused.append(f"{name} {value:g}: at least {knob.least:g}: {knob.reason}")
        if knob.most is not None and value > knob.most:
            refused.append(f"{name} {value:g}: at most {knob.most:g}: {knob.reason}")
    return MemoryPlan(
        shape,
        need,
        backed,
        None if ceiling is None else ceiling[0],
        tuple(refused),
        tuple(_consequences(law, shape, need, ledger, ceiling, pair)),
    )


def _check(
    law: Law, shape: Shape, knobs: Mapping[str, float], pair: tuple[float, float] | None
) -> None:
    if shape.dtype not in law.dtypes:
        raise UsageError(
            f"dtype {one_line(shape.dtype, 40)!r}: {law.flags.get('dtype', 'it')} takes "
            f"{', '.join(law.dtypes)}"
        )
    for what, count, most in (
        ("sequences", shape.seqs, _SEQS_MOST),
        ("window", shape.window, _WINDOW_MOST),
    ):
        if not 1 <= count <= most:
            raise UsageError(f"{what} {one_line(str(count), 40)}: valid: 1 to {most:,}")
    sizes = {"pool": shape.pool, "weights": shape.weights}
    if pair is not None:
        sizes |= {"the ledger's weights": pair[0], "the ledger's pool": pair[1]}
    for what, size in sizes.items():
        # No bound is below nan: it would pass them all.
        if size is not None and not 0 <= size <= _MIB_MOST:
            raise UsageError(f"{what} {size:g}: valid: MiB, 0 to {_MIB_MOST:,}")
    known = [knob.name for knob in law.knobs]
    for name, value in knobs.items():
        if name not in known:
            valid = ", ".join(known) or "none"
            raise UsageError(f"knob {one_line(name, 60)!r}: the law has none; valid: {valid}")
        if not math.isfinite(value):
            raise UsageError(f"knob {name} {value:g}: valid: a finite number")


def _consequences(
    law: Law,
    shape: Shape,
    need: float,
    ledger: Ledger | None,
    ceiling: tuple[float, float] | None,
    pair: tuple[float, float] | None,
) -> list[str]:
    lines = []
    if shape.pool is not None:
        lines.append(f"the shape needs a pool of {need:,.1f} MiB, {math.ceil(need):,} as a flag")
    if ceiling is None:
        lines.append("no ledger with a settled card: the budget of weights and pool is not checked")
    else:
        lines.append(
            f"weights and pool together: at most {ceiling[0]:,.0f} MiB by the ledger, give or take "
            f"{ceiling[1]:.0f}"
        )
        if shape.pool is not None:
            lines.append(f"beside this pool the weights get {ceiling[0] - shape.pool:,.0f} MiB")
    if ledger is not None and shape.pool is not None:
        lines += _slab(ledger, shape.pool, pair)
    if law.rows_per_sequence is not None and law.rows_most is not None:
        rows = shape.seqs * law.rows_per_sequence
        warning = "" if rows <= law.rows_most else "WARNING: "
        lines.append(f"{warning}{rows} all-reduce rows, at most {law.rows_most}: {law.rows_reason}")
    if law.ranks is not None:
        entry = law.ranks * sum(group.page_kib[shape.dtype] for group in law.groups)
        lines.append(
            f"a prefix entry takes {entry:.2f} KiB: 1 GiB of a tier holds "
            f"{int((1 << 20) / entry):,}"
        )
    if law.pinned:
        total = law.pinned_mib
        parts = " + ".join(
            f"{one_line(part.name, 60)} {f'{part.times} x ' if part.times > 1 else ''}"
            f"{part.mib:,.0f}"
            for part in law.pinned
        )
        against = warning = ""
        if law.pinned_floor is not None:
            over = total > law.pinned_floor
            warning = "WARNING: " if over else ""
            side = "above" if over else "under"
            against = f", {side} the knob's floor of {law.pinned_floor:,.0f} MiB"
        lines.append(
            f"{warning}pinned: {parts} = {total:,.0f} MiB ({total / 1024:.2f} GiB){against}"
        )
    return lines


def _slab(ledger: Ledger, pool: float, pair: tuple[float, float] | None) -> list[str]:
    """What another pool does to the slab at the same sum, in slots of the ledger's own size."""
    before = pair[1] if pair is not None else ledger.number("vram_kv", "stated")
    slots, size = ledger.number("mover", "lendable slots"), ledger.number("mover", "lendable")
    if before is None or not slots or not size or pool == before:
        return []
    moved = abs(pool - before)
    way = "to" if pool < before else "from"
    return [
        f"{moved:,.0f} MiB go {way} the slab at the same sum: about {moved / (size / slots):,.0f} "
        f"slots of {size / slots:.2f} MiB"
    ]


def alternatives(law: Law, shape: Shape, ceiling: float | None) -> list[Alternative]:
    """Return every dtype at one to `shape.seqs` + 1 sequences of the same window."""
    found = []
    for dtype in law.dtypes:
        for seqs in range(1, shape.seqs + 2):
            need = law.need_mib(dtype, seqs, shape.window)
            left = None if ceiling is None else ceiling - math.ceil(need)
            found.append(Alternative(dtype, seqs, need, left))
    return found


@dataclass(frozen=True)
class LawCheck:
    """What a law says of a boot, and what the boot said: tokens backed, or MiB taken (`unit`)."""

    dtype: str
    seqs: int
    window: int
    law: float
    ledger: float
    unit: str

    @property
    def apart(self) -> float:
        """By which fraction of the law the ledger lies above it; below: negative.

        Infinite where the law leaves nothing at all.
        """
        return (self.ledger - self.law) / self.law if self.law else math.inf


def law_against(law: Law, ledger: Ledger, pool: float | None = None) -> LawCheck | None:
    """Hold a ledger against a law; dtype, sequences and window are the ledger's own.

    `pool` is the pool in MiB by the flags; without it the stated, rounded one is taken. None where
    the ledger does not say enough, or no dtype of the law has its pages.
    """
    if law.dialect == "llamacpp":
        return _llamacpp_against(law, ledger)
    seqs, window = (ledger.number("kv cache", name) for name in ("sequences", "tokens each"))
    tokens = ledger.number(law.groups[0].name, "tokens")
    if pool is None:
        pool = ledger.number("vram_kv", "stated")
    dtype = printed_dtype(law, ledger)
    if seqs is None or window is None or tokens is None or pool is None or dtype is None:
        return None
    backed = law.backed_tokens(dtype, int(seqs), int(window), pool)
    return LawCheck(dtype, int(seqs), int(window), backed, tokens, "tokens")


def printed_dtype(law: Law, ledger: Ledger) -> str | None:
    """Return the dtype of the KV cache by the pages that a ledger prints, whatever was asked for.

    None where a group of the law is not printed, or no dtype of the law has these pages.
    """
    return next((one for one in law.dtypes if _pages(law, ledger, one)), None)


def _pages(law: Law, ledger: Ledger, dtype: str) -> bool:
    """Whether every group of the law has, at this dtype, the page that the ledger printed."""
    for group in law.groups:
        page = ledger.find(group.name, "page")
        if page is None or isinstance(page.value, str):
            return False
        if abs(page.value - group.page_kib[dtype] / 1024) > page.rounding + 1e-12:
            return False
    return True


def _llamacpp_against(law: Law, ledger: Ledger) -> LawCheck | None:
    window = ledger.number("context", "n_ctx_seq")
    caches = [subject for subject in ledger.subjects("cells") if subject.startswith("kv")]
    dtypes = {str(fact.value) for fact in ledger.facts if fact.name in ("K dtype", "V dtype")}
    seqs = {ledger.number(subject, "sequences") for subject in caches}
    if window is None or len(dtypes) != 1 or len(seqs) != 1 or None in seqs:
        return None
    (dtype,), count = dtypes, int(max(one for one in seqs if one is not None))
    if dtype not in law.dtypes:
        return None
    taken = sum(ledger.number(subject, "size") or 0.0 for subject in caches)
    need = law.need_mib(dtype, count, int(window))
    return LawCheck(dtype, count, int(window), need, taken, "MiB")
