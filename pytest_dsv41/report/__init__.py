"""Reports of a window: on the terminal, as JUnit, as a page; views of its folder's facts.

The modules are imported when they are used: rich, jinja2 and junitparser cost start-up time that
a window's measuring does not need.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_views"]


def write_views(folder: Path) -> tuple[Path, Path]:
    """Make junit.xml and report.html of a window's folder from its other files.

    Both are views: making them again changes no fact, and gives the same bytes.

    Returns:
        The paths of junit.xml and report.html.

    Raises:
        UsageError: the folder is no window's, or plan.json or summary.json is damaged; one line.
    """
    from .html import write_html
    from .junit import write_junit
    from .model import load_window

    files = load_window(folder)
    return write_junit(folder, files), write_html(folder, files)
