"""Run a probe cell's item: make its prompts for the server, measure, judge, keep what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pytest_dsv41.engines.served import Served
from pytest_dsv41.errors import MeasurementFailed, UsageError
from pytest_dsv41.measure.cell import Cell, Request
from pytest_dsv41.measure.group import Endpoint, GroupResult
from pytest_dsv41.measure.probes.audit import audit_answer
from pytest_dsv41.measure.probes.capacity import capacity_requests, judge_capacity, too_long
from pytest_dsv41.measure.probes.cell import ProbeCell
from pytest_dsv41.measure.probes.ladder import rung_of
from pytest_dsv41.measure.probes.laws import said
from pytest_dsv41.measure.probes.prompts import PromptMaker
from pytest_dsv41.measure.probes.requests import audit_request, ladder_requests, prefill_groups
from pytest_dsv41.measure.probes.shape import window_of

__all__ = ["Measuring", "run_cell"]

_REFUSE_S = 120.0


class Measuring(Protocol):
    """What a cell's item can do: the fixture `measure`."""

    cell: Cell

    @property
    def endpoint(self) -> Endpoint:
        """Where the current start answers."""

    def __call__(
        self, requests: Sequence[Request] | None = None, *, beside: bool = False
    ) -> GroupResult:
        """Send requests as one group and record their values."""

    def shape(self) -> Served:
        """The shape of the current start."""

    def keep(self, name: str, facts: Mapping[str, Any]) -> None:
        """Keep what was found beside the values."""

    def value(self, metric: str, value: float, *, source: str = "cell") -> None:
        """Record one more value."""


def run_cell(measure: Measuring, *, salt: str) -> None:
    """Run one item of a probe cell; `salt` is the item's own.

    Raises:
        UsageError: the cell is no `ProbeCell`, or the window holds no such prompt.
        MeasurementFailed: kinds `capacity`, `depth-audit`: it did not pass; and as measured.
        MeasurementRefused: kinds `shape`, `law-…`; and as measured.
    """
    cell = measure.cell
    if not isinstance(cell, ProbeCell):
        raise UsageError(f"cell {cell.name}: is no ProbeCell")
    shape = measure.shape()
    maker = PromptMaker.on(measure.endpoint, api=cell.api, corpus=cell.corpus)
    if cell.probe == "capacity":
        _capacity(measure, cell, maker, shape, salt)
        return
    depth = cell.depth_in(window_of(shape, streams=cell.batch))
    if cell.probe == "ladder":
        sent = ladder_requests(maker, cell.batch, depth, cell.max_tokens, salt=salt)
        rung = rung_of(measure(sent), depth=depth, corpus=cell.corpus)
        measure.value("fairness", rung.fairness, source="client")
        measure.keep("ladder", rung.to_json())
    elif cell.probe == "depth-audit":
        _audit(measure, cell, maker, depth, salt)
    else:
        for group in prefill_groups(maker, cell.probe, depth, salt=salt):
            measure(group)


def _capacity(
    measure: Measuring, cell: ProbeCell, maker: PromptMaker, shape: Served, salt: str
) -> None:
    refusal = too_long(maker, shape, deadline_s=_REFUSE_S)
    prompts, requests = capacity_requests(maker, shape, cell.batch)
    result = measure(cell.salted(tuple(requests), salt), beside=True)
    found = judge_capacity(shape, prompts, result, refusal)
    measure.keep("capacity", found.to_json())
    if found.verdict != "PASS":
        raise MeasurementFailed("capacity", f"{found.verdict}: {found.reason}")


def _audit(measure: Measuring, cell: ProbeCell, maker: PromptMaker, depth: int, salt: str) -> None:
    request, titles = audit_request(maker, depth, cell.max_tokens, salt=salt)
    (stream,) = measure([request]).streams
    text, _ = said(stream)
    found = audit_answer(text, maker.tokens(text), titles)
    measure.keep("audit", found.to_json())
    if found.verdict != "PASS":
        raise MeasurementFailed("depth-audit", found.reason)
