"""A faster candidate that answers otherwise is rejected; a faster one that is the same is not."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from .running import Ended, assert_ended_well, run

EXAMPLES = Path(__file__).parents[2] / "pytest_dsv41" / "window" / "examples"


def window(folder: Path, *changes: tuple[str, str]) -> str:
    """The shipped window with some of its text replaced."""
    text = (EXAMPLES / "demo-quality.toml").read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    shutil.copy(EXAMPLES / "demo-quality.band.json", folder)
    (folder / "quality.toml").write_text(text, "utf-8")
    return str(folder / "quality.toml")


def speed(ended: Ended) -> str:
    verdict: str = ended.summary["decisions"]["fast"]["cells"]["decode-b1"]["verdict"]
    return verdict


@pytest.mark.slow
def test_faster_and_another_model_is_not_a_candidate_and_every_report_names_it(
    tmp_path: Path,
) -> None:
    ended = run(tmp_path, window="demo-quality")
    assert ended.returncode == 11, ended.output
    assert_ended_well(ended)
    assert speed(ended) == "WIN"
    decision = ended.summary["decisions"]["fast"]
    assert (decision["verdict"], decision["speed_verdict"]) == ("NOT A CANDIDATE", "CANDIDATE")
    quality = decision["cells"]["same-model"]
    assert quality["verdict"] == "LOSS"
    assert quality["gate"]["mean_kl"] > quality["gate"]["kl_ceiling"] > 0
    assert ended.summary["promotion"] is None
    assert re.search(r"quality fast +LOSS in same-model: mean KL", ended.output)
    junit = (ended.folder / "junit.xml").read_text("utf-8")
    assert 'name="quality.fast.same-model" value="LOSS: mean KL' in junit
    html = (ended.folder / "report.html").read_text("utf-8")
    assert "NOT A CANDIDATE by quality (LOSS in same-model)" in html
    assert 'Quality of fast</b><span class="bad">LOSS</span> in same-model' in html
    tests = re.search(r"<h2>same-model.*?</table>", html, re.DOTALL)
    assert tests is not None
    assert "64 positions, by a band of 3 comparisons" in tests[0]
    assert tests[0].count('<b class="bad">LOSS</b>') >= 1
    # What was probed is kept with the band that judged it, and nothing of it is text.
    kept = sorted(path.name for path in (ended.folder / "quality").iterdir())
    assert kept == [
        "I1-same-model-r0.probe.json",
        "K1-same-model-r0.probe.json",
        "K2-same-model-r0.probe.json",
        "same-model.band.json",
    ]
    probe = json.loads((ended.folder / "quality" / kept[0]).read_text("utf-8"))
    assert (probe["role"], len(probe["positions"])) == ("candidate", 64)


@pytest.mark.slow
def test_faster_and_the_same_model_is_a_candidate(tmp_path: Path) -> None:
    ended = run(tmp_path, window=window(tmp_path, (', "--perturb", "0.3"', "")))
    assert ended.returncode == 0, ended.output
    assert_ended_well(ended)
    assert speed(ended) == "WIN"
    quality = ended.summary["decisions"]["fast"]["cells"]["same-model"]
    assert (quality["verdict"], quality["gate"]["mean_kl"]) == ("PASS", 0.0)
    assert ended.summary["promotion"]["arm"] == "fast"


@pytest.mark.slow
def test_a_candidate_whose_answers_cannot_be_trusted_leaves_the_window_incomplete(
    tmp_path: Path,
) -> None:
    broken = '"--perturb", "0.3", "--fault", "logprobs=zeros"'
    ended = run(tmp_path, window=window(tmp_path, ('"--perturb", "0.3"', broken)))
    assert ended.returncode == 12, ended.output
    assert_ended_well(ended)
    (told, again) = ended.summary["incomplete"]
    assert told.startswith("I1-same-model-r0 refused: all-zero: dist-short-01, ")
    assert again.startswith("arm fast: same-model not judged: I1-same-model-r0: ")
    assert ended.summary["promotion"] is None


@pytest.mark.slow
def test_a_folder_inside_a_git_work_tree_is_told_before_anything_is_touched(
    tmp_path: Path,
) -> None:
    (tmp_path / ".git").mkdir()
    ended = run(tmp_path, window="demo-quality")
    assert ended.returncode == 4
    assert "inside the git work tree" in ended.output
    assert not [path for path in tmp_path.iterdir() if "-W-" in path.name]
