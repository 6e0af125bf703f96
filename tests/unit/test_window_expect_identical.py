"""`expect_identical`: who may expect it, and what the control starts must then show (RULES 2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from window_values import CELLS, PROMPT, values_of, window_text

from pytest_dsv41.errors import SpecError
from pytest_dsv41.quality.aa_compare import PILOT_SCHEMA
from pytest_dsv41.quality.sealed import write_sealed
from pytest_dsv41.window.plan import Plan, make_plan
from pytest_dsv41.window.spec import load_spec
from pytest_dsv41.window.verdict import conclude

DEFINITION = {**CELLS["decode-b1"], "name": "s1", "seed_base": 1000}
CELL = {key: DEFINITION[key] for key in ("name", "kind", "max_tokens", "seed_base")}
KNOWN = {**CELLS, "s1": {**DEFINITION, "pairs": 12, "report_only": False}}
USE = '[[cells]]\nname = "s1"\ndecision = true\nprimary = "decode_tok_s"\n'
EXPECT = 'expect_identical = "p.json"\n'


def pilot(**changes: Any) -> dict[str, Any]:
    """A pilot's record as far as a window reads it."""
    return {
        "schema": PILOT_SCHEMA,
        "passed": True,
        "reasons": [],
        "definition": {"cells": {"s1": {"cell": CELL, "pairs": 6, "prompt_sha256": PROMPT}}},
        "cells": {"s1": {"profile": "single"}},
    } | changes


def planned(
    folder: Path, *, schedule: str = "C/X/C", cells: str = USE + EXPECT, **changes: Any
) -> Plan:
    write_sealed(folder / "p.json", pilot(**changes))
    text = window_text(schedule=schedule, repeats="6", cells=cells)
    (folder / "w.toml").write_text(text)
    return make_plan(load_spec(folder / "w.toml"), KNOWN, window_id="L-w-W-1")


def test_the_plan_keeps_the_pilots_seal_and_not_its_place(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    use = plan.window.cell("s1").expect_identical
    assert use is not None
    assert use.sha256 == json.loads((tmp_path / "p.json").read_text())["sha256"]
    assert (use.cell, use.prompt_sha256) == (CELL, PROMPT)
    (tmp_path / "moved").mkdir()
    assert planned(tmp_path / "moved").digest == plan.digest
    (tmp_path / "other").mkdir()
    assert planned(tmp_path / "other", reasons=["x"]).digest != plan.digest


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"passed": False, "reasons": ["s1: 1 of 6 pairs have different outputs"]}, "FAILED: s1"),
        ({"definition": {"cells": {"s9": {}}}}, "has no cell s1; it has s9"),
        ({"cells": USE.replace("true", "false") + EXPECT}, "decides nothing"),
        ({"schedule": "C/X"}, "valid: C/X/C, not 'C/X'"),
        ({"cells": USE.replace("s1", "decode-b1") + EXPECT}, "has no cell decode-b1"),
        ({"cells": USE + 'expect_identical = "none.json"\n'}, "none.json"),
        ({"schema": "dsv41-aa-start-v1"}, "schema"),
        (
            {
                "definition": {
                    "cells": {"s1": {"cell": {**CELL, "max_tokens": 12}, "prompt_sha256": PROMPT}}
                }
            },
            "max_tokens is 12 there and 96 here",
        ),
    ],
)
def test_what_no_pilot_allows_is_refused_in_one_line(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    record = {key: value for key, value in options.items() if key not in ("cells", "schedule")}
    window = {key: options[key] for key in ("cells", "schedule") if key in options}
    with pytest.raises(SpecError) as refused:
        planned(tmp_path, **window, **record)
    assert told in str(refused.value)
    assert str(refused.value).count("\n") == 0
    assert ": cells[0]." in str(refused.value)


def test_a_cell_of_several_requests_is_not_the_pilots_to_allow(tmp_path: Path) -> None:
    record = pilot()
    record["cells"]["s1"]["profile"] = "multi"
    write_sealed(tmp_path / "p.json", record)
    (tmp_path / "w.toml").write_text(window_text(schedule="C/X/C", repeats="6", cells=USE + EXPECT))
    with pytest.raises(SpecError, match="several requests at a time"):
        load_spec(tmp_path / "w.toml")


def test_an_edited_pilot_is_refused(tmp_path: Path) -> None:
    write_sealed(tmp_path / "p.json", pilot(passed=False))
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "p.json").write_text(text.replace("false", "true", 1))
    (tmp_path / "w.toml").write_text(window_text(schedule="C/X/C", repeats="6", cells=USE + EXPECT))
    with pytest.raises(SpecError, match="expect_identical"):
        load_spec(tmp_path / "w.toml")


# -- what the control starts show ------------------------------------------------------------------


def measured(plan: Plan) -> list[dict[str, Any]]:
    """A candidate that is 10 % faster in every pair, and streams that depend on the pair alone."""
    rows = values_of(plan)
    for row in rows:
        faster = 1.1 if row["start"] == "X" else 1.0
        row["values"]["decode_tok_s"] = {
            "value": 100.0 * faster + row["repeat"] + (0.1 if row["start"] == "C2" else 0.0)
            * (-1) ** row["repeat"],
            "unit": "tokens/s",
            "lower_is_better": False,
        }  # fmt: skip
        row["outputs"] = [f"{row['repeat']:064x}"]
        row["rounds"] = 40 + row["repeat"]
        row["prompt_sha256"] = PROMPT
    return rows


def other_output(row: dict[str, Any]) -> None:
    row["outputs"] = ["f" * 64]


def other_rounds(row: dict[str, Any]) -> None:
    row["rounds"] += 1


def no_rounds(row: dict[str, Any]) -> None:
    row["rounds"] = None


def no_output(row: dict[str, Any]) -> None:
    del row["outputs"]


def other_prompt(row: dict[str, Any]) -> None:
    row["prompt_sha256"] = "cd" * 32


def test_identical_control_starts_leave_the_verdict_to_the_pairs(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    outcome = conclude(plan, measured(plan))
    assert (outcome.status, outcome.exit_code) == ("CANDIDATE", 0)


def test_the_candidates_streams_may_differ(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    rows = measured(plan)
    other_output(next(row for row in rows if row["start"] == "X" and row["repeat"] == 2))
    assert conclude(plan, rows).status == "CANDIDATE"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (other_output, "pair 4 has different outputs in the two control starts"),
        (other_rounds, "pair 4 has different round counts in the two control starts"),
        (no_rounds, "pair 4 does not tell its round counts in both control starts"),
        (no_output, "pair 4 does not tell its outputs in both control starts"),
    ],
)
def test_one_pair_that_differs_makes_it_inconclusive_with_the_reason(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str
) -> None:
    plan = planned(tmp_path)
    rows = measured(plan)
    change(next(row for row in rows if row["start"] == "C2" and row["repeat"] == 4))
    outcome = conclude(plan, rows)
    assert (outcome.status, outcome.exit_code) == ("INCONCLUSIVE", 10)
    assert f"s1: identical streams were expected: {told}" in outcome.notes
    (decision,) = outcome.decisions.values()
    assert "identical token streams" in decision["cells"]["s1"]["reason"]


def test_another_prompt_than_the_pilots_is_inconclusive(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    rows = measured(plan)
    for row in rows:
        other_prompt(row)
    outcome = conclude(plan, rows)
    assert outcome.status == "INCONCLUSIVE"
    assert any("another prompt than the A/A pilot" in note for note in outcome.notes)


def test_a_plan_read_back_decides_the_same(tmp_path: Path) -> None:
    plan = Plan.from_json(json.loads(json.dumps(planned(tmp_path).to_json())))
    (tmp_path / "p.json").unlink()
    rows = measured(plan)
    other_output(next(row for row in rows if row["start"] == "C1" and row["repeat"] == 0))
    assert conclude(plan, rows).status == "INCONCLUSIVE"
