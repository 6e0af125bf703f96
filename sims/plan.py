"""A planner's question: which design shows a gain of this size, and how long does it take?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pytest_dsv41.decision_v2 import half_width

from . import paired as seeded
from . import power
from .draws import Step

__all__ = ["Costs", "Option", "options", "print_options"]

REPEATS = (
    *(
        (False, nc, nx)
        for nc, nx in ((3, 3), (4, 3), (6, 3), (4, 4), (6, 4), (8, 4), (6, 6), (8, 6))
    ),
    *((False, n, n) for n in (8, 12, 16, 24)),
    *((True, n, n) for n in (3, 4, 6, 8, 12, 16)),
)
SEEDED = (6, 7, 8, 10, 12, 16, 20)


@dataclass(frozen=True)
class Costs:
    """What a design is charged: minutes a start, seconds a repeat, seconds a seeded pair."""

    start_min: float
    repeat_s: float
    pair_s: float


@dataclass(frozen=True)
class Option:
    """One design, its minutes, and its verdict rates for the asked gain and a loss of that size."""

    design: str
    schedule: str
    minutes: float
    power: float
    loss_power: float
    false_win: float
    false_loss: float
    half_width: float
    enough: bool


def options(
    *,
    cv: float,
    gain: float,
    wanted: float,
    costs: Costs,
    trials: int,
    seed: int,
    start_sd: float = 0.0,
    step: Step | None = None,
) -> list[Option]:
    """All designs, quickest first. `cv` is that of one repeat (or one seeded request), a fraction.

    C/X/C has three starts; adjacent pairs need a start for every repeat. `start_sd` counts as
    registered between-start SD and concerns seeded pairs only.
    """
    out = []
    for index, design in enumerate(REPEATS):
        is_paired, nc, nx = design
        starts = nc + nx if is_paired else 3
        minutes = starts * costs.start_min + (nc + nx) * costs.repeat_s / 60
        rates = []
        for column, effect in enumerate((-gain, gain, 0.0)):
            rng = np.random.default_rng([seed, 500 + index, column])
            counts = power.count(design, effect, trials, rng=rng, cv=cv, step=step)[3]
            rates.append((counts["WIN"] / trials, counts["LOSS"] / trials))
        name = f"pairs:{nx}" if is_paired else f"unpaired:{nc}v{nx}"
        half = half_width(name, cv=cv)
        schedule = "/".join(["K/I"] * nx) if is_paired and nx <= 4 else "K/I pairs"
        schedule = schedule if is_paired else "C/X/C"
        out.append(_option(name, schedule, minutes, rates, half, wanted))
    for index, n in enumerate(SEEDED):
        minutes = 3 * costs.start_min + 3 * n * costs.pair_s / 60
        rates = []
        for column, effect in enumerate((gain, -gain, 0.0)):
            win, loss = seeded.count(
                np.random.default_rng([seed, 600 + index, column]),
                trials,
                starts=2,
                n=n,
                residual=cv,
                start_sd=start_sd,
                registered=True,
                effect=effect,
                step=step,
            )
            rates.append((win / trials, loss / trials))
        # Two control starts: a difference has 1.5 times the variance of one request.
        half = half_width(f"seeded:{n}", diff_cv=cv * math.sqrt(1.5))
        out.append(_option(f"seeded:{n}", "C/X/C", minutes, rates, half, wanted))
    return sorted(out, key=lambda option: (option.minutes, -option.power))


def _option(
    design: str,
    schedule: str,
    minutes: float,
    rates: list[tuple[float, float]],
    half: float,
    wanted: float,
) -> Option:
    (win, _), (_, loss), (false_win, false_loss) = rates
    return Option(design, schedule, minutes, win, loss, false_win, false_loss, half, win >= wanted)


def print_options(found: list[Option], wanted: float) -> None:
    """The designs as a table; the quickest one that reaches the wanted power is marked."""
    print(
        f"  {'design':14} {'schedule':16} {'minutes':>8} {'power':>7} {'finds loss':>11} "
        f"{'false WIN':>10} {'false LOSS':>11} {'resolves':>9}"
    )
    chosen = next((option for option in found if option.enough), None)
    for option in found:
        mark = ""
        if option.enough:
            mark = "  <-- quickest" if option is chosen else "  enough"
        print(
            f"  {option.design:14} {option.schedule:16} {option.minutes:8.1f} "
            f"{100 * option.power:6.1f}% {100 * option.loss_power:10.1f}% "
            f"{100 * option.false_win:9.1f}% {100 * option.false_loss:10.1f}% "
            f"±{100 * option.half_width:6.2f}%{mark}"
        )
    if chosen is None:
        print(f"\nNo design listed reaches a power of {100 * wanted:g} %.")
