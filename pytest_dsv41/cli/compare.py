"""`dsv41 compare`: two windows side by side."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

__all__ = ["HELP", "configure", "run"]

HELP = "set two windows side by side; ends with the exit code of the second"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", metavar="A", help="folder of the first window")
    parser.add_argument("second", metavar="B", help="folder of the second window")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the comparison; the exit code with which window B ended (12 without a summary)."""
    from ..report.compare import compare_windows, render_comparison
    from ..report.model import load_window

    comparison = compare_windows(load_window(Path(args.first)), load_window(Path(args.second)))
    if args.json:
        print(json.dumps(comparison.to_json(), indent=2))
    else:
        print(render_comparison(comparison, encoding=sys.stdout.encoding), end="")
    return comparison.exit_code
