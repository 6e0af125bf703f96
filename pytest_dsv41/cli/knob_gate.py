"""`dsv41 knob-gate`: may a server start under the kernel's limits? 0 yes, 2 no."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = (
    "Reads the cap as the smallest of the knobs the kernel exposes and compares it with a floor; "
    "with --raise, a cap below the floor is raised to the target first. Exit code: 0 the cap "
    "clears the floor, 2 it does not, or is not known. For ExecStartPre=+ of a unit."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--knob", type=Path, action="append", required=True, metavar="PATH", help="repeatable"
    )
    parser.add_argument("--unit", default="pages", help="pages (default), bytes, kib or mib")
    parser.add_argument("--floor-mib", type=int, required=True, metavar="N", help="the least cap")
    parser.add_argument("--target-mib", type=int, required=True, metavar="N", help="raised to")
    parser.add_argument("--raise", dest="raises", action="store_true", help="write; else only read")


def run(args: argparse.Namespace) -> int:
    """Run the gate and say what it found."""
    from ..text import one_line
    from ..unit.knob_gate import check_knobs

    report = check_knobs(
        args.knob,
        unit=args.unit,
        floor_mib=args.floor_mib,
        target_mib=args.target_mib,
        raise_knobs=args.raises,
    )
    for line in report.lines:
        print(f"knob-gate: {one_line(line, 600)}", file=sys.stdout if report.passed else sys.stderr)
    return 0 if report.passed else 2
