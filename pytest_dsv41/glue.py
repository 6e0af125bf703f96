"""The hooks of a session that has a window: between pytest's events and the library's rooms."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import inspect
import json
import os
import shlex
import signal
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Generator, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from . import fixtures
from .collecting import PLANNED, CellCollector
from .engines import ENGINES
from .errors import Dsv41Error, MeasurementFailed, MeasurementRefused, SpecError, StartFailed
from .errors import UsageError as OurUsageError
from .lifecycle.chain import ChainUse, refuse_overrides
from .lifecycle.closing import CloseResult
from .lifecycle.finish import ARCHIVE_NAME, refuse_window
from .lifecycle.marker import marker_path
from .lifecycle.record import TargetRecord
from .lifecycle.session import State, WindowRun, as_arm
from .measure import METRICS, Reader, prompt_identity
from .neighbours import refuse_neighbours
from .options import option
from .rehearsing import Fault, Rehearsal, rehearsed
from .report.progress import Progress
from .signals import Signals, StopNow
from .targets import TARGETS, TargetFactory, name_class, name_factory
from .text import one_line
from .window.plan import Plan, PlannedItem, describe_plan, render_plan
from .window.process_rules import archived, ask
from .window.spec import PILOT_CELL, WindowSpec, example_names, load_spec
from .window.summary import CHAINED, ProcessRules, Summary

__all__ = ["WindowPlugin", "list_windows", "register"]

CAUSE = pytest.StashKey[BaseException]()
_OPEN = "window::open"
_REHEARSAL = (
    "window: REHEARSAL on simulated hosts: nothing real is touched, the verdict is nobody's"
)
_SEAM_LEAST_S = 60.0
"""What start B may take beside three times its estimate."""
_RESTORE = "window::restore"


def list_windows() -> int:
    """Print the shipped example windows, one a line with its hypothesis."""
    examples = resources.files("pytest_dsv41.window") / "examples"
    for name in example_names():
        table = tomllib.loads((examples / f"{name}.toml").read_text(encoding="utf-8"))
        print(f"{name:<14} {table['window']['hypothesis']}")  # noqa: T201
    return 0


def register(config: pytest.Config) -> None:
    """Read the window and register the plugin that runs it.

    Raises:
        pytest.UsageError: a wrong spec or plugin combination; nothing was touched.
    """
    refuse_neighbours(config)
    hook = config.pluginmanager.hook
    targets: dict[str, TargetFactory] = dict(TARGETS)
    for found in hook.pytest_dsv41_targets():
        targets.update(found or {})
    engines: dict[str, str] = {}
    for found in hook.pytest_dsv41_engines():
        for name, engine in (found or {}).items():
            try:
                engines[name] = name_class(type(engine))
            except OurUsageError as error:
                raise pytest.UsageError(str(error)) from None
            ENGINES[name] = engine
    for found in hook.pytest_dsv41_metrics():
        METRICS.update({metric.name: metric for metric in found or ()})
    try:
        spec = load_spec(
            option(config, "window"),
            variables=_variables(option(config, "window_set")),
            seed=_seed(option(config, "window_seed")),
            out=option(config, "window_out"),
            campaign=option(config, "window_campaign"),
            report_only=bool(option(config, "window_report_only")),
            override=option(config, "window_override") or "",
            extra_metrics=tuple(METRICS),
            target_kinds=tuple(targets),
        )
    except OurUsageError as error:
        raise pytest.UsageError(str(error)) from None
    rehearsal = _rehearsal(config, spec)
    if rehearsal is not None:
        given = option(config, "window_out")
        spec = rehearsed(spec, Path(given) if given else None)
    plugin = WindowPlugin(config, spec, targets, engines, _chain_use(config), rehearsal)
    config.pluginmanager.register(fixtures, "dsv41-fixtures")
    config.pluginmanager.register(plugin.collector, "dsv41-cells")
    config.pluginmanager.register(plugin, "dsv41-window")
    config.add_cleanup(plugin.ensure_closed)


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise pytest.UsageError(f"--window-set {pair}: write NAME=VALUE")
        values[name] = value
    return values


def _rehearsal(config: pytest.Config, spec: WindowSpec) -> tuple[Fault, ...] | None:
    """The faults of a rehearsal; None where the window is run in earnest."""
    wanted = option(config, "window_fault")
    if not option(config, "window_rehearse"):
        if wanted:
            raise pytest.UsageError("--window-fault breaks simulated hosts: add --window-rehearse")
        return None
    try:
        faults = tuple(Fault.parse(text) for text in wanted)
        for fault in faults:
            fault.check([start.name for start in spec.starts])
    except OurUsageError as error:
        raise pytest.UsageError(str(error)) from None
    return faults


def _chain_use(config: pytest.Config) -> ChainUse:
    """What the options ask for, or else WINDOW_CHAIN and WINDOW_CHAIN_LAST."""
    requested = bool(option(config, "window_chain")) or _switch(
        "WINDOW_CHAIN", os.environ.get("WINDOW_CHAIN", "")
    )
    last = bool(option(config, "window_chain_last")) or _switch(
        "WINDOW_CHAIN_LAST", os.environ.get("WINDOW_CHAIN_LAST", "")
    )
    if last and not requested:
        raise pytest.UsageError(
            "--window-chain-last (WINDOW_CHAIN_LAST): of which chain? "
            "add --window-chain (WINDOW_CHAIN=1)"
        )
    return ChainUse(requested, last)


def _switch(name: str, value: str) -> bool:
    if value not in ("", "0", "1"):
        raise pytest.UsageError(f"{name}: {one_line(value)!r}; valid: 1, 0, or not set")
    return value == "1"


def _seed(value: object) -> int | None:
    if value is None:
        return None
    try:
        return int(str(value))
    except ValueError:
        shown = one_line(repr(value), 80)
        raise pytest.UsageError(
            f"window_seed: {shown} is not a whole number; valid: 0 to 2147483647"
        ) from None


class WindowPlugin:
    """One window's session. Every path out of it goes through `ensure_closed`."""

    def __init__(
        self,
        config: pytest.Config,
        spec: WindowSpec,
        targets: dict[str, TargetFactory],
        engines: dict[str, str],
        chain: ChainUse,
        faults: tuple[Fault, ...] | None = None,
    ) -> None:
        self.config = config
        self.chain = chain
        # Made before the target is looked at: its hosts lie in the rehearsal's world.
        self.rehearsal = None if faults is None else Rehearsal(spec, faults)
        self.engines = engines
        self.spec = spec
        self.factory = targets[spec.target.kind]
        self.mode = option(config, "window_plan")
        self.session: pytest.Session | None = None
        self.run: WindowRun | None = None
        self.folder: Path | None = None
        self.refused: str | None = None
        self.code: int | None = None
        self.summary: Summary | None = None
        self.notes: list[str] = []
        self.plan_text = ""
        self.results: dict[str, fixtures.Recorded] = {}
        self.signals = Signals(self._request_stop)
        self.reader = Reader()
        self._begun: dict[str, tuple[str, float]] = {}
        self._last_index = -1
        self._closing = False
        self._timer: threading.Timer | None = None
        # Made while pytest captures nothing: later, standard error is its capture file.
        self._progress = Progress(enabled=config.getoption("verbose", 0) > -2)
        now = datetime.datetime.now(datetime.UTC)
        self.date = now.strftime("%Y%m%d")
        self.window_id = self._free_id(f"{spec.lane}-{spec.name}-W-{now:%Y%m%dT%H%M%SZ}")
        self.collector = CellCollector(config, spec, self.window_id)
        # Built once before anything is collected: a wrong target table is wrong use.
        try:
            name_factory(self.factory)
            refuse_overrides({"kind": spec.target.kind, **spec.target.table})
            with tempfile.TemporaryDirectory() as nowhere:
                target, _ = self._record().build(Path(nowhere))
                target.check([as_arm(arm.model_dump()) for arm in spec.arms])
                if chain.requested and not target.chains:
                    raise OurUsageError(
                        f"--window-chain: target {spec.target.kind} cannot chain here: production "
                        'must be served by default (not serve = "window") on hosts that are held'
                    )
        except SpecError as error:
            raise pytest.UsageError(str(spec.target.located(error))) from None
        except Dsv41Error as error:
            raise pytest.UsageError(str(error)) from None
        if self.mode and option(config, "window_json"):
            config.option.verbose = -2
            config.option.no_header = True

    @property
    def plan(self) -> Plan | None:
        """The plan, once everything is collected."""
        return self.collector.plan

    # -- naming ------------------------------------------------------------------------------------

    def _free_id(self, wanted: str) -> str:
        name, number = wanted, 1
        while (self.spec.out / name).exists() or (
            self.spec.campaign / "windows" / f"{name}.json"
        ).exists():
            number += 1
            name = f"{wanted}-{number}"
        return name

    def _record(self) -> TargetRecord:
        spec = self.spec
        limits = {k: float(v) for k, v in spec.limits.model_dump().items() if v is not None}
        limits["window_s"] = self.plan.estimate.window_s if self.plan else 0.0
        if self.plan and self.plan.window.pilot:
            limits["seam_s"] = _SEAM_LEAST_S + 3 * self.plan.estimate.seam_s
        return TargetRecord(
            window=self.window_id,
            factory=f"{self.factory.__module__}:{getattr(self.factory, '__qualname__', '')}",
            table=spec.target.table,
            base=str(Path(spec.target.where).resolve().parent),
            campaign=str(spec.campaign.resolve()),
            seed=self.plan.seed if self.plan else 0,
            limits=limits,
            variables=dict(spec.variables),
            state={},
            commit="",
            date=self.date,
            path=tuple(str(Path(entry).resolve()) for entry in sys.path if entry),
            engines=self.engines,
        )

    # -- the plan alone ----------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        spec = self.spec
        return [
            f"window: {self.window_id} ({spec.kind}): {spec.hypothesis}",
            *([_REHEARSAL] if self.rehearsal is not None else []),
            f"window: {spec.schedule}, cells {', '.join(self._cell_names())}",
        ]

    def _cell_names(self) -> list[str]:
        spec = self.spec
        names = [*(use.name for use in spec.cells), *(use.name for use in spec.quality)]
        return [*names, PILOT_CELL] if spec.pilot else names

    def pytest_report_collectionfinish(self) -> list[str]:
        if self.plan is None or self.mode:
            return []
        estimate = self.plan.estimate
        held = estimate.down_s > 0
        starts = " and the starts" if estimate.starts_s is None else ""
        return [
            f"window: seed {self.plan.seed}, about {_minutes(estimate.total_s)}{starts}"
            + (f", production down for about {_minutes(estimate.down_s)}{starts}" if held else "")
        ]

    def _prompts(self) -> dict[str, str]:
        """Cell to the prompt identity that it will send; a text that is not there has none yet."""
        found: dict[str, str] = {}
        if not (self.spec.campaign / ARCHIVE_NAME).exists():
            # They pick rows of the archive and nothing else; long texts take a while to build.
            return found
        for use in self.spec.cells:
            with contextlib.suppress(Dsv41Error):
                sent = self.collector.found[use.name].cell.requests()
                found[use.name] = prompt_identity([request.prompt_sha256 for request in sent])
        return found

    # -- the run -----------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[None]:
        if session.config.option.collectonly or self.plan is None:
            return (yield)
        if self.mode:
            self._print_plan()
            session.items.clear()
            return (yield)
        if not session.items or (
            session.testsfailed and not session.config.option.continue_on_collection_errors
        ):
            return (yield)
        try:
            self._open(session)
            result = yield
        finally:
            self._note_end(session)
            self.ensure_closed()
        return result

    def _print_plan(self) -> None:
        plan = self.plan
        assert plan is not None
        live: list[str] | None = None
        commit = None
        rules: ProcessRules | None = None
        if self.mode == "live":
            with tempfile.TemporaryDirectory() as nowhere:
                run = self._new_run(Path(nowhere))
                live = run.refusals()
                commit, rules = run.commit, run.process_rules
        archive = self.spec.campaign / ARCHIVE_NAME
        spreads = archived(plan, archive, commit=commit, prompts=self._prompts())
        rules = rules or ask(plan, spreads, campaign=self.spec.campaign)
        if option(self.config, "window_json"):
            described = describe_plan(plan, spreads=spreads)
            described["process_rules"] = rules.model_dump(mode="json")
            if live is not None:
                described["refusals"] = live
            self.plan_text = json.dumps(described, indent=2)
        else:
            self.plan_text = render_plan(plan, spreads=spreads)
            self.plan_text += "\nbefore it opens:\n" + "".join(f"  {one}\n" for one in rules.lines)
            if live is not None:
                self.plan_text += "\nlive probes: " + (
                    "\n".join(f"would be REFUSED: {why}" for why in live)
                    or "nothing would refuse this window now"
                )
        self.code = 13 if live else 0

    def _new_run(self, folder: Path) -> WindowRun:
        assert self.plan is not None
        hook = self.config.hook
        rules: dict[str, Any] = {}
        for found in hook.pytest_dsv41_rules():
            rules.update(found or {})
        return WindowRun(
            self.plan,
            self._record(),
            folder,
            self.factory,
            on_step=self._step,
            on_state=self._show,
            rules=rules,
            report_only=bool(option(self.config, "window_report_only")),
            prompts=self._prompts(),
            chain=self.chain,
        )

    def _step(self, name: str, event: str) -> None:
        if self.rehearsal is not None:
            self.rehearsal.step(name, event)
        self.config.hook.pytest_dsv41_step(name=name, event=event)

    def _open(self, session: pytest.Session) -> None:
        """Open the window; a refusal leaves no item to run."""
        assert self.plan is not None
        self.folder = self._make_folder()
        self.run = self._new_run(self.folder)
        self.signals.install()
        try:
            if self.rehearsal is not None:
                self.rehearsal.begin()
            self.run.open()
        except BaseException as error:
            reason = one_line(str(error) or type(error).__name__, 2000)
            session.items.clear()
            if not self.run.opened:
                self._refuse(error, reason)
                return
            self.run.request_stop(reason)
            self._report(_OPEN, "failed", reason)
            if not isinstance(error, (Dsv41Error, OSError)):
                raise
            return
        self._timer = threading.Timer(max(0.1, self.run.seconds_left()), self._deadline_reached)
        self._timer.daemon = True
        self._timer.start()

    def _make_folder(self) -> Path:
        for name, wanted in (("out", self.spec.out), ("campaign", self.spec.campaign)):
            try:
                wanted.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _no_folder(name, wanted, error) from None
        while True:
            folder = self.spec.out.resolve() / self.window_id
            try:
                folder.mkdir()
            except PermissionError as error:
                raise _no_folder("out", folder, error) from None
            except FileExistsError:
                self.window_id = self._free_id(self.window_id)
                assert self.plan is not None
                self.collector.plan = dataclasses.replace(self.plan, window_id=self.window_id)
            else:
                return folder

    def _refuse(self, error: BaseException, reason: str) -> None:
        assert self.plan is not None
        assert self.folder is not None
        if isinstance(error, OurUsageError):
            self.folder.rmdir()
            raise pytest.UsageError(reason) from None
        self.refused = reason
        with self.signals.deferring():
            aborted = self.run.abort_chain() if self.run is not None else None
        if self.config.getoption("xmlpath", None):
            # A JUnit file of the user's own names the reason; the terminal says it once, below.
            self._report(_OPEN, "failed", f"REFUSED: {reason}")
        rules = self.run.process_rules if self.run else None
        closed = aborted.closed if aborted else self._passed_over()
        self.summary = refuse_window(self.folder, self.plan, self._record(), reason, rules, closed)
        self.code = self.summary.exit_code
        if aborted is not None:
            self.notes.append(f"the chain was ended: {aborted.line}")
        self._views()

    def _passed_over(self) -> CloseResult | None:
        """A window that its chain goes on without leaves production to the chain."""
        if self.run is None or not self.run.passed_over or not self.run.chain.requested:
            return None
        return CloseResult.of_chain() if marker_path(self.run.campaign).exists() else None

    def _deadline_reached(self) -> None:
        self.signals.reason = "the window's deadline has passed"
        self._request_stop(self.signals.reason)
        os.kill(os.getpid(), signal.SIGTERM)

    def _request_stop(self, reason: str) -> None:
        if self.run is not None:
            self.run.request_stop(reason)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        run = self.run
        assert run is not None
        planned = item.stash[PLANNED]
        self._begun[planned.id] = (_utc(), time.monotonic())
        self._erase()
        try:
            if planned.index <= self._last_index:
                run.request_stop(f"{planned.id} came out of the planned order")
            self._last_index = planned.index
            run.before_item(planned)
            # Only now: the time that a start takes is not the item's.
            self._begun[planned.id] = (_utc(), time.monotonic())
        except StartFailed as error:
            item.stash[CAUSE] = error
            if self._ends_window(planned):
                run.request_stop(str(error))
        except Exception as error:  # noqa: BLE001 - the item reports it, the window ends in order
            item.stash[CAUSE] = error
            run.request_stop(one_line(str(error) or type(error).__name__))
        run.state.phase = "measuring"
        self._show(run.state, item=planned)
        result = yield
        if run.stop_event.is_set():
            item.session.shouldstop = run.stop_reason or "stopped"
        return result

    def _ends_window(self, planned: PlannedItem) -> bool:
        """A start that failed ends the window, unless other candidate arms can still be judged."""
        return planned.arm == self.spec.control.name or len(self.spec.candidates) < 2

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        cause = item.stash.get(CAUSE, None)
        if cause is None:
            return
        first = cause.__cause__ is not None or not isinstance(cause, StartFailed)
        text = one_line(str(cause) or type(cause).__name__)
        if first and isinstance(cause, StartFailed):
            pytest.fail(text, pytrace=False)
        pytest.skip(text)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        run = self.run
        assert run is not None
        with self.signals.interruptible():
            if run.stop_event.is_set():
                raise StopNow(run.stop_reason or "stopped")
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run an `async def` cell in a loop of its own; no plugin is needed for that."""
        function = pyfuncitem.obj
        if not inspect.iscoroutinefunction(function):
            return None
        wanted = inspect.signature(function).parameters
        asyncio.run(function(**{name: pyfuncitem.funcargs[name] for name in wanted}))
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_exception_interact(self) -> Iterator[None]:
        # A debugger may sit here: the deadline and signals must still end the window.
        with self.signals.interruptible(pytest.exit.Exception):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" or (report.when == "setup" and not report.passed):
            self._record_item(item, report, call)
        return report

    def _record_item(
        self, item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]
    ) -> None:
        """Write the item's row: measured rows are durable as they come."""
        run = self.run
        assert run is not None
        planned = item.stash[PLANNED]
        recorded = self.results.get(planned.id)
        error = call.excinfo.value if call.excinfo is not None else None
        outcome, kind, reason = "measured", None, None
        if report.skipped:
            outcome, reason = "skipped", str(error)
        elif isinstance(error, MeasurementRefused):
            outcome, kind, reason = "refused", error.kind, str(error)
        elif isinstance(error, MeasurementFailed):
            outcome, kind, reason = "failed", error.kind, str(error)
        elif error is not None:
            outcome, kind = "failed", type(error).__name__
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        elif recorded is None or not (recorded.values or recorded.files):
            outcome, kind, reason = "failed", "nothing-recorded", "the cell recorded no value"
        begun_utc, begun = self._begun[planned.id]
        row = {
            "item": planned.id,
            "start": planned.start,
            "arm": planned.arm,
            "cell": planned.cell,
            "repeat": planned.repeat,
            "outcome": outcome,
            "kind": kind,
            "reason": one_line(reason) if reason else None,
            "values": recorded.values if recorded and outcome == "measured" else {},
            "missing": {
                metric: why
                for metric, why in (recorded.missing if recorded else {}).items()
                if outcome == "measured" and recorded and metric not in recorded.values
            },
            "prompt_sha256": recorded.prompt_sha256 if recorded else None,
            "prompt_members": list(recorded.prompt_members) if recorded else [],
            "max_tokens": self._max_tokens(planned.cell),
            "started_utc": begun_utc,
            "duration_s": round(time.monotonic() - begun, 6),
        }
        if recorded is not None and recorded.files:
            row["files"] = recorded.files
        if recorded is not None and recorded.outputs:
            row |= {"outputs": list(recorded.outputs), "rounds": recorded.rounds}
        try:
            run.record(row)
        except (OSError, ValueError) as lost:
            # A value that is not on disk was not measured; the window ends in order.
            run.request_stop(one_line(f"{planned.id} could not be recorded: {lost}"))

    def _max_tokens(self, cell: str) -> int | None:
        """Tokens of one answer; a quality cell and the pilot have no one number."""
        found = self.collector.found.get(cell)
        return None if found is None else found.cell.max_tokens

    # -- the end -----------------------------------------------------------------------------------

    def _note_end(self, session: pytest.Session) -> None:
        """Why the loop ended, when it ended early."""
        run = self.run
        if run is None or not run.opened or run.stop_reason is not None:
            return
        for why in (session.shouldfail, session.shouldstop):
            if why:
                run.request_stop(one_line(f"pytest: {why}"))
        error = sys.exc_info()[1]
        if error is not None:
            run.request_stop(one_line(f"{type(error).__name__}: {error}"))

    def ensure_closed(self) -> None:
        """Close the window; called from every way out, does its work once, never raises."""
        run = self.run
        if run is None or self._closing:
            return
        self._closing = True
        with self.signals.deferring():
            if self._timer is not None:
                self._timer.cancel()
            try:
                if run.opened:
                    self._close(run)
            except BaseException as error:  # noqa: BLE001 - what is left is said, and the keeper acts
                self.code = 21 if run.production_is_back else 20
                campaign = shlex.quote(str(self.spec.campaign))
                self.notes.append(
                    f"ALERT: the close ended with {type(error).__name__}: {one_line(str(error))}; "
                    f"the keeper tries again: dsv41 status --campaign {campaign}"
                )
            finally:
                self._erase()
        self.signals.remove()

    def _close(self, run: WindowRun) -> None:
        self.summary = run.close()
        assert self.summary is not None
        self.code = self.summary.exit_code
        self._views()
        restore = self.summary.restore
        if run.target.holds:
            ok = self.code not in (20, 21) and (
                restore.production_up or self.summary.chain == CHAINED
            )
            text = f"{restore.status}; watch {self.summary.watch.status}"
            if not ok:
                text += f": {restore.reason or '; '.join(self.summary.alerts)}"
            self._report(_RESTORE, "passed" if ok else "failed", text)

    def _views(self) -> None:
        from .report import write_views

        assert self.folder is not None
        try:
            write_views(self.folder)
        except Exception as error:  # noqa: BLE001 - a view can be made again, a verdict cannot
            self.notes.append(
                f"report not written: {one_line(str(error))}; dsv41 report {self.folder}"
            )
        for found in self.config.hook.pytest_dsv41_reporters():
            for name, reporter in (found or {}).items():
                try:
                    reporter(self.folder)
                except Exception as error:  # noqa: BLE001 - foreign code never changes an ending
                    self.notes.append(f"reporter {name} failed: {one_line(str(error))}")

    def _report(self, nodeid: str, outcome: str, text: str) -> None:
        """Report opening and restoring as test cases of their own."""
        location = (nodeid.partition("::")[0], None, nodeid.partition("::")[2])
        report = pytest.TestReport(
            nodeid=nodeid,
            location=location,
            keywords={nodeid: 1},
            outcome="passed" if outcome == "passed" else "failed",
            longrepr=None if outcome == "passed" else text,
            when="call",
        )
        hook = self.config.hook
        if self.session is not None:
            # One case more than was collected: 100 % stays 100 %.
            self.session.testscollected += 1
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            # The line before has its percentage already; a change of file would write it again.
            reporter.currentfspath = None
        with contextlib.suppress(OSError):
            hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
            hook.pytest_runtest_logreport(report=report)
            hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        self.ensure_closed()
        if self.code is not None:
            session.exitstatus = self.code
        try:
            return (yield)
        except BaseException as error:
            if self.code is None:
                raise
            # The verdict stands, whatever another plugin does at the end.
            self._say(
                f"another plugin's session end raised {type(error).__name__}: "
                f"{one_line(str(error))}"
            )
            return None
        finally:
            if self.code is not None:
                session.exitstatus = self.code

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.plan_text:
            terminalreporter.write_line(self.plan_text)
            return
        if self.refused is not None:
            terminalreporter.write_line(f"REFUSED: {self.refused}")
        elif self.summary is not None and self.folder is not None:
            from .report.model import load_window
            from .report.terminal import render_files

            try:
                text = render_files(load_window(self.folder))
            except Exception as error:  # noqa: BLE001 - a table is a view
                text = f"{self.summary.status} (no table: {one_line(str(error))})"
            terminalreporter.section("window")
            terminalreporter.write_line(text)
            terminalreporter.write_line(f"window folder: {self.folder}")
            if self.summary.chain == "CHAINED":
                previous, campaign = (
                    shlex.quote(str(path)) for path in (self.folder, self.spec.campaign)
                )
                terminalreporter.write_line(
                    f"production is left down for the chain's next window; before it: "
                    f"dsv41 chain gate --prev {previous} --campaign {campaign}"
                )
        if self.rehearsal is not None:
            for missed in self.rehearsal.not_struck:
                terminalreporter.write_line(f"fault {missed}: the window has no such step")
            terminalreporter.write_line(
                "the simulated hosts end with the rehearsal; its folder may be deleted: "
                f"{self.spec.campaign}"
            )
        for note in self.notes:
            terminalreporter.write_line(note)

    def _say(self, text: str) -> None:
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            with contextlib.suppress(OSError):
                reporter.write_line(text)

    # -- progress ----------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Let everything that pytest writes take the progress line away first."""
        self.session = session
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        writer = getattr(reporter, "_tw", None)
        if writer is not None and hasattr(writer, "_file"):
            writer._file = self._progress.guard(writer._file)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self) -> None:
        # Reporters that replace pytest's own write next; the line must not stand in their way.
        self._erase()

    def pytest_unconfigure(self) -> None:
        if self.rehearsal is not None:
            self.rehearsal.end()
        self.reader.close()
        self._progress.close()
        try:
            sys.stdout.flush()
        except OSError:
            # Nobody reads any more; what the interpreter still flushes must not change the code.
            with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def tell(self, item: PlannedItem, text: str) -> None:
        """Show what an item that takes long is at."""
        if self.run is not None:
            self.run.state.phase = one_line(text, 80)
            self._show(self.run.state, item=item)

    def _show(self, state: State, item: PlannedItem | None = None) -> None:
        run = self.run
        plan = self.plan
        self._progress.update(
            phase=state.phase,
            start=state.start,
            cell=item.cell if item else "",
            repeat=(item.repeat + 1) if item else 0,
            repeats=self._repeats(item) if item else 0,
            item=(item.index + 1) if item else 0,
            items=len(plan.items) if plan else 0,
            seconds_left=state.seconds_left or (self._left(item) if item and run else None),
            production=state.production,
        )

    def _repeats(self, item: PlannedItem) -> int:
        beside = item.cell not in self.collector.found
        return 1 if beside else self.spec.repeats_of(item.start)

    def _left(self, item: PlannedItem) -> float | None:
        plan = self.plan
        if plan is None:
            return None
        return sum(plan.estimates[later.cell] for later in plan.items[item.index :])

    def _erase(self) -> None:
        self._progress.erase()


def _no_folder(name: str, path: Path, error: OSError) -> pytest.UsageError:
    why = error.strerror or str(error)
    return pytest.UsageError(one_line(f"--window-{name} {path}: cannot be made a folder: {why}"))


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _utc() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
