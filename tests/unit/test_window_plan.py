"""The plan: its digest, its way through JSON, its times, and what it says it can show."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from window_values import CELLS, plan_of, window_text

from pytest_dsv41.errors import SpecError, UsageError
from pytest_dsv41.window.plan import KnownSpread, Plan, describe_plan, make_plan, render_plan
from pytest_dsv41.window.spec import example_names, load_spec


def through_json(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(plan.to_json()))
    return data


@pytest.mark.parametrize("name", example_names())
def test_a_plan_survives_json(name: str) -> None:
    spec = load_spec(name, environ={"LLAMA_SERVER": "s", "LLAMA_MODEL": "m"})
    quality = {use.name: {"kind": "quality", "estimated_s": 1.0} for use in spec.quality}
    plan = make_plan(spec, {**CELLS, **quality}, window_id="A-W-1")
    again = Plan.from_json(through_json(plan))
    assert again == plan
    assert again.window == plan.window


def test_an_arms_environment_values_are_in_no_plan_that_is_written(tmp_path: Path) -> None:
    def with_env(value: str) -> Plan:
        text = window_text().replace("[arms.c1]", f"[arms.c1]\nenv = {{KEY = {json.dumps(value)}}}")
        return plan_of(tmp_path, text)

    plan = with_env("canary-7f3a")
    assert plan.spec["arms"][1]["env"] == {"KEY": "canary-7f3a"}
    for written in (plan.to_json(), describe_plan(plan)):
        assert "canary" not in json.dumps(written)
        hashed = f"sha256:{hashlib.sha256(b'canary-7f3a').hexdigest()}"
        assert written["spec"]["arms"][1]["env"] == {"KEY": hashed}
    again = Plan.from_json(through_json(plan))
    assert again.digest == plan.digest
    assert through_json(again) == through_json(plan)
    # Another value is another plan.
    assert with_env("canary-7f3b").digest != plan.digest


def test_the_digest_holds_what_matters_and_nothing_else(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    file = tmp_path / "w.toml"

    def digest(text: str = "", window_id: str = plan.window_id, **options: Any) -> str:
        file.write_text(text or window_text())
        spec = load_spec(file, seed=plan.seed)
        return make_plan(spec, options.get("cells", CELLS), window_id=window_id).digest

    assert len(plan.digest) == 64
    same = window_text().replace('hypothesis = "h"', 'hypothesis = "other words"')
    same = same.replace('name = "prefill-b1"', 'name = "prefill-b1"\nestimated_s = 9')
    slow = {name: {**cell, "estimated_s": 99.0} for name, cell in CELLS.items()}
    assert digest(same, window_id="L-w-W-2", cells=slow) == plan.digest
    for text in (
        window_text(repeats="4"),
        window_text(more='pairing = "none"'),
        window_text().replace('"ms_per_round"', '"decode_tok_s"'),
        window_text().replace("[arms.control]", "[limits]\nitem_s = 1\n[arms.control]"),
        window_text(target='kind = "local"\ncommand = ["other"]'),
    ):
        assert digest(text) != plan.digest
    other = {**CELLS, "decode-b1": {**CELLS["decode-b1"], "max_tokens": 97}}
    assert digest(cells=other) != plan.digest


def test_the_seed_is_the_given_one_else_the_files_else_made_from_the_id(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(window_text(more="seed = 5"))
    with_seed = load_spec(tmp_path / "w.toml")
    assert make_plan(with_seed, CELLS, window_id="a").seed == 5
    assert make_plan(with_seed, CELLS, window_id="a", seed=6).seed == 6
    (tmp_path / "w.toml").write_text(window_text())
    without = load_spec(tmp_path / "w.toml")
    seeds = {make_plan(without, CELLS, window_id=f"W-{n}").seed for n in range(50)}
    assert len(seeds) == 50
    assert all(0 <= seed < 2**31 for seed in seeds)
    # The first four bytes of the id's sha256, halved.
    expected = int(hashlib.sha256(b"W-0").hexdigest()[:8], 16) // 2
    assert make_plan(without, CELLS, window_id="W-0").seed == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("items"),
        lambda data: data.pop("digest"),
        lambda data: data["items"].reverse(),
        lambda data: data["items"].pop(),
        lambda data: data["items"][0].update(decision=False),
        lambda data: data["items"][0].update(extra=1),
        lambda data: data["spec"].update(pairing="none"),
        lambda data: data["spec"].update(unknown=1),
        lambda data: data["spec"]["cells"][0].update(primary="decode_tok_s"),
        lambda data: data["cells"].clear(),
        lambda data: data.update(seed="5"),
        lambda data: data.update(seed=data["seed"] + 1),
        lambda data: data.update(cells=None),
        lambda data: data.update(starts=3),
        lambda data: data.update(schema="dsv41-plan-v0"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(tmp_path: Path, damage: Any) -> None:
    data = through_json(plan_of(tmp_path))
    damage(data)
    with pytest.raises(UsageError) as caught:
        Plan.from_json(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [None, [], "x", 3, {}])
def test_what_is_no_plan_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match=r"no plan of schema dsv41-plan-v1, but"):
        Plan.from_json(data)


def test_an_unknown_cell_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(window_text().replace('"prefill-b1"', '"prefil-b1"'))
    with pytest.raises(SpecError) as caught:
        make_plan(load_spec(tmp_path / "w.toml"), CELLS, window_id="a")
    assert str(caught.value) == (
        f"{tmp_path}/w.toml:18: cells[1].name: unknown cell 'prefil-b1'; did you mean "
        "'prefill-b1'?; valid: decode-b1, decode-b2, decode-b3, prefill-b1, short-b1"
    )


def test_times_add_up(tmp_path: Path) -> None:
    text = window_text(more="start_estimate_s = 5") + "[limits]\nwatch_s = 60\n"
    plan = plan_of(tmp_path, text)
    estimate = plan.estimate
    # 12 decode items of 0.5 s, 12 prefill items of 0.25 s, 4 starts of 5 s
    assert estimate.items_s == pytest.approx(9.0)
    assert estimate.starts_s == pytest.approx(20.0)
    assert estimate.down_s == pytest.approx(29.0)
    assert estimate.total_s == pytest.approx(89.0)
    # 3 x 9 s, one item of 120 s, 4 starts of 600 + 60 + 60 s
    assert estimate.window_s == pytest.approx(27 + 120 + 4 * 720)
    assert describe_plan(plan)["minutes"] == {
        "total": 1.48,
        "items": 0.15,
        "starts": 0.33,
        "seam": 0.0,
        "watch": 1.0,
        "production_down": 0.48,
        "deadline": 50.45,
    }


def test_the_files_estimate_wins_over_what_is_known_over_the_cells_own(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(window_text().rstrip() + "\n")
    spec = load_spec(tmp_path / "w.toml")
    known = {"decode-b1": 4.0, "prefill-b1": 1.0}
    assert make_plan(spec, CELLS, window_id="a", estimates=known).estimates == known
    text = window_text().replace('name = "prefill-b1"', 'name = "prefill-b1"\nestimated_s = 7')
    (tmp_path / "w.toml").write_text(text)
    spec = load_spec(tmp_path / "w.toml")
    assert make_plan(spec, CELLS, window_id="a", estimates=known).estimates == {
        "decode-b1": 4.0,
        "prefill-b1": 7.0,
    }


def test_servers_that_run_already_are_never_down_and_not_watched(tmp_path: Path) -> None:
    estimate = plan_of(tmp_path, window_text(target='kind = "endpoints"')).estimate
    assert (estimate.down_s, estimate.watch_s, estimate.starts_s) == (0.0, 0.0, 0.0)
    assert estimate.total_s == estimate.items_s


def test_a_limit_of_the_window_wins_over_the_computed_one(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text() + "[limits]\nwindow_s = 77\n")
    assert plan.estimate.window_s == 77.0


def design(plan: Plan, cv: float | None = None, cell: str = "decode-b1") -> dict[str, Any]:
    rows = describe_plan(plan, spreads=lambda _cell, _metric: KnownSpread(cv))["designs"]
    found: dict[str, Any] = next(row for row in rows if row["cell"] == cell)
    return found


def test_six_pairs_can_reach_two_in_sixty_four(tmp_path: Path) -> None:
    row = design(plan_of(tmp_path))
    assert (row["design"], row["least_p"], row["half_width"]) == ("pairs:6", 2 / 2**6, None)
    assert row["notes"] == []


def test_the_half_width_comes_from_the_archives_spread(tmp_path: Path) -> None:
    # RULES section 3: short-b1 at 2.55 % gives 3.785 % at 6 pairs, counted with the plain cv.
    row = design(plan_of(tmp_path), cv=0.0255)
    assert row["half_width"] == pytest.approx(0.03785, abs=5e-6)
    unpaired = plan_of(tmp_path, window_text(schedule="C/X/C", repeats="{control = 2, c1 = 3}"))
    expected = stats.t.ppf(0.975, 5) * 0.02 * math.sqrt(1 / 4 + 1 / 3)
    assert design(unpaired, cv=0.02)["half_width"] == pytest.approx(expected)
    bracket = plan_of(tmp_path, window_text(schedule="C/X/C", more='pairing = "bracket"'))
    expected = stats.t.ppf(0.975, 2) * 0.02 * math.sqrt(1.5 / 3)
    assert design(bracket, cv=0.02)["half_width"] == pytest.approx(expected)


def test_few_unpaired_controls_are_named_with_the_power_they_cost(tmp_path: Path) -> None:
    three = plan_of(tmp_path, window_text(schedule="X/C", repeats="3"))
    (note,) = design(three)["notes"]
    assert note == (
        "3 control repeats, unpaired; 4 are advised: at a spread of 2 % a true 5 % gain is found "
        "45.1 % of the time (62.1 % at 4 v 3), a true 3 % gain 17.3 % (26.4 %), a true 5 % loss "
        "41.6 % (53.3 %)"
    )
    more = plan_of(tmp_path, window_text(schedule="X/C", repeats="{control = 3, c1 = 5}"))
    assert design(more)["notes"] == ["3 control repeats, unpaired; 4 are advised for power"]
    four = plan_of(tmp_path, window_text(schedule="X/C", repeats="{control = 4, c1 = 3}"))
    assert design(four)["notes"] == []
    assert design(three, cell="prefill-b1")["notes"] == []


def test_a_shared_bracket_is_named(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, window_text(schedule="C/X/C/X/C", more='pairing = "bracket"'))
    (note,) = design(plan)["notes"]
    assert "stands in two brackets" in note


def test_the_printed_plan_is_plain_and_names_what_runs(tmp_path: Path) -> None:
    text = render_plan(plan_of(tmp_path), spreads=lambda _cell, _metric: KnownSpread(0.0255))
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith("\n")
    assert "\x1b" not in text
    for line in (
        "window L-w-W-20261101T000000Z",
        "  1. K1  control 'control', 3 repeats a cell, 6 items",
        "  decode-b1  decides, single, about 0.5 s a repeat",
        "    primary ms_per_round, guards accepted_per_round",
        "    primary ttft_ms, guards none",
        "production down: about 9 s and the starts",
    ):
        assert line in text.splitlines()
    joined = " ".join(text.split())
    assert "decode-b1: 6 pairs; the least p a sign flip of them can reach is 0.031" in joined
    assert "resolves ms_per_round to ±3.78 % (archive spread 2.55 %)" in joined
    assert "starts not estimated (up to 600 s each)" in joined


def test_hostile_texts_reach_no_terminal(tmp_path: Path) -> None:
    text = window_text().replace('"h"', '"a\\u001b[31mred\\nnext ' + "long " * 50 + '"')
    shown = render_plan(plan_of(tmp_path, text))
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_long_schedule_is_cut(tmp_path: Path) -> None:
    text = window_text(schedule="/".join(["K/I"] * 100), repeats="1")
    shown = render_plan(plan_of(tmp_path, text))
    assert "  … and 160 more" in shown.splitlines()
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("name", ["demo", "demo-null", "demo-loss", "demo-tiny"])
def test_the_shipped_demonstrations_fit_into_their_time(name: str) -> None:
    plan = make_plan(load_spec(name), CELLS, window_id="a")
    assert plan.estimate.total_s < (5 if name == "demo-tiny" else 60)
