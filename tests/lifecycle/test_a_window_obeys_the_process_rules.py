"""`pytest --window` asks the window cap and the resolution filter before it touches anything."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .running import assert_ended_well, command, environment, run

TINY = Path(__file__).parents[2] / "pytest_dsv41/window/examples/demo-tiny.toml"
# Four pairs at 20 %: t(0.975, 3) = 3.1824 times 20 % over √4 is ±31.824 %.
TOO_WIDE = 'diff_cv = { "decode-b1/ms_per_round" = 0.2 }'


def refused_twice(campaign: Path) -> str:
    """A campaign whose cap refuses, and a window that its filter refuses."""
    campaign.mkdir()
    (campaign / "WINDOW-CAP.json").write_text('{"adopted_utc": "2026-10-26T00:00:00Z"}')
    for number in (1, 2):
        folder = campaign / f"DEMO-{number}-W-2026102{number + 6}T000000Z"
        folder.mkdir()
        (folder / "summary.json").write_text('{"status": "INCONCLUSIVE"}')
    window = campaign / "w.toml"
    window.write_text(TINY.read_text().replace("[window]", f"[window]\n{TOO_WIDE}"))
    return str(window)


def test_a_refusal_is_13_and_one_line_and_nothing_was_touched(tmp_path: Path) -> None:
    campaign = tmp_path / "campaign"
    ended = run(campaign, window=refused_twice(campaign))
    assert ended.returncode == 13, ended.output
    (line,) = (s for s in ended.output.splitlines() if s.startswith("REFUSED:"))
    assert line.startswith("REFUSED: window cap: 2 counted window(s) of DEMO since 2026-10-26")
    assert "resolution: decode-b1/ms_per_round, arm fast: pairs:4 resolves ±31.824 %" in line
    assert line.endswith(
        f"dsv41 window-cap DEMO --campaign {campaign}, or --window-override=REASON"
    )
    assert not (ended.folder / "journal.jsonl").exists()
    assert not (ended.folder / "log").exists()
    assert not (campaign / "HOLD").exists()
    rules = ended.summary["process_rules"]
    assert rules["window_cap"]["answer"] == "REFUSE"
    assert [one["answer"] for one in rules["resolution"]] == ["REFUSE"]
    assert ended.summary["status"] == "REFUSED"
    assert 'name="window_cap" value="REFUSE: 2 counted' in (ended.folder / "junit.xml").read_text()


@pytest.mark.parametrize("override", ["", "the cap is of another rack"])
def test_the_plan_says_what_the_rules_answer(tmp_path: Path, override: str) -> None:
    campaign = tmp_path / "campaign"
    window = refused_twice(campaign)
    words = ["--window-plan=live", *([f"--window-override={override}"] if override else [])]
    done = subprocess.run(
        command(campaign, *words, window=window),
        cwd=campaign,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if override else 13), done.stdout
    text = done.stdout[done.stdout.index("before it opens:") :]
    assert "  window cap: REFUSE: 2 counted window(s) of DEMO" in text
    assert "  resolution: decode-b1/ms_per_round, arm fast: REFUSE: pairs:4 resolves" in text
    assert (f"  overridden: {override}" in text) is bool(override)
    assert ("would be REFUSED: window cap: " in text) is not bool(override)


@pytest.mark.slow
def test_an_override_opens_it_and_plan_summary_and_junit_keep_the_reason(tmp_path: Path) -> None:
    campaign = tmp_path / "campaign"
    window = refused_twice(campaign)
    (campaign / "pytest.ini").write_text("[pytest]\nwindow_override = from ini\n")
    ended = run(campaign, "--window-override", "the cap is of another rack", window=window)
    assert ended.returncode == 0, ended.output
    assert_ended_well(ended)
    plan = json.loads((ended.folder / "plan.json").read_text())
    assert plan["spec"]["override"] == "the cap is of another rack"
    rules = ended.summary["process_rules"]
    assert rules["override"] == "the cap is of another rack"
    assert rules["window_cap"]["answer"] == "REFUSE"
    overridden = [one for one in ended.summary["notes"] if "the cap is of another rack" in one]
    assert len(overridden) == 2
    junit = (ended.folder / "junit.xml").read_text()
    assert 'name="override" value="the cap is of another rack"' in junit
    shown = " ".join(ended.output.split())
    assert "opened by override (the cap is of another rack) although window cap: 2" in shown
    # The cap still stands, and the reason in the ini file is a reason too.
    again = run(campaign, window=window)
    assert again.returncode == 0, again.output
    assert again.summary["process_rules"]["override"] == "from ini"
