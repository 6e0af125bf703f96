"""A quality cell in a window: its LOSS rejects whatever the speed, and without a verdict of it the
window is INCOMPLETE. Everything is judged from the window's folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from window_values import CELLS, plan_of, values_of, window_text

from pytest_dsv41.errors import SpecError, UsageError
from pytest_dsv41.quality.bands import Band, register_band, save_band
from pytest_dsv41.quality.kl import top20_kl
from pytest_dsv41.quality.probe import Conditions, Position, Probe, ProbedPrompt, save_probe
from pytest_dsv41.window.plan import Plan, make_plan, render_plan
from pytest_dsv41.window.quality import QualityVerdict, judge_quality, keep_band, probe_file
from pytest_dsv41.window.spec import load_spec
from pytest_dsv41.window.verdict import conclude

SURE = ((7, math.log(0.6)), (8, math.log(0.3)), (9, math.log(0.0999)))
OTHER = ((8, math.log(0.5)), (7, math.log(0.4)), (9, math.log(0.0999)))
PROMPTS = ("dist-short-01", "dist-short-02")


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def probe_of(run: str, *, other: int = 0, **more: Any) -> Probe:
    """A probe of 16 positions, of which the first `other` have another likeliest token."""
    positions = tuple(
        Position(name, 20 + n, sha(f"{name}{n}"), None, SURE) for name in PROMPTS for n in range(8)
    )
    changed = tuple(
        dataclasses.replace(one, top=OTHER) if n < other else one for n, one in enumerate(positions)
    )
    table: dict[str, Any] = {
        "schema": "dsv41-probe-1",
        "run": run,
        "role": "control",
        "band": None,
        "engine": "vllm",
        "version": "1",
        "model": "m",
        "top_n": 20,
        "conditions": Conditions(),
        "started_utc": "2026-11-01T00:00:00Z",
        "notes": (),
        "prompts": tuple(ProbedPrompt(name, "short", sha(name), 28) for name in PROMPTS),
        "positions": changed,
    }
    return Probe(**{**table, **more})


def band_of(*flips: int) -> Band:
    """A band of pairs, the second of each with so many other likeliest tokens."""
    pairs = [(probe_of(f"a{n}"), probe_of(f"b{n}", other=f)) for n, f in enumerate(flips)]
    return register_band(pairs)


QUALITY = '[[cells]]\nname = "same"\nrole = "quality"\nband = "band.json"\n'
FILE = {"kind": "quality", "estimated_s": 3.0}


class Window:
    """A window's folder with a registered band and the probes of its starts."""

    def __init__(self, folder: Path, *, schedule: str = "K/I/K/I", **text: Any) -> None:
        self.folder = folder
        self.band = band_of(0, 0, 0)
        self.seal = save_band(folder / "band.json", self.band)
        decides = '[[cells]]\nname = "decode-b1"\ndecision = true\nprimary = "ms_per_round"\n'
        text = {"cells": decides + QUALITY, "schedule": schedule, **text}
        (folder / "w.toml").write_text(window_text(**text))
        spec = load_spec(folder / "w.toml")
        self.plan = make_plan(spec, {**CELLS, "same": FILE}, window_id="L-w-W-20261101T000000Z")
        keep_band(folder, "same", folder / "band.json")
        self.rows = values_of(self.plan, {("c1", "ms_per_round"): 0.9, ("c2", "ms_per_round"): 0.9})
        for row in self.rows:
            if row["cell"] == "same":
                row["values"], row["max_tokens"] = {}, None

    def probed(self, item: str, *, other: int = 0, **more: Any) -> None:
        """An item's probe as the run leaves it."""
        planned = next(one for one in self.plan.items if one.id == item)
        if planned.arm != "control":
            more = {"role": "candidate", "band": self.seal, **more}
        probe = probe_of(f"run-{item}", other=other, **more)
        path = probe_file(self.folder, planned)
        path.unlink(missing_ok=True)
        save_probe(path, probe)
        row = next(row for row in self.rows if row["item"] == item)
        row["files"] = {"probe": {"file": path.name, "sha256": probe.sha256}}

    def probed_all(self, **other: int) -> None:
        for item in self.plan.items:
            if item.cell == "same":
                self.probed(item.id, other=other.get(item.start, 0))

    def judged(self, arm: str = "c1") -> QualityVerdict:
        (verdict,) = judge_quality(self.folder, self.plan, self.rows)[arm]
        return verdict

    def outcome(self, **options: Any) -> Any:
        quality = judge_quality(self.folder, self.plan, self.rows)
        return conclude(self.plan, self.rows, quality=quality, **options)


# -- what runs where -------------------------------------------------------------------------------


def test_the_probe_runs_in_each_arms_first_start_and_once_more_in_the_last_control(
    tmp_path: Path,
) -> None:
    plan = Window(tmp_path, schedule="C/X1/C/X2/C/X1", candidates=2).plan
    placed = [(item.start, item.decision) for item in plan.items if item.cell == "same"]
    assert placed == [("C1", True), ("X11", True), ("X2", True), ("C3", False)]
    for item in plan.items:
        after = [other for other in plan.items if other.index > item.index]
        if item.cell == "same":
            assert all(other.start != item.start for other in after)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_servers_that_take_turns_are_probed_after_all_repeats(tmp_path: Path) -> None:
    target = 'kind = "endpoints"\nengine = "vllm"'
    window = Window(tmp_path, schedule="K/I", more="interleave = true", target=target)
    assert [item.id for item in window.plan.items[-2:]] == ["K-same-r0", "I-same-r0"]
    assert all(item.cell == "decode-b1" for item in window.plan.items[:-2])
    window.probed_all(I=16)
    assert window.outcome().status == "NOT A CANDIDATE"


def test_the_plan_names_the_band_the_starts_and_the_cost(tmp_path: Path) -> None:
    window = Window(tmp_path)
    text = render_plan(window.plan)
    assert "same  quality, decides: subset short in K1, I1, K2, about 3 s each" in text
    assert window.seal[:12] in text


def test_the_digest_is_of_the_bands_seal_and_not_of_its_path(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = Window(tmp_path / "one").plan
    (tmp_path / "two" / "band.json").write_bytes((tmp_path / "one" / "band.json").read_bytes())
    (tmp_path / "two" / "w.toml").write_text((tmp_path / "one" / "w.toml").read_text())
    spec = load_spec(tmp_path / "two" / "w.toml")
    again = make_plan(spec, {**CELLS, "same": FILE}, window_id=one.window_id)
    assert again.digest == one.digest
    save_band(tmp_path / "two" / "other.json", band_of(1, 0, 0))
    (tmp_path / "two" / "other.json").rename(tmp_path / "two" / "band.json")
    spec = load_spec(tmp_path / "two" / "w.toml")
    other = make_plan(spec, {**CELLS, "same": FILE}, window_id=one.window_id)
    assert other.digest != one.digest


# -- verdicts --------------------------------------------------------------------------------------


def test_a_faster_candidate_that_is_the_same_is_a_candidate(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all()
    outcome = window.outcome()
    assert (outcome.status, outcome.exit_code) == ("CANDIDATE", 0)
    assert outcome.decisions["c1"]["cells"]["same"]["verdict"] == "PASS"
    assert "speed_verdict" not in outcome.decisions["c1"]
    assert outcome.promotion["cells"] == ["decode-b1"]


def test_a_faster_candidate_that_is_another_model_is_rejected_by_quality(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all(I1=2)
    outcome = window.outcome()
    assert (outcome.status, outcome.exit_code) == ("NOT A CANDIDATE", 11)
    assert outcome.promotion is None
    decision = outcome.decisions["c1"]
    assert (decision["verdict"], decision["speed_verdict"]) == ("NOT A CANDIDATE", "CANDIDATE")
    cell = decision["cells"]["same"]
    assert (cell["verdict"], cell["decides"], cell["series"]) == ("LOSS", True, [])
    # Two of 16 positions, each as far as these two lists are from each other.
    expected = 2 * top20_kl(SURE, OTHER).kl / 16
    assert cell["gate"]["mean_kl"] == pytest.approx(expected, rel=1e-12)
    assert f"mean KL {expected:.3g} is above the ceiling 1e-06" in cell["reason"]
    assert outcome.explanations["c1"][-1] == (
        "Window: NOT A CANDIDATE by quality (LOSS in same), whatever the speed, which alone gave "
        "CANDIDATE (decided by decode-b1)."
    )


def test_a_loss_rejects_in_every_profile(tmp_path: Path) -> None:
    cells = "".join(
        f'[[cells]]\nname = "{name}"\ndecision = true\nprimary = "ms_per_round"\n'
        for name in ("decode-b1", "decode-b2")
    )
    window = Window(tmp_path, cells=cells + QUALITY, more="by_profile = true")
    window.probed_all(I1=16)
    outcome = window.outcome()
    assert outcome.status == "NOT A CANDIDATE"
    groups = outcome.decisions["c1"]["groups"]
    assert {name: group["verdict"] for name, group in groups.items()} == {
        "single": "NOT A CANDIDATE",
        "multi": "NOT A CANDIDATE",
    }


def test_of_two_arms_only_the_one_that_lost_is_rejected(tmp_path: Path) -> None:
    window = Window(tmp_path, schedule="C/X1/C/X2", candidates=2)
    window.probed_all(X1=16)
    outcome = window.outcome()
    assert outcome.status == "CANDIDATE"
    assert outcome.promotion["arm"] == "c2"
    verdicts = {arm: one["verdict"] for arm, one in outcome.decisions.items()}
    assert verdicts == {"c1": "NOT A CANDIDATE", "c2": "CANDIDATE"}


def test_a_report_shows_the_verdict_and_decides_nothing(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all(I1=16)
    outcome = window.outcome(report_only=True)
    assert (outcome.status, outcome.exit_code) == ("COMPLETE", 0)
    cell = outcome.decisions["c1"]["cells"]["same"]
    assert (cell["verdict"], cell["decides"]) == ("LOSS", False)
    assert any("quality LOSS" in line and "decides nothing" in line
               for line in outcome.explanations["c1"])  # fmt: skip


def test_a_slower_candidate_that_is_the_same_still_loses(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all()
    window.rows = [
        row if row["cell"] == "same" else rescaled
        for row, rescaled in zip(
            window.rows, values_of(window.plan, {("c1", "ms_per_round"): 1.2}), strict=True
        )
    ]
    assert window.outcome().status == "NOT A CANDIDATE"


def test_the_windows_own_aa_outside_the_band_is_said_and_changes_nothing(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all(K2=16)
    outcome = window.outcome()
    assert outcome.status == "CANDIDATE"
    (note,) = [note for note in outcome.notes if "own A/A" in note]
    assert "(K1 against K2) is outside the band too" in note


# -- what is no verdict ----------------------------------------------------------------------------


def test_a_refused_probe_makes_the_window_incomplete(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all()
    row = next(row for row in window.rows if row["item"] == "I1-same-r0")
    row |= {"outcome": "refused", "kind": "duplicate-id", "reason": "token 7 is listed twice"}
    outcome = window.outcome()
    assert (outcome.status, outcome.exit_code) == ("INCOMPLETE", 12)
    assert outcome.incomplete == [
        "I1-same-r0 refused: duplicate-id: token 7 is listed twice",
        "arm c1: same not judged: I1-same-r0: token 7 is listed twice",
    ]
    assert outcome.decisions["c1"]["provisional"] is True


def test_a_refused_probe_of_the_last_control_stops_nothing(tmp_path: Path) -> None:
    window = Window(tmp_path)
    window.probed_all()
    row = next(row for row in window.rows if row["item"] == "K2-same-r0")
    row |= {"outcome": "refused", "kind": "nan", "reason": "token 7 has nan"}
    outcome = window.outcome()
    assert outcome.status == "CANDIDATE"
    assert "K2-same-r0 refused: nan: token 7 has nan" in outcome.notes
    assert any("own A/A (K1 against K2) was not judged" in note for note in outcome.notes)


def _other_production(window: Window) -> None:
    window.probed("K1-same-r0", version="2")


def _late_band(window: Window) -> None:
    window.probed("I1-same-r0", band=None)


def _other_conditions(window: Window) -> None:
    window.probed("I1-same-r0", conditions=Conditions(cache="cold"))


def _edited_probe(window: Window) -> None:
    planned = next(item for item in window.plan.items if item.id == "I1-same-r0")
    path = probe_file(window.folder, planned)
    path.write_text(path.read_text().replace('"m"', '"n"'))


def _swapped_probe(window: Window) -> None:
    planned = next(item for item in window.plan.items if item.id == "I1-same-r0")
    path = probe_file(window.folder, planned)
    path.unlink()
    save_probe(path, probe_of("another", role="candidate", band=window.seal))


def _lost_probe(window: Window) -> None:
    planned = next(item for item in window.plan.items if item.id == "I1-same-r0")
    probe_file(window.folder, planned).unlink()


def _swapped_band(window: Window) -> None:
    path = window.folder / "quality" / "same.band.json"
    path.unlink()
    save_band(path, band_of(16, 16))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_other_production, "the band was gathered on vllm 1 m"),
        (_late_band, "names no band"),
        (_other_conditions, "the probe cold, alone"),
        (_edited_probe, "the probe was edited"),
        (_swapped_probe, "its probe is not the recorded one"),
        (_lost_probe, "No such file"),
        (_swapped_band, "is not the band of the plan"),
    ],
)
def test_what_cannot_be_judged_is_told_and_never_a_pass(
    damage: Any, told: str, tmp_path: Path
) -> None:
    window = Window(tmp_path)
    window.probed_all()
    damage(window)
    verdict = window.judged()
    assert verdict.verdict is None
    assert told in verdict.reason
    outcome = window.outcome()
    assert outcome.status == "INCOMPLETE"
    assert any("same not judged" in line for line in outcome.incomplete)


def test_a_window_whose_probes_were_not_looked_at_is_no_candidate(tmp_path: Path) -> None:
    window = Window(tmp_path)
    outcome = conclude(window.plan, window.rows)
    assert outcome.status == "INCOMPLETE"
    assert outcome.incomplete == ["arm c1: same not judged: its probes were not looked at"]


def test_the_folder_keeps_one_band(tmp_path: Path) -> None:
    window = Window(tmp_path)
    keep_band(tmp_path, "same", tmp_path / "band.json")
    save_band(tmp_path / "other.json", band_of(1))
    with pytest.raises(UsageError, match="another band lies there"):
        keep_band(window.folder, "same", tmp_path / "other.json")


# -- the file --------------------------------------------------------------------------------------

DECIDES = '[[cells]]\nname = "decode-b1"\ndecision = true\nprimary = "ms_per_round"\n'


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        (QUALITY + DECIDES, "stands after a quality cell"),
        (QUALITY, "only quality cells"),
        (DECIDES + QUALITY + QUALITY, "cell 'same' is listed twice"),
        (DECIDES + QUALITY.replace('"quality"', '"speed"'), "unknown value 'speed'"),
        (DECIDES + QUALITY + "decision = true\n", "unknown key"),
        (DECIDES + QUALITY.replace('band = "band.json"', ""), "band: missing"),
        (DECIDES + QUALITY.replace("band.json", "none.json"), "No such file"),
        (DECIDES + QUALITY.replace("band.json", "w.toml"), "no band: not JSON"),
        (DECIDES + QUALITY + 'subset = "32k"\n', "and the band covers 'short'"),
        (DECIDES + QUALITY + 'subset = "long"\n', "subset 'long': valid: short, 32k, 150k"),
    ],
)
def test_a_wrong_quality_cell_is_told_in_one_line(cells: str, told: str, tmp_path: Path) -> None:
    save_band(tmp_path / "band.json", band_of(0))
    (tmp_path / "w.toml").write_text(window_text(cells=cells))
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "w.toml")
    assert told in str(caught.value)
    assert str(caught.value).startswith("w.toml:") or "w.toml:" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_edited_band_is_refused_when_the_window_is_read(tmp_path: Path) -> None:
    save_band(tmp_path / "band.json", band_of(0))
    table = json.loads((tmp_path / "band.json").read_text())
    (tmp_path / "band.json").write_text(json.dumps({**table, "kl_ceiling": 9.0}))
    (tmp_path / "w.toml").write_text(window_text(cells=DECIDES + QUALITY))
    with pytest.raises(SpecError, match="the band was edited"):
        load_spec(tmp_path / "w.toml")


def test_a_variable_names_the_band(tmp_path: Path) -> None:
    seal = save_band(tmp_path / "band.json", band_of(0))
    cells = DECIDES + QUALITY.replace("band.json", "{band}.json")
    cells += '[variables.band]\ndefault = "band"\n'
    (tmp_path / "w.toml").write_text(window_text(cells=cells))
    (use,) = load_spec(tmp_path / "w.toml").quality
    assert (use.band_sha256, use.subset) == (seal, "short")


# -- the pilot's table -----------------------------------------------------------------------------


def test_one_table_plans_the_pilot_at_the_end_of_the_last_control_start(tmp_path: Path) -> None:
    text = window_text(schedule="C/X/C", repeats="2") + '[pilot]\nsubset = "short"\n'
    text = text.replace("decision = true\n", "").replace('guards = ["accepted_per_round"]\n', "")
    (tmp_path / "w.toml").write_text(text)
    pilot = {"kind": "pilot", "estimated_s": 500.0, "seam_s": 300.0}
    plan = make_plan(load_spec(tmp_path / "w.toml"), {**CELLS, "aa-pilot": pilot}, window_id="w")
    assert [item.id for item in plan.items if item.cell == "aa-pilot"] == ["C2-aa-pilot-r0"]
    assert plan.items[-1].id == "C2-aa-pilot-r0"
    assert not plan.items[-1].decision
    # Start B holds production back for longer; it is part of its time down.
    assert plan.estimate.seam_s == 300.0
    assert plan.estimate.down_s == pytest.approx(plan.estimate.items_s + 300.0)
    assert "start A in C2, about 8.3 min; start B on restored production" in render_plan(
        plan
    ).replace("\n    ", " ")


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('subset = "shorts"', "subset 'shorts': valid: short, 32k, 150k"),
        ("each = 0", "0 is not above 0"),
        ("bridge_sampling = { temprature = 1.0 }", "unknown key"),
        ("pairs = 6", "unknown key"),
    ],
)
def test_a_wrong_pilot_is_told_in_one_line(table: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(window_text() + f"[pilot]\n{table}\n")
    with pytest.raises(SpecError, match="pilot") as caught:
        load_spec(tmp_path / "w.toml")
    assert told in str(caught.value)


def test_the_pilot_needs_a_production_that_comes_back(tmp_path: Path) -> None:
    target = 'kind = "endpoints"\nengine = "vllm"'
    (tmp_path / "w.toml").write_text(window_text(target=target) + "[pilot]\n")
    with pytest.raises(SpecError, match="start B is the restored production"):
        load_spec(tmp_path / "w.toml")


def test_a_plan_without_them_is_what_it_was(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.window.pilot is None
    assert plan.window.quality == ()
    assert judge_quality(tmp_path, plan, []) == {}
