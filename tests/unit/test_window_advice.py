"""Registered advice: refused by name, frozen before the first start, shown, and never deciding."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize
import scipy.special
import scipy.stats
from window_values import CELLS, PROMPT, plan_of, values_of, window_text

from pytest_dsv41.archive import archive_append
from pytest_dsv41.cli import main
from pytest_dsv41.errors import SpecError
from pytest_dsv41.window import spec as module
from pytest_dsv41.window.advice import freeze_prior, read_prior
from pytest_dsv41.window.plan import Plan, make_plan, render_plan
from pytest_dsv41.window.spec import WindowSpec, load_spec
from pytest_dsv41.window.verdict import Outcome, conclude

COMMIT = "596ba1c" + "0" * 33
OTHER = "cd" * 32
SEEDED = {**CELLS["decode-b1"], "name": "seeded-b1", "seed_base": 1000}
MODERATED = "[advice]\nmoderated = true\n"


# -- an independent computation -------------------------------------------------------------------


def limma(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(s0², d0) by solving the trigamma equation with a root finder."""
    variances = [statistics.variance(group) / statistics.mean(group) ** 2 for group in groups]
    dfs = [len(group) - 1 for group in groups]
    e = [
        math.log(v) - float(scipy.special.digamma(d / 2)) + math.log(d / 2)
        for v, d in zip(variances, dfs, strict=True)
    ]
    trigamma = statistics.mean(float(scipy.special.polygamma(1, d / 2)) for d in dfs)
    v = statistics.variance(e) - trigamma
    if v <= 0:
        return math.exp(statistics.mean(e)), math.inf
    half = scipy.optimize.brentq(lambda x: float(scipy.special.polygamma(1, x)) - v, 1e-4, 1e6)
    shift = float(scipy.special.digamma(half)) - math.log(half)
    return math.exp(statistics.mean(e) + shift), 2 * half


def moderated_t(
    control: Sequence[float], candidate: Sequence[float], s0_squared: float, d0: float
) -> tuple[float, float]:
    """(t, df) of an unpaired cell where lower is better."""
    mean, df = statistics.mean(control), len(control) + len(candidate) - 2
    squares = (len(control) - 1) * statistics.variance(control)
    squares += (len(candidate) - 1) * statistics.variance(candidate)
    own, prior = squares / mean**2 / df, min(d0, 10.0)
    pooled = max((prior * s0_squared + df * own) / (prior + df), own)
    gain = (mean - statistics.mean(candidate)) / mean
    return gain / math.sqrt((1 / len(control) + 1 / len(candidate)) * pooled), prior + df


# -- what a window and its folder are here --------------------------------------------------------


def advised_text(advice: str = MODERATED, **options: Any) -> str:
    """C/X/C with four control and three candidate repeats, and advice."""
    given = {"schedule": "C/X/C", "repeats": "{C1 = 2, X = 3, C2 = 2}", **options}
    return window_text(**given).replace("[target]", f"{advice}[target]")


def archive_groups(
    archive: Path,
    *,
    metric: str = "ms_per_round",
    windows: int = 12,
    size: int = 4,
    level: float = 8.0,
    seed: int = 3,
    **changes: Any,
) -> list[list[float]]:
    """Append one start of `size` control repeats a window, of unequal spreads; their values."""
    draw = random.Random(seed)
    groups = []
    for number in range(windows):
        spread = 0.01 * draw.choice([0.5, 1.0, 2.0])
        groups.append([level * (1 + draw.gauss(0, spread)) for _ in range(size)])
        rows = [
            {
                "window": f"L-old{seed}-W-{number:02}",
                "cell": "decode-b1",
                "metric": metric,
                "value": value,
                "max_tokens": 96,
                "commit": COMMIT,
                "clock_cap_mhz": 2150,
                "clock_source": "start-log",
                "date": "20261001",
                "start": "C1",
                "repeat": repeat,
                "prompt_sha256": PROMPT,
                **changes,
            }
            for repeat, value in enumerate(groups[-1])
        ]
        # The file's order is no matter: a group is put into run order.
        archive_append(archive, rows[::-1])
    return groups


def opened(folder: Path, plan: Plan, archive: Path, *, cap: int = 2150) -> Path:
    """The folder as the window's opening and its starts leave it."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    sealed = freeze_prior(folder, plan, archive=archive, commit=COMMIT)
    lines: list[dict[str, Any]] = [{"step": "window", "event": "begin", "utc": "u", **sealed}]
    lines += [
        {"step": f"start:{start.name}", "event": "end", "utc": "u", "clock_cap_mhz": cap}
        for start in plan.starts
    ]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def with_values(
    plan: Plan, cell: str, metric: str, numbers: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """Values in which the named starts have these numbers, repeat by repeat."""
    rows = values_of(plan)
    for row in rows:
        if row["cell"] == cell and row["start"] in numbers:
            row["values"][metric]["value"] = numbers[row["start"]][row["repeat"]]
    return rows


# win2-v1's interval reaches zero; the archive's spread knows better.
CONTROL, CANDIDATE = [7.84, 8.16, 8.0, 8.0], [7.52, 7.88, 7.70]
WIDE = {"C1": CONTROL[:2], "X": CANDIDATE, "C2": CONTROL[2:]}


def concluded(folder: Path, plan: Plan, rows: Sequence[Mapping[str, Any]]) -> Outcome:
    return conclude(plan, rows, prior=read_prior(folder, plan))


def without_advice(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON, less everything that is advice."""
    found = outcome.to_json()
    del found["advisory"]
    for decision in found["decisions"].values():
        for cell in decision["cells"].values():
            cell.pop("advice", None)
    return found


# -- registered -----------------------------------------------------------------------------------


def load(folder: Path, text: str) -> WindowSpec:
    (folder / "w.toml").write_text(text)
    return load_spec(folder / "w.toml")


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as caught:
        make_plan(load(folder, text), {**CELLS, "seeded-b1": SEEDED}, window_id="L-w-W-1")
    return str(caught.value).removeprefix(f"{folder}/")


def test_advice_is_off_unless_it_is_registered(tmp_path: Path) -> None:
    assert not load(tmp_path, window_text()).advice.moderated
    assert not load(tmp_path, window_text()).advice.widened_aa
    plan = plan_of(tmp_path)
    assert freeze_prior(tmp_path, plan, archive=tmp_path / "none.jsonl", commit=COMMIT) == {}
    assert not (tmp_path / "prior.json").exists()
    assert read_prior(tmp_path, plan) is None
    assert conclude(plan, values_of(plan)).advisory == {}


def test_registered_advice_comes_back_from_the_plans_json(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, advised_text())
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again.window.advice.moderated
    assert again.digest == plan.digest != plan_of(tmp_path, advised_text("")).digest


def test_a_plan_from_before_advice_is_still_read(tmp_path: Path) -> None:
    old = plan_of(tmp_path).to_json()
    del old["spec"]["advice"]
    with pytest.raises(Exception, match="digest"):
        Plan.from_json(old)
    window = dict(old["spec"])
    assert not WindowSpec.model_validate(window).advice.moderated


SEEDED_CELL = '[[cells]]\nname = "seeded-b1"\ndecision = true\nprimary = "decode_tok_s"\n'
WIDENED = "[advice]\nwidened_aa = true\n"
START_SD = 'start_sd = {"seeded-b1/decode_tok_s" = 0.01}'
SIX = {"cells": SEEDED_CELL, "repeats": "6"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (advised_text("[advice]\nmoderate = true\n"), "advice.moderate: unknown key; did you mean"),
        (advised_text("[advice]\nmoderated = 1\n"), "advice.moderated: expected true or false"),
        (
            advised_text(cells='[[cells]]\nname = "decode-b1"\n'),
            "advice.moderated: needs a decision cell; a window of kind 'report' has none",
        ),
        (
            advised_text(WIDENED, cells='[[cells]]\nname = "decode-b1"\n'),
            "advice.widened_aa: needs a decision cell; a window of kind 'report' has none",
        ),
        (
            advised_text(repeats="3", more='pairing = "bracket"'),
            "advice.moderated: has no prior for pairing 'bracket'; valid: adjacent, none",
        ),
        (
            advised_text(**SIX),
            "advice.moderated: judges repeats, not seeded pairs; seeded: seeded-b1",
        ),
        (
            advised_text(WIDENED),
            "advice.widened_aa: needs a seeded decision cell; not seeded: decode-b1",
        ),
        (
            advised_text(WIDENED, schedule="C/X", more=START_SD, **SIX),
            "advice.widened_aa: needs a candidate start between two control starts (C/X/C), "
            "not 'C/X'",
        ),
        (
            advised_text(WIDENED, **SIX),
            "advice.widened_aa: needs the start spread of 'seeded-b1/decode_tok_s' in "
            "window.start_sd, a fraction",
        ),
    ],
)
def test_advice_that_cannot_apply_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    line = refusal(tmp_path, text)
    assert "\n" not in line
    key = told.partition(":")[0].removeprefix("advice.").partition(".")[0]
    number = next(n for n, one in enumerate(text.splitlines(), 1) if one.startswith(f"{key} ="))
    assert line.startswith(f"w.toml:{number}: {told}"), line


def test_the_page_and_the_schema_have_the_tables_keys() -> None:
    fields = module._Advice.model_fields
    page = (Path(__file__).parents[2] / "docs/window-file.md").read_text(encoding="utf-8")
    section = page.partition("\n## `[advice]`\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(fields)
    schema = json.loads((Path(module.__file__).parent / "schemas/window-v1.json").read_text())
    table = schema["properties"]["advice"]
    assert table["additionalProperties"] is False
    assert set(table["properties"]) == set(fields)
    assert not table["properties"]["moderated"]["default"]


# -- frozen ---------------------------------------------------------------------------------------


def test_the_prior_is_fitted_from_the_windows_own_definition_alone(tmp_path: Path) -> None:
    archive = tmp_path / "control-archive.jsonl"
    groups = archive_groups(archive)
    for seed, changes in enumerate(
        [
            {"commit": "ab" * 20},
            {"max_tokens": 512},
            {"cell": "short-b1"},
            {"metric": "ttft_ms"},
        ],
        start=10,
    ):
        archive_groups(archive, seed=seed, **changes)
    plan = plan_of(tmp_path, advised_text())
    folder = opened(tmp_path / "w", plan, archive)
    written = json.loads((folder / "prior.json").read_text())
    assert written["window_id"] == plan.window_id
    assert written["archive"]["rows"] == 5 * 12 * 4
    assert set(written["priors"]) == {"decode-b1/ms_per_round", "decode-b1/accepted_per_round"}
    assert written["priors"]["decode-b1/accepted_per_round"] == []
    (prior,) = written["priors"]["decode-b1/ms_per_round"]
    s0_squared, d0 = limma(groups)
    assert prior["s0_squared"] == pytest.approx(s0_squared, rel=1e-9)
    assert prior["d0"] == pytest.approx(d0, rel=1e-7)
    assert (prior["groups"], prior["paired"]) == (12, False)
    assert prior["definition"] == {
        "cell": "decode-b1",
        "metric": "ms_per_round",
        "max_tokens": 96,
        "clock_cap_mhz": 2150,
        "commit": COMMIT,
        "prompt_sha256": PROMPT,
    }


def test_pairs_take_the_spread_of_adjacent_control_differences(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    groups = archive_groups(archive, size=8)
    plan = plan_of(tmp_path, advised_text(schedule="K/I/K/I", repeats="3"))
    folder = opened(tmp_path / "w", plan, archive)
    (prior,) = json.loads((folder / "prior.json").read_text())["priors"]["decode-b1/ms_per_round"]
    differences = [[(b - a) / a for a, b in zip(g[::2], g[1::2], strict=True)] for g in groups]
    # Shifted to mean 1, so that their own variance is the relative one.
    shifted = [[1 + x - statistics.mean(pair) for x in pair] for pair in differences]
    s0_squared, d0 = limma(shifted)
    assert prior["paired"] is True
    assert prior["s0_squared"] == pytest.approx(s0_squared, rel=1e-9)
    assert prior["d0"] == ("infinite" if math.isinf(d0) else pytest.approx(d0, rel=1e-7))


def test_the_seal_is_the_sha256_of_the_canonical_json(tmp_path: Path) -> None:
    archive_groups(tmp_path / "a.jsonl")
    plan = plan_of(tmp_path, advised_text())
    folder = opened(tmp_path / "w", plan, tmp_path / "a.jsonl")
    written = json.loads((folder / "prior.json").read_text())
    seal = written.pop("sha256")
    text = json.dumps(written, sort_keys=True, separators=(",", ":"))
    assert seal == hashlib.sha256(text.encode()).hexdigest()
    begin = json.loads((folder / "journal.jsonl").read_text().splitlines()[0])
    assert begin["prior_sha256"] == seal


# -- given ----------------------------------------------------------------------------------------


def test_the_archives_spread_calls_a_win_that_the_verdict_does_not_change_to(
    tmp_path: Path,
) -> None:
    archive = tmp_path / "a.jsonl"
    groups = archive_groups(archive)
    archive_groups(archive, metric="accepted_per_round", level=1.2, seed=4)
    plan = plan_of(tmp_path, advised_text())
    rows = with_values(plan, "decode-b1", "ms_per_round", WIDE)
    outcome = concluded(opened(tmp_path / "w", plan, archive), plan, rows)
    assert (outcome.status, outcome.exit_code) == ("INCONCLUSIVE", 10)

    t, df = moderated_t(CONTROL, CANDIDATE, *limma(groups))
    p = float(scipy.stats.t.sf(t, df))
    assert p < 0.0165
    primary, guard = outcome.decisions["c1"]["cells"]["decode-b1"]["advice"]
    assert (primary["rule"], primary["decides"], primary["call"]) == (
        "win3-moderated",
        False,
        "WIN",
    )
    assert primary["t"] == pytest.approx(t, rel=1e-9)
    assert primary["df"] == pytest.approx(df, rel=1e-7)
    assert primary["p_win"] == pytest.approx(p, rel=1e-6)
    assert (guard["metric"], guard["call"]) == ("accepted_per_round", "INCONCLUSIVE")
    first, second = outcome.advisory["win3-moderated"]
    assert first == (
        f"decode-b1 ms per round: with the archive's spread: WIN (t {t:.2f} at {df:g} degrees of "
        f"freedom, one-sided p {p:.2g}); it decides nothing."
    )
    assert second.startswith("decode-b1 accepted per round: with the archive's spread: INCONCLUS")


@pytest.mark.parametrize("factor", [0.9, 0.97, 1.0, 1.03, 1.1])
def test_advice_changes_nothing_else(tmp_path: Path, factor: float) -> None:
    archive_groups(tmp_path / "a.jsonl")
    plan = plan_of(tmp_path, advised_text())
    rows = values_of(plan, {("c1", "ms_per_round"): factor}, noise=0.01)
    advised = concluded(opened(tmp_path / "w", plan, tmp_path / "a.jsonl"), plan, rows)
    plain = plan_of(tmp_path, advised_text(""))
    assert without_advice(advised) == without_advice(conclude(plain, rows))
    assert advised.advisory["win3-moderated"]


def test_the_prior_of_the_measured_prompt_and_clock_cap_is_used(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    archive_groups(archive, seed=5, prompt_sha256=OTHER)
    archive_groups(archive, seed=6, clock_cap_mhz=2300)
    groups = archive_groups(archive, seed=7)
    plan = plan_of(tmp_path, advised_text())
    rows = with_values(plan, "decode-b1", "ms_per_round", WIDE)
    folder = opened(tmp_path / "w", plan, archive)
    written = json.loads((folder / "prior.json").read_text())
    assert len(written["priors"]["decode-b1/ms_per_round"]) == 3
    outcome = concluded(folder, plan, rows)
    primary = outcome.decisions["c1"]["cells"]["decode-b1"]["advice"][0]
    assert primary["prior"]["s0_squared"] == pytest.approx(limma(groups)[0], rel=1e-9)
    assert primary["prior"]["definition"]["clock_cap_mhz"] == 2150

    foreign = opened(tmp_path / "v", plan, archive, cap=1)
    (line, _) = concluded(foreign, plan, rows).advisory["win3-moderated"]
    assert line == (
        "decode-b1 ms per round: with the archive's spread: no advice (the archive had no rows of "
        "this definition before the window)."
    )


def test_control_starts_at_two_clock_caps_have_no_prior(tmp_path: Path) -> None:
    archive_groups(tmp_path / "a.jsonl")
    plan = plan_of(tmp_path, advised_text())
    folder = opened(tmp_path / "w", plan, tmp_path / "a.jsonl")
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write('{"step": "start:C2", "event": "end", "clock_cap_mhz": 2300}\n')
    line = concluded(folder, plan, values_of(plan)).advisory["win3-moderated"][0]
    assert line.endswith("no advice (the control starts ran at 2 clock caps).")


@pytest.mark.parametrize("damage", ["missing", "broken", "small"])
def test_an_archive_without_a_prior_gives_no_advice_and_refuses_nothing(
    tmp_path: Path, damage: str
) -> None:
    archive = tmp_path / "a.jsonl"
    if damage != "missing":
        archive_groups(archive, windows=2)
    if damage == "broken":
        archive.write_bytes(archive.read_bytes().replace(b'"value":8', b'"value":7', 1))
    plan = plan_of(tmp_path, advised_text())
    rows = values_of(plan, {("c1", "ms_per_round"): 0.9})
    outcome = concluded(opened(tmp_path / "w", plan, archive), plan, rows)
    assert (outcome.status, outcome.exit_code) == ("CANDIDATE", 0)
    told = {
        "missing": "no advice (the archive had no rows of this definition before the window).",
        "broken": "no advice (the archive cannot be read: ",
        "small": "no advice (2 groups with a spread, at least 3 are needed for a prior).",
    }[damage]
    assert told in outcome.advisory["win3-moderated"][0]
    assert outcome.decisions["c1"]["cells"]["decode-b1"]["advice"][0]["call"] is None


def edited(folder: Path, change: str) -> None:
    """Change the frozen prior in one of the ways that must be noticed."""
    path = folder / "prior.json"
    content = json.loads(path.read_text())
    if change == "missing":
        path.unlink()
    elif change == "torn":
        path.write_text(path.read_text()[:40])
    elif change == "an array":
        path.write_text("[1]")
    elif change == "no journal":
        (folder / "journal.jsonl").unlink()
    else:
        content["priors"]["decode-b1/ms_per_round"][0]["s0_squared"] = 1e-9
        if change == "sealed again":
            del content["sha256"]
            text = json.dumps(content, sort_keys=True, separators=(",", ":"))
            content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("missing", "prior.json is missing"),
        ("torn", "prior.json is damaged: it is not used"),
        ("an array", "prior.json is damaged: it is not used"),
        ("a number", "prior.json was changed since the window was opened: its sha256 is "),
        ("sealed again", "prior.json was changed since the window was opened: its sha256 is "),
        ("no journal", "the journal has none; it is not used"),
    ],
)
def test_an_edited_prior_is_noticed_and_not_used(
    tmp_path: Path, change: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archive_groups(tmp_path / "a.jsonl")
    plan = plan_of(tmp_path, advised_text())
    rows = with_values(plan, "decode-b1", "ms_per_round", WIDE)
    folder = opened(tmp_path / "w", plan, tmp_path / "a.jsonl")
    (folder / "values.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = concluded(folder, plan, rows)
    edited(folder, change)
    after = concluded(folder, plan, rows)
    (line,) = after.advisory["win3-moderated"]
    assert line.startswith("no advice: ")
    assert told in line
    assert without_advice(after) == without_advice(before)

    assert main(["decide", str(folder)]) == 10
    assert f"win3-moderated (advisory): {line}" in capsys.readouterr().out


def test_decide_needs_the_folder_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "a.jsonl"
    archive_groups(archive)
    plan = plan_of(tmp_path, advised_text())
    rows = with_values(plan, "decode-b1", "ms_per_round", WIDE)
    folder = opened(tmp_path / "w", plan, archive)
    (folder / "values.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    frozen = (folder / "prior.json").read_bytes()
    line = concluded(folder, plan, rows).advisory["win3-moderated"][0]
    # What the archive learns later is of no account.
    archive_groups(archive, seed=99)
    moved = folder.rename(tmp_path / "moved")
    assert main(["decide", str(moved)]) == 10
    assert f"win3-moderated (advisory): {line}\n" in capsys.readouterr().out
    assert main(["decide", str(moved), "--json"]) == 10
    assert json.loads(capsys.readouterr().out)["advisory"]["win3-moderated"][0] == line
    assert (moved / "prior.json").read_bytes() == frozen


def test_an_incomplete_windows_advice_is_provisional(tmp_path: Path) -> None:
    archive_groups(tmp_path / "a.jsonl")
    plan = plan_of(tmp_path, advised_text())
    folder = opened(tmp_path / "w", plan, tmp_path / "a.jsonl")
    outcome = conclude(
        plan, values_of(plan), stopped="signal SIGTERM", prior=read_prior(folder, plan)
    )
    assert outcome.status == "INCOMPLETE"
    for line in outcome.advisory["win3-moderated"]:
        assert line.startswith("provisional, decode-b1 ")


def test_of_several_candidates_each_line_names_its_arm(tmp_path: Path) -> None:
    archive_groups(tmp_path / "a.jsonl")
    plan = plan_of(tmp_path, advised_text(schedule="C/X1/C/X2/C", repeats="3", candidates=2))
    folder = opened(tmp_path / "w", plan, tmp_path / "a.jsonl")
    lines = concluded(folder, plan, values_of(plan)).advisory["win3-moderated"]
    assert [line.partition(",")[0] for line in lines] == ["c1", "c1", "c2", "c2"]
    assert "no level is known for unpaired 9 v 3" in lines[0]


# -- the widened A/A ------------------------------------------------------------------------------


def seeded_plan(folder: Path) -> Plan:
    spec = load(folder, advised_text(WIDENED, more=START_SD, **SIX))
    return make_plan(spec, {"seeded-b1": SEEDED}, window_id="L-w-W-2")


FIRST, LAST = [100.0] * 6, [101.0, 102.0, 101.0, 102.0, 101.0, 102.0]


def seeded_values(plan: Plan, mine: Sequence[float]) -> list[dict[str, Any]]:
    rows = values_of(plan)
    numbers = {"C1": FIRST, "X": mine, "C2": LAST}
    for row in rows:
        row["values"]["decode_tok_s"] = {
            "value": numbers[row["start"]][row["repeat"]],
            "unit": "tok/s",
            "lower_is_better": False,
        }
    return rows


def test_the_widened_check_lets_starts_differ_by_the_registered_spread(tmp_path: Path) -> None:
    plan = seeded_plan(tmp_path)
    rows = seeded_values(plan, [110.0] * 6)
    outcome = conclude(plan, rows)
    (advice,) = outcome.decisions["c1"]["cells"]["seeded-b1"]["advice"]
    # e = .01 .02 …: mean .015, variance 3e-5; half = t · √(3e-5/6 + 2 · .01²) at 5 degrees.
    half = float(scipy.stats.t.ppf(0.975, 5)) * math.sqrt(3e-5 / 6 + 2e-4)
    assert (advice["rule"], advice["decides"], advice["metric"]) == (
        "widened-aa",
        False,
        "decode_tok_s",
    )
    assert (advice["low"], advice["high"]) == pytest.approx((0.015 - half, 0.015 + half))
    assert (advice["call"], advice["drift"]) == ("WIN", False)
    assert outcome.advisory == {
        "widened-aa": [
            "seeded-b1 decode tok/s: with the A/A interval widened by the registered start "
            "spread: WIN (no drift); it decides nothing."
        ]
    }
    assert outcome.status == "INCONCLUSIVE"
    spec = load(tmp_path, advised_text("", more=START_SD, **SIX))
    plain = make_plan(spec, {"seeded-b1": SEEDED}, window_id="L-w-W-2")
    assert without_advice(outcome) == without_advice(conclude(plain, rows))


def test_pairs_that_are_not_whole_get_no_widened_advice(tmp_path: Path) -> None:
    plan = seeded_plan(tmp_path)
    rows = [r for r in seeded_values(plan, [110.0] * 6) if r["item"] != "C2-seeded-b1-r5"]
    outcome = conclude(plan, rows)
    assert outcome.status == "INCOMPLETE"
    assert outcome.incomplete == [
        "C2-seeded-b1-r5 not measured",
        "arm c1: seeded-b1 / control C2: pairs [5] are not in every start",
    ]
    assert (outcome.decisions, outcome.advisory) == ({}, {})


def test_the_plan_says_what_is_registered(tmp_path: Path) -> None:
    assert "advice: win3-moderated; it decides nothing" in render_plan(
        plan_of(tmp_path, advised_text())
    )
    assert "advice:" not in render_plan(plan_of(tmp_path))
    assert "advice: widened-aa; it decides nothing" in render_plan(seeded_plan(tmp_path))
