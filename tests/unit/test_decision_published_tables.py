"""The published tables come out of the rules: replayed to the printed digit, or within error."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from pytest_dsv41.decision_v2 import excess_p, least_losing_count, mean_ceiling
from pytest_dsv41.decision_v2.series import Refused
from sims import gate, moderated, no_effect, paired, plan, power, published, resolution
from sims.cli import main
from sims.draws import DEFAULT_SEED, PythonGauss
from sims.table import Row, compare

ROOT = Path(__file__).parents[2]


def missed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.ok is False]


def test_the_replayed_stream_is_pythons() -> None:
    for seed in (5, 9):
        stream, python = PythonGauss(seed), random.Random(seed)
        # Odd portions: half a pair is carried over.
        for count in (1, 7, 2, 1001):
            expected = [python.gauss(0, 1) for _ in range(count)]
            assert stream.take(count) == pytest.approx(expected, abs=1e-15)


def test_all_81_power_numbers_replay_to_the_printed_digit() -> None:
    rows = power.rows(list(published.POWER), trials=20_000, seed=0, exact=True)
    assert sum(row.published is not None for row in rows) == 81
    assert not missed(rows)
    wrong_wins = [row for row in rows if row.published is None]
    assert len(wrong_wins) == 18
    assert max(row.simulated for row in wrong_wins) == 0.01  # 2 of 20,000


def test_revision_1_loses_power_with_more_controls() -> None:
    designs = [(False, 3, 3), (False, 8, 4)]
    rows = power.rows(designs, trials=20_000, seed=0, exact=True, revision=1)
    found = [row.simulated for row in rows if row.name == "true loss 5 %: LOSS [rev 1]"]
    assert found == pytest.approx([74.48, 27.895])
    assert not missed(rows)


def test_the_no_effect_table_replays_and_names_the_one_known_difference() -> None:
    rows = no_effect.rows(list(published.NO_EFFECT), windows=10_000, seed=0, exact=True)
    assert len(rows) == 16
    assert not missed(rows)
    (known,) = [row for row in rows if row.note]
    assert (known.name, known.published) == ("revision 1: rejected", 32.5)
    assert round(known.simulated, 1) == 32.6


def test_fresh_simulations_of_power_and_no_effect_are_within_error() -> None:
    seed = DEFAULT_SEED
    assert not missed(power.rows(list(published.POWER), trials=20_000, seed=seed, exact=False))
    rows = no_effect.rows(list(published.NO_EFFECT), windows=10_000, seed=seed, exact=False)
    assert not missed(rows)


def test_seeded_pairs_are_within_error_at_the_published_size() -> None:
    assert not missed(paired.rows(list(published.PAIRED), trials=None, seed=DEFAULT_SEED))


@pytest.mark.slow
def test_seeded_pairs_are_within_error_and_a_point_at_200_000_trials() -> None:
    assert not missed(paired.rows(list(published.PAIRED), trials=200_000, seed=DEFAULT_SEED))


def test_half_widths_are_the_published_ones() -> None:
    assert not missed(resolution.rows())


def test_the_gates_rates_are_the_exact_ones() -> None:
    judged, beside = gate.rows(trials=20_000, kl_trials=0, seed=DEFAULT_SEED)
    assert not missed(judged)
    assert all(row.ok is None for row in beside)


@pytest.mark.slow
def test_the_gates_mean_kl_is_within_error() -> None:
    judged, _ = gate.rows(trials=100_000, kl_trials=1_000, seed=DEFAULT_SEED)
    assert not missed(judged)


def test_the_advisory_rules_are_within_error() -> None:
    assert not missed(moderated.rows(archives=60, windows=1_000, seed=DEFAULT_SEED))
    assert not missed(paired.widened_rows(trials=5_000, seed=DEFAULT_SEED))


def test_bracket_pairs_are_within_error() -> None:
    assert not missed(power.bracket_rows(trials=100_000, seed=DEFAULT_SEED))


# -- the gate's counts -----------------------------------------------------------------------------


def test_the_smallest_losing_counts_against_one_run() -> None:
    assert [least_losing_count(a, 1) for a in range(4)] == [7, 10, 12, 14]


def test_excess_p_by_hand() -> None:
    # X ~ Bin(7, ½): all seven are the candidate's
    assert excess_p(7, 0, 1) == pytest.approx(1 / 128, rel=1e-12)
    # X ~ Bin(3, ¼): at least 2 of 3
    assert excess_p(2, 1, 3) == pytest.approx(3 * 0.25**2 * 0.75 + 0.25**3, rel=1e-12)
    assert excess_p(0, 5, 1) == 1.0


def test_counts_that_are_none_are_refused() -> None:
    for bad in ((-1, 0, 1), (0, -1, 1), (1, 1, 0)):
        with pytest.raises(Refused):
            excess_p(*bad)


def test_the_ceiling_of_equal_values_is_half_above_them() -> None:
    assert mean_ceiling([0.002] * 50, seed=1) == pytest.approx(0.003, rel=1e-12)
    assert mean_ceiling([0.0] * 50, seed=1) == 0.0


def test_the_ceiling_is_the_normal_ones_for_many_positions() -> None:
    values = np.random.default_rng(3).exponential(0.01, 5_000)
    expected = 1.5 * (values.mean() + 2.326348 * values.std() / np.sqrt(5_000))
    assert mean_ceiling(values, seed=1) == pytest.approx(expected, rel=0.01)
    assert mean_ceiling(values, seed=1) == mean_ceiling(values, seed=1)


@pytest.mark.parametrize("bad", [[], [np.nan], [-1e-9], [np.inf]])
def test_kl_values_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(Refused):
        mean_ceiling(bad, seed=1)


# -- the command -----------------------------------------------------------------------------------


def test_a_number_beyond_three_standard_errors_is_marked() -> None:
    # p = .5, both of 10,000: the standard error of the difference is .7071 points.
    near = compare("t", "n", 5_200, 10_000, 50.0, 10_000)
    far = compare("t", "n", 5_220, 10_000, 50.0, 10_000)
    assert near.standard_error == pytest.approx(0.7070, abs=1e-3)
    assert near.distance == pytest.approx((2.0 - 0.05) / 0.7070, rel=1e-3)
    assert (near.ok, far.ok) == (True, False)
    # Within the error, but more than the point it may be away.
    assert compare("t", "n", 5_200, 10_000, 50.0, 10_000, most=1.0).ok is False


def test_exact_tables_end_with_zero_and_a_wrong_number_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["power", "--exact", "--design", "unpaired:4v3"]
    assert main(argv) == 0
    assert "9 of 9 published numbers met." in capsys.readouterr().out
    wrong = {**published.POWER, (False, 4, 3): (53.4, *published.POWER[(False, 4, 3)][1:])}
    monkeypatch.setattr(published, "POWER", wrong)
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "8 of 9 published numbers met." in out
    assert "<-- differs" in out


def test_rows_come_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resolution", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 5
    assert document["rows"][0]["published"] == 3.785


@pytest.mark.parametrize(
    "argv",
    [
        ["power", "--design", "pairs:5"],
        ["power", "--design", "five"],
        ["power", "--exact", "--trials", "100"],
        ["paired", "--design", "seeded:7"],
        ["power", "--design", "pairs:3", "--trials", "100", "--plot", "power.pdf"],
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("sims: ")
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_plot_has_one_line_a_design_and_verdict(tmp_path: Path) -> None:
    target = tmp_path / "power.svg"
    argv = ["power", "--design", "pairs:3", "--design", "unpaired:4v3", "--seed", "3"]
    assert main([*argv, "--trials", "2000", "--plot", str(target)]) in (0, 1)
    root = ET.fromstring(target.read_text("utf-8"))
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 4


def test_a_plan_lists_designs_quickest_first_and_marks_enough(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["plan", "--cv", "0.02", "--gain", "0.05", "--power", "0.8", "--trials", "1500"]
    assert main([*argv, "--json"]) == 0
    options = json.loads(capsys.readouterr().out)
    minutes = [option["minutes"] for option in options]
    assert minutes == sorted(minutes)
    assert len(options) == len(plan.REPEATS) + len(plan.SEEDED)
    by_design = {option["design"]: option for option in options}
    # The published table has 62.1 % for unpaired 4 v 3 and 93.8 % for six adjacent pairs.
    assert by_design["unpaired:4v3"]["power"] == pytest.approx(0.621, abs=0.05)
    assert by_design["pairs:6"]["power"] == pytest.approx(0.938, abs=0.03)
    assert by_design["pairs:6"]["enough"] is True
    # 3 starts of 6.8 minutes and 7 repeats of 30 seconds
    assert by_design["unpaired:4v3"]["minutes"] == pytest.approx(23.9)


def test_it_runs_as_a_module_without_a_terminal() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sims", "resolution"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "5 of 5 published numbers met." in done.stdout


def test_the_rules_load_no_statistics_package_and_no_pytest() -> None:
    code = (
        "import sys, pytest_dsv41.decision_v2; "
        "print([m for m in ('scipy', 'scipy.stats', 'pytest', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
