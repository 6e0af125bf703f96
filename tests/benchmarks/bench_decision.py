"""Speed of the decision rules, as ratios taken in one run on one core.

    python -m tests.benchmarks.bench_decision [--memory]

Each line is a measured ratio, the least it may be, and whether it holds; exit 1 if one does not.
`--memory` adds a run of 10 million trials and its peak memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import ttest_ind

from pytest_dsv41.decision_v2.kernel import win2_repeats
from sims import no_effect, paired, power, published

TRIALS = 8_192
ROUNDS = 9
CALLS = 40
MEMORY_TRIALS = 10_000_000
MEMORY_LIMIT_MB = 500
EXACT_LIMIT_S = 5.0


@dataclass(frozen=True)
class Line:
    what: str
    value: float
    bound: float
    holds: bool
    note: str = ""

    def show(self) -> None:
        mark = "" if self.holds else "  <-- missed"
        print(f"{self.what:66} {self.value:10.2f}  bound {self.bound:g}{mark}  {self.note}")


def best(action: Callable[[], object]) -> float:
    """Seconds of the fastest of several runs: what the core can do when left alone."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def at_least(what: str, value: float, bound: float, note: str = "") -> Line:
    return Line(what, value, bound, value >= bound, note)


def repeats() -> list[Line]:
    rng = np.random.default_rng(1)
    z = rng.standard_normal((7, TRIALS))
    control, candidate = 100 + 2 * z[:4], 100 + 2 * z[4:]
    draw = best(lambda: rng.standard_normal((7, TRIALS))) / TRIALS
    rule = (
        best(lambda: win2_repeats(control, candidate, lower_is_better=True, paired=False)) / TRIALS
    )
    a, b = control[:, 0].copy(), candidate[:, 0].copy()
    welch = best(lambda: [ttest_ind(a, b, equal_var=False) for _ in range(CALLS)]) / CALLS
    note = f"{1e9 * rule:.0f} ns a cell, draws {1e9 * draw:.0f} ns"
    return [
        at_least(
            "win2-v1, unpaired 4 v 3: rate against drawing the normals", draw / rule, 1 / 3, note
        ),
        at_least(
            "win2-v1, unpaired 4 v 3: rate against one ttest_ind a cell",
            welch / rule,
            500,
            f"ttest_ind {1e6 * welch:.0f} µs",
        ),
    ]


def pairs() -> list[Line]:
    out = []
    for name, effect in (("no effect", 0.0), ("true +3 %", 0.03)):
        rng = np.random.default_rng(2)
        controls, candidate = paired.draw(
            rng, starts=2, n=6, residual=0.02, start_sd=0.0, effect=effect, trials=TRIALS
        )
        draw = best(lambda rng=rng: rng.standard_normal((18, TRIALS))) / TRIALS
        rule = best(lambda c=controls, x=candidate: paired.batch(c, x)) / TRIALS
        note = f"{1e9 * rule:.0f} ns a cell, 18 draws {1e9 * draw:.0f} ns"
        what = f"win2-paired-v1, 6 pairs C/X/C, {name}: rate against its draws"
        out.append(at_least(what, draw / rule, 1 / 15, note))
    return out


def exact_tables() -> Line:
    start = time.perf_counter()
    rows = power.rows(
        list(published.POWER), trials=published.POWER_TRIALS, seed=0, exact=True
    ) + no_effect.rows(
        list(published.NO_EFFECT), windows=published.NO_EFFECT_WINDOWS, seed=0, exact=True
    )
    seconds = time.perf_counter() - start
    right = not any(row.ok is False for row in rows)
    what = "both --exact tables, seconds"
    return Line(what, seconds, EXACT_LIMIT_S, right and seconds <= EXACT_LIMIT_S)


def memory() -> Line:
    code = (
        "import resource; from sims.cli import main; "
        f"main(['power', '--design', 'unpaired:4v3', '--trials', '{MEMORY_TRIALS}']); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-1]) / 1024
    what = f"peak memory at {MEMORY_TRIALS:,} trials, MB"
    return Line(what, peak, MEMORY_LIMIT_MB, peak <= MEMORY_LIMIT_MB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true")
    args = parser.parse_args()
    lines = [*repeats(), *pairs(), exact_tables()]
    if args.memory:
        lines.append(memory())
    for line in lines:
        line.show()
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
