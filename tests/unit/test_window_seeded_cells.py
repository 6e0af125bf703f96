"""A window whose decision cells are seeded is decided by win2-paired-v1, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
from window_values import CELLS, plan_of, values_of, window_text

from pytest_dsv41.errors import SpecError
from pytest_dsv41.report.model import decision_rows, pairs_text
from pytest_dsv41.report.terminal import render_decision
from pytest_dsv41.window.plan import KnownSpread, Plan, make_plan, render_plan
from pytest_dsv41.window.spec import load_spec
from pytest_dsv41.window.verdict import Outcome, conclude


def seeded(name: str, profile: str = "single", **more: Any) -> dict[str, Any]:
    return {**CELLS["decode-b1"], "name": name, "profile": profile, "seed_base": 1000, **more}


DEFINITIONS = {
    **CELLS,
    **{f"s{n}": seeded(f"s{n}", pairs=12) for n in range(1, 4)},
    **{f"m{n}": seeded(f"m{n}", "multi", pairs=12) for n in range(1, 4)},
    "bridge": seeded("bridge", pairs=6, report_only=True),
}


def deciding(*names: str, guards: str = "[]") -> str:
    return "".join(
        f'[[cells]]\nname = "{name}"\ndecision = true\nprimary = "decode_tok_s"\n'
        f"guards = {guards}\n"
        for name in names
    )


def text_of(**options: Any) -> str:
    return window_text(**{"schedule": "C/X/C", "repeats": "6", "cells": deciding("s1"), **options})


def planned(folder: Path, **options: Any) -> Plan:
    (folder / "w.toml").write_text(text_of(**options))
    return make_plan(load_spec(folder / "w.toml"), DEFINITIONS, window_id="L-w-W-1")


def measured(
    plan: Plan, numbers: Mapping[str, Sequence[float]], metric: str = "decode_tok_s"
) -> list[dict[str, Any]]:
    """Every item measured; `numbers` gives each start's values of the metric, repeat by repeat."""
    rows = values_of(plan)
    for row in rows:
        row["values"][metric] = {
            "value": numbers[row["start"]][row["repeat"]],
            "unit": "tok/s",
            "lower_is_better": False,
        }
    return rows


# -- refused when the plan is made ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"cells": deciding("s1", "decode-b1")},
            "w.toml:19: cells[1].decision: decision cell 's1' is seeded and 'decode-b1' is not: "
            "two rules cannot decide one window",
        ),
        (
            {"cells": deciding("decode-b1", "s1")},
            "w.toml:19: cells[1].decision: decision cell 's1' is seeded and 'decode-b1' is not: "
            "two rules cannot decide one window",
        ),
        (
            {"schedule": "K/I/K/I"},
            "w.toml:5: window.schedule: decision cell 's1' is seeded, which needs one candidate "
            "start after a control start, or between two; valid: C/X/C, C/X; not 'K/I/K/I'",
        ),
        (
            {"schedule": "C/X1/C/X2/C", "candidates": 2},
            "w.toml:5: window.schedule: decision cell 's1' is seeded, which needs one candidate "
            "start after a control start, or between two; valid: C/X/C, C/X; not 'C/X1/C/X2/C'",
        ),
        (
            {"repeats": "5"},
            "w.toml:6: window.repeats: decision cell 's1' is seeded, which needs 6 pairs or more, "
            "not 5",
        ),
        (
            {"repeats": "{C1 = 6, X = 6, C2 = 7}"},
            "w.toml:6: window.repeats: decision cell 's1' is seeded, which needs equal repeats: "
            "C1 has 6, X has 6, C2 has 7",
        ),
        (
            {"repeats": "13"},
            "w.toml:6: window.repeats: 13 repeats in start C1; cell 's1' has seeds for 12",
        ),
        (
            {"cells": deciding("bridge")},
            "w.toml:14: cells[0].decision: cell 'bridge' is report-only and never decides",
        ),
        (
            {"cells": deciding("s1", "m1", "s2", "s3")},
            "w.toml:29: cells[3].decision: 3 decision cells of profile single; at most 2",
        ),
        (
            {"schedule": "K/I/K/I", "cells": deciding("decode-b1", "decode-b2", "short-b1")},
            "w.toml:24: cells[2].decision: 3 decision cells; at most 2",
        ),
        (
            {"more": 'start_sd = {"s1/ms_per_round" = 0.01}'},
            "w.toml:7: window.start_sd.'s1/ms_per_round': no primary or guard of a seeded cell; "
            "valid: s1/decode_tok_s",
        ),
        (
            {"more": 'start_sd = {"s1/decode_tok_s" = 1.5}'},
            "w.toml:7: window.start_sd: 1.5 is no fraction",
        ),
        (
            {"more": "start_sd = {a = 0.01}", "cells": deciding("decode-b1")},
            "w.toml:7: window.start_sd: belongs to seeded pairs, which this window does not have",
        ),
    ],
)
def test_what_no_rule_can_decide_is_refused(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, **options)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(told)


def test_two_seeded_cells_may_decide_in_each_profile(tmp_path: Path) -> None:
    plan = planned(tmp_path, cells=deciding("s1", "s2", "m1", "m2"))
    assert plan.window.decision_cells == ("s1", "s2", "m1", "m2")


# -- decided --------------------------------------------------------------------------------------

# C1 and C2 have the means 100 and 200, whatever the seed's luck, and no start drift.
C1 = [99.0, 201.0, 99.0, 201.0, 99.0, 201.0]
C2 = [101.0, 199.0, 101.0, 199.0, 101.0, 199.0]
# d = .04 .06 .04 .06 .04 .06: mean .05, variance .00012.
FASTER = [104.0, 212.0, 104.0, 212.0, 104.0, 212.0]
VARIANCE = 6 * 0.01**2 / 5
T5 = float(scipy.stats.t.ppf(0.975, 5))


def test_pairs_are_decided_with_the_seeds_luck_cancelled(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    outcome = conclude(plan, measured(plan, {"C1": C1, "X": FASTER, "C2": C2}))
    assert (outcome.status, outcome.exit_code) == ("CANDIDATE", 0)
    assert outcome.promotion == {"arm": "c1", "profile": "single", "cells": ["s1"]}
    decision = outcome.decisions["c1"]
    assert decision["rule"] == "win2-paired-v1"
    assert decision["profiles"] == {"single": {"cells": ["s1"], "verdict": "CANDIDATE"}}
    (series,) = decision["cells"]["s1"]["series"]
    half = T5 * math.sqrt(VARIANCE / 6)
    assert series["design"] == "seeded 6 pairs, C/X/C"
    assert series["gain"] == pytest.approx(0.05)
    assert (series["low"], series["high"]) == pytest.approx((0.05 - half, 0.05 + half))
    # All six agree: the mirror is the only other sign pattern as large.
    assert series["p"] == 2 / 64
    assert (series["start_sd"], series["start_sd_registered"]) == (0.0, False)
    assert series["diff_cv"] == pytest.approx(math.sqrt(VARIANCE))
    # e = 2/99 and -2/201 in turn.
    assert series["aa"]["gain"] == pytest.approx((2 / 99 - 2 / 201) / 2)
    assert series["aa"]["drift"] is False


def test_the_registered_start_spread_decides(tmp_path: Path) -> None:
    plan = planned(tmp_path, more='start_sd = {"s1/decode_tok_s" = 0.02}')
    outcome = conclude(plan, measured(plan, {"C1": C1, "X": FASTER, "C2": C2}))
    # half = 2.571 · √(.00012/6 + .0004 · 1.5) = 6.4 %, more than the gain of 5 %.
    (series,) = outcome.decisions["c1"]["cells"]["s1"]["series"]
    half = T5 * math.sqrt(VARIANCE / 6 + 0.02**2 * 1.5)
    assert half == pytest.approx(0.06401, abs=1e-5)
    assert series["low"] == pytest.approx(0.05 - half)
    assert (series["start_sd"], series["start_sd_registered"]) == (0.02, True)
    assert (outcome.status, outcome.exit_code) == ("INCONCLUSIVE", 10)


def test_control_starts_that_differ_decide_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    drifted = [1.02 * one for one in C1]
    outcome = conclude(plan, measured(plan, {"C1": C1, "X": [150.0] * 6, "C2": drifted}))
    assert outcome.status == "INCONCLUSIVE"
    assert outcome.decisions["c1"]["cells"]["s1"]["series"][0]["aa"]["drift"] is True


def test_one_control_start_has_no_built_in_aa(tmp_path: Path) -> None:
    plan = planned(tmp_path, schedule="C/X")
    outcome = conclude(plan, measured(plan, {"C": [100.0, 200.0] * 3, "X": FASTER}))
    (series,) = outcome.decisions["c1"]["cells"]["s1"]["series"]
    assert (outcome.status, series["aa"]) == ("CANDIDATE", None)
    assert series["design"] == "seeded 6 pairs, C/X"


def test_each_profile_has_its_verdict(tmp_path: Path) -> None:
    plan = planned(tmp_path, cells=deciding("s1", "m1"))
    rows = measured(plan, {"C1": C1, "X": FASTER, "C2": C2})
    for row in rows:
        if (row["cell"], row["start"]) == ("m1", "X"):
            # d = -.06 and -.04 in turn.
            row["values"]["decode_tok_s"]["value"] = [94.0, 192.0][row["repeat"] % 2]
    outcome = conclude(plan, rows)
    profiles = outcome.decisions["c1"]["profiles"]
    assert profiles["single"] == {"cells": ["s1"], "verdict": "CANDIDATE"}
    assert profiles["multi"] == {"cells": ["m1"], "verdict": "NOT A CANDIDATE"}
    assert outcome.status == "CANDIDATE"
    assert outcome.promotion == {"arm": "c1", "profile": "single", "cells": ["s1"]}


def test_a_promotion_relies_on_the_cells_of_its_profile_alone(tmp_path: Path) -> None:
    plan = planned(tmp_path, cells=deciding("s1", "s2", "m1"))
    rows = measured(plan, {"C1": C1, "X": FASTER, "C2": C2})
    for row in rows:
        if (row["cell"], row["start"]) == ("s2", "X"):
            row["values"]["decode_tok_s"]["value"] = [94.0, 192.0][row["repeat"] % 2]
    outcome = conclude(plan, rows)
    cells = outcome.decisions["c1"]["cells"]
    assert [cells[name]["verdict"] for name in cells] == ["WIN", "LOSS", "WIN"]
    assert outcome.status == "CANDIDATE"
    assert outcome.promotion == {"arm": "c1", "profile": "multi", "cells": ["m1"]}


def test_a_guard_can_lose_a_seeded_cell(tmp_path: Path) -> None:
    plan = planned(tmp_path, cells=deciding("s1", guards='["accepted_per_round"]'))
    rows = measured(plan, {"C1": C1, "X": FASTER, "C2": C2})
    for row in rows:
        noise = 0.001 * (row["repeat"] % 2)
        worse = 0.9 if row["start"] == "X" else 1.0
        row["values"]["accepted_per_round"]["value"] = 1.2 * worse + noise
    outcome = conclude(plan, rows)
    assert outcome.status == "NOT A CANDIDATE"
    guard = outcome.decisions["c1"]["cells"]["s1"]["series"][1]
    assert (guard["role"], guard["verdict"]) == ("guard", "LOSS")


REPORTED = deciding("s1") + '[[cells]]\nname = "m1"\n[[cells]]\nname = "decode-b2"\n'


def test_reported_cells_of_either_kind_stand_beside_and_decide_nothing(tmp_path: Path) -> None:
    plan = planned(tmp_path, cells=REPORTED)
    outcome = conclude(plan, measured(plan, {"C1": C1, "X": FASTER, "C2": C2}))
    cells = outcome.decisions["c1"]["cells"]
    assert list(cells) == ["s1", "m1", "decode-b2"]
    assert [cells[name]["decides"] for name in cells] == [True, False, False]
    designs = [cells[name]["series"][0]["design"] for name in cells]
    assert designs == ["seeded 6 pairs, C/X/C", "seeded 6 pairs, C/X/C", "unpaired 12 v 6"]
    assert outcome.decisions["c1"]["decision_cells"] == ["s1"]


def test_a_reported_seeded_cell_never_decides(tmp_path: Path) -> None:
    cells = '[[cells]]\nname = "decode-b1"\ndecision = true\nprimary = "ms_per_round"\n'
    cells += '[[cells]]\nname = "bridge"\nprimary = "decode_tok_s"\n'
    plan = planned(tmp_path, cells=cells, repeats="3")
    lost = {"C1": [100.0, 200.0, 100.0], "X": [50.0, 100.0, 50.0], "C2": [100.0, 200.0, 100.0]}
    outcome = conclude(plan, measured(plan, lost))
    decision = outcome.decisions["c1"]
    assert (outcome.status, decision["rule"]) == ("INCONCLUSIVE", "win2-v1")
    assert decision["cells"]["bridge"]["decides"] is False
    assert decision["cells"]["bridge"]["series"][0]["gain"] == pytest.approx(-0.5)


def test_a_report_only_run_of_seeded_cells_is_complete(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    rows = measured(plan, {"C1": C1, "X": FASTER, "C2": C2})
    outcome = conclude(plan, rows, report_only=True)
    assert (outcome.status, outcome.promotion) == ("COMPLETE", None)
    assert outcome.decisions["c1"]["decision_cells"] == []


# -- prompts and pairs that are not proved --------------------------------------------------------


def broken(plan: Plan, change: Any) -> Outcome:
    rows = measured(plan, {"C1": C1, "X": FASTER, "C2": C2})
    change(next(row for row in rows if row["item"] == "X-s1-r3"))
    return conclude(plan, rows)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda row: row.update(prompt_sha256="cd" * 32),
            "arm c1: s1 / candidate[3]: pairs on different prompts",
        ),
        (
            lambda row: row.update(prompt_sha256=None),
            "arm c1: s1 / candidate[3]: has no prompt identity",
        ),
        (
            lambda row: row.update(outcome="refused", kind="cold-cache", reason="r"),
            "arm c1: s1 / candidate: pairs [3] are not in every start",
        ),
        (
            lambda row: row["values"].pop("decode_tok_s"),
            "arm c1: s1 / decode_tok_s / candidate: pair 3 has no value",
        ),
    ],
)
def test_a_pair_that_is_not_proved_leaves_the_window_incomplete(
    tmp_path: Path, change: Any, told: str
) -> None:
    outcome = broken(planned(tmp_path), change)
    assert (outcome.status, outcome.exit_code) == ("INCOMPLETE", 12)
    assert any(line.startswith(told) for line in outcome.incomplete), outcome.incomplete
    assert outcome.decisions == {}


# -- said beforehand and afterwards ---------------------------------------------------------------


def test_the_plan_says_what_c_x_and_an_unregistered_start_spread_cost(tmp_path: Path) -> None:
    text = " ".join(render_plan(planned(tmp_path, schedule="C/X")).split())
    assert "s1: 6 seeded pairs; the least p a sign flip of them can reach is 0.031" in text
    assert "there is no built-in A/A" in text
    assert "called WIN up to 8 % and LOSS up to 13 % of the time; C/X/C has the check" in text
    assert "start_sd is unregistered for decode_tok_s and counts as 0" in text

    text = " ".join(render_plan(planned(tmp_path)).split())
    assert "no built-in A/A" not in text
    assert "at 1 % about 5 % false WIN and 10 % false LOSS" in text


def test_the_plan_says_what_a_registered_start_spread_holds_the_interval_at(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, more='start_sd = {"s1/decode_tok_s" = 0.01}')
    text = " ".join(render_plan(plan, spreads=lambda cell, metric: KnownSpread(0.01)).split())
    assert "unregistered" not in text
    # t(.975, 5) = 2.5706: 2.5706 · .01 · √1.5 = 3.148 %; with √2 · 1 % over 6 pairs 3.480 %.
    assert "the registered start_sd of 1 % alone holds the interval at ±3.15 %" in text
    assert "resolves decode_tok_s to ±3.48 %" in text


def test_the_report_shows_p_start_spread_and_the_aa_check(tmp_path: Path) -> None:
    plan = planned(tmp_path, more='start_sd = {"s1/decode_tok_s" = 0.002}')
    outcome = conclude(plan, measured(plan, {"C1": C1, "X": FASTER, "C2": C2}))
    decision = outcome.decisions["c1"]
    (row,) = decision_rows("c1", decision)
    # e: mean .51 %, sd .0165 -> half 1.73 %; three of six each way: p is the share of sign
    # patterns whose sum is at least as large, 44 of 64.
    told = pairs_text(row)
    assert told.startswith("start_sd 0.20 %, registered; A/A +0.5 %, 95 % interval −1.2 to +2.2 %")
    assert told.endswith(": no drift")
    text = " ".join(render_decision("c1", decision, width=120, color=False).split())
    assert "0.03125" in text
    assert f"pairs of s1 decode_tok_s: {told}" in text
    assert "single: CANDIDATE on s1" in text


def test_the_report_says_that_nothing_was_registered_or_checked(tmp_path: Path) -> None:
    plan = planned(tmp_path, schedule="C/X")
    outcome = conclude(plan, measured(plan, {"C": [100.0, 200.0] * 3, "X": FASTER}))
    (row,) = decision_rows("c1", outcome.decisions["c1"])
    assert pairs_text(row) == (
        "start_sd not registered, counts as 0; no built-in A/A (one control start)"
    )
    plain = plan_of(tmp_path)
    for row in decision_rows("c1", conclude(plain, values_of(plain)).decisions["c1"]):
        assert pairs_text(row) == ""
