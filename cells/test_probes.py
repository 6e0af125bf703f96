"""Probes as cells: their prompts are made for the server that each item runs on.

Depths are in tokens of the server's own tokenizer; `window` fills what the server says it has. A
cell with more streams than the server has slots is refused, so that one module serves any server.
"""

from __future__ import annotations

from pytest_dsv41 import for_cells
from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.fixtures import Measure
from pytest_dsv41.measure import Endpoint, Sampling
from pytest_dsv41.measure.probes import (
    ProbeCell,
    PromptMaker,
    audit_answer,
    judge_capacity,
    rung_of,
)
from pytest_dsv41.measure.probes.audit import AUDIT_TOKENS
from pytest_dsv41.measure.probes.capacity import ANSWER_TOKENS, capacity_requests, too_long
from pytest_dsv41.measure.probes.ladder import LADDER_TOKENS
from pytest_dsv41.measure.probes.laws import said
from pytest_dsv41.measure.probes.requests import (
    PREFILL_TOKENS,
    audit_request,
    ladder_requests,
    prefill_groups,
)
from pytest_dsv41.measure.probes.shape import window_of
from pytest_dsv41.window.plan import Plan, PlannedItem

DEPTHS = {"1k": 1024, "3k": 3072, "32k": 32768, "window": None}
GREEDY = Sampling(temperature=0.0)


def _name(depth: int | None) -> str:
    return next(name for name, tokens in DEPTHS.items() if tokens == depth)


def _of(measure: Measure, endpoint: Endpoint) -> tuple[ProbeCell, PromptMaker]:
    cell = measure.cell
    assert isinstance(cell, ProbeCell)
    return cell, PromptMaker.on(endpoint, api=cell.api, corpus=cell.corpus)


def _salt(window: Plan, start: PlannedItem) -> str:
    return f"{window.window_id}-{start.id}"


@for_cells(
    *(
        ProbeCell(
            f"prefill-{pass_}-{name}",
            prompts=("stream-0",),
            max_tokens=PREFILL_TOKENS,
            kind="prefill",
            sampling=GREEDY,
            probe=f"prefill-{pass_}",  # type: ignore[arg-type]
            depth=depth,
            estimated_s=10.0,
            description=f"time to first token of {name} tokens, {told}",
        )
        for pass_, told in (
            ("cold", "nothing cached, proved"),
            ("warm", "the server warm, nothing cached, proved"),
            ("hit", "from the prefix cache, proved"),
        )
        for name, depth in DEPTHS.items()
    )
)
def test_prefill(measure: Measure, endpoint: Endpoint, start: PlannedItem, window: Plan) -> None:
    """Time to first token by depth, cold, warm, and from the prefix cache."""
    cell, maker = _of(measure, endpoint)
    depth = cell.depth_in(window_of(measure.shape()))
    for group in prefill_groups(maker, cell.probe, depth, salt=_salt(window, start)):
        measure(group)


@for_cells(
    *(
        ProbeCell(
            f"capacity-{streams}",
            prompts=tuple(f"stream-{member}" for member in range(streams)),
            max_tokens=ANSWER_TOKENS,
            kind="prefill",
            sampling=Sampling(temperature=0.0, ignore_eos=False),
            probe="capacity",
            estimated_s=60.0,
            description=f"{streams} conversations of the whole window at once, each exact",
        )
        for streams in (1, 2, 3, 4)
    )
)
def test_capacity(measure: Measure, endpoint: Endpoint, start: PlannedItem) -> None:
    """N full windows at once, each answered exactly, and one token more refused."""
    cell, maker = _of(measure, endpoint)
    shape = measure.shape()
    refusal = too_long(maker, shape, deadline_s=60.0)
    prompts, requests = capacity_requests(maker, shape, cell.batch)
    found = judge_capacity(
        shape, prompts, measure(cell.salted(tuple(requests), start.id), beside=True), refusal
    )
    measure.keep("capacity", found.to_json())
    if found.verdict != "PASS":
        raise MeasurementFailed("capacity", f"{found.verdict}: {found.reason}")


@for_cells(
    *(
        ProbeCell(
            f"ladder-b{streams}-{name}",
            prompts=tuple(f"stream-{member}" for member in range(streams)),
            max_tokens=LADDER_TOKENS,
            sampling=GREEDY,
            probe="ladder",
            depth=depth,
            estimated_s=30.0 * streams,
            description=f"{streams} streams of {LADDER_TOKENS} tokens at a depth of {name}",
        )
        for streams in (1, 2, 3, 4)
        for name, depth in DEPTHS.items()
    )
)
def test_ladder(measure: Measure, endpoint: Endpoint, start: PlannedItem, window: Plan) -> None:
    """Decode by depth and concurrency: each stream, both aggregates, fairness."""
    cell, maker = _of(measure, endpoint)
    depth = cell.depth_in(window_of(measure.shape(), streams=cell.batch))
    sent = ladder_requests(maker, cell.batch, depth, cell.max_tokens, salt=_salt(window, start))
    rung = rung_of(measure(sent), depth=depth, corpus=cell.corpus)
    measure.value("fairness", rung.fairness, source="client")
    measure.keep("ladder", rung.to_json())


@for_cells(
    *(
        ProbeCell(
            f"depth-audit-{name}",
            prompts=("stream-0",),
            max_tokens=AUDIT_TOKENS,
            sampling=Sampling(temperature=0.0, ignore_eos=False),
            probe="depth-audit",
            depth=depth,
            estimated_s=30.0,
            description=f"an index written at a depth of {name}: no loops, whole, in order",
        )
        for name, depth in DEPTHS.items()
    )
)
def test_depth_audit(
    measure: Measure, endpoint: Endpoint, start: PlannedItem, window: Plan
) -> None:
    """What is written at depth is text: no loop, no token that fills all, in order."""
    cell, maker = _of(measure, endpoint)
    depth = cell.depth_in(window_of(measure.shape()))
    sent, titles = audit_request(maker, depth, cell.max_tokens, salt=_salt(window, start))
    (stream,) = measure([sent]).streams
    text, _ = said(stream)
    found = audit_answer(text, maker.tokens(text), titles)
    measure.keep("audit", found.to_json())
    if found.verdict != "PASS":
        raise MeasurementFailed("depth-audit", found.reason)
