"""`dsv41 experts derive | splice`: the experts that are kept whole, and a recipe that says so."""

from __future__ import annotations

import argparse
import json
import re
import sys
from fractions import Fraction
from pathlib import Path

from ..text import counted
from .arguments import new_file

HELP = "which experts are kept whole, from their Grams; and into a recipe with them"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACTION", required=True)
    derive = acts.add_parser("derive", help="apply the protection law to a folder of Grams")
    derive.add_argument("folder", type=Path, metavar="DIR", help="the recording's RADGRAM2 files")
    derive.add_argument(
        "--stem", default="ffn_down_exps", help="the weight (default: ffn_down_exps)"
    )
    derive.add_argument(
        "--energy-share", type=_fraction, default="0.03", metavar="F", help="default: 0.03"
    )
    derive.add_argument(
        "--over-routing", type=_fraction, default="3", metavar="F", help="default: 3"
    )
    derive.add_argument(
        "--experts", type=int, default=0, metavar="N", help="of a layer; default: as seen"
    )
    derive.add_argument("--out", type=Path, metavar="FILE", help="write the derivation as JSON")
    derive.add_argument("--json", action="store_true", help="print the derivation as JSON")
    splice = acts.add_parser("splice", help="put the derived names between a recipe's markers")
    splice.add_argument("recipe", type=Path, metavar="RECIPE", help="a file with the two markers")
    splice.add_argument(
        "names", type=Path, metavar="NAMES", help="of derive --out, or text: a name a line"
    )
    splice.add_argument("--replace", action="store_true", help="over a block that is filled")


def _fraction(text: str) -> Fraction:
    # No exponent: 1e9999999 is a number of as many digits.
    form = re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,12}|/0*[1-9][0-9]{0,8})?", text)
    value = Fraction(text) if form else Fraction()
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: valid: above 0, such as 0.03 or 3/100")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the chosen act."""
    return _derive(args) if args.act == "derive" else _splice(args)


def _derive(args: argparse.Namespace) -> int:
    from ..durable import write_atomic
    from ..payload.experts import Law, derive
    from ..payload.grams import read_grams
    from ..payload.shown import Shown

    if args.out is not None:
        new_file(args.out, "a derivation is never overwritten")
    with Shown(sys.stderr) as show:
        grams, others = read_grams(
            args.folder,
            stem=args.stem,
            progress=lambda done, all_: show(f"derive: {done} of {all_} Grams", done / all_),
        )
    found = derive(grams, Law(args.energy_share, args.over_routing), experts=args.experts)
    text = json.dumps(found.to_json(), indent=1, allow_nan=False)
    if args.out is not None:
        write_atomic(args.out, text + "\n")
    if args.json:
        print(text)
        return 0
    gaps = sorted(set(range(found.layers[-1] + 1)) - set(found.layers))
    print(
        f"{counted(len(grams), 'Gram')} of {counted(len(found.layers), 'layer')} x "
        f"{found.experts} experts, "
        f"k {found.k}, domain {found.domain}; {counted(others, 'other file')} left alone"
    )
    for title, layers in (("empty layers", found.empty), ("layers without Grams", gaps)):
        if layers:
            more = f" and {len(layers) - 64} more" if len(layers) > 64 else ""
            print(f"{title}: {', '.join(map(str, layers[:64]))}{more}")
    print(f"{'layer':>5} {'expert':>6} {'rank':>4} {'energy':>8} {'routing':>8}  why")
    for p in found.ranked():
        print(
            f"{p.layer:>5} {p.expert:>6} {p.rank:>4} {float(p.energy_share):>8.2%} "
            f"{float(p.routing_share):>8.3%}  {p.why}"
        )
    added = sum(not p.by_law for p in found.protected)
    print(
        f"{counted(len(found.protected), 'protected expert')}, {added} of them to make a half even"
    )
    return 0


def _splice(args: argparse.Namespace) -> int:
    from ..payload.recipe import read_names, splice

    done = splice(args.recipe, read_names(args.names), replace=args.replace)
    print(
        f"{args.recipe}: {counted(done.names, 'protected expert')} between its markers, "
        f"{done.before} before"
    )
    print(f"sha256 {done.sha256}")
    return 0
