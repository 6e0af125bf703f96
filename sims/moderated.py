"""win3-moderated beside win2-v1: archives of 125 groups of 4 rows, windows of three repeats.

The groups' variances follow the prior's own model, a scaled inverse chi-squared with 20 degrees of
freedom, whose MEAN is the window's variance: (2 %)², twice that for paired differences. All windows
judged with one archive share its prior, so standard errors are taken between archives.
"""

from __future__ import annotations

import numpy as np

from pytest_dsv41.decision_v2.kernel import REQUIRED_GAIN, Bools, Floats, mean_var, win2_repeats
from pytest_dsv41.decision_v2.moderated import LEVELS, fit_variances, moderated_t

from . import published
from .draws import Step
from .power import Design, design_name
from .table import Row, compare_clusters

__all__ = ["archive_prior", "count", "rows"]

GROUPS, ROWS, TRUE_D0 = 125, 4, 20.0
CV = 0.02
NOISY_CV = 0.03
EFFECTS = (("no effect", 0.0), ("true +3 %", 0.03), ("true +5 %", 0.05))


def archive_prior(rng: np.random.Generator, paired: bool) -> tuple[float, float]:
    """(s0², d0) fitted to one random archive whose variances have 20 degrees of freedom."""
    scale = CV * (np.sqrt(2) if paired else 1.0)
    sd = scale * np.sqrt((TRUE_D0 - 2) / rng.chisquare(TRUE_D0, GROUPS))
    values = rng.standard_normal((ROWS, GROUPS)) * sd
    if not paired:
        # Values relative to their own mean; paired rows are relative differences already.
        values += 1
        values /= values.mean(axis=0)
    _, variances = mean_var(values)
    return fit_variances(variances, np.full(GROUPS, ROWS - 1.0))


def count(
    rng: np.random.Generator,
    design: Design,
    effect: float,
    *,
    archives: int,
    windows: int,
    cv: float = CV,
    step: Step | None = None,
) -> dict[str, Floats]:
    """{rule: (archives, 2) counts of WIN and LOSS} of `windows` windows an archive, for both rules.

    `effect` is positive where the candidate is better.
    """
    from scipy.special import stdtr

    paired, nc, nx = design
    p_win, p_loss = LEVELS[design]
    totals = np.zeros((2, archives, 2))
    for archive in range(archives):
        s0_squared, d0 = archive_prior(rng, paired)
        control = 1 + cv * rng.standard_normal((nc, windows))
        candidate = (1 - effect) * (1 + cv * rng.standard_normal((nx, windows)))
        judged = win2_repeats(control, candidate, lower_is_better=True, paired=paired)
        totals[0, archive] = _counts(judged.win & ~judged.loss, judged.loss)
        variance: Floats
        if paired:
            variance = mean_var(judged.differences)[1]
            df, factor = nx - 1, 1 / nx
        else:
            mean, control_var = mean_var(control)
            candidate_var = mean_var(candidate)[1]
            df, factor = nc + nx - 2, 1 / nc + 1 / nx
            variance = ((nc - 1) * control_var + (nx - 1) * candidate_var) / (df * mean * mean)
        t, total_df = moderated_t(
            judged.gain,
            variance,
            factor=factor,
            df=df,
            s0_squared=np.array(s0_squared),
            d0=np.array(d0),
        )
        loss = stdtr(total_df, t) <= p_loss
        win = (judged.gain > REQUIRED_GAIN) & (stdtr(total_df, -t) <= p_win)
        totals[1, archive] = _counts(win, loss)
        if step is not None:
            step(windows)
    return {"win2-v1": totals[0], "win3-moderated": totals[1]}


def _counts(win: Bools, loss: Bools) -> tuple[int, int]:
    return int(np.count_nonzero(win)), int(np.count_nonzero(loss))


def rows(*, archives: int, windows: int, seed: int, step: Step | None = None) -> list[Row]:
    """RULES section 5's numbers for both designs."""
    out = []
    for index, (design, numbers) in enumerate(published.MODERATED.items()):
        title = f"win3-moderated, {design_name(design)} ({archives} archives × {windows} windows)"

        def row(label: str, hits: Floats, number: float | None, title: str = title) -> Row:
            return compare_clusters(
                title, label, hits / windows, number, published.MODERATED_ARCHIVES
            )

        for column, (name, effect) in enumerate(EFFECTS):
            rng = np.random.default_rng([seed, 300 + index, column])
            counts = count(rng, design, effect, archives=archives, windows=windows, step=step)
            for rule_index, (rule, hits) in enumerate(counts.items()):
                if effect:
                    number = numbers[2 * rule_index + column - 1]
                    out.append(row(f"{rule}, {name}: WIN", hits[:, 0], number))
                else:
                    out.append(row(f"{rule}, {name}: WIN", hits[:, 0], None))
                    out.append(row(f"{rule}, {name}: LOSS", hits[:, 1], None))
        rng = np.random.default_rng([seed, 300 + index, 9])
        noisy = count(rng, design, 0.0, archives=archives, windows=windows, cv=NOISY_CV, step=step)
        # RULES states the price once; it is the unpaired design's.
        price = None if design[0] else published.MODERATED_NOISY
        for side, verdict in enumerate(("WIN", "LOSS")):
            label = f"win3-moderated, a window of 3 %, no effect: {verdict}"
            out.append(row(label, noisy["win3-moderated"][:, side], price))
    return out
