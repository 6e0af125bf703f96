"""A plan's minutes come from what the campaign's earlier windows took."""

from __future__ import annotations

from pathlib import Path

from pytest_dsv41.durable import append_json_line
from pytest_dsv41.lifecycle.durations import known_seconds
from pytest_dsv41.lifecycle.journal import Journal
from pytest_dsv41.lifecycle.record import register_window


def earlier(campaign: Path, name: str, *seconds: float, **changes: object) -> None:
    folder = campaign / name
    folder.mkdir()
    register_window(campaign, name, folder)
    Journal(folder).note("window", "begin")
    for took in seconds:
        row = {"cell": "short-b1", "outcome": "measured", "max_tokens": 512, "duration_s": took}
        append_json_line(folder / "values.jsonl", {**row, **changes})


def test_the_median_over_windows_is_of_measured_items_of_the_same_length(tmp_path: Path) -> None:
    assert known_seconds(tmp_path / "none", {"short-b1": 512}) == {}
    earlier(tmp_path, "a", 9.0, 11.0, 30.0)
    earlier(tmp_path, "b", 10.0, 12.0)
    earlier(tmp_path, "longer", 99.0, 99.0, 99.0, max_tokens=1500)
    earlier(tmp_path, "failed", 0.1, 0.1, 0.1, outcome="failed")
    earlier(tmp_path, "odd", -1.0, duration_s=None)
    earlier(tmp_path, "other", 1.0, cell="32k-b1")
    assert known_seconds(tmp_path, {"short-b1": 512, "32k-b2": 512}) == {"short-b1": 11.0}


def test_only_the_newest_windows_count(tmp_path: Path) -> None:
    for number in range(25):
        earlier(tmp_path, f"w{number:02}", 100.0 if number < 13 else 5.0)
    assert known_seconds(tmp_path, {"short-b1": 512}) == {"short-b1": 5.0}
