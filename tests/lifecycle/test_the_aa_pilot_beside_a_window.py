"""The A/A pilot runs in the last control start and in the restore's seam, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.quality.bands import load_band

from .running import Ended, assert_ended_well, run

EXAMPLES = Path(__file__).parents[2] / "pytest_dsv41" / "window" / "examples"
PILOT = '[pilot]\ncells = ["seeded-demo-b1"]\nsubset = "short"\neach = 2\nbridge = false\n'


def window(folder: Path, *, production: str = "") -> str:
    """The smallest window with a pilot beside it."""
    text = (EXAMPLES / "demo-tiny.toml").read_text("utf-8") + f"\n{PILOT}"
    if production:
        head, mark, tail = text.rpartition('args = ["--round-ms", "2.0"]')
        assert mark
        text = f'{head}args = ["--round-ms", "2.0", {production}]{tail}'
    (folder / "pilot.toml").write_text(text, "utf-8")
    return str(folder / "pilot.toml")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = main(words)
    out = capsys.readouterr()
    return code, json.loads(out.out) if out.out.startswith("{") else out.out + out.err


def assert_in_the_seam(ended: Ended) -> None:
    steps = ended.steps()
    seam = [index for index, step in enumerate(steps) if step.startswith("restore-seam:")]
    assert steps.index("restore-check:end") < min(seam)
    assert max(seam) < steps.index("hold-close:begin")


@pytest.mark.slow
def test_one_table_runs_the_whole_pilot_and_its_records_feed_the_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = run(tmp_path, window=window(tmp_path))
    assert ended.returncode == 0, ended.output
    assert_ended_well(ended)
    assert_in_the_seam(ended)
    summary = ended.summary
    assert summary["restore"]["seam"] == "DONE"
    pilot = summary["pilot"]
    assert (pilot["status"], pilot["reasons"], pilot["expect_identical"]) == ("PASSED", [], True)
    assert pilot["distribution"]["positions"] == 16
    assert pilot["distribution"]["mean_kl"] == 0.0
    assert "A/A pilot" in ended.output
    assert "PASSED, reported only" in ended.output
    # The item stands behind the last control start's own cells.
    plan = json.loads((ended.folder / "plan.json").read_text("utf-8"))
    of_k2 = [item["cell"] for item in plan["items"] if item["start"] == "K2"]
    assert of_k2 == ["decode-b1", "decode-b1", "aa-pilot"]

    record = ended.folder / pilot["record"]
    known = json.loads(record.read_text("utf-8"))
    assert known["definition"]["commit"] == summary["production_commit"]
    code, answer = told(
        capsys, "resolution", "--cell", "seeded-demo-b1", "--metric", "decode_tok_s",
        "--design", "seeded:12", "--expected-gain", "0.5", "--diff-cv", str(record), "--json",
    )  # fmt: skip
    assert code == 0
    assert answer["diff_cv"] == pilot["diff_cv"]["seeded-demo-b1/decode_tok_s"]
    code, text = told(capsys, "aa-pilot", "accumulate", str(record))
    assert code == 0
    assert "1 pilot of one definition, 1 PASSED" in text
    probes = [str(ended.folder / "pilot" / f"{name}.probe.json") for name in "AB"]
    band = tmp_path / "band.json"
    code, text = told(capsys, "dist-gate", "band", *probes, "--out", str(band))
    assert code == 0, text
    assert load_band(band)[0].k == 1


@pytest.mark.slow
def test_a_pilot_that_fails_is_reported_and_changes_no_verdict(tmp_path: Path) -> None:
    # Production accepts fewer drafts than the control: the tokens are equal, the rounds are not.
    ended = run(tmp_path, window=window(tmp_path, production='"--acceptance", "0.4"'))
    assert ended.returncode == 0, ended.output
    assert_ended_well(ended)
    pilot = ended.summary["pilot"]
    assert (pilot["status"], pilot["expect_identical"]) == ("FAILED", False)
    assert "pairs have different round counts" in pilot["reasons"][0]
    assert ended.summary["status"] == "CANDIDATE"


@pytest.mark.slow
@pytest.mark.parametrize("do", ["SIGINT", "SIGINT,SIGINT"])
def test_who_wants_to_leave_ends_start_b_and_the_hold_goes(do: str, tmp_path: Path) -> None:
    ended = run(tmp_path, at="restore-seam:begin", do=do, window=window(tmp_path))
    assert ended.returncode == 0, ended.output
    assert_ended_well(ended)
    assert_in_the_seam(ended)
    assert ended.summary["restore"]["seam"].startswith("FAILED: ")
    assert "stop" in ended.summary["restore"]["seam"]
    assert ended.summary["pilot"]["reasons"] == ["start B was not run to its end"]
    assert not (ended.folder / "pilot" / "B.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "seam"),
    [
        ("restore-seam:begin", "FAILED: its process died"),
        ("restore-check:begin", "SKIPPED: only the window's own session runs it"),
    ],
)
def test_the_keeper_skips_start_b_and_says_so(at: str, seam: str, tmp_path: Path) -> None:
    ended = run(tmp_path, at=at, do="SIGKILL", window=window(tmp_path))
    assert_ended_well(ended)
    assert ended.summary["stopped"] == "the measuring process died"
    assert ended.summary["restore"]["seam"] == seam
    assert f"the measurement in the restore's seam: {seam}" in ended.summary["notes"]
    assert ended.summary["pilot"]["status"] == "INCOMPLETE"


@pytest.mark.slow
def test_a_window_that_is_stopped_gives_production_back_without_start_b(tmp_path: Path) -> None:
    ended = run(tmp_path, at="cell:I1-decode-b1-r1", do="SIGINT", window=window(tmp_path))
    assert ended.returncode == 12
    assert_ended_well(ended)
    assert ended.summary["restore"]["seam"] == "SKIPPED: the window was stopped"
    assert ended.summary["pilot"]["reasons"] == ["start A was not run to its end"]


@pytest.mark.slow
def test_a_pilot_whose_prompts_are_nowhere_is_told_before_anything_is_touched(
    tmp_path: Path,
) -> None:
    path = Path(window(tmp_path))
    path.write_text(path.read_text().replace('subset = "short"', 'subset = "32k"'))
    ended = run(tmp_path, window=str(path))
    assert ended.returncode == 4
    assert "pilot: prompt dist-32k-01: in no corpus" in ended.output
    assert not [found for found in tmp_path.iterdir() if "-W-" in found.name]
