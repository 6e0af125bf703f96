"""`dsv41 keeper`: started by a window itself, never by hand."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..lifecycle.keeper import keep

HELP = "Watches a window's process and finishes the window if that process cannot."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--budget", type=float, required=True)


def run(arguments: argparse.Namespace) -> int:
    """Watch until the window has ended."""
    return keep(arguments.folder, arguments.parent, arguments.deadline, arguments.budget)
