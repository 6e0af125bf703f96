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

from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.aa_compare import compare_starts
from pytest_dsv41.quality.pilot import plan_pilot, run_start
from pytest_dsv41.quality.sealed import write_sealed
from pytest_dsv41.stub import serve
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


@pytest.fixture
def pilot(tmp_path: Path) -> Path:
    """A real pilot of the window's cell: two starts of the stub, which speaks by seeds alone."""
    from cells.test_shared import test_seeded

    (cell,) = [one for one in test_seeded.__dsv41_cells__ if one.name == "seeded-demo-b1"]
    plan = plan_pilot(("seeded-demo-b1",), known={cell.name: cell}, subset=None, bridge=False)
    starts = []
    for name in ("A", "B"):
        with serve(model="stub", round_ms=2.0, seed=7) as stub:
            record, _ = run_start(
                Endpoint(stub.url, "vllm", "stub"), plan, start=name, deadline_s=120
            )
            starts.append(record)
    record = compare_starts(*starts)
    assert record["passed"] is True, record["reasons"]
    write_sealed(tmp_path / "p.json", record)
    return tmp_path / "p.json"


@pytest.mark.slow
@pytest.mark.parametrize("starts", ["alike", "unlike"])
def test_identical_streams_are_expected_of_both_control_starts(
    tmp_path: Path, pilot: Path, starts: str
) -> None:
    text = Path(window(tmp_path)).read_text()
    primary = 'primary = "ms_per_round"'
    assert text.count(primary) == 1
    text = text.replace(primary, f'{primary}\nexpect_identical = "{pilot}"')
    if starts == "unlike":
        # The second control start computes a little differently: the same seeds, other streams.
        (tmp_path / "other.py").write_text(
            "import runpy, sys\n"
            "name = sys.argv.pop(1)\n"
            "sys.argv += ['--perturb', '0.5'] if name == 'C2' else []\n"
            "runpy.run_module('pytest_dsv41', run_name='__main__', alter_sys=True)\n"
        )
        plain = '"{python}", "-m", "pytest_dsv41", "stub"'
        assert text.count(plain) == 1
        text = text.replace(plain, f'"{{python}}", "{tmp_path}/other.py", "{{start}}", "stub"')
    (tmp_path / "w.toml").write_text(text)
    ended = run(tmp_path / "out", window=str(tmp_path / "w.toml"))
    assert_ended_well(ended)
    rows = [json.loads(x) for x in (ended.folder / "values.jsonl").read_text().splitlines()]
    first, last = (
        [(row["outputs"], row["rounds"]) for row in rows if row["start"] == name]
        for name in ("C1", "C2")
    )
    assert (first == last) is (starts == "alike")
    cell = ended.summary["decisions"]["fast"]["cells"]["seeded-demo-b1"]
    if starts == "unlike":
        assert (ended.summary["status"], ended.returncode) == ("INCONCLUSIVE", 10), ended.output
        assert "identical token streams" in cell["reason"]
        assert "identical streams were expected: pair 0" in " ".join(ended.output.split())
    else:
        assert "identical" not in cell["reason"]
