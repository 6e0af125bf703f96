"""A whole C/X/C window that a seeded cell decides, on the stub, and its decision once more."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import scipy.stats

from tests.lifecycle.running import assert_ended_well, run

ROOT = Path(__file__).parents[2]
TINY = ROOT / "pytest_dsv41/window/examples/demo-tiny.toml"


def window(folder: Path) -> str:
    """demo-tiny as six seeded pairs of one control start before and one after the candidate."""
    text = TINY.read_text()
    for old, new in (
        ('"K/I/K/I"', '"C/X/C"'),
        (
            "repeats = 2 ",
            'repeats = 6\nstart_sd = { "seeded-demo-b1/ms_per_round" = 0.01 }\n'
            f'cell_modules = ["{ROOT / "cells/test_shared.py"}"] ',
        ),
        ('name = "decode-b1"', 'name = "seeded-demo-b1"'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "w.toml").write_text(text)
    return str(folder / "w.toml")


def interval(differences: Sequence[float], drift: float = 0.0) -> tuple[float, float]:
    """The 95 % interval of a mean, widened by the spread between starts."""
    n, mean = len(differences), statistics.mean(differences)
    spread = math.sqrt(statistics.variance(differences) / n + drift)
    half = float(scipy.stats.t.ppf(0.975, n - 1)) * spread
    return mean - half, mean + half


def sign_flip(differences: Sequence[float]) -> float:
    """The share of sign patterns whose sum is at least as large as the one measured."""
    sums = [
        abs(math.fsum(sign * d for sign, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return sum(one >= abs(math.fsum(differences)) - 1e-12 for one in sums) / len(sums)


@pytest.mark.slow
def test_a_window_decided_by_seeded_pairs(tmp_path: Path) -> None:
    ended = run(tmp_path / "out", window=window(tmp_path))
    assert_ended_well(ended)
    summary = ended.summary
    lines = [json.loads(x) for x in (ended.folder / "values.jsonl").read_text().splitlines()]
    first, mine, last = (
        [row["values"]["ms_per_round"]["value"] for row in lines if row["start"] == name]
        for name in ("C1", "X", "C2")
    )
    gains = [1 - x / ((a + b) / 2) for a, x, b in zip(first, mine, last, strict=True)]
    between = [1 - b / a for a, b in zip(first, last, strict=True)]

    decision = summary["decisions"]["fast"]
    assert decision["rule"] == "win2-paired-v1"
    primary = decision["cells"]["seeded-demo-b1"]["series"][0]
    assert primary["differences"] == pytest.approx(gains)
    low, high = interval(gains, 0.01**2 * 1.5)
    assert (primary["low"], primary["high"]) == pytest.approx((low, high))
    # 1.6 ms a round against 2.0 ms: far beyond 2 %, and every pair agrees.
    assert low > 0.02
    assert primary["p"] == sign_flip(gains) == 2 / 64
    assert (primary["start_sd"], primary["start_sd_registered"]) == (0.01, True)

    below, above = interval(between)
    assert (primary["aa"]["low"], primary["aa"]["high"]) == pytest.approx((below, above))
    assert primary["aa"]["p"] == sign_flip(between)
    # The two control starts are alike; as any 5 % test, the check may say otherwise.
    drift = not below <= 0 <= above and sign_flip(between) < 0.05
    assert primary["aa"]["drift"] is drift
    status, code = ("INCONCLUSIVE", 10) if drift else ("CANDIDATE", 0)
    assert (summary["status"], ended.returncode) == (status, code), ended.output
    promoted = {"arm": "fast", "profile": "single", "cells": ["seeded-demo-b1"]}
    assert summary["promotion"] == (None if drift else promoted)

    told = "pairs of seeded-demo-b1 ms_per_round: start_sd 1.00 %, registered; A/A "
    assert told in " ".join(ended.output.split())
    assert "start_sd 1.00 %, registered; A/A " in (ended.folder / "report.html").read_text()

    again = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "decide", str(ended.folder), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == code
    assert json.loads(again.stdout)["decisions"] == summary["decisions"]
