"""The verdict of a window: from plan and values to status, exit code, decisions and promotion."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from window_values import PROMPT, plan_of, values_of, window_text

from pytest_dsv41.errors import UsageError
from pytest_dsv41.window.plan import Plan
from pytest_dsv41.window.verdict import EXIT_CODES, Outcome, conclude, read_folder

FASTER = {("c1", "ms_per_round"): 0.92}
SLOWER = {("c1", "ms_per_round"): 1.08}


def test_the_exit_codes_are_the_documented_ones() -> None:
    assert EXIT_CODES == {
        "CANDIDATE": 0,
        "COMPLETE": 0,
        "INCONCLUSIVE": 10,
        "NOT A CANDIDATE": 11,
        "INCOMPLETE": 12,
    }


@pytest.mark.parametrize(
    ("factors", "status", "code"),
    [(FASTER, "CANDIDATE", 0), ({}, "INCONCLUSIVE", 10), (SLOWER, "NOT A CANDIDATE", 11)],
)
def test_each_verdict_has_its_exit_code(
    tmp_path: Path, factors: dict[tuple[str, str], float], status: str, code: int
) -> None:
    plan = plan_of(tmp_path)
    outcome = conclude(plan, values_of(plan, factors))
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert outcome.incomplete == outcome.notes == []
    decision = outcome.decisions["c1"]
    assert decision["verdict"] == status
    assert decision["provisional"] is False
    assert decision["decision_cells"] == ["decode-b1"]
    assert list(decision["cells"]) == ["decode-b1", "prefill-b1"]
    assert decision["cells"]["prefill-b1"]["decides"] is False
    assert outcome.explanations["c1"][-1] == f"Window: {status} (decided by decode-b1)."
    expected = {"arm": "c1", "profile": "single", "cells": ["decode-b1"]}
    assert outcome.promotion == (expected if status == "CANDIDATE" else None)
    assert json.loads(json.dumps(outcome.to_json())) == outcome.to_json()


def primary(outcome: Outcome, arm: str = "c1", cell: str = "decode-b1") -> dict[str, Any]:
    found: dict[str, Any] = outcome.decisions[arm]["cells"][cell]["series"][0]
    return found


def value(rows: list[dict[str, Any]], item: str, metric: str = "ms_per_round") -> float:
    return float(next(row["values"][metric]["value"] for row in rows if row["item"] == item))


def test_the_gain_of_adjacent_pairs_is_the_mean_over_each_pairs_own_control(
    tmp_path: Path,
) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, FASTER)
    outcome = conclude(plan, rows)
    gains = [
        1
        - value(rows, f"I{start}-decode-b1-r{repeat}")
        / value(rows, f"K{start}-decode-b1-r{repeat}")
        for start in (1, 2)
        for repeat in range(3)
    ]
    series = primary(outcome)
    assert series["gain"] == pytest.approx(sum(gains) / 6, rel=1e-12)
    assert (series["paired"], series["n_control"], series["df"]) == (True, 6, 5)
    assert (series["metric"], series["unit"]) == ("ms_per_round", "ms")
    guard = outcome.decisions["c1"]["cells"]["decode-b1"]["series"][1]
    assert (guard["metric"], guard["role"]) == ("accepted_per_round", "guard")


def test_a_bracket_compares_with_the_mean_of_both_sides(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X/C", more='pairing = "bracket"'))
    rows = values_of(plan, FASTER)
    gains = []
    for repeat in range(3):
        before, own, after = (
            value(rows, f"{start}-decode-b1-r{repeat}") for start in ("C1", "X", "C2")
        )
        gains.append(1 - own / ((before + after) / 2))
    series = primary(conclude(plan, rows))
    assert series["gain"] == pytest.approx(sum(gains) / 3, rel=1e-12)
    assert (series["paired"], series["n_control"]) == (True, 3)


def test_unpaired_controls_are_pooled(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X/C", repeats="{control = 2, c1 = 3}"))
    rows = values_of(plan, FASTER)
    controls = [value(rows, f"C{s}-decode-b1-r{r}") for s in (1, 2) for r in range(2)]
    candidates = [value(rows, f"X-decode-b1-r{r}") for r in range(3)]
    series = primary(conclude(plan, rows))
    mean = sum(controls) / 4
    assert series["gain"] == pytest.approx((mean - sum(candidates) / 3) / mean, rel=1e-12)
    assert (series["paired"], series["n_control"], series["n_candidate"]) == (False, 4, 3)


def test_the_order_of_the_records_does_not_matter(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, FASTER)
    shuffled = rows[:]
    random.Random(3).shuffle(shuffled)
    assert conclude(plan, shuffled) == conclude(plan, rows)
    # A record that was written twice, word for word, is one record.
    assert conclude(plan, [*rows, copy.deepcopy(rows[0])]) == conclude(plan, rows)


# -- several arms, several profiles ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "status", "code"),
    [
        (0.92, 1.08, "CANDIDATE", 0),
        (1.08, 0.92, "CANDIDATE", 0),
        (1.0, 1.08, "NOT A CANDIDATE", 11),
        (1.08, 1.08, "NOT A CANDIDATE", 11),
        (1.0, 1.0, "INCONCLUSIVE", 10),
        (1.0, 0.92, "CANDIDATE", 0),
    ],
)
def test_each_candidate_has_a_decision_and_one_success_is_enough(
    tmp_path: Path, first: float, second: float, status: str, code: int
) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X1/X2/C", candidates=2))
    factors = {("c1", "ms_per_round"): first, ("c2", "ms_per_round"): second}
    outcome = conclude(plan, values_of(plan, factors))
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert set(outcome.decisions) == {"c1", "c2"}
    if status == "CANDIDATE":
        assert outcome.promotion is not None
        assert outcome.promotion["arm"] == ("c1" if first < 1 else "c2")


def test_of_two_successes_the_larger_gain_is_promoted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X1/X2/C", candidates=2))
    factors = {("c1", "ms_per_round"): 0.92, ("c2", "ms_per_round"): 0.85}
    outcome = conclude(plan, values_of(plan, factors))
    assert outcome.promotion == {"arm": "c2", "profile": "single", "cells": ["decode-b1"]}


TWO = "".join(
    f'[[cells]]\nname = "decode-b{n}"\ndecision = true\nprimary = "ms_per_round"\n' for n in (1, 2)
)


def with_b2(plan: Plan, single: float, multi: float) -> list[dict[str, Any]]:
    rows = values_of(plan)
    for row in rows:
        if row["arm"] == "c1":
            factor = single if row["cell"] == "decode-b1" else multi
            row["values"]["ms_per_round"]["value"] *= factor
    return rows


def test_one_loss_rejects_the_window(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(cells=TWO))
    outcome = conclude(plan, with_b2(plan, 0.92, 1.08))
    assert (outcome.status, outcome.promotion) == ("NOT A CANDIDATE", None)
    outcome = conclude(plan, with_b2(plan, 0.92, 1.0))
    assert outcome.promotion == {"arm": "c1", "profile": "single", "cells": ["decode-b1"]}
    outcome = conclude(plan, with_b2(plan, 0.92, 0.92))
    assert outcome.promotion == {
        "arm": "c1",
        "profile": "single+multi",
        "cells": ["decode-b1", "decode-b2"],
    }


def test_by_profile_each_profile_has_a_verdict_of_its_own(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(cells=TWO, more="by_profile = true"))
    outcome = conclude(plan, with_b2(plan, 1.08, 0.92))
    assert (outcome.status, outcome.exit_code) == ("CANDIDATE", 0)
    assert outcome.decisions["c1"]["groups"] == {
        "single": {"cells": ["decode-b1"], "verdict": "NOT A CANDIDATE"},
        "multi": {"cells": ["decode-b2"], "verdict": "CANDIDATE"},
    }
    assert outcome.promotion == {"arm": "c1", "profile": "multi", "cells": ["decode-b2"]}
    both = conclude(plan, with_b2(plan, 0.92, 0.90))
    assert both.promotion == {
        "arm": "c1",
        "profile": "single+multi",
        "cells": ["decode-b1", "decode-b2"],
    }


def test_guards_only_reject(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    better = conclude(plan, values_of(plan, {("c1", "accepted_per_round"): 1.2}))
    assert better.status == "INCONCLUSIVE"
    worse = conclude(plan, values_of(plan, {**FASTER, ("c1", "accepted_per_round"): 0.8}))
    assert (worse.status, worse.promotion) == ("NOT A CANDIDATE", None)


# -- what is missing -------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], object]

FAULTS: dict[str, tuple[Change, str]] = {
    "failed": (
        lambda row: row.update(outcome="failed", kind="timeout", reason="no answer\nin 5 s"),
        "K1-decode-b1-r0 failed: timeout: no answer in 5 s",
    ),
    "refused": (
        lambda row: row.update(outcome="refused", kind="foreign", reason="a foreign request"),
        "K1-decode-b1-r0 refused: foreign: a foreign request",
    ),
    "skipped": (
        lambda row: row.update(outcome="skipped", reason="start K1 did not come up"),
        "K1-decode-b1-r0 skipped: start K1 did not come up",
    ),
    "without a reason": (lambda row: row.update(outcome="failed"), "K1-decode-b1-r0 failed"),
    "unknown outcome": (
        lambda row: row.update(outcome="ok"),
        "K1-decode-b1-r0 damaged: its outcome is 'ok'",
    ),
    "another arm": (
        lambda row: row.update(arm="c1"),
        "K1-decode-b1-r0 damaged: its arm is 'c1'",
    ),
    "no values": (
        lambda row: row.update(values=None),
        "K1-decode-b1-r0 damaged: it has no values",
    ),
    "no guard": (
        lambda row: row["values"].pop("accepted_per_round"),
        "K1-decode-b1-r0 without accepted_per_round",
    ),
    "no primary": (
        lambda row: row["values"].update(ms_per_round=3.0),
        "K1-decode-b1-r0 without ms_per_round",
    ),
    "no guard, and why": (
        lambda row: row.update(
            values={**row["values"], "accepted_per_round": None},
            missing={"accepted_per_round": "the server does not speculate"},
        ),
        "K1-decode-b1-r0 without accepted_per_round: the server does not speculate",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
@pytest.mark.parametrize("pairing", ["adjacent", "none"])
def test_a_missing_decision_value_makes_the_window_incomplete(
    tmp_path: Path, case: str, pairing: str
) -> None:
    change, reason = FAULTS[case]
    plan = plan_of(tmp_path, window_text(more=f'pairing = "{pairing}"'))
    rows = values_of(plan, FASTER)
    change(rows[0])
    outcome = conclude(plan, rows)
    assert (outcome.status, outcome.exit_code) == ("INCOMPLETE", 12)
    assert outcome.incomplete == [reason]
    assert outcome.promotion is None
    # What is left can still be judged, and is marked.
    assert outcome.decisions["c1"]["provisional"] is True
    assert outcome.explanations["c1"][0] == "Provisional, the window is incomplete:"
    series = primary(outcome)
    assert (series["n_control"], series["n_candidate"]) == ((5, 5) if pairing == "adjacent"
        else (5, 6))  # fmt: skip
    # The same window, made a report, reports it and stops at nothing.
    report = conclude(plan, rows, report_only=True)
    assert (report.status, report.exit_code, report.incomplete) == ("COMPLETE", 0, [])
    assert reason in report.notes or case in ("no guard", "no primary")


BAD_VALUES: dict[str, tuple[Change, str]] = {
    "NaN": (
        lambda row: row["values"]["ms_per_round"].update(value=float("nan")),
        "arm c1: decode-b1 / ms_per_round / control[0]: nan is not a finite number",
    ),
    "zero": (
        lambda row: row["values"]["ms_per_round"].update(value=0),
        "arm c1: decode-b1 / ms_per_round / control[0]: a control value must be above 0, got 0",
    ),
    "text": (
        lambda row: row["values"]["ms_per_round"].update(value="8"),
        "arm c1: decode-b1 / ms_per_round / control[0]: '8' is not a number",
    ),
    "no prompt": (lambda row: row.update(prompt_sha256=None), "has no prompt identity"),
    "another prompt": (lambda row: row.update(prompt_sha256="cd" * 32), "prompt"),
    "orientation": (
        lambda row: row["values"]["ms_per_round"].update(lower_is_better=False),
        "decode-b1 / ms_per_round: the values have more than one orientation: False, True",
    ),
}


@pytest.mark.parametrize("case", BAD_VALUES)
@pytest.mark.parametrize("schedule", ["K/I/K/I", "C/X/C"])
def test_a_value_that_no_rule_can_judge_makes_the_window_incomplete(
    tmp_path: Path, case: str, schedule: str
) -> None:
    change, reason = BAD_VALUES[case]
    more = 'pairing = "bracket"' if schedule == "C/X/C" else ""
    plan = plan_of(tmp_path, window_text(schedule=schedule, more=more))
    rows = values_of(plan, FASTER)
    change(rows[0])
    outcome = conclude(plan, rows)
    assert (outcome.status, outcome.promotion) == ("INCOMPLETE", None)
    (line,) = outcome.incomplete
    assert reason in line
    # The deciding cell could not be judged; what is reported still is.
    assert list(outcome.decisions["c1"]["cells"]) == ["prefill-b1"]
    assert outcome.decisions["c1"]["verdict"] == "NOT JUDGED"
    assert outcome.explanations["c1"][-1] == "Window: NOT JUDGED (no decision cell was judged)."


def test_missing_items_are_grouped_by_their_cause(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = [row for row in values_of(plan, FASTER) if row["start"] in ("K1", "I1")]
    for row in values_of(plan):
        if row["start"] == "K2":
            row.update(outcome="skipped", kind=None, reason="start K2: not healthy", values={})
            rows.append(row)
    outcome = conclude(plan, rows, stopped="signal SIGTERM")
    assert outcome.status == "INCOMPLETE"
    assert outcome.incomplete == [
        "K2-decode-b1-r0, K2-decode-b1-r1, K2-decode-b1-r2 skipped: start K2: not healthy",
        "I2-decode-b1-r0, I2-decode-b1-r1, I2-decode-b1-r2 not measured",
        "stopped: signal SIGTERM",
    ]
    assert len(outcome.notes) == 2
    assert primary(outcome)["n_control"] == 3


def test_too_little_for_any_decision_is_incomplete_without_one(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    outcome = conclude(plan, values_of(plan, FASTER)[:8])
    assert outcome.status == "INCOMPLETE"
    assert outcome.incomplete[0] == (
        "I1-decode-b1-r2, K2-decode-b1-r0, K2-decode-b1-r1 and 4 more items not measured"
    )
    assert any("at least 3 are needed" in line for line in outcome.incomplete)
    empty = conclude(plan, [])
    assert (empty.status, empty.decisions, empty.promotion) == ("INCOMPLETE", {}, None)


def test_two_answers_for_one_item_are_nobodys_choice(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, FASTER)
    again = copy.deepcopy(rows[0])
    again["values"]["ms_per_round"]["value"] *= 1.5
    outcome = conclude(plan, [*rows, again])
    assert outcome.status == "INCOMPLETE"
    assert outcome.incomplete == ["K1-decode-b1-r0 measured twice"]


def test_foreign_values_are_left_out_and_noted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, FASTER)
    outcome = conclude(plan, [*rows, {"item": "Z-x-r0"}, {}])
    assert outcome.status == "CANDIDATE"
    assert outcome.notes == ["2 values of no planned item: left out"]


def test_a_fault_in_a_reported_cell_stops_nothing(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = [row for row in values_of(plan, FASTER) if row["item"] != "K1-prefill-b1-r0"]
    outcome = conclude(plan, rows)
    assert (outcome.status, outcome.notes) == ("CANDIDATE", ["K1-prefill-b1-r0 not measured"])
    rows = [row for row in values_of(plan, FASTER) if row["cell"] != "prefill-b1"]
    outcome = conclude(plan, rows)
    assert outcome.status == "CANDIDATE"
    assert outcome.notes[-1] == "arm c1: prefill-b1: nothing was measured"
    rows = values_of(plan, FASTER)
    for row in rows:
        if row["cell"] == "prefill-b1":
            row["values"]["ttft_ms"]["value"] = float("inf")
    outcome = conclude(plan, rows)
    assert outcome.status == "CANDIDATE"
    assert outcome.decisions["c1"]["cells"]["prefill-b1"]["verdict"] == "REFUSED"


def test_a_stopped_window_is_incomplete_whatever_it_has(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for report_only in (False, True):
        outcome = conclude(
            plan, values_of(plan, FASTER), stopped="watch\nfailed", report_only=report_only
        )
        assert (outcome.status, outcome.exit_code) == ("INCOMPLETE", 12)
        assert outcome.incomplete == ["stopped: watch failed"]
        assert outcome.promotion is None


def test_no_set_of_missing_items_leads_to_a_candidate(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, FASTER)
    decisive = [row["item"] for row in rows if row["cell"] == "decode-b1"]
    draw = random.Random(11)
    for _ in range(40):
        gone = set(draw.sample(decisive, draw.randint(1, len(decisive))))
        outcome = conclude(plan, [row for row in rows if row["item"] not in gone])
        assert (outcome.status, outcome.exit_code) == ("INCOMPLETE", 12)
        assert outcome.incomplete
        assert outcome.promotion is None


# -- windows that do not decide --------------------------------------------------------------------


def test_a_report_shows_every_cell_and_decides_nothing(tmp_path: Path) -> None:
    text = window_text(more='kind = "report"').replace("decision = true\n", "")
    plan = plan_of(tmp_path, text)
    outcome = conclude(plan, values_of(plan, SLOWER))
    assert (outcome.status, outcome.exit_code, outcome.promotion) == ("COMPLETE", 0, None)
    assert outcome.decisions["c1"]["verdict"] == "COMPLETE"
    assert outcome.decisions["c1"]["cells"]["decode-b1"]["verdict"] == "LOSS"
    assert outcome.decisions["c1"]["decision_cells"] == []
    nothing = conclude(plan, [])
    assert (nothing.status, nothing.incomplete[-1]) == ("INCOMPLETE", "nothing was measured")


def test_an_admission_has_no_decision(tmp_path: Path) -> None:
    text = window_text(more='kind = "admission"').replace("decision = true\n", "")
    plan = plan_of(tmp_path, text)
    outcome = conclude(plan, values_of(plan, FASTER))
    assert (outcome.status, outcome.exit_code, outcome.decisions) == ("COMPLETE", 0, {})


def test_report_only_is_kept_in_the_plan(tmp_path: Path) -> None:
    plan = Plan.from_json(json.loads(json.dumps(plan_of(tmp_path, report_only=True).to_json())))
    outcome = conclude(plan, values_of(plan, FASTER))
    assert (outcome.status, outcome.exit_code, outcome.promotion) == ("COMPLETE", 0, None)
    assert primary(outcome)["gain"] == pytest.approx(0.08, abs=0.01)


# -- from the files --------------------------------------------------------------------------------


def written(folder: Path, plan: Plan, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    (folder / "values.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_files_give_the_same_outcome(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    for number, factors in enumerate((FASTER, {}, SLOWER)):
        rows = values_of(plan, factors)
        folder = written(tmp_path / str(number), plan, rows)
        moved = folder.rename(tmp_path / f"moved-{number}")
        again, read = read_folder(moved)
        assert conclude(again, read) == conclude(plan, rows)


def test_a_value_that_is_no_number_is_refused_from_the_file_too(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    rows = values_of(plan, FASTER)
    rows[0]["values"]["ms_per_round"]["value"] = float("nan")
    outcome = conclude(*read_folder(written(tmp_path / "a", plan, rows)))
    assert "nan is not a finite number" in outcome.incomplete[0]


def test_a_torn_last_line_is_a_value_that_is_not_there(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    folder = written(tmp_path / "a", plan, values_of(plan, FASTER))
    file = folder / "values.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    outcome = conclude(*read_folder(folder))
    assert outcome.status == "CANDIDATE"
    assert outcome.notes == ["I2-prefill-b1-r2 not measured"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "plan.json").unlink(), "no such file; not a window's folder"),
        (lambda folder: (folder / "plan.json").write_text("{"), "plan.json: "),
        (lambda folder: (folder / "plan.json").write_bytes(b"\xff"), "plan.json: "),
        (lambda folder: (folder / "plan.json").write_text("[" * 100_000), "plan.json: "),
        (lambda folder: (folder / "plan.json").write_text('"x"'), "no plan of schema"),
        (
            lambda folder: (folder / "values.jsonl").write_text('{"item"\n{}\n'),
            "values.jsonl:1: damaged: no JSON record",
        ),
        (
            lambda folder: (folder / "values.jsonl").write_text("{}\n[]\n"),
            "values.jsonl:2: damaged: no JSON record",
        ),
        (
            lambda folder: [(folder / "plan.json").unlink(), (folder / "plan.json").mkdir()],
            "not a regular file",
        ),
    ],
)
def test_damaged_files_are_told_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    plan = plan_of(tmp_path)
    folder = written(tmp_path / "a", plan, values_of(plan))
    damage(folder)
    with pytest.raises(UsageError) as caught:
        read_folder(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_that_ended_before_its_first_item_has_no_values(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", plan_of(tmp_path), [])
    (folder / "values.jsonl").unlink()
    assert read_folder(folder)[1] == []
    with pytest.raises(UsageError, match="no such folder"):
        read_folder(tmp_path / "none")


def test_the_prompt_identity_of_a_bracket_is_that_of_both_sides(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X/C", more='pairing = "bracket"'))
    series = primary(conclude(plan, values_of(plan, FASTER)))
    assert series["control_prompts"] == [PROMPT] * 3
