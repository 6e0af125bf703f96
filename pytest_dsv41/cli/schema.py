"""`dsv41 schema`: the JSON schema of a summary or of a window file, for editors and checks."""

from __future__ import annotations

import argparse
from importlib.resources import files

__all__ = ["HELP", "configure", "run"]

HELP = "print the JSON schema of summary.json or of a window file"

_FILES = {"summary": "summary-v1.json", "window": "window-v1.json"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("what", choices=sorted(_FILES), help="which file the schema describes")


def run(args: argparse.Namespace) -> int:
    """Print the schema (draft 2020-12)."""
    folder = files("pytest_dsv41.window").joinpath("schemas")
    print(folder.joinpath(_FILES[args.what]).read_text(encoding="utf-8"), end="")
    return 0
