"""`dsv41 windows`: the windows of a campaign and how they ended."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

__all__ = ["HELP", "configure", "run"]

HELP = "list the windows of a campaign folder and how each ended"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("lane", metavar="LANE", nargs="?", help="only the windows of this lane")
    parser.add_argument(
        "--campaign",
        metavar="DIR",
        default="dsv41-windows",
        help="folder that holds the windows' folders (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: argparse.Namespace) -> int:
    """Print one line a window, oldest first; 0 also when there is none."""
    from ..report.listing import list_windows, render_listing

    windows = list_windows(Path(args.campaign), lane=args.lane)
    if args.json:
        print(json.dumps([window.to_json() for window in windows], indent=2))
    else:
        print(render_listing(windows, encoding=sys.stdout.encoding), end="")
    return 0
