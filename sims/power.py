"""Power of win2-v1: one cell, ms per round, cv 2 %, a true effect on the candidate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytest_dsv41.decision_v2.kernel import Floats, win2_repeats

from . import published
from .draws import PythonGauss, Step, chunks
from .table import Row, bound_row, compare, exact_row

__all__ = ["Design", "bracket_rows", "count", "curve", "design_name", "rows"]

Design = tuple[bool, int, int]
CV = 0.02
MEAN = 100.0
STREAM_SEED = 9
WRONG_WINS = 2
"""WINs under a true loss that the published number of trials may show."""

EFFECTS = {
    "true loss 5 %": 0.05,
    "true loss 3 %": 0.03,
    "no effect": 0.0,
    "true gain 3 %": -0.03,
    "true gain 5 %": -0.05,
}
# Where a published number sits in its row: (effect, verdict, revision).
COLUMNS = (
    ("true loss 5 %", "LOSS", 3),
    ("true loss 5 %", "LOSS", 2),
    ("true loss 3 %", "LOSS", 3),
    ("true loss 3 %", "LOSS", 2),
    ("no effect", "LOSS", 3),
    ("no effect", "LOSS", 2),
    ("no effect", "WIN", 3),
    ("true gain 3 %", "WIN", 3),
    ("true gain 5 %", "WIN", 3),
)


def design_name(design: Design) -> str:
    """`unpaired 4 v 3`, `paired 3 v 3`."""
    paired, nc, nx = design
    return f"{'paired' if paired else 'unpaired'} {nc} v {nx}"


def _tally(z: Floats, design: Design, effect: float, revisions: Sequence[int], cv: float) -> Floats:
    """Counts of (LOSS, WIN) for each revision, from standard normals (nc + nx, trials)."""
    paired, nc, _ = design
    control = z[:nc] * (cv * MEAN)
    control += MEAN
    mean = MEAN * (1 + effect)
    candidate = z[nc:] * (cv * mean)
    candidate += mean
    out = np.zeros((len(revisions), 2))
    for row, revision in enumerate(revisions):
        judged = win2_repeats(
            control, candidate, lower_is_better=True, paired=paired, revision=revision
        )
        # A cell that fulfils both is a LOSS; only the older revisions can do that.
        out[row, 0] = np.count_nonzero(judged.loss)
        out[row, 1] = np.count_nonzero(judged.win & ~judged.loss)
    return out


def count(
    design: Design,
    effect: float,
    trials: int,
    *,
    rng: np.random.Generator | None,
    revisions: Sequence[int] = (3,),
    cv: float = CV,
    step: Step | None = None,
) -> dict[int, dict[str, int]]:
    """{revision: {"LOSS": n, "WIN": n}} over `trials` cells; without `rng` the published stream.

    `effect` is the true relative change of the candidate's ms per round (+0.05 = 5 % slower).
    """
    _, nc, nx = design
    totals = np.zeros((len(revisions), 2))
    stream = PythonGauss(STREAM_SEED)
    for size in chunks(trials):
        if rng is None:
            z = stream.columns(nc + nx, size)
        else:
            z = rng.standard_normal((nc + nx, size))
        totals += _tally(z, design, effect, revisions, cv)
        if step is not None:
            step(size)
    return {
        revision: {"LOSS": int(totals[row, 0]), "WIN": int(totals[row, 1])}
        for row, revision in enumerate(revisions)
    }


def rows(
    designs: Sequence[Design],
    *,
    trials: int,
    seed: int,
    exact: bool,
    revision: int | None = None,
    step: Step | None = None,
) -> list[Row]:
    """The power table (revisions 3 and 2), or revision 1's two known numbers beside its own."""
    revisions = (3, 2) if revision is None else (revision,)
    out = []
    for index, design in enumerate(designs):
        rng = None if exact else np.random.default_rng([seed, index])
        counts = {
            name: count(design, effect, trials, rng=rng, revisions=revisions, step=step)
            for name, effect in EFFECTS.items()
        }
        title = f"Power, {design_name(design)} (cv 2 %, {trials:,} trials)"
        for column, (effect, verdict, of_revision) in enumerate(COLUMNS):
            # A WIN does not depend on the revision.
            used = of_revision if verdict == "LOSS" else revisions[0]
            if used not in revisions:
                continue
            number = published.POWER[design][column]
            name = f"{effect}: {verdict}" + (f" [rev {used}]" if verdict == "LOSS" else "")
            hits = counts[effect][used][verdict]
            if exact:
                out.append(exact_row(title, name, hits, trials, number))
            else:
                out.append(compare(title, name, hits, trials, number, published.POWER_TRIALS))
        if revision == 1:
            for effect in ("true loss 5 %", "true loss 3 %", "no effect"):
                hits = counts[effect][1]["LOSS"]
                known = (
                    published.POWER_REVISION_1.get(design) if effect == "true loss 5 %" else None
                )
                if exact and known is not None:
                    row = exact_row(
                        title, f"{effect}: LOSS [rev 1]", hits, trials, known, decimals=2
                    )
                else:
                    row = compare(
                        title,
                        f"{effect}: LOSS [rev 1]",
                        hits,
                        trials,
                        known,
                        published.POWER_TRIALS,
                        decimals=2,
                    )
                out.append(row)
        for effect in ("true loss 5 %", "true loss 3 %"):
            hits = counts[effect][revisions[0]]["WIN"]
            out.append(
                bound_row(
                    title,
                    f"{effect}: WIN ({hits:,} cells)",
                    hits,
                    trials,
                    WRONG_WINS,
                    published.POWER_TRIALS,
                    exact=exact,
                )
            )
    return out


def curve(
    design: Design, effects: Sequence[float], *, trials: int, seed: int, step: Step | None = None
) -> list[dict[str, float]]:
    """WIN and LOSS rates over true effects (positive = better), for the plot."""
    out = []
    for index, effect in enumerate(effects):
        rng = np.random.default_rng([seed, 7, index])
        counts = count(design, -effect, trials, rng=rng, step=step)[3]
        out.append(
            {
                "effect": effect,
                "win": counts["WIN"] / trials,
                "loss": counts["LOSS"] / trials,
            }
        )
    return out


def bracket_rows(*, trials: int, seed: int, step: Step | None = None) -> list[Row]:
    """LOSS rates of bracketed pairs: each control value is the mean of two starts' repeats."""
    out = []
    title = f"Bracket pairs, LOSS (cv 2 %, {trials:,} trials)"
    for n, numbers in published.BRACKET.items():
        for index, (name, effect) in enumerate((("no effect", 0.0), ("true loss 5 %", 0.05))):
            rng = np.random.default_rng([seed, n, index])
            hits = 0
            for size in chunks(trials):
                control = rng.standard_normal((2, n, size)).mean(axis=0)
                control *= CV * MEAN
                control += MEAN
                mean = MEAN * (1 + effect)
                candidate = rng.standard_normal((n, size))
                candidate *= CV * mean
                candidate += mean
                judged = win2_repeats(control, candidate, lower_is_better=True, paired=True)
                hits += int(np.count_nonzero(judged.loss))
                if step is not None:
                    step(size)
            out.append(
                compare(
                    title,
                    f"{n} pairs, {name}",
                    hits,
                    trials,
                    numbers[index],
                    published.BRACKET_TRIALS,
                    decimals=2 - index,
                )
            )
    return out
