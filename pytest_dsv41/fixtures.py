"""The fixtures of a cell: thin views of the running window."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from .durable import dump_json, write_atomic
from .errors import MeasurementRefused
from .measure import (
    METRICS,
    Cell,
    Endpoint,
    GroupResult,
    Request,
    measure_group,
    prompt_identity,
)
from .measure.probes.cell import ProbeCell
from .measure.probes.laws import obey
from .measure.record import write_record
from .measure.seeded import SeededCell

if TYPE_CHECKING:
    from .engines.served import Served
    from .glue import WindowPlugin
    from .quality.probe import Probe
    from .window.plan import Plan, PlannedItem

__all__ = [
    "Measure",
    "Pilot",
    "Probed",
    "Recorded",
    "chain",
    "endpoint",
    "hold",
    "measure",
    "pilot",
    "probed",
    "restore",
    "start",
    "window",
]

_SEED_STRIDE = 1000
_SEEDS = 1 << 31


@dataclasses.dataclass
class Recorded:
    """What a cell has recorded for its item: metric to value, and the prompts it came from."""

    values: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    prompt_sha256: str | None = None
    prompt_members: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """The sha256 of each output of a seeded cell, by member."""
    rounds: int | None = None
    """The rounds of a seeded cell's group."""
    files: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    """What a quality cell or the pilot wrote: `probe` or `start` to its file and seal."""


class Measure:
    """Sends requests to the current start and records their values for this item."""

    def __init__(self, plugin: WindowPlugin, planned: PlannedItem, cell: Cell) -> None:
        self._plugin = plugin
        self._planned = planned
        self.cell = cell
        self.recorded = plugin.results[planned.id] = Recorded()

    def __call__(
        self, requests: Sequence[Request] | None = None, *, beside: bool = False
    ) -> GroupResult:
        """Send the cell's requests (or these) as one group, record every metric, return all.

        Called again in one item, the last group's values and raw record count. `beside` looks at
        how many run at a time. A probe's rates from too few tokens are refused by law.

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
            progress=lambda now: self._plugin.tell(self._planned, now.text),
            reader=self._plugin.reader,
            keep_bytes=self.cell.record == "bytes",
            beside=beside,
        )
        if self.cell.record != "none":
            write_record(
                run.folder / "raw" / f"{self._planned.id}.jsonl",
                run.endpoint,
                result,
                record=self.cell.record,
                caches=tuple(request.sampling.cache for request in sent),
            )
        if isinstance(self.cell, ProbeCell):
            result = obey(result)
        for metric, value in result.values.items():
            self.recorded.values[metric] = dataclasses.asdict(value)
        for metric in result.missing:
            # A former group's value would stand on other requests than the last group's.
            self.recorded.values.pop(metric, None)
        self.recorded.missing = dict(result.missing)
        self.recorded.prompt_sha256 = result.prompt_sha256
        self.recorded.prompt_members = tuple(result.prompt_members)
        if isinstance(self.cell, SeededCell):
            self.recorded.outputs = tuple(stream.output_sha256 for stream in result.streams)
            self.recorded.rounds = result.server.rounds
        return result

    @property
    def endpoint(self) -> Endpoint:
        """Where the current start answers."""
        run = self._plugin.run
        assert run is not None
        return run.endpoint

    def shape(self) -> Served:
        """The shape of the current start: the server's own, and its boot ledger where there is one.

        Raises:
            MeasurementRefused: kind `shape`: the two contradict each other.
        """
        from .measure.probes import read_shape
        from .unit.memory import ledger_shape, parse_ledger
        from .unit.memory.ledger import DIALECTS

        run = self._plugin.run
        assert run is not None
        told: list[Served] = []
        for kept in ("ledger", "log"):
            path = run.folder / kept / f"{self._planned.start}.log"
            if run.endpoint.engine in DIALECTS and path.is_file():
                text = path.read_text("utf-8", "replace")
                ledger = parse_ledger(text, run.endpoint.engine)
                told = [ledger_shape(ledger, f"{kept}/{path.name}")]
                break
        return read_shape(run.endpoint, *told)

    def keep(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep what a probe found beside its values: `probes/<item>.<name>.json` in the folder."""
        run = self._plugin.run
        assert run is not None
        path = run.folder / "probes" / f"{self._planned.id}.{name}.json"
        path.parent.mkdir(exist_ok=True)
        text = dump_json(facts) + "\n"
        write_atomic(path, text)
        self.recorded.files[name] = {
            "file": path.relative_to(run.folder).as_posix(),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
        }

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


class Probed:
    """Probes the current start for a quality cell."""

    def __init__(self, plugin: WindowPlugin, planned: PlannedItem) -> None:
        self._plugin = plugin
        self._planned = planned
        self.recorded = plugin.results[planned.id] = Recorded()

    def __call__(self) -> Probe:
        """Run the probe that the cell's band asks for, and keep it in the window's folder.

        Raises:
            MeasurementFailed: a request did not deliver.
            MeasurementRefused: an answer cannot be trusted; the reason names the prompt.
        """
        from .quality.cell import run_quality
        from .quality.probe import save_probe
        from .window.quality import keep_band, probe_file

        plugin, planned = self._plugin, self._planned
        run = plugin.run
        assert run is not None
        plan = plugin.collector.quality[planned.cell]
        keep_band(run.folder, planned.cell, plan.path)
        probe = run_quality(
            run.endpoint,
            plan,
            role=plugin.spec.arm(planned.arm).role,
            deadline_s=plugin.collector.deadline_s(planned.cell),
            salt=f"{run.plan.window_id}-{planned.id}",
            stop=run.stop_event,
            progress=lambda now: plugin.tell(
                planned, f"probe, position {now.done} of {now.total}: {now.prompt}"
            ),
        )
        path = probe_file(run.folder, planned)
        path.parent.mkdir(exist_ok=True)
        seal = save_probe(path, probe)
        self.recorded.files["probe"] = {
            "file": path.relative_to(run.folder).as_posix(),
            "sha256": seal,
        }
        return probe


class Pilot:
    """Runs start A of the A/A pilot on the current start, and plans start B."""

    def __init__(self, plugin: WindowPlugin, planned: PlannedItem) -> None:
        self._plugin = plugin
        self._planned = planned
        self.recorded = plugin.results[planned.id] = Recorded()

    def __call__(self) -> None:
        """Run start A, keep its record, and let the restore's seam run start B.

        Raises:
            MeasurementFailed: stopped, or not finished at the deadline.
            MeasurementRefused: kind `pilot`: something in it was refused; the record has the rest.
        """
        from .lifecycle.pilot import keep_start, pilot_seam
        from .quality.pilot import refused_parts, run_start

        plugin, planned = self._plugin, self._planned
        run, plan = plugin.run, plugin.collector.pilot
        assert run is not None
        assert run.started is not None
        assert plan is not None
        cap = run.started.clock_cap
        record, probe = run_start(
            run.endpoint,
            plan,
            start="A",
            deadline_s=plugin.collector.deadline_s(planned.cell),
            salt=f"{run.plan.window_id}-A",
            commit=run.commit,
            clock_cap_mhz=None if cap.source == "none" else cap.mhz,
            stop=run.stop_event,
            progress=lambda text: plugin.tell(planned, text),
        )
        path, seal = keep_start(run.folder, record, probe)
        self.recorded.files["start"] = {
            "file": path.relative_to(run.folder).as_posix(),
            "sha256": seal,
        }
        run.seam = pilot_seam(
            run.folder,
            plan,
            production=run.target.production,
            salt=f"{run.plan.window_id}-B",
            commit=run.commit,
            deadline_s=run.seam_s,
        )
        refused = refused_parts(record)
        if refused:
            raise MeasurementRefused("pilot", f"start A: {'; '.join(refused)}")


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
def probed(request: pytest.FixtureRequest, start: PlannedItem) -> Probed:
    """Call it to probe the current start for a quality cell."""
    return Probed(_plugin(request), start)


@pytest.fixture
def pilot(request: pytest.FixtureRequest, start: PlannedItem) -> Pilot:
    """Call it to run start A of the A/A pilot."""
    return Pilot(_plugin(request), start)


@pytest.fixture
def chain(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """The chain that left production down: `owner` and `placeholders` by host; None without."""
    run = _plugin(request).run
    assert run is not None
    owner = run.journal.chain()
    if not owner:
        return None
    seen = run.target.placeholders(owner)
    return {"owner": owner, "placeholders": {host: state.value for host, state in seen.items()}}


@pytest.fixture
def restore(request: pytest.FixtureRequest) -> dict[str, Any] | None:
    """What production's restore will be compared with: the capture, read only; None without."""
    plugin = _plugin(request)
    if plugin.folder is None:
        return None
    from .lifecycle.production import captured

    return captured(plugin.folder)
