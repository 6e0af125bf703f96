"""Probes as cells: their prompts are made for the server that each item runs on.

Depths are in tokens of the server's own tokenizer; `window` fills what the server says it has. A
cell with more streams than the server has slots is refused, so that one module serves any server.
"""

from __future__ import annotations

from pytest_dsv41 import for_cells
from pytest_dsv41.fixtures import Measure
from pytest_dsv41.measure import Sampling
from pytest_dsv41.measure.probes import ProbeCell, run_cell
from pytest_dsv41.measure.probes.audit import AUDIT_TOKENS
from pytest_dsv41.measure.probes.capacity import ANSWER_TOKENS
from pytest_dsv41.measure.probes.cell import Probe
from pytest_dsv41.measure.probes.ladder import LADDER_TOKENS
from pytest_dsv41.measure.probes.requests import PREFILL_TOKENS
from pytest_dsv41.window.plan import Plan, PlannedItem

DEPTHS = {"1k": 1024, "3k": 3072, "32k": 32768, "window": None}
PASSES: tuple[tuple[Probe, str], ...] = (
    ("prefill-cold", "nothing cached, proved"),
    ("prefill-warm", "the server warm, nothing cached, proved"),
    ("prefill-hit", "from the prefix cache, proved"),
)


@for_cells(
    *(
        ProbeCell(
            f"{probe}-{name}",
            prompts=("stream-0",),
            max_tokens=PREFILL_TOKENS,
            kind="prefill",
            probe=probe,
            depth=depth,
            estimated_s=10.0,
            description=f"time to first token of {name} tokens, {told}",
        )
        for probe, told in PASSES
        for name, depth in DEPTHS.items()
    )
)
def test_prefill(measure: Measure, start: PlannedItem, window: Plan) -> None:
    """Time to first token by depth, cold, warm, and from the prefix cache."""
    run_cell(measure, salt=f"{window.window_id}-{start.id}")


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
def test_capacity(measure: Measure, start: PlannedItem, window: Plan) -> None:
    """N full windows at once, each answered exactly, and one token more refused."""
    run_cell(measure, salt=f"{window.window_id}-{start.id}")


@for_cells(
    *(
        ProbeCell(
            f"ladder-b{streams}-{name}",
            prompts=tuple(f"stream-{member}" for member in range(streams)),
            max_tokens=LADDER_TOKENS,
            probe="ladder",
            depth=depth,
            estimated_s=30.0 * streams,
            description=f"{streams} streams of {LADDER_TOKENS} tokens at a depth of {name}",
        )
        for streams in (1, 2, 3, 4)
        for name, depth in DEPTHS.items()
    )
)
def test_ladder(measure: Measure, start: PlannedItem, window: Plan) -> None:
    """Decode by depth and concurrency: each stream, both aggregates, fairness."""
    run_cell(measure, salt=f"{window.window_id}-{start.id}")


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
def test_depth_audit(measure: Measure, start: PlannedItem, window: Plan) -> None:
    """What is written at depth is text: no loop, no token that fills all, in order."""
    run_cell(measure, salt=f"{window.window_id}-{start.id}")
