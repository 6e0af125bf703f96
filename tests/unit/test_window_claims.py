"""Claims: registered before the window, and held, falsified or not resolvable after it."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from window_values import plan_of, values_of, window_text

from pytest_dsv41.cli import main
from pytest_dsv41.errors import SpecError
from pytest_dsv41.window.claims import judge_claims
from pytest_dsv41.window.plan import Plan, render_plan

CLAIM = """
[[claims]]
text = "{text}"
cell = "prefill-b1"
metric = "ttft_ms"
{arms}
direction = "{direction}"
threshold = {threshold}
"""


def text_of(
    direction: str = "flat",
    threshold: str = "0.03",
    arms: str = 'to_arm = "c1"',
    text: str = "the slab is a threshold",
) -> str:
    claim = CLAIM.format(text=text, arms=arms, direction=direction, threshold=threshold)
    base = window_text(schedule="control/c1/c2/c3/control", candidates=3)
    return base.replace("[target]", f"{claim}\n[target]")


def plan_with(folder: Path, *words: str, **named: str) -> Plan:
    return plan_of(folder, text_of(*words, **named))


def welch(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """The relative change and its 95 % interval over the first mean, degrees floored (RULES 1)."""
    mean = statistics.fmean(before)
    vc = statistics.variance(before) / mean**2 / len(before)
    vx = statistics.variance(after) / mean**2 / len(after)
    df = (vc + vx) ** 2 / (vc**2 / (len(before) - 1) + vx**2 / (len(after) - 1))
    half = stats.t.ppf(0.975, math.floor(df + 1e-9)) * math.sqrt(vc + vx)
    change = statistics.fmean(after) / mean - 1
    return change, change - half, change + half


def of_arm(rows: list[dict[str, Any]], arm: str) -> list[float]:
    return [
        row["values"]["ttft_ms"]["value"]
        for row in rows
        if (row["arm"], row["cell"]) == (arm, "prefill-b1")
    ]


@pytest.mark.parametrize(
    ("direction", "threshold", "factor", "answer"),
    [
        ("up", "0.05", 1.09, "HELD"),
        ("up", "0.05", 1.02, "FALSIFIED"),
        ("up", "0.05", 0.90, "FALSIFIED"),
        ("down", "0.05", 0.90, "HELD"),
        ("down", "0.05", 1.09, "FALSIFIED"),
        ("flat", "0.03", 1.0, "HELD"),
        ("flat", "0.03", 1.089, "FALSIFIED"),
        ("flat", "0.03", 0.90, "FALSIFIED"),
    ],
)
def test_a_claim_is_held_or_falsified_by_the_whole_interval(
    tmp_path: Path, direction: str, threshold: str, factor: float, answer: str
) -> None:
    plan = plan_with(tmp_path, direction, threshold)
    rows = values_of(plan, {("c1", "ttft_ms"): factor})
    (found,) = judge_claims(plan, rows)
    assert found.answer == answer, found.line
    change, low, high = welch(of_arm(rows, "control"), of_arm(rows, "c1"))
    assert (found.change, found.low, found.high) == pytest.approx((change, low, high))


def test_two_points_inside_each_others_noise_are_not_equal(tmp_path: Path) -> None:
    """FRANK-ARCHON's own claim: 22,208 and 24,000 alike, so the slab is a plateau below 26 GiB."""
    plan = plan_with(tmp_path, "flat", "0.03", arms='from_arm = "c1"\nto_arm = "c2"')
    rows = values_of(plan, {("c2", "ttft_ms"): 1.01}, noise=0.05)
    (found,) = judge_claims(plan, rows)
    assert found.answer == "NOT RESOLVABLE"
    assert "inside each other's noise, which does not make them equal" in found.reason
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.03 or found.high > 0.03


def test_a_threshold_inside_the_noise_is_not_resolvable(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "up", "0.09")
    rows = values_of(plan, {("c1", "ttft_ms"): 1.09}, noise=0.01)
    (found,) = judge_claims(plan, rows)
    assert found.answer == "NOT RESOLVABLE"
    assert "the threshold lies inside the noise" in found.reason


def test_what_was_not_measured_is_not_resolvable(tmp_path: Path) -> None:
    plan = plan_with(tmp_path, "up", "0.05")
    rows = [row for row in values_of(plan) if (row["arm"], row["repeat"]) != ("c1", 0)]
    (found,) = judge_claims(plan, rows)
    assert found.answer == "NOT RESOLVABLE"
    assert found.reason == "6 and 2 repeats; at least 3 of each are needed"
    assert found.change is None


def test_a_claim_is_part_of_the_plan(tmp_path: Path) -> None:
    plan = plan_with(tmp_path)
    assert (
        "the slab is a threshold (prefill-b1/ttft_ms, control to c1: within 3 % either way)"
        in " ".join(render_plan(plan).split())
    )
    assert plan.digest != plan_with(tmp_path, "flat", "0.05").digest
    assert plan.digest == plan_with(tmp_path, text="in other words").digest
    assert Plan.from_json(plan.to_json()).window.claims == plan.window.claims


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('cell = "prefill-b1"', 'cell = "prefil-b1"', r"claims\[0\]\.cell: no cell"),
        ('to_arm = "c1"', 'to_arm = "c9"', r"claims\[0\]\.to_arm: no arm"),
        ('to_arm = "c1"', 'to_arm = "control"', r"to_arm: is the arm that it is compared with"),
        ('"flat"', '"level"', r"direction: unknown value 'level'; valid: .*up, down, flat"),
        ("threshold = 0.03", "threshold = 3", r"threshold: 3 is no fraction"),
        ('metric = "ttft_ms"', 'metric = "ttft"', r"metric: unknown metric 'ttft'"),
        ('direction = "flat"', "", r"direction: missing"),
    ],
)
def test_a_wrong_claim_is_one_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(SpecError, match=told):
        plan_of(tmp_path, text_of().replace(old, new))


def test_the_folder_answers_the_claims_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_with(tmp_path, "up", "0.05")
    rows = values_of(plan, {("c1", "ttft_ms"): 1.09})
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "values.jsonl").write_text(lines)
    (found,) = judge_claims(plan, rows)
    main(["decide", str(tmp_path)])
    assert f"claim: {found.line}\n" in capsys.readouterr().out
    main(["decide", "--json", str(tmp_path)])
    assert json.loads(capsys.readouterr().out)["claims"] == [found.model_dump(mode="json")]
