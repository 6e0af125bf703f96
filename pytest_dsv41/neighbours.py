"""Other plugins, and options of pytest, that would repeat, move or kill measured items."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest

__all__ = ["refuse_marks", "refuse_neighbours"]


def refuse_neighbours(config: pytest.Config) -> None:
    """Plugins and options that would repeat, move or kill measured items: wrong use."""

    def given(name: str) -> Any:
        value = config.getoption(name, None)
        if value in (None, False, [], ""):
            with contextlib.suppress(ValueError, KeyError):
                value = config.getini(name)
        return None if value in (None, False, [], "") else value

    if (
        given("numprocesses")
        or config.getoption("dist", "no") != "no"
        or given("tx")
        or hasattr(config, "workerinput")
    ):
        raise pytest.UsageError("pytest-xdist: a window measures in one process; use -n0")
    if given("timeout_method") == "thread" or os.environ.get("PYTEST_TIMEOUT_METHOD") == "thread":
        raise pytest.UsageError(
            "pytest-timeout: the thread method ends the process without any teardown; "
            "use --timeout-method=signal"
        )
    if not any(config.pluginmanager.hasplugin(name) for name in ("timeout", "pytest_timeout")):
        raise pytest.UsageError("pytest-timeout is off; a window needs it for its items' deadlines")
    if given("faulthandler_exit_on_timeout"):
        raise pytest.UsageError(
            "faulthandler_exit_on_timeout ends the process without any teardown; turn it off"
        )
    for name, plugin in (
        ("reruns", "pytest-rerunfailures"),
        ("force_flaky", "flaky"),
        ("forked", "pytest-forked"),
        ("boxed", "pytest-xdist"),
        ("looponfail", "pytest-xdist"),
        ("flake_finder_enable", "pytest-flakefinder"),
        ("setuponly", "pytest"),
        ("setupplan", "pytest"),
    ):
        if given(name):
            instead = "; use --window-plan" if name.startswith("setup") else ""
            raise pytest.UsageError(
                f"{plugin}: --{name} does not go with a window, whose items are measured once, "
                f"in this process, in the planned order{instead}"
            )
    if str(config.getoption("count", 1)) != "1":
        raise pytest.UsageError(
            "pytest-repeat: --count does not go with a window; its file says repeats"
        )


def refuse_marks(item: pytest.Item) -> None:
    """A cell may not carry a mark by which it would run twice, or end the process."""
    for name in ("flaky", "repeat", "forked", "xdist_group"):
        if item.get_closest_marker(name) is not None:
            raise pytest.UsageError(
                f"{item.nodeid}: marker {name} does not go with a measured item"
            )
    timeout = item.get_closest_marker("timeout")
    if timeout is not None and "thread" in (*timeout.args, *timeout.kwargs.values()):
        raise pytest.UsageError(
            f"{item.nodeid}: pytest-timeout's thread method ends the process without teardown"
        )
