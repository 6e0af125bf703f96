"""`dsv41 init`: write a commented window file and target file that run as they stand."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from ..errors import UsageError
from ..text import one_line

__all__ = ["HELP", "configure", "run"]

HELP = "write a commented window.toml and target.toml to start from"

_FILES = ("target.toml", "window.toml")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "folder",
        nargs="?",
        default=".",
        metavar="DIR",
        help="where to write them (default: the current folder); made if it does not exist",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files.

    Raises:
        UsageError: one of them exists (then nothing is written), or the folder cannot be written.
    """
    folder = Path(args.folder)
    for path in _write(folder):
        print(f"wrote {one_line(str(path))}")
    print(f"run it: pytest --window={one_line(str(folder / 'window.toml'))}")
    return 0


def _write(folder: Path) -> list[Path]:
    templates = resources.files("pytest_dsv41.window") / "templates"
    paths = [folder / name for name in _FILES]
    try:
        for path in paths:
            if path.exists() or path.is_symlink():
                raise UsageError(f"{one_line(str(path))} exists; nothing was written")
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            # Exclusive: a file that appeared meanwhile is not overwritten.
            with path.open("x", encoding="utf-8") as file:
                file.write((templates / path.name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{one_line(str(folder))}: cannot be written: {reason}") from None
    return paths
