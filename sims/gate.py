"""Error rates of the distributional gate: exact by enumeration, and simulated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytest_dsv41.decision_v2.excess import least_losing_count, mean_ceiling
from pytest_dsv41.decision_v2.kernel import Floats
from pytest_dsv41.quality.dist_gate import FMETHOD_MARGIN, count_test

from . import published
from .draws import Step
from .table import Row, compare, free_row

__all__ = ["exact_rate", "kl_false_loss", "literal_rate", "rows", "simulate_top1"]

POSITIONS = published.GATE_POSITIONS
_TAIL = 160
"""Counts beyond this have no weight at the flip rates looked at."""


def _binomial(count: int, rate: float) -> Floats:
    """P(X = 0 … tail) for X ~ Bin(count, rate)."""
    from scipy.special import gammaln, xlog1py, xlogy

    x = np.arange(min(_TAIL, count) + 1)
    log_choose = gammaln(count + 1) - gammaln(x + 1) - gammaln(count - x + 1)
    pmf: Floats = np.exp(log_choose + xlogy(x, rate) + xlog1py(count - x, -rate))
    return pmf


def exact_rate(flips: float, factor: float, k: int = 1) -> float:
    """P(LOSS) of the top-1 test: `flips` expected in one A/A run, `factor` times as many candidate
    flips, k registered A/A comparisons."""
    rate = flips / POSITIONS
    aa = _binomial(k * POSITIONS, rate)
    candidate = _binomial(POSITIONS, factor * rate)
    total = 0.0
    for count, weight in enumerate(aa):
        total += float(weight * candidate[least_losing_count(count, k) :].sum())
    return total


def literal_rate(flips: float) -> float:
    """P(LOSS) without an effect under the literal rule: two more flips than the A/A run had."""
    aa = _binomial(POSITIONS, flips / POSITIONS)
    return float(sum(aa[i] * aa[i + FMETHOD_MARGIN :].sum() for i in range(aa.size)))


def simulate_top1(
    rng: np.random.Generator, flips: float, factor: float, trials: int, k: int = 1
) -> tuple[int, int]:
    """(LOSSes of the gate, LOSSes of the literal rule) in `trials` simulated comparisons."""
    rate = flips / POSITIONS
    aa = rng.binomial(POSITIONS, rate, size=(k, trials))
    candidate = rng.binomial(POSITIONS, min(1.0, factor * rate), size=trials)
    pairs, counts = np.unique(np.vstack([aa, candidate]), axis=1, return_counts=True)
    lost = sum(
        int(number)
        for (*each, c), number in zip(pairs.T.tolist(), counts, strict=True)
        if count_test(c, tuple(each)).loss
    )
    literal = int(np.count_nonzero(candidate >= aa.max(axis=0) + FMETHOD_MARGIN))
    return lost, literal


def kl_false_loss(
    rng: np.random.Generator, sigma: float, trials: int, *, step: Step | None = None
) -> int:
    """LOSSes of the mean-KL test alone: A/A and candidate KL both lognormal with `sigma`."""
    hits = 0
    for trial in range(trials):
        aa = np.exp(sigma * rng.standard_normal(POSITIONS))
        candidate = np.exp(sigma * rng.standard_normal(POSITIONS))
        hits += bool(candidate.mean() > mean_ceiling(aa, seed=trial))
        if step is not None:
            step(1)
    return hits


def _sigma(cv: float) -> float:
    return float(np.sqrt(np.log(1 + cv**2)))


def rows(
    *, trials: int, kl_trials: int, seed: int, step: Step | None = None
) -> tuple[list[Row], list[Row]]:
    """(rows that are judged, rows that only show the document's simulated table beside ours)."""
    out: list[Row] = []
    title = "Gate, smallest losing count with one A/A run"
    for aa, least in published.GATE_LEAST_LOSING.items():
        name = f"{aa} A/A disagreements"
        out.append(free_row(title, name, least_losing_count(aa, 1), least, decimals=0))

    title = "Gate, exact rates, enumerated"
    simulated: list[Row] = []
    sim_title = f"Gate, exact rates, simulated ({trials:,} trials)"
    cases: Sequence[tuple[float, float, int, float]] = [
        *((f, m, 1, v) for f, row in published.GATE_EXACT.items() for m, v in row.items()),
        (1.0, 4.0, 3, published.GATE_THREE_AA),
    ]
    for index, (flips, factor, k, number) in enumerate(cases):
        name = f"{flips:g} flips, {factor:g} times, {k} A/A: LOSS"
        out.append(free_row(title, name, 100 * exact_rate(flips, factor, k), number, decimals=1))
        hits, _ = simulate_top1(np.random.default_rng([seed, 400, index]), flips, factor, trials, k)
        simulated.append(compare(sim_title, name, hits, trials, number, None))
    for index, (flips, number) in enumerate(published.GATE_LITERAL_EXACT.items()):
        name = f"{flips:g} flips, literal rule, no effect: LOSS"
        out.append(free_row(title, name, 100 * literal_rate(flips), number, decimals=1))
        _, hits = simulate_top1(np.random.default_rng([seed, 401, index]), flips, 1.0, trials)
        simulated.append(compare(sim_title, name, hits, trials, number, None))
    out += simulated

    if kl_trials:
        title = f"Gate, mean KL alone, no effect ({kl_trials:,} trials)"
        for index, cv in enumerate((1.0, 3.0)):
            rng = np.random.default_rng([seed, 402, index])
            hits = kl_false_loss(rng, _sigma(cv), kl_trials, step=step)
            name = f"KL per position with a cv of {cv:g}: LOSS"
            most = published.GATE_KL_MOST / 100
            allowed = most * kl_trials + 3 * np.sqrt(most * kl_trials)
            row = compare(title, name, hits, kl_trials, None, None)
            note = f"at most {published.GATE_KL_MOST} %"
            out.append(Row(**{**row.to_dict(), "ok": bool(hits <= allowed), "note": note}))
        rng = np.random.default_rng([seed, 403])
        hits = kl_false_loss(rng, 2.0, kl_trials, step=step)
        name = "KL lognormal with a sigma of 2: LOSS"
        number = published.GATE_KL_HEAVY
        out.append(compare(title, name, hits, kl_trials, number, KL_TRIALS))

    beside: list[Row] = []
    title = f"Gate, the document's own table of about 1,000 trials ({trials:,} trials)"
    for flips, columns in published.GATE_DOCUMENT.items():
        for factor, number in columns.items():
            rng = np.random.default_rng([seed, 404, int(4 * flips), int(factor)])
            hits, literal = simulate_top1(rng, flips, factor, trials)
            name = f"{flips:g} flips, {factor:g} times: LOSS"
            beside.append(_beside(title, name, hits, trials, number))
            if factor == 1:
                name = f"{flips:g} flips, literal rule, no effect: LOSS"
                number = published.GATE_LITERAL_DOCUMENT[flips]
                beside.append(_beside(title, name, literal, trials, number))
    return out, beside


KL_TRIALS = 5_000
"""RULES does not state the trials behind the mean-KL rate; this is the size assumed."""


def _beside(title: str, name: str, hits: int, trials: int, number: float) -> Row:
    row = compare(title, name, hits, trials, number, published.GATE_DOCUMENT_TRIALS)
    return Row(**{**row.to_dict(), "ok": None, "note": "shown beside, not judged"})
