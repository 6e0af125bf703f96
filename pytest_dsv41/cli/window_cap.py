"""`dsv41 window-cap`: may this lane open another window? 0 ALLOW, 2 REFUSE."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UsageError
from ..text import one_line

__all__ = ["HELP", "configure", "run"]

HELP = "may this lane open another window? 0 ALLOW, 2 REFUSE"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("lane", metavar="LANE", help="the line of work")
    parser.add_argument(
        "--campaign",
        metavar="DIR",
        default="dsv41-windows",
        help="folder of the windows, with WINDOW-CAP.json, experiments/ and LANES.md "
        "(default: %(default)s)",
    )
    parser.add_argument("--since", metavar="UTC", help="adoption, instead of WINDOW-CAP.json")
    parser.add_argument(
        "--prefix", metavar="P", help="count windows whose name begins with P, not the lane's"
    )
    parser.add_argument(
        "--experiments",
        metavar="DIR",
        action="append",
        default=[],
        help="another folder with <LANE>/hypothesis-<n>.md, beside the campaign's and "
        "./experiments (may be given again)",
    )
    parser.add_argument(
        "--lanes",
        metavar="FILE",
        action="append",
        default=[],
        help="another LANES.md, beside the campaign's and ./LANES.md (may be given again)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the answer, what was counted, and what would satisfy it."""
    from ..archive.window_cap import window_cap

    # What was named and is not there would be looked at in vain, and nobody would know.
    for flag, names in (("--experiments", args.experiments), ("--lanes", args.lanes)):
        for name in names:
            if not Path(name).exists():
                raise UsageError(f"{flag} {name}: there is no such file or folder")
    answer = window_cap(
        args.lane,
        args.campaign,
        since=args.since,
        prefix=args.prefix,
        # The campaign's own are always looked at; these are kept in a repository.
        experiments=["experiments", *args.experiments],
        lanes=["LANES.md", *args.lanes],
    )
    code = 0 if answer.allow else 2
    if args.json:
        print(json.dumps(answer.to_dict(), indent=2))
        return code
    print(one_line(f"{'ALLOW' if answer.allow else 'REFUSE'}: {answer.reason}", 1000))
    for window in answer.windows:
        mark = "counted" if window.counts else f"not counted ({window.why})"
        ended = window.ended_utc or "-"
        print("  " + one_line(f"{window.window}: {window.status}, ended {ended}: {mark}", 400))
    for reason in answer.reasons:
        mark = "satisfies the cap" if reason.satisfies else "not after the latest counted window"
        if not answer.counted:
            mark = "nothing to satisfy yet"
        print("  " + one_line(f"{reason.kind} {reason.source}, {reason.dated_utc}: {mark}", 400))
    for peeked in answer.peeked:
        print(
            "  " + one_line(f"INCOMPLETE with both arms of a decision cell measured: {peeked}", 400)
        )
    if answer.needed:
        print("one of these would allow it:")
        for way in answer.needed:
            print("  " + one_line(f"{way}", 600))
    return code
