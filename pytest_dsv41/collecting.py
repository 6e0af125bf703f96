"""From cells to items: one item per (start, cell, repeat), in the plan's order."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .errors import MeasurementRefused
from .errors import UsageError as OurUsageError
from .lifecycle.durations import known_seconds
from .measure import Cell, Sampling
from .measure.corpus import text_sha256
from .measure.seeded import SEEDED_CELLS, SeededCell
from .neighbours import refuse_marks
from .text import one_line
from .window.plan import Plan, PlannedItem, make_plan, planned_items
from .window.spec import PILOT_CELL, WindowSpec

if TYPE_CHECKING:
    from .quality.cell import QualityPlan
    from .quality.pilot import PilotPlan

__all__ = ["PLANNED", "CellCollector"]

PLANNED = pytest.StashKey[PlannedItem]()
"""The planned item of a collected one."""


@dataclasses.dataclass
class _Found:
    """A cell as it was collected."""

    cell: Cell
    where: str


class CellCollector:
    """Collects the window's cells, makes the plan of all of them, and then narrows it."""

    def __init__(self, config: pytest.Config, spec: WindowSpec, window_id: str) -> None:
        self.config = config
        self.spec = spec
        self.window_id = window_id
        self.found: dict[str, _Found] = {}
        self.plan: Plan | None = None
        self.quality: dict[str, QualityPlan] = {}
        self.pilot: PilotPlan | None = None
        self._faults: list[str] = []
        self._narrow = list(config.getoption("file_or_dir", None) or [])
        self._collect_window()

    def _collect_window(self) -> None:
        """Collect the window's cells and nothing else; a path or node id narrows later."""
        here = Path(__file__).parent
        self._shipped = here / "cells" if (here / "cells").is_dir() else here.parent / "cells"
        paths = [*sorted(self._shipped.glob("test_*.py")), *self.spec.cell_modules]
        self.config.args = [str(path) for path in paths]
        self.config.args_source = pytest.Config.ArgsSource.ARGS

    def pytest_pycollect_makemodule(
        self, module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        """Name an installed shipped module as in a checkout: outside of the root it has no name."""
        if module_path.parent != self._shipped or module_path.is_relative_to(self.config.rootpath):
            return None
        nodeid = f"{self._shipped.name}/{module_path.name}"
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=nodeid)
        return module

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(
        self, collector: pytest.Collector, name: str, obj: object
    ) -> list[pytest.Item] | None:
        cells: tuple[Cell, ...] | None = getattr(obj, "__dsv41_cells__", None)
        if not callable(obj) or isinstance(obj, type):
            return None
        if cells is None:
            return []
        beside: str | None = getattr(obj, "__dsv41_beside__", None)
        if beside is not None:
            return None if self._beside(beside) else []
        wanted = {use.name for use in self.spec.cells}
        for cell in cells:
            where = f"{collector.nodeid}::{name}"
            if cell.name in self.found and cell.name in wanted:
                self._faults.append(
                    f"cell {cell.name} is defined twice: {self.found[cell.name].where} and {where}"
                )
                return []
            self.found[cell.name] = _Found(self._with_sampling(cell), where)
        return None if any(cell.name in wanted for cell in cells) else []

    def _beside(self, what: str) -> tuple[str, ...]:
        """The names of the quality cells, or of the pilot, that this window has."""
        if what == "quality":
            return tuple(use.name for use in self.spec.quality)
        return (PILOT_CELL,) if self.spec.pilot is not None else ()

    def _with_sampling(self, cell: Cell) -> Cell:
        use = next((use for use in self.spec.cells if use.name == cell.name), None)
        if use is None or not use.sampling:
            return cell
        try:
            sampling = dataclasses.replace(cell.sampling, **use.sampling)
            return dataclasses.replace(cell, sampling=sampling)
        except (TypeError, ValueError) as error:
            names = ", ".join(field.name for field in dataclasses.fields(cell.sampling))
            # Raised here it would be an error of collecting the module, with a traceback.
            self._faults.append(
                f"{self.spec.path.name}: cells.{cell.name}.sampling: {error}; valid: {names}"
            )
            return cell

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        cells: tuple[Cell, ...] = getattr(metafunc.function, "__dsv41_cells__", ())
        wanted = {use.name for use in self.spec.cells}
        beside: str | None = getattr(metafunc.function, "__dsv41_beside__", None)
        names = self._beside(beside) if beside else ()
        parameters = [
            pytest.param((item.cell, item.id), id=item.id, marks=self._marks_beside(item.decision))
            for item in planned_items(self.spec)
            if item.cell in names
        ]
        for cell in cells:
            if cell.name not in wanted:
                continue
            for start in self.spec.starts:
                for repeat in range(self.spec.repeats_of(start.name)):
                    item_id = f"{start.name}-{cell.name}-r{repeat}"
                    parameters.append(
                        pytest.param((cell.name, item_id), id=item_id, marks=self._marks(cell))
                    )
        if parameters:
            metafunc.fixturenames.append("_dsv41_item")
            metafunc.parametrize("_dsv41_item", parameters, indirect=True)

    def _marks_beside(self, decides: bool) -> list[pytest.MarkDecorator]:
        return [pytest.mark.decision if decides else pytest.mark.report_only]

    def _marks(self, cell: Cell) -> list[pytest.MarkDecorator]:
        use = next(use for use in self.spec.cells if use.name == cell.name)
        names = [
            "decision" if use.decision else "report_only",
            cell.kind,
            use.profile or cell.profile,
            f"b{cell.batch}",
        ]
        if cell.batch not in (1, 2, 3, 4, 8, 16, 32, 64):
            self.config.addinivalue_line("markers", f"b{cell.batch}: a cell with so many requests")
        if getattr(cell, "seeded", False):
            names.append("seeded")
        return [getattr(pytest.mark, name) for name in names]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> Iterator[None]:
        if session.testsfailed:
            return (yield)
        if self._faults:
            raise pytest.UsageError(self._faults[0])
        try:
            definitions = {
                name: {
                    **found.cell.definition(),
                    "estimated_s": found.cell.estimated_s,
                    "profile": found.cell.profile,
                    "kind": found.cell.kind,
                    **_seeds(found.cell),
                }
                for name, found in self.found.items()
            }
            definitions |= self._definitions_beside()
            tokens = {name: found.cell.max_tokens for name, found in self.found.items()}
            self.plan = make_plan(
                self.spec,
                definitions,
                window_id=self.window_id,
                seed=self.spec.seed,
                estimates=known_seconds(self.spec.campaign, tokens),
            )
        except (OurUsageError, MeasurementRefused) as error:
            raise pytest.UsageError(str(error)) from None
        planned = {item.id: item for item in self.plan.items}
        for item in items:
            item.stash[PLANNED] = planned[_item_id(item)]
            refuse_marks(item)
            self._deadline(item)
        yield
        # Pinned last: whatever reordered the items before, the plan's order is the run's order.
        items.sort(key=lambda item: item.stash[PLANNED].index)
        if self._narrow:
            kept = [item for item in items if self._named(item)]
            dropped = [item for item in items if item not in kept]
            if dropped:
                self.config.hook.pytest_deselected(items=dropped)
                items[:] = kept
        return None

    def _definitions_beside(self) -> dict[str, dict[str, Any]]:
        """What the quality cells and the pilot are; their prompts are looked for before the run.

        Raises:
            OurUsageError: a prompt or a seeded cell is missing, or the out folder lies in a git
                work tree, where no probe is written.
        """
        spec = self.spec
        if not spec.quality and spec.pilot is None:
            return {}
        # numpy and scipy are loaded only where a window has one of them.
        from .quality.cell import plan_quality
        from .quality.pilot import cell_definition, plan_pilot, probe_estimate_s
        from .quality.sealed import outside_git

        defined: dict[str, dict[str, Any]] = {}
        for position, use in enumerate(spec.quality, start=len(spec.cells)):
            key = ("cells", position, "band")
            try:
                quality = plan_quality(Path(use.band))
            except (OurUsageError, MeasurementRefused) as error:
                raise spec.error(key, one_line(str(error), 400)) from None
            if quality.seal != use.band_sha256:
                raise spec.error(key, f"{use.band} has changed since this window was read")
            self.quality[use.name] = quality
            defined[use.name] = {
                "kind": "quality",
                "band": quality.seal,
                "subset": use.subset,
                "prompts": [prompt.sha256 for prompt in quality.band.prompts],
                "estimated_s": use.estimated_s or probe_estimate_s(quality.prompts),
            }
        if spec.pilot is not None:
            asked = spec.pilot
            known = {n: f.cell for n, f in self.found.items() if isinstance(f.cell, SeededCell)}
            try:
                self.pilot = plan_pilot(
                    asked.cells or tuple(SEEDED_CELLS),
                    known=known,
                    subset=asked.subset,
                    each=asked.each,
                    bridge=asked.bridge,
                    bridge_sampling=None
                    if asked.bridge_sampling is None
                    else Sampling(**asked.bridge_sampling),
                )
                definition = {cell.name: cell_definition(cell) for cell in self.pilot.cells}
            except (OurUsageError, MeasurementRefused) as error:
                raise spec.error(("pilot",), str(error)) from None
            defined[PILOT_CELL] = {
                "kind": "pilot",
                "cells": definition,
                "prompts": [text_sha256(prompt.text) for prompt in self.pilot.prompts],
                "estimated_s": self.pilot.estimate_s("A"),
                "seam_s": self.pilot.estimate_s("B"),
            }
        if spec.quality or (self.pilot is not None and self.pilot.prompts):
            outside_git(spec.out / "probe.json")
        return defined

    def _named(self, item: pytest.Item) -> bool:
        """Whether a path or node id of the command line names the item."""
        for argument in self._narrow:
            path, _, rest = argument.partition("::")
            wanted = Path(self.config.invocation_params.dir, path).resolve()
            own = item.path.resolve()
            named, _, inside = item.nodeid.partition("::")
            if own != wanted and wanted not in own.parents and named != path:
                continue
            if not rest or inside == rest or inside.startswith((f"{rest}[", f"{rest}::")):
                return True
        return False

    def _deadline(self, item: pytest.Item) -> None:
        """An item's deadline covers its call only, never a teardown or a start."""
        seconds = self.deadline_s(item.stash[PLANNED].cell)
        own = item.get_closest_marker("timeout")
        given: list[Any] = [
            self.config.getoption("timeout", None),
            os.environ.get("PYTEST_TIMEOUT"),
            self.config.getini("timeout"),
            own.args[0] if own and own.args else own.kwargs.get("timeout") if own else None,
        ]
        for value in given:
            with contextlib.suppress(TypeError, ValueError):
                if float(value) > 0:
                    seconds = min(seconds, float(value))
        item.add_marker(pytest.mark.timeout(seconds, method="signal", func_only=True), append=False)

    def deadline_s(self, cell: str) -> float:
        """The longest that one item of a cell may take: the file's limit, or by its estimate.

        A quality cell's item asks for hundreds of positions and the pilot's runs whole cells.
        """
        limit = self.spec.limits.item_s
        if cell in self.found or self.plan is None:
            return limit
        return limit + 3 * self.plan.estimates[cell]


def _seeds(cell: Cell) -> dict[str, Any]:
    """What a plan must know of a seeded cell besides its definition."""
    if not isinstance(cell, SeededCell):
        return {}
    return {"pairs": cell.pairs, "report_only": cell.report_only}


def _item_id(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    assert callspec is not None
    name: str = callspec.params["_dsv41_item"][1]
    return name
