"""Reading an option: the command line wins over ini."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["option"]


def option(config: pytest.Config, name: str) -> Any:
    """The value of `--name` (with underscores), or else of the ini key of that name."""
    given = config.getoption(name, None)
    # Not `in (None, False, [])`: 0 equals False, and is a seed.
    if given is not None and given is not False and given != []:
        return given
    return config.getini(name)
