"""Collecting from the root: the workloads in cells/ are no tests of this project."""

from __future__ import annotations

collect_ignore = ["cells", "sims"]

pytest_plugins = ["pytester"]
