"""Options, ini values, markers and the switch: without `--window` this plugin does nothing."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest

from .options import option

__all__: list[str] = []

MARKERS = (
    "decision: a cell that decides the window",
    "report_only: a cell that is measured and decides nothing",
    "decode: a cell that measures decoding",
    "prefill: a cell that measures the time to the first token",
    "seeded: a cell whose requests carry registered seeds",
    "single: a cell with one request at a time (B1)",
    "multi: a cell with several requests at a time",
    *(f"b{n}: a cell with {n} requests at a time" for n in (1, 2, 3, 4, 8, 16, 32, 64)),
)

_PLANS = ("files", "live")

_OPTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "window",
        {"metavar": "FILE", "help": "run the window of this file, or of a shipped example's name"},
        "string",
    ),
    (
        "window-plan",
        {
            "nargs": "?",
            "const": "files",
            "choices": _PLANS,
            "help": "print the plan and run nothing; live: also probe, reading only, and say what "
            "would refuse",
        },
        "string",
    ),
    ("window-out", {"metavar": "DIR", "help": "where the window's folder is made"}, "string"),
    (
        "window-campaign",
        {"metavar": "DIR", "help": "the folder of lease, intent and archive (default: the out)"},
        "string",
    ),
    (
        "window-report-only",
        {"action": "store_true", "help": "measure and report; decide nothing"},
        "bool",
    ),
    (
        "window-override",
        {
            "metavar": "REASON",
            "help": "open the window although the window cap or the resolution filter refuses it; "
            "the reason is recorded",
        },
        "string",
    ),
    (
        "window-seed",
        {"metavar": "N", "help": "the seed of everything random, 0 to 2147483647"},
        "string",
    ),
    (
        "window-set",
        {
            "action": "append",
            "default": [],
            "metavar": "NAME=VALUE",
            "help": "give a variable of the window file a value",
        },
        "linelist",
    ),
    (
        "window-chain",
        {
            "action": "store_true",
            "help": "the window belongs to a chain: production stays down for the next one",
        },
        "bool",
    ),
    (
        "window-chain-last",
        {
            "action": "store_true",
            "help": "the chain's last window: production comes back at its end",
        },
        "bool",
    ),
    (
        "window-rehearse",
        {
            "action": "store_true",
            "help": "run the window over simulated hosts and the stub engine; nothing real is "
            "touched, the verdict means nothing",
        },
        "bool",
    ),
    (
        "window-fault",
        {
            "action": "append",
            "default": [],
            "metavar": "NAME[/HOST]@STEP",
            "help": "with --window-rehearse: break a host at the beginning of a journalled step",
        },
        "linelist",
    ),
    (
        "window-list",
        {"action": "store_true", "help": "list the shipped example windows and end"},
        "bool",
    ),
    (
        "window-json",
        {"action": "store_true", "help": "print the plan as JSON (with --window-plan)"},
        "bool",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare each option on the command line and in ini."""
    group = parser.getgroup("window", "A/B windows for LLM servers (pytest-dsv41)")
    for name, settings, ini in _OPTIONS:
        dest = name.replace("-", "_")
        group.addoption(f"--{name}", dest=dest, **settings)
        kind: Any = ini
        default = {"bool": False, "linelist": [], "string": None}[ini]
        parser.addini(dest, f"as --{name}", type=kind, default=default)
    # A short name that another plugin may own: then only the long one exists.
    with contextlib.suppress(ValueError):
        group.addoption(
            "--json",
            dest="window_json",
            action="store_true",
            help="as --window-json",
        )


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Make the hooks of `pytest_dsv41.hookspecs` known."""
    from . import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Answer --window-list without a session."""
    if not option(config, "window_list"):
        return None
    from .glue import list_windows

    return list_windows()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers; with a window, the plugin that runs it."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    plan = option(config, "window_plan")
    if plan and plan not in _PLANS:
        raise pytest.UsageError(f"window_plan: {plan!r}; valid: {', '.join(_PLANS)}")
    if option(config, "window"):
        if not plan and config.getoption("window_json", False):
            # Who asks for a plan in JSON must not find production taken down.
            raise pytest.UsageError("--window-json prints the plan as JSON: add --window-plan")
        from .glue import register

        register(config)
    elif plan:
        raise pytest.UsageError("--window-plan: of which window? add --window=FILE")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Without a window a cell is no test: it would have no server to measure."""
    if inspect.isfunction(obj) and getattr(obj, "__dsv41_cells__", None) is not None:
        return None if option(collector.config, "window") else []
    return None
