"""The fixtures of a cell: thin views of the running window."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from .measure import (
    METRICS,
    Cell,
    Endpoint,
    GroupResult,
    Request,
    measure_group,
    prompt_identity,
)
from .measure.record import write_record

if TYPE_CHECKING:
    from .glue import WindowPlugin
    from .window.plan import Plan, PlannedItem

__all__ = ["Measure", "Recorded", "endpoint", "hold", "measure", "restore", "start", "window"]

_SEED_STRIDE = 1000
_SEEDS = 1 << 31


@dataclasses.dataclass
class Recorded:
    """What a cell has recorded for its item: metric to value, and the prompts it came from."""

    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    prompt_sha256: str | None = None
    prompt_members: tuple[str, ...] = ()


class Measure:
    """Sends requests to the current start and records their values for this item."""

    def __init__(self, plugin: WindowPlugin, planned: PlannedItem, cell: Cell) -> None:
        self._plugin = plugin
        self._planned = planned
        self.cell = cell
        self.recorded = plugin.results[planned.id] = Recorded()

    def __call__(self, requests: Sequence[Request] | None = None) -> GroupResult:
        """Send the cell's requests (or these) as one group, record every metric, return all.

        Called again in one item, the last group's values and raw record count.

        Raises:
            MeasurementFailed: a request did not deliver.
            MeasurementRefused: the values cannot be trusted (foreign traffic, reset counters).
        """
        run = self._plugin.run
        assert run is not None
        sent = tuple(requests) if requests is not None else self.requests()
        result = measure_group(
            run.endpoint,
            sent,
            deadline_s=self._plugin.spec.limits.item_s,
            stop=run.stop_event,
            keep_bytes=self.cell.record == "bytes",
        )
        if self.cell.record != "none":
            write_record(
                run.folder / "raw" / f"{self._planned.id}.jsonl",
                run.endpoint,
                result,
                record=self.cell.record,
                caches=tuple(request.sampling.cache for request in sent),
            )
        for metric, value in result.values.items():
            self.recorded.values[metric] = dataclasses.asdict(value)
        for metric in result.missing:
            # A former group's value would stand on other requests than the last group's.
            self.recorded.values.pop(metric, None)
        self.recorded.missing = dict(result.missing)
        self.recorded.prompt_sha256 = result.prompt_sha256
        self.recorded.prompt_members = tuple(result.prompt_members)
        return result

    def requests(self) -> tuple[Request, ...]:
        """The cell's requests for this item.

        The n-th repeat of a cell has the same seed in every arm, so that a pair shares its luck,
        and no two repeats of one arm share theirs, over all its starts: they stay independent.
        """
        plan = self._plugin.plan
        assert plan is not None
        mine = self._planned
        before = sum(
            item.arm == mine.arm and item.cell == mine.cell and item.index < mine.index
            for item in plan.items
        )
        seed = (plan.seed + _SEED_STRIDE * before) % _SEEDS
        return self.cell.requests(seed=seed, salt=f"{plan.window_id}-{mine.id}")

    def value(self, metric: str, value: float, *, source: str = "cell") -> None:
        """Record one more value of this item under a registered metric's name.

        Until this fixture has sent requests, the value stands on the cell's own prompts.

        Raises:
            ValueError: no such metric, or no finite number.
        """
        if metric not in METRICS:
            raise ValueError(f"unknown metric {metric!r}; valid: {', '.join(METRICS)}")
        if not math.isfinite(value):
            raise ValueError(f"{metric}: {value!r} is not a finite number")
        known = METRICS[metric]
        if self.recorded.prompt_sha256 is None:
            members = tuple(request.prompt_sha256 for request in self.requests())
            self.recorded.prompt_sha256 = prompt_identity(members)
            self.recorded.prompt_members = members
        self.recorded.values[metric] = {
            "value": float(value),
            "unit": known.unit,
            "lower_is_better": known.lower_is_better,
            "source": source,
            "parts": {},
        }


def _plugin(request: pytest.FixtureRequest) -> WindowPlugin:
    found: WindowPlugin = request.config.pluginmanager.getplugin("dsv41-window")
    return found


@pytest.fixture
def _dsv41_item(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The cell's name and the item's id."""
    parameters: tuple[str, str] = request.param
    return parameters


@pytest.fixture
def window(request: pytest.FixtureRequest) -> Plan:
    """The window's plan: spec, starts, items, seed."""
    plan = _plugin(request).plan
    assert plan is not None
    return plan


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> str | None:
    """The owner of the HOLD over production, or None when the target holds nothing."""
    run = _plugin(request).run
    assert run is not None
    return run.hold.owner()[1] if run.target.holds else None


@pytest.fixture
def start(request: pytest.FixtureRequest, _dsv41_item: tuple[str, str]) -> PlannedItem:
    """The planned item: start, arm, cell, repeat."""
    plan = _plugin(request).plan
    assert plan is not None
    return next(item for item in plan.items if item.id == _dsv41_item[1])


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> Endpoint:
    """Where the current start answers: url, engine, model."""
    run = _plugin(request).run
    assert run is not None
    return run.endpoint


@pytest.fixture
def measure(
    request: pytest.FixtureRequest, _dsv41_item: tuple[str, str], start: PlannedItem
) -> Measure:
    """Call it to send the cell's requests and record their values for this item."""
    plugin = _plugin(request)
    return Measure(plugin, start, plugin.collector.found[_dsv41_item[0]].cell)


@pytest.fixture
def restore(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """What production's restore will be compared with: the capture, read only; None without."""
    plugin = _plugin(request)
    if plugin.folder is None:
        return None
    from .lifecycle.production import captured

    return captured(plugin.folder)
