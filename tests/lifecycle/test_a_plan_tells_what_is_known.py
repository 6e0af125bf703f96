"""`--window-plan`: what the archive knows is told, live probes refuse, and nothing is touched."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from pytest_dsv41.archive import archive_append
from pytest_dsv41.decision_v2 import half_width
from pytest_dsv41.measure.corpus import find_prompt

from .running import command, environment


def plan(campaign: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(campaign, *words),
        cwd=campaign,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def archive(campaign: Path, **changes: object) -> None:
    """Two windows, each of two control repeats 2 % apart, whose means differ by 10 %."""
    archive_append(
        campaign / "control-archive.jsonl",
        [
            {
                "window": f"L-w{number}{sorted(changes)}",
                "cell": "decode-b1",
                "metric": "ms_per_round",
                "value": mean * factor,
                "max_tokens": 96,
                "commit": "a" * 40,
                "clock_cap_mhz": 1,
                "clock_source": "none",
                "date": "20261101",
                "start": "K1",
                "repeat": repeat,
                # The one prompt that the cell sends.
                "prompt_sha256": hashlib.sha256(find_prompt("demo-1").text.encode()).hexdigest(),
                **changes,
            }
            for number, mean in enumerate((2.0, 2.2))
            for repeat, factor in enumerate((0.99, 1.01))
        ],
    )


@pytest.mark.slow
def test_the_half_width_is_that_of_repeats_inside_a_window(tmp_path: Path) -> None:
    archive(tmp_path)
    archive(tmp_path, max_tokens=1500)
    done = plan(tmp_path, "--window-plan", "--json")
    assert done.returncode == 0, done.stdout
    (design,) = json.loads(done.stdout)["designs"]
    # The SD of two values that lie 2 % of their mean apart is 2 % / √2.
    assert design["archive_cv"] == pytest.approx(0.02 / 2**0.5)
    assert design["half_width"] == pytest.approx(half_width("pairs:4", cv=0.02 / 2**0.5))
    archive(tmp_path, commit="c" * 40)
    (design,) = json.loads(plan(tmp_path, "--window-plan", "--json").stdout)["designs"]
    assert (design["archive_cv"], design["half_width"]) == (None, None)
    (note,) = design["notes"]
    assert "rows of 2 definitions are never pooled; pick one by commit" in note


@pytest.mark.parametrize("held", [False, True])
def test_live_probes_say_what_would_refuse_and_touch_nothing(held: bool, tmp_path: Path) -> None:
    if held:
        (tmp_path / "HOLD").write_text('{"owner": "somebody-else"}')
    before = sorted(tmp_path.iterdir())
    done = plan(tmp_path, "--window-plan=live")
    assert done.returncode == (13 if held else 0), done.stdout
    said = "would be REFUSED: HOLD" if held else "nothing would refuse this window now"
    assert f"live probes: {said}" in done.stdout
    if held:
        assert "belongs to somebody-else" in done.stdout
    assert sorted(tmp_path.iterdir()) == before
