"""`dsv41 report`: the views of a window again, from the facts in its folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

__all__ = ["HELP", "configure", "run"]

HELP = "make junit.xml and report.html again from the other files in a window's folder"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="the window's folder")
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="write the files and print their paths only"
    )


def run(args: argparse.Namespace) -> int:
    """Write both files, print the window's tables and the paths; 0, whatever the verdict was."""
    from ..report import write_views
    from ..report.model import load_window
    from ..report.terminal import render_files

    folder = Path(args.folder)
    paths = write_views(folder)
    if not args.quiet:
        print(render_files(load_window(folder), encoding=sys.stdout.encoding))
    for path in paths:
        print(path)
    return 0
