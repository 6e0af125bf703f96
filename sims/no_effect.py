"""Windows of two independent cells whose candidate has no effect: how often they are called.

The model of the published table: per cell the control arm, then the candidate; per arm n values of
ms per round N(M, 1.5 %), then n of accepted per round N(1.3, 12 %); tok/s = (1 + accepted)/ms. Ms
per round is the primary, the other two are guards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytest_dsv41.decision_v2.kernel import Bools, Floats, win2_repeats

from . import published
from .draws import PythonGauss, Step, chunks
from .power import Design, design_name
from .table import Row, compare, exact_row

__all__ = ["count", "rows"]

STREAM_SEED = 5
CELLS = 2
MS, MS_CV = 70.0, 0.015
ACCEPTED, ACCEPTED_CV = 1.3, 0.12

# What is counted: (name, revision, guards count).
VARIANTS = (
    ("revision 3, primary only", 3, False),
    ("revision 3", 3, True),
    ("revision 2", 2, True),
    ("revision 1", 1, True),
)

Arm = tuple[Floats, Floats, Floats]


def _arm(z: Floats) -> Arm:
    """(ms per round, accepted per round, tok/s), each (n, trials), from (2 n, trials) normals."""
    n = z.shape[0] // 2
    ms = MS * (1 + MS_CV * z[:n])
    accepted = ACCEPTED * (1 + ACCEPTED_CV * z[n:])
    return ms, accepted, (1 + accepted) / ms


def _cell(control: Arm, candidate: Arm, paired: bool, revision: int) -> tuple[Bools, Bools, Bools]:
    """(primary LOSS, guard LOSS, primary WIN) of each trial."""
    verdicts = [
        win2_repeats(
            control[metric],
            candidate[metric],
            lower_is_better=metric == 0,
            paired=paired,
            guard=metric > 0,
            revision=revision,
        )
        for metric in range(3)
    ]
    return verdicts[0].loss, verdicts[1].loss | verdicts[2].loss, verdicts[0].win


def count(
    design: Design,
    windows: int,
    *,
    rng: np.random.Generator | None,
    revisions: Sequence[int] = (3, 2, 1),
    step: Step | None = None,
) -> dict[str, dict[str, int]]:
    """{variant: {"rejected": n, "accepted": n}}; without `rng` the published stream."""
    paired, nc, nx = design
    per_cell = 2 * (nc + nx)
    stream = PythonGauss(STREAM_SEED)
    totals = {
        name: {"rejected": 0, "accepted": 0}
        for name, revision, _ in VARIANTS
        if revision in revisions
    }
    for size in chunks(windows):
        if rng is None:
            z = stream.columns(CELLS * per_cell, size)
        else:
            z = rng.standard_normal((CELLS * per_cell, size))
        arms = []
        for cell in range(CELLS):
            part = z[cell * per_cell : (cell + 1) * per_cell]
            arms.append((_arm(part[: 2 * nc]), _arm(part[2 * nc :])))
        for revision in revisions:
            cells = [_cell(control, candidate, paired, revision) for control, candidate in arms]
            for name, of_revision, guards in VARIANTS:
                if of_revision != revision:
                    continue
                lost = np.zeros(size, dtype=np.bool_)
                won = np.zeros(size, dtype=np.bool_)
                for primary_loss, guard_loss, win in cells:
                    lost |= primary_loss
                    if guards:
                        lost |= guard_loss
                    won |= win
                totals[name]["rejected"] += int(np.count_nonzero(lost))
                totals[name]["accepted"] += int(np.count_nonzero(won & ~lost))
        if step is not None:
            step(size)
    return totals


def rows(
    designs: Sequence[Design],
    *,
    windows: int,
    seed: int,
    exact: bool,
    revision: int | None = None,
    step: Step | None = None,
) -> list[Row]:
    """The no-effect table, all revisions or one."""
    revisions = (3, 2, 1) if revision is None else (revision,)
    out = []
    for index, design in enumerate(designs):
        title = f"No effect, {design_name(design)} (two cells a window, {windows:,} windows)"
        rng = None if exact else np.random.default_rng([seed, 50 + index])
        totals = count(design, windows, rng=rng, revisions=revisions, step=step)
        for name, hits in totals.items():
            for column, what in enumerate(("rejected", "accepted")):
                number = published.NO_EFFECT[design][name][column]
                label = f"{name}: {what}"
                if exact:
                    known = published.NO_EFFECT_KNOWN.get((design, name, what))
                    row = exact_row(title, label, hits[what], windows, number, known=known)
                else:
                    row = compare(
                        title, label, hits[what], windows, number, published.NO_EFFECT_WINDOWS
                    )
                out.append(row)
    return out
