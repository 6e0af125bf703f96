"""`dsv41 ab URL_A URL_B`: nothing but two URLs, and the known effect comes out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_dsv41.stub import Profile, spawn


def ab(folder: Path, *words: str) -> tuple[int, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "ab", *words],
        cwd=folder,
        env={**kept, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("candidate_ms", "code", "status"),
    [
        pytest.param(7.36, 0, "CANDIDATE", id="faster"),
        pytest.param(8.0, 10, "INCONCLUSIVE", id="same", marks=pytest.mark.slow),
        pytest.param(8.64, 11, "NOT A CANDIDATE", id="slower", marks=pytest.mark.slow),
    ],
)
def test_a_known_effect_of_8_percent_is_found(
    candidate_ms: float, code: int, status: str, tmp_path: Path
) -> None:
    one = Profile(round_ms=8.0, noise=0.003, seed=1)
    two = Profile(round_ms=candidate_ms, noise=0.003, seed=2)
    with spawn(one) as a, spawn(two) as b:
        returned, output = ab(tmp_path, a.url, b.url)
    assert returned == code, output
    (folder,) = (p for p in (tmp_path / "dsv41-windows").iterdir() if "-W-" in p.name)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == status
    assert summary["restore"]["status"] == "NOT NEEDED: production untouched"
    assert not (tmp_path / "dsv41-windows" / "HOLD").exists()
    rows = [json.loads(s) for s in (folder / "values.jsonl").read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["a", "b"] * 6


@pytest.mark.slow
def test_the_same_server_twice_is_inconclusive(tmp_path: Path) -> None:
    with spawn(Profile(round_ms=2.0, noise=0.003)) as server:
        returned, output = ab(tmp_path, server.url, server.url)
    assert returned == 10, output


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["127.0.0.1:8000", "http://127.0.0.1:1"], "URL_A"),
        (["http://127.0.0.1:99999", "http://127.0.0.1:1"], "URL_A"),
        (["http://u:p@127.0.0.1:1", "http://127.0.0.1:1"], "password"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1", "--repeats", "2"], "--repeats"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], part: str, tmp_path: Path) -> None:
    code, output = ab(tmp_path, *words)
    assert code == 4, output
    assert len(output.strip().splitlines()) == 1
    assert part in output


@pytest.mark.slow
def test_the_window_cap_holds_for_its_lane_too_and_can_be_overridden(tmp_path: Path) -> None:
    campaign = tmp_path / "dsv41-windows"
    campaign.mkdir()
    (campaign / "WINDOW-CAP.json").write_text('{"adopted_utc": "2026-10-26T00:00:00Z"}')
    for number in (1, 2):
        folder = campaign / f"AB-{number}-W-2026102{number + 6}T000000Z"
        folder.mkdir()
        (folder / "summary.json").write_text('{"status": "INCONCLUSIVE"}')
    with spawn(Profile(round_ms=2.0, noise=0.003)) as server:
        code, output = ab(tmp_path, server.url, server.url)
        assert code == 13, output
        assert "REFUSED: window cap: 2 counted window(s) of AB" in output
        code, output = ab(tmp_path, server.url, server.url, "--window-override", "a spare rack")
    assert code == 10, output
    assert "a spare rack" in output
