"""Before a window opens: the window cap and the resolution filter, and what an override records."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
from test_window_seeded_cells import deciding, planned
from window_values import plan_of, window_text

from pytest_dsv41.archive import archive_append
from pytest_dsv41.archive.testing import example_row
from pytest_dsv41.errors import SpecError
from pytest_dsv41.window import process_rules
from pytest_dsv41.window.plan import Plan, describe_plan, render_plan
from pytest_dsv41.window.process_rules import archived, ask
from pytest_dsv41.window.spec import load_spec
from pytest_dsv41.window.summary import ProcessRules

PROMPT = "9" * 64
NOW, BEFORE = "a" * 40, "b" * 40
CV = 0.0255
"""The published spread of ms per round of a short cell."""


def fill(campaign: Path, cv: float = CV, *, cell: str = "decode-b1", **changes: Any) -> None:
    """Two windows of four control repeats whose sample CV is exactly `cv`."""
    # Four values at 1 ± u have a sample SD of u · √(4/3).
    u = cv * math.sqrt(3 / 4)
    archive_append(
        campaign / "control-archive.jsonl",
        [
            {
                **example_row(0, start=f"C{repeat // 2}"),
                "window": f"L-w{window}-{cell}{sorted(changes.items())!r:.120}",
                "cell": cell,
                "metric": "ms_per_round",
                "value": mean * (1 + u * (-1) ** repeat),
                "max_tokens": 96,
                "commit": NOW,
                "prompt_sha256": PROMPT,
                "repeat": repeat,
                **changes,
            }
            for window, mean in enumerate((8.0, 9.0))
            for repeat in range(4)
        ],
    )


def gain(expected: float | None, **options: Any) -> str:
    line = "" if expected is None else f"expected_gain = {expected}\n"
    return window_text(**options).replace('primary = "ms', f'{line}primary = "ms')


def asked(
    plan: Plan, campaign: Path, commit: str | None = NOW, prompts: dict[str, str] | None = None
) -> ProcessRules:
    known = {"decode-b1": PROMPT} if prompts is None else prompts
    archive = campaign / "control-archive.jsonl"
    return ask(plan, archived(plan, archive, commit=commit, prompts=known), campaign=campaign)


# -- the resolution filter ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cv", "expected", "answer", "least"),
    [
        # RULES section 3: 2.55 % resolves ±3.785 % with 6 pairs; 1.07 % ±1.588 % (6), ±1.399 % (7).
        (0.0255, 0.05, "REFUSE", None),
        (0.0255, 0.076, "QUEUE", None),
        (0.0107, 0.03, "REFUSE", "pairs:7"),
        (0.0107, 0.032, "QUEUE", None),
    ],
)
def test_a_gain_below_twice_the_half_width_is_refused(
    tmp_path: Path, cv: float, expected: float, answer: str, least: str | None
) -> None:
    fill(tmp_path, cv)
    (cell,) = asked(plan_of(tmp_path, gain(expected)), tmp_path).resolution
    half = scipy.stats.t.ppf(0.975, 5) * math.sqrt(2) * cv / math.sqrt(6)
    assert cell.half_width == pytest.approx(half, rel=1e-9)
    assert (cell.cell, cell.arm, cell.design, cell.answer) == (
        "decode-b1",
        "c1",
        "pairs:6",
        answer,
    )
    if least:
        assert cell.least_design == least
        assert f"{least} would queue" in cell.reason


def test_what_is_not_known_is_not_judged_and_said(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, gain(0.05))

    def told(rules: ProcessRules) -> str:
        (cell,) = rules.resolution
        assert (cell.answer, rules.refusals) == ("NOT JUDGED", [])
        return cell.reason

    assert "no rows of decode-b1/ms_per_round as it is planned" in told(asked(plan, tmp_path))
    archive = tmp_path / "control-archive.jsonl"
    archive.write_text("rubbish\n")
    assert "the archive cannot be read" in told(asked(plan, tmp_path))
    archive.unlink()
    archive_append(archive, [example_row(0, cell="decode-b1", max_tokens=96)])
    reason = told(asked(plan, tmp_path, commit=None, prompts={}))
    assert "no window in the archive has two repeats" in reason
    fill(tmp_path)
    reason = told(asked(plan_of(tmp_path, gain(None)), tmp_path))
    assert "the window file gives no expected_gain" in reason


def test_the_definition_is_picked_by_commit_prompt_tokens_and_clock(tmp_path: Path) -> None:
    fill(tmp_path)
    plan = plan_of(tmp_path, gain(0.05))
    for changes in (
        {"commit": BEFORE},
        {"prompt_sha256": "8" * 64},
        {"max_tokens": 1500},
    ):
        fill(tmp_path, 0.001, **changes)
    assert asked(plan, tmp_path).resolution[0].answer == "REFUSE"
    fill(tmp_path, 0.001, clock_cap_mhz=2300)
    (cell,) = asked(plan, tmp_path).resolution
    assert cell.answer == "NOT JUDGED"
    assert "2 definitions are never pooled; pick one by clock_cap_mhz 2150, 2300" in cell.reason
    for clock, answer in ((2150, "REFUSE"), (2300, "QUEUE")):
        named = plan_of(tmp_path, gain(0.05, more=f"clock_cap_mhz = {clock}"))
        assert asked(named, tmp_path).resolution[0].answer == answer
        # What only picks a definition of the past does not change what is measured.
        assert named.digest == plan.digest


def test_several_definitions_are_named_in_the_plan(tmp_path: Path) -> None:
    fill(tmp_path)
    fill(tmp_path, commit=BEFORE)
    plan = plan_of(tmp_path, gain(None))
    spreads = archived(plan, tmp_path / "control-archive.jsonl")
    text = " ".join(render_plan(plan, spreads=spreads).split())
    assert "note: no spread is taken from the archive: decode-b1/ms_per_round: rows of 2" in text
    assert f"pick one by commit {NOW[:12]}, {BEFORE[:12]}" in text


def test_a_registered_spread_of_pairs_goes_before_the_archive(tmp_path: Path) -> None:
    fill(tmp_path)
    more = 'diff_cv = { "decode-b1/ms_per_round" = 0.02 }'
    plan = plan_of(tmp_path, gain(0.05, more=more))
    for campaign in (tmp_path, tmp_path / "nowhere"):
        (cell,) = asked(plan, campaign).resolution
        # t(0.975, 5) = 2.5706 times 2 % over √6
        assert cell.half_width == pytest.approx(0.020989, abs=1e-6)
        assert cell.answer == "QUEUE"
    spreads = archived(plan, tmp_path / "control-archive.jsonl")
    text = " ".join(render_plan(plan, spreads=spreads).split())
    assert "to ±2.10 % (registered spread of pairs 2.00 %)" in text


@pytest.mark.parametrize(
    ("more", "schedule", "told"),
    [
        ('diff_cv = {"decode-b1/ttft_ms" = 0.1}', "K/I/K/I", "no primary of a cell in pairs"),
        ('diff_cv = {"decode-b1/ms_per_round" = 0.1}', "C/X/C", "belongs to pairs"),
        ('diff_cv = {"decode-b1/ms_per_round" = 2}', "K/I/K/I", "2 is no fraction"),
        ("clock_cap_mhz = 0", "K/I/K/I", "0 is no clock cap; valid: MHz above 0"),
    ],
)
def test_a_wrong_registration_is_one_line(
    tmp_path: Path, more: str, schedule: str, told: str
) -> None:
    with pytest.raises(SpecError, match=r"w\.toml:\d+: window\.") as caught:
        plan_of(tmp_path, window_text(more=more, schedule=schedule))
    assert told in str(caught.value)


def test_seeded_decode_speed_is_estimated_from_ms_per_round_and_start_spread(
    tmp_path: Path,
) -> None:
    # WIN2: seeded 6 pairs ±3.8 % at 2.55 %, from the ms per round; tok/s itself spreads 6.8 %.
    fill(tmp_path, cell="s1")
    fill(tmp_path, 0.068, cell="s1", metric="decode_tok_s")
    cells = deciding("s1").replace("primary", "expected_gain = 0.08\nprimary")
    (cell,) = asked(planned(tmp_path, cells=cells), tmp_path, prompts={}).resolution
    assert (cell.design, cell.metric, cell.answer) == ("seeded:6", "decode_tok_s", "QUEUE")
    assert cell.half_width == pytest.approx(0.03785, abs=5e-6)
    # With start_sd 1 %: t · √((√2 · 2.55 %)²/6 + (1 %)² · 1.5), as the interval will be.
    more = 'start_sd = {"s1/decode_tok_s" = 0.01}'
    (cell,) = asked(planned(tmp_path, cells=cells, more=more), tmp_path, prompts={}).resolution
    half = scipy.stats.t.ppf(0.975, 5) * math.sqrt(2 * CV**2 / 6 + 1.5 * 0.01**2)
    assert cell.half_width == pytest.approx(half, rel=1e-9)
    assert cell.answer == "REFUSE"


def test_each_candidate_arm_is_asked_for(tmp_path: Path) -> None:
    fill(tmp_path)
    text = gain(0.05, schedule="C/X1/C/X2/C", repeats="3", candidates=2)
    rules = asked(plan_of(tmp_path, text), tmp_path)
    assert [(one.arm, one.design) for one in rules.resolution] == [
        ("c1", "unpaired:9v3"),
        ("c2", "unpaired:9v3"),
    ]
    half = scipy.stats.t.ppf(0.975, 10) * CV * math.sqrt(1 / 9 + 1 / 3)
    assert rules.resolution[0].half_width == pytest.approx(half, rel=1e-9)


def test_a_window_that_decides_nothing_is_not_asked(tmp_path: Path) -> None:
    fill(tmp_path)
    assert asked(plan_of(tmp_path, gain(0.01), report_only=True), tmp_path).resolution == ()


# -- the window cap -------------------------------------------------------------------------------


def capped(campaign: Path, windows: int) -> None:
    (campaign / "WINDOW-CAP.json").write_text('{"adopted_utc": "2026-10-26T00:00:00Z"}')
    for number in range(windows):
        folder = campaign / f"L-{number}-W-2026102{7 + number}T000000Z"
        folder.mkdir()
        (folder / "summary.json").write_text('{"status": "INCONCLUSIVE"}')


def test_the_third_window_of_a_lane_is_refused_until_a_hypothesis_is_new(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert asked(plan, tmp_path).window_cap.answer == "ALLOW"
    capped(tmp_path, 1)
    assert asked(plan, tmp_path).refusals == []
    capped_again = tmp_path / "L-9-W-20261029T000000Z"
    capped_again.mkdir()
    (capped_again / "summary.json").write_text('{"status": "CANDIDATE"}')
    rules = asked(plan, tmp_path)
    (refusal,) = rules.refusals
    assert refusal.startswith("window cap: 2 counted window(s) of L since 2026-10-26T00:00:00Z; ")
    told = process_rules.refusal(rules, plan, campaign=tmp_path)
    assert told == (
        f"{refusal}; next: dsv41 window-cap L --campaign {tmp_path}, or --window-override=REASON"
    )
    (tmp_path / "LANES.md").write_text("WINDOW-CAP OVERRIDE L 2026-10-30T00:00:00Z\n")
    assert asked(plan, tmp_path).refusals == []


def test_a_cap_that_is_not_in_force_says_so(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for campaign in (tmp_path, tmp_path / "nowhere"):
        cap = asked(plan, campaign).window_cap
        assert cap.answer == "ALLOW"
        assert cap.reason.startswith("the cap is not in force: ")


def test_hypotheses_of_the_current_folder_count_as_for_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = tmp_path / "campaign"
    campaign.mkdir()
    capped(campaign, 2)
    plan = plan_of(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert asked(plan, campaign).refusals
    (tmp_path / "LANES.md").write_text("HYPOTHESIS L the queue is shared 2026-10-30T00:00:00Z\n")
    assert not asked(plan, campaign).refusals


def test_an_admission_window_is_not_held_to_the_cap_and_a_damaged_one_refuses(
    tmp_path: Path,
) -> None:
    capped(tmp_path, 2)
    admission = window_text(more='kind = "admission"').replace("decision = true\n", "")
    cap = asked(plan_of(tmp_path, admission), tmp_path).window_cap
    assert (cap.answer, cap.reason) == ("ALLOW", "an admission window never counts")
    (tmp_path / "WINDOW-CAP.json").write_text("{")
    cap = asked(plan_of(tmp_path), tmp_path).window_cap
    assert cap.refuses
    assert "WINDOW-CAP.json" in cap.reason


# -- an override ----------------------------------------------------------------------------------


def test_an_override_is_kept_with_what_it_overrode_and_only_then(tmp_path: Path) -> None:
    fill(tmp_path)
    plan = plan_of(tmp_path, gain(0.05), override="the old drafter's spread")
    assert plan.to_json()["spec"]["override"] == "the old drafter's spread"
    rules = asked(plan, tmp_path)
    assert rules.override == "the old drafter's spread"
    assert len(rules.refusals) == 1
    assert rules.lines[-1] == "overridden: the old drafter's spread"
    again = ProcessRules.model_validate(json.loads(json.dumps(rules.model_dump(mode="json"))))
    assert again == rules
    wide = plan_of(tmp_path, gain(0.2), override="the old drafter's spread")
    assert asked(wide, tmp_path).override is None


@pytest.mark.parametrize(("text", "told"), [("  ", "empty; write a text"), ("x" * 2001, "2001")])
def test_an_override_without_a_reason_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "w.toml").write_text(window_text())
    with pytest.raises(SpecError, match=f"window_override: {told}"):
        load_spec(tmp_path / "w.toml", override=text)


def test_a_plan_in_json_has_what_the_filter_used(tmp_path: Path) -> None:
    fill(tmp_path)
    plan = plan_of(tmp_path, gain(0.05))
    spreads = archived(plan, tmp_path / "control-archive.jsonl")
    row = describe_plan(plan, spreads=spreads)["designs"][0]
    assert row["archive_cv"] == pytest.approx(CV)
    assert (row["archive_metric"], row["archive_unknown"], row["diff_cv"]) == (
        "ms_per_round",
        None,
        None,
    )
