"""The shared cells over a corpus of long prompts, and the seeded ones.

The 32K and 150K prompts come from a corpus of yours (`dsv41 corpus cut`, DSV41_CORPUS). `ORDER` is
the default order; the ctl cells run only when a window names them.
"""

from __future__ import annotations

from pytest_dsv41 import Cell, for_cells
from pytest_dsv41.fixtures import Measure
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.measure.seeded import SEEDED_CELLS, SeededCell, fill_seeded
from pytest_dsv41.window.plan import Plan, PlannedItem

ORDER = ("short-b1", "32k-b1", "32k-b2", "32k-b3", "prefill-32k-b1")


@for_cells(
    Cell(
        "32k-b1",
        prompts=("32k-0",),
        max_tokens=512,
        estimated_s=30.0,
        description="one 32K prompt, 512 tokens of answer",
    ),
    Cell(
        "32k-b2",
        prompts=("32k-1", "32k-2"),
        max_tokens=512,
        estimated_s=50.0,
        description="two 32K prompts side by side",
    ),
    Cell(
        "32k-b3",
        prompts=("32k-1", "32k-2", "32k-3"),
        max_tokens=512,
        estimated_s=70.0,
        description="three 32K prompts side by side",
    ),
    Cell(
        "ctl-mixed150k-4user",
        prompts=("32k-1", "32k-2", "32k-3", "150k"),
        max_tokens=512,
        late=1,
        estimated_s=300.0,
        description="three 32K decoders; a 150K document is admitted beside them",
    ),
    Cell(
        "ctl-long-5k",
        prompts=("short",),
        max_tokens=5000,
        estimated_s=180.0,
        description="one request with a long answer",
    ),
)
def test_shared(measure: Measure) -> None:
    """Decode speed on long prompts, and the control cells."""
    measure()


@for_cells(
    Cell(
        "prefill-32k-b1",
        prompts=("32k-0",),
        max_tokens=8,
        kind="prefill",
        estimated_s=20.0,
        description="time to first token of one cold 32K prompt",
    ),
)
def test_shared_prefill(measure: Measure) -> None:
    """Time to first token of a long prompt."""
    measure()


@for_cells(
    *SEEDED_CELLS.values(),
    SeededCell(
        "seeded-demo-b1",
        prompts=("demo-1",),
        max_tokens=64,
        seed_base=50_000,
        pairs=12,
        estimated_s=1.0,
        description="one short seeded request a pair, for the demo",
    ),
)
def test_seeded(measure: Measure, endpoint: Endpoint, start: PlannedItem, window: Plan) -> None:
    """One pair: the repeat's number is the pair's; the first fills the prefix, proved cold."""
    cell = measure.cell
    assert isinstance(cell, SeededCell)
    salt = f"{window.window_id}-{start.start}-{cell.name}"
    if start.repeat == 0:
        fill_seeded(endpoint, cell, salt=salt, deadline_s=600.0)
    measure(cell.pair(start.repeat, salt))
