"""What several commands ask of their words: told before anything long is begun."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import UsageError

__all__ = ["new_file", "seconds"]


def seconds(text: str) -> float:
    """An argument in seconds, above 0 to 1e9, as argparse takes it.

    Raises:
        argparse.ArgumentTypeError: it is no such number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text}: valid: above 0 to 1e9 seconds")
    return value


def new_file(path: Path, why: str) -> Path:
    """Return `path` if a file can be created there: what follows may take an hour.

    Raises:
        UsageError: something lies there, and `why` it is not replaced; or its folder is missing
            or cannot be written to.
    """
    if os.path.lexists(path):
        raise UsageError(f"{path}: exists; {why}")
    if not path.parent.is_dir():
        raise UsageError(f"{path}: its folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"{path}: its folder {path.parent} cannot be written to")
    return path
