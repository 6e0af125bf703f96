"""`dsv41 kv`: a KV pool by law and by ledger, before and after a restart.

Exit codes of its own: plan 0 it fits, 2 REFUSED; ledger 1: something in it does not agree.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..text import counted, one_line

if TYPE_CHECKING:
    from ..unit.memory import Ledger

__all__ = ["HELP", "configure", "run"]

HELP = "memory laws and boot ledgers: plan a KV pool, check a ledger, compare two"

_MOST_BYTES = 64 << 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, text: str, work: Any) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text)
        sub.set_defaults(work=work)
        return sub

    plan = action("plan", "does this shape fit? 0 yes, 2 REFUSED, before any restart", _plan)
    _law(plan, required=True)
    plan.add_argument("--dtype", required=True, help="of the KV cache")
    plan.add_argument("--seqs", type=int, required=True, metavar="N", help="sequences at once")
    plan.add_argument("--window", type=int, required=True, metavar="TOKENS", help="of each")
    plan.add_argument("--pool", type=float, metavar="MIB", help="the KV pool")
    plan.add_argument("--weights", type=float, metavar="MIB", help="the weights beside it")
    plan.add_argument(
        "--ledger", type=Path, metavar="FILE", help="the newest start log: the budget's ceiling"
    )
    plan.add_argument(
        "--ledger-pair",
        metavar="WEIGHTS/POOL",
        help="the flags that it was printed at, in MiB; default: as it states them, rounded",
    )
    plan.add_argument(
        "--knob",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another flag that the law bounds, without its dashes; repeatable",
    )
    plan.add_argument(
        "--alternatives", action="store_true", help="every dtype, and up to one sequence more"
    )
    plan.add_argument("--json", action="store_true", help="print a JSON object")

    ledger = action("ledger", "read a start log: its facts, and whether they agree", _ledger)
    ledger.add_argument("file", type=Path, metavar="LOG", help="a server's start log")
    ledger.add_argument("--dialect", default="radiance", help="radiance (default) or llamacpp")
    ledger.add_argument(
        "--flag",
        action="append",
        default=[],
        metavar="NAME=MIB",
        help="a flag that the ledger states, such as vram-kv-mib=6912; repeatable",
    )
    _law(ledger, required=False)
    ledger.add_argument("--json", action="store_true", help="print a JSON object")

    diff = action("diff", "every fact that differs between two start logs", _diff)
    diff.add_argument("before", type=Path, metavar="BEFORE", help="the start log before")
    diff.add_argument("after", type=Path, metavar="AFTER", help="the start log after")
    diff.add_argument("--dialect", default="radiance", help="radiance (default) or llamacpp")


def _law(parser: argparse.ArgumentParser, *, required: bool) -> None:
    from ..unit.memory import shipped_laws

    parser.add_argument(
        "--law",
        required=required,
        metavar="FILE",
        help=f"a law's file, or one that is shipped: {', '.join(shipped_laws())}",
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    code: int = args.work(args)
    return code


def _read_ledger(path: Path, dialect: str) -> Ledger:
    from ..unit.memory import parse_ledger
    from ..window.source import read_input

    raw = read_input(path, _MOST_BYTES)
    return parse_ledger(raw.decode("utf-8", "replace"), dialect)


def _pairs(given: list[str], flag: str) -> dict[str, float]:
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if name in found:
            raise UsageError(f"--{flag} {pair}: {name} is given twice")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name or not math.isfinite(found[name]):
            raise UsageError(f"--{flag} {one_line(pair, 80)}: write NAME=NUMBER")
    return found


def _flags(given: list[str]) -> dict[str, str]:
    """Flags by name, with the dashes that may be left out; a size must be a number."""
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        bare = name.lstrip("-")
        if not equals or not bare or not value:
            raise UsageError(f"--flag {one_line(pair, 80)}: write NAME=VALUE")
        if bare.endswith("-mib"):
            _pairs([pair], "flag")
        found[name if name.startswith("-") else f"--{bare}"] = value
    return found


def _plan(args: argparse.Namespace) -> int:
    from ..unit.memory import Shape, alternatives, make_plan, read_law

    law = read_law(args.law)
    ledger = None if args.ledger is None else _read_ledger(args.ledger, law.dialect)
    pair = None
    if args.ledger_pair is not None:
        try:
            weights, pool = (float(one) for one in args.ledger_pair.split("/"))
        except ValueError:
            raise UsageError(f"--ledger-pair {args.ledger_pair}: write WEIGHTS/POOL") from None
        pair = (weights, pool)
    shape = Shape(args.dtype, args.seqs, args.window, args.pool, args.weights)
    plan = make_plan(law, shape, ledger=ledger, pair=pair, knobs=_pairs(args.knob, "knob"))
    others = alternatives(law, shape, plan.ceiling) if args.alternatives else []
    if args.json:
        print(
            json.dumps({**asdict(plan), "alternatives": [asdict(one) for one in others]}, indent=2)
        )
        return 2 if plan.refused else 0
    for line in plan.refused:
        print(one_line(f"REFUSED: {line}", 400))
    if not plan.refused:
        if plan.backed is None:
            need = plan.need
            print(f"NEEDS a pool of {need:,.1f} MiB, {math.ceil(need):,} as a flag (--pool)")
        else:
            windows = plan.backed / shape.window
            print(f"FITS: {plan.backed:,} tokens = {windows:.2f} windows of {shape.window:,}")
    for line in plan.consequences:
        print(f"  {one_line(line, 400)}")
    for one in others:
        left = "" if one.weights_left is None else f", weights {one.weights_left:>8,.0f} MiB"
        dtype = one_line(one.dtype, 40)
        print(f"  {dtype:<6}{one.seqs} x {shape.window:,}: pool {one.need:>9,.1f} MiB{left}")
    return 2 if plan.refused else 0


def _ledger(args: argparse.Namespace) -> int:
    from ..unit.memory import budget_ceiling, law_against, read_law
    from ..unit.proof import ledger_faults

    law = None if args.law is None else read_law(args.law)
    ledger = _read_ledger(args.file, args.dialect if law is None else law.dialect)
    flags = _flags(args.flag)
    wrong = ledger_faults(ledger, [f"{name}={value}" for name, value in flags.items()], law)
    held = None
    if law is not None:
        pool = flags.get(law.flags.get("pool", ""))
        held = law_against(law, ledger, None if pool is None else float(pool))
        if held is None:
            raise UsageError(f"{args.file}: says too little, or other pages, to hold it to the law")
    if args.json:
        print(
            json.dumps({**asdict(ledger), "wrong": wrong, "law": held and asdict(held)}, indent=2)
        )
        return 1 if wrong or ledger.missing else 0
    for fact in ledger.facts:
        print(f"  {one_line(str(fact), 300)}")
    ceiling = budget_ceiling(ledger)
    if ceiling is not None:
        print(
            f"  weights and pool together: at most {ceiling[0]:,.0f} MiB, give or take "
            f"{ceiling[1]:.0f}"
        )
    if held is not None:
        print(
            f"  {one_line(held.dtype, 40)}, {held.seqs} x {held.window:,}: the law says "
            f"{held.law:,.10g} {held.unit}, the ledger {held.ledger:,.10g}: "
            f"{100 * held.apart:+.2f} %"
        )
    for name in ledger.missing:
        print(f"MISSING: {name}")
    for line in wrong:
        print(one_line(f"DOES NOT AGREE: {line}", 400))
    unknown = counted(len(ledger.unknown), "line")
    shown = "; --json shows them" if ledger.unknown else ""
    print(f"{counted(len(ledger.facts), 'fact')}, {unknown} not understood{shown}")
    return 1 if wrong or ledger.missing else 0


def _diff(args: argparse.Namespace) -> int:
    from ..unit.memory import diff_ledgers

    before, after = (_read_ledger(path, args.dialect) for path in (args.before, args.after))
    changes = diff_ledgers(before, after)
    for change in changes:
        print(f"  {one_line(str(change), 300)}")
    print(f"{len(changes)} of {counted(len({*_keys(before), *_keys(after)}), 'fact')} differ")
    return 0


def _keys(ledger: Ledger) -> list[tuple[str, str]]:
    return [(fact.subject, fact.name) for fact in ledger.facts]
