"""Advice through a whole window: frozen before production goes down, given again by everyone."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import scipy.optimize
import scipy.special
import scipy.stats

from pytest_dsv41.archive import archive_append
from pytest_dsv41.measure.corpus import find_prompt
from tests.lifecycle.running import Ended, assert_ended_well, run

TINY = Path(__file__).parents[2] / "pytest_dsv41/window/examples/demo-tiny.toml"
COMMIT = "596ba1c" + "0" * 33


def window(folder: Path) -> str:
    """demo-tiny as four control against three candidate repeats, with advice."""
    text = TINY.read_text()
    for old, new in (
        ('"K/I/K/I"', '"C/X/C"'),
        ("repeats = 2 ", "repeats = { C1 = 2, X = 3, C2 = 2 } "),
        ("[limits]", "[advice]\nmoderated = true\n\n[limits]"),
        ('kind = "local"', f'kind = "local"\ncommit = "{COMMIT}"'),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "w.toml").write_text(text)
    return str(folder / "w.toml")


def synthetic_archive(archive: Path) -> list[list[float]]:
    """Twenty earlier windows of the demo's definition; ms per round of each start."""
    draw = random.Random(7)
    groups = [[2.0 * (1 + draw.gauss(0, 0.01)) for _ in range(4)] for _ in range(20)]
    rows = [
        {
            "window": f"DEMO-earlier-W-{number:02}",
            "cell": "decode-b1",
            "metric": "ms_per_round",
            "value": value,
            "max_tokens": 96,
            "commit": COMMIT,
            "clock_cap_mhz": 1,
            "clock_source": "none",
            "date": "20261001",
            "start": "C1",
            "repeat": repeat,
            "prompt_sha256": find_prompt("demo-1").sha256,
        }
        for number, group in enumerate(groups)
        for repeat, value in enumerate(group)
    ]
    archive.parent.mkdir()
    archive_append(archive, rows)
    return groups


def expected(groups: list[list[float]], rows: list[dict[str, Any]]) -> tuple[float, float]:
    """(t, df), computed from the archive's groups and the window's values alone."""
    variances = [statistics.variance(group) / statistics.mean(group) ** 2 for group in groups]
    e = [math.log(v) - float(scipy.special.digamma(1.5)) + math.log(1.5) for v in variances]
    excess = statistics.variance(e) - float(scipy.special.polygamma(1, 1.5))
    s0_squared, d0 = math.exp(statistics.mean(e)), 10.0
    if excess > 0:
        half = scipy.optimize.brentq(
            lambda x: float(scipy.special.polygamma(1, x)) - excess, 1e-3, 1e6
        )
        s0_squared *= math.exp(float(scipy.special.digamma(half)) - math.log(half))
        d0 = min(d0, 2 * half)
    values: dict[str, list[float]] = {"control": [], "fast": []}
    for row in rows:
        values[row["arm"]].append(row["values"]["ms_per_round"]["value"])
    control, fast = values["control"], values["fast"]
    mean = statistics.mean(control)
    own = (3 * statistics.variance(control) + 2 * statistics.variance(fast)) / mean**2 / 5
    pooled = max((d0 * s0_squared + 5 * own) / (d0 + 5), own)
    return (1 - statistics.mean(fast) / mean) / math.sqrt((1 / 4 + 1 / 3) * pooled), d0 + 5


def decided(folder: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "decide", str(folder), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_a_window_with_advice_from_archive_to_decide(tmp_path: Path) -> None:
    groups = synthetic_archive(tmp_path / "out" / "control-archive.jsonl")
    ended = run(tmp_path / "out", window=window(tmp_path))
    assert_ended_well(ended)
    assert ended.returncode == 0, ended.output
    summary = ended.summary

    frozen = json.loads((ended.folder / "prior.json").read_text())
    seal = frozen.pop("sha256")
    canonical = json.dumps(frozen, sort_keys=True, separators=(",", ":"))
    assert seal == hashlib.sha256(canonical.encode()).hexdigest()
    first = ended.journal()[0]
    assert (first["step"], first["event"], first["prior_sha256"]) == ("window", "begin", seal)
    assert frozen["archive"]["rows"] == 80

    values = [json.loads(s) for s in (ended.folder / "values.jsonl").read_text().splitlines()]
    t, df = expected(groups, values)
    advice = summary["decisions"]["fast"]["cells"]["decode-b1"]["advice"][0]
    assert advice["t"] == pytest.approx(t, rel=1e-9)
    assert advice["df"] == pytest.approx(df, rel=1e-6)
    assert advice["p_win"] == pytest.approx(float(scipy.stats.t.sf(t, df)), rel=1e-6)
    assert advice["call"] == "WIN"

    line, guard = summary["advisory"]["win3-moderated"]
    assert line.startswith("decode-b1 ms per round: with the archive's spread: WIN (t ")
    assert guard == (
        "decode-b1 accepted per round: with the archive's spread: no advice (the archive had no "
        "rows of this definition before the window)."
    )
    assert "decode-b1 ms per round: with the archive's spread: WIN (t " in " ".join(
        ended.output.split()
    )
    page = (ended.folder / "report.html").read_text()
    assert "win3-moderated (advisory): decode-b1 ms per round: with the archive&#39;s" in page

    moved = Path(shutil.move(ended.folder, tmp_path / "moved"))
    shutil.rmtree(tmp_path / "out")
    code, again = decided(moved)
    assert (code, again["status"]) == (0, "CANDIDATE")
    assert again["advisory"] == summary["advisory"]
    assert again["decisions"] == summary["decisions"]

    text = (moved / "prior.json").read_text()
    (moved / "prior.json").write_text(text.replace('"rows":80', '"rows":81'))
    code, edited = decided(moved)
    assert (code, edited["status"]) == (0, "CANDIDATE")
    (told,) = edited["advisory"]["win3-moderated"]
    assert told.startswith("no advice: prior.json was changed since the window was opened")


@pytest.mark.slow
def test_the_keeper_gives_the_same_advice_without_an_archive_too(tmp_path: Path) -> None:
    ended: Ended = run(
        tmp_path / "out", window=window(tmp_path), at="cell:C2-decode-b1-r1", do="SIGKILL"
    )
    assert ended.summary["status"] == "INCOMPLETE"
    assert_ended_well(ended)
    line = ended.summary["advisory"]["win3-moderated"][0]
    assert line == (
        "provisional, decode-b1 ms per round: with the archive's spread: no advice (the archive "
        "had no rows of this definition before the window)."
    )
