"""What a plugin or a conftest.py can add to a window.

Targets, engines and metrics are asked for while pytest configures itself: by an installed plugin,
by `-p MODULE`, or by the conftest.py of the folder in which pytest is started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .engines import Engine
    from .measure import Metric
    from .targets import TargetFactory
    from .window.plan import Plan

__all__ = [
    "pytest_dsv41_engines",
    "pytest_dsv41_metrics",
    "pytest_dsv41_reporters",
    "pytest_dsv41_rules",
    "pytest_dsv41_step",
    "pytest_dsv41_targets",
]


@pytest.hookspec
def pytest_dsv41_targets() -> Mapping[str, TargetFactory]:  # type: ignore[empty-body]
    """Return kinds of target: the value of `target.kind` to the factory that builds it.

    The factory lies at the top level of an importable module: the keeper, a process of its own,
    imports it again to bring production back.

    ::

        # rack.py
        from pytest_dsv41.targets import local_target

        def rack_target(table, context):
            return local_target({**table, "kind": "local"}, context)

        # conftest.py
        def pytest_dsv41_targets():
            from rack import rack_target

            return {"rack": rack_target}
    """


@pytest.hookspec
def pytest_dsv41_engines() -> Mapping[str, Engine]:  # type: ignore[empty-body]
    """Return server dialects: the value of `target.engine` to an engine object.

    ::

        # my_engine.py
        from pytest_dsv41.engines import Vllm

        class MyEngine(Vllm):
            name = "mine"

        # conftest.py
        def pytest_dsv41_engines():
            from my_engine import MyEngine

            return {"mine": MyEngine()}
    """


@pytest.hookspec
def pytest_dsv41_metrics() -> Sequence[Metric]:  # type: ignore[empty-body]
    """Return metrics that cells record by `measure.value(…)` and windows may name.

    ::

        # conftest.py
        def pytest_dsv41_metrics():
            from pytest_dsv41.measure import Metric

            return [
                Metric(
                    name="joules_per_token", unit="J", lower_is_better=True,
                    source="power meter", needs_speculation=False, doc="energy for one token",
                )
            ]
    """


@pytest.hookspec
def pytest_dsv41_rules() -> Mapping[  # type: ignore[empty-body]
    str, Callable[[Plan, Sequence[dict[str, Any]]], Sequence[str]]
]:
    """Return advisory rules: lines that stand beside the verdict and never change it.

    A rule gets the plan and the rows of values.jsonl.

    ::

        # conftest.py
        def pytest_dsv41_rules():
            def count(plan, values):
                return [f"{len(values)} of {len(plan.items)} items have a row"]

            return {"count": count}
    """


@pytest.hookspec
def pytest_dsv41_reporters() -> Mapping[str, Callable[[Path], None]]:  # type: ignore[empty-body]
    """Return reporters: called with the window's folder once its summary is written.

    ::

        # conftest.py
        def pytest_dsv41_reporters():
            def mail(folder):
                (folder / "mail.txt").write_text((folder / "summary.json").read_text())

            return {"mail": mail}
    """


@pytest.hookspec
def pytest_dsv41_step(name: str, event: str) -> None:
    """Called after a step of the window was journalled: `event` is begin, end or fail.

    An exception ends the window early; while it closes, an exception is noted and nothing more.

    ::

        # conftest.py
        def pytest_dsv41_step(name, event):
            with open("steps.txt", "a") as file:
                print(name, event, file=file)
    """
