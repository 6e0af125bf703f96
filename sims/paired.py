"""Seeded pairs: seed luck 7 % shared by the arms, a start's own offset, a residual per request.

v = (1 + effect)(1 + L_i)(1 + S_start)(1 + R), higher is better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytest_dsv41.decision_v2.kernel import (
    REQUIRED_GAIN,
    SIGNIFICANT,
    Bools,
    Floats,
    Pairs,
    pair_verdicts,
    t975,
    win2_pairs,
)
from pytest_dsv41.decision_v2.signflip import sign_flip_columns

from . import published
from .draws import Step, chunks
from .table import Row, compare

__all__ = ["EFFECTS", "batch", "count", "draw", "rows", "verdicts", "widened_rows"]

LUCK = 0.07
EFFECTS = (("no effect", 0.0), ("true +3 %", 0.03), ("true +5 %", 0.05), ("true -3 %", -0.03))


def draw(
    rng: np.random.Generator,
    *,
    starts: int,
    n: int,
    residual: float,
    start_sd: float,
    effect: float,
    trials: int,
) -> tuple[Floats, Floats]:
    """(controls (starts, n, trials), candidate (n, trials)) of the model."""
    luck = rng.standard_normal((n, trials))
    luck *= LUCK
    luck += 1
    values = rng.standard_normal((starts + 1, n, trials))
    values *= residual
    values += 1
    values *= luck
    if start_sd:
        offsets = rng.standard_normal((starts + 1, 1, trials))
        offsets *= start_sd
        offsets += 1
        values *= offsets
    values[starts] *= 1 + effect
    return values[:starts], values[starts]


def _p_where(differences: Floats, where: Bools) -> Floats:
    """The sign-flip p of the columns in `where`; 1 elsewhere, where no verdict asks for it."""
    p = np.ones(where.shape)
    picked = np.flatnonzero(where)
    if picked.size:
        p[picked] = sign_flip_columns(np.ascontiguousarray(differences[:, picked]))
    return p


def verdicts(pairs: Pairs, aa_half: Floats | None = None) -> tuple[Bools, Bools]:
    """(WIN, LOSS) of each trial, A/A drift having overruled both."""
    beyond = (pairs.high < 0) | ((pairs.low > 0) & (pairs.point > REQUIRED_GAIN))
    p = _p_where(pairs.differences, beyond)
    aa_p = None
    if pairs.aa_differences is not None and pairs.aa_point is not None:
        half = pairs.aa_half if aa_half is None else aa_half
        # Drift only matters where it overrules something.
        asked = (np.abs(pairs.aa_point) > half) & (p < SIGNIFICANT)
        aa_p = _p_where(pairs.aa_differences, asked)
    win, loss, drift = pair_verdicts(pairs, p, aa_p, aa_half=aa_half)
    return win & ~drift, loss & ~drift


def batch(controls: Floats, candidate: Floats, start_sd: float = 0.0) -> tuple[Bools, Bools]:
    """(WIN, LOSS) of each trial under win2-paired-v1, higher being better."""
    pairs = win2_pairs(controls, candidate, lower_is_better=False, start_sd=start_sd)
    return verdicts(pairs)


def count(
    rng: np.random.Generator,
    trials: int,
    *,
    starts: int,
    n: int,
    residual: float,
    start_sd: float,
    registered: bool,
    effect: float,
    widened: bool = False,
    step: Step | None = None,
) -> tuple[int, int]:
    """(WINs, LOSSes) of `trials` seeded cells."""
    wins = losses = 0
    known = start_sd if registered else 0.0
    for size in chunks(trials):
        controls, candidate = draw(
            rng,
            starts=starts,
            n=n,
            residual=residual,
            start_sd=start_sd,
            effect=effect,
            trials=size,
        )
        pairs = win2_pairs(controls, candidate, lower_is_better=False, start_sd=known)
        aa_half = None
        if widened:
            assert pairs.aa_half is not None
            aa_half = np.sqrt(pairs.aa_half**2 + 2 * (t975(n - 1) * known) ** 2)
        win, loss = verdicts(pairs, aa_half)
        wins += int(np.count_nonzero(win))
        losses += int(np.count_nonzero(loss))
        if step is not None:
            step(size)
    return wins, losses


def _name(key: published.Paired) -> str:
    starts, n, residual, start_sd, registered, _ = key
    drift = ""
    if start_sd:
        drift = f" ({'registered' if registered else 'not registered'})"
    return (
        f"{'C/X/C' if starts == 2 else 'C/X'}, {n} pairs, residual {100 * residual:g} %, "
        f"start SD {100 * start_sd:g} %{drift}"
    )


def rows(
    keys: Sequence[published.Paired],
    *,
    trials: int | None,
    seed: int,
    step: Step | None = None,
) -> list[Row]:
    """The operating characteristics of seeded pairs; `trials` None means the published size."""
    out = []
    for index, key in enumerate(keys):
        starts, n, residual, start_sd, registered, published_trials = key
        size = trials or published_trials
        title = f"{_name(key)} ({size:,} trials)"
        for column, (effect_name, effect) in enumerate(EFFECTS):
            win_loss = count(
                np.random.default_rng([seed, 100 + index, column]),
                size,
                starts=starts,
                n=n,
                residual=residual,
                start_sd=start_sd,
                registered=registered,
                effect=effect,
                step=step,
            )
            for hits, number, verdict in zip(
                win_loss, published.PAIRED[key][column], ("WIN", "LOSS"), strict=True
            ):
                name = f"{effect_name}: {verdict}"
                if number is None:
                    out.append(compare(title, name, hits, size, None, None))
                    continue
                # A run longer than the published one is held to the published one's error alone.
                bound = 1.0 if size > published_trials else None
                row = compare(title, name, hits, size, number, published_trials, most=bound)
                out.append(row)
    return out


def widened_rows(*, trials: int, seed: int, step: Step | None = None) -> list[Row]:
    """RULES section 5: the A/A interval widened by the registered start spread, and more pairs."""
    out = []
    title = f"Widened A/A interval, advisory (6 pairs, 1 %, 1 % registered, {trials:,} trials)"
    plain, widened = published.WIDENED["plain"], published.WIDENED["widened"]
    wrong = published.WIDENED["false calls"]
    cases = [
        ("plain, true +3 %: WIN", 0.03, False, 0, plain[0]),
        ("plain, true +5 %: WIN", 0.05, False, 0, plain[1]),
        ("widened, true +3 %: WIN", 0.03, True, 0, widened[0]),
        ("widened, true +5 %: WIN", 0.05, True, 0, widened[1]),
        ("widened, no effect: WIN", 0.0, True, 0, wrong[0]),
        ("widened, no effect: LOSS", 0.0, True, 1, wrong[1]),
    ]
    for index, (name, effect, wide, verdict, number) in enumerate(cases):
        hits = count(
            np.random.default_rng([seed, 200, index]),
            trials,
            starts=2,
            n=6,
            residual=0.01,
            start_sd=0.01,
            registered=True,
            effect=effect,
            widened=wide,
            step=step,
        )
        out.append(compare(title, name, hits[verdict], trials, number, RULES_TRIALS))
    title = f"More pairs, residual 2 %, no start drift ({trials:,} trials)"
    for n, number in published.MORE_PAIRS.items():
        hits = count(
            np.random.default_rng([seed, 201, n]),
            trials,
            starts=2,
            n=n,
            residual=0.02,
            start_sd=0.0,
            registered=False,
            effect=0.03,
            step=step,
        )
        name = f"{n} pairs, true +3 %: WIN"
        out.append(compare(title, name, hits[0], trials, number, RULES_TRIALS, decimals=0))
    return out


RULES_TRIALS = 20_000
"""RULES does not state the trials of these numbers; the published tables' size is assumed."""
