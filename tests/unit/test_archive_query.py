"""Rows out of the archive: filters, CSV, JSON, Parquet, spreads, and the plot that names drift."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import threading
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.archive import archive_append, archive_head, archive_rows, archive_spread
from pytest_dsv41.archive.drift import Chart, chart, svg
from pytest_dsv41.archive.testing import example_row
from pytest_dsv41.cli import main
from pytest_dsv41.cli.archive import patience

HIDDEN = importlib.util.find_spec


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    rows = [
        example_row(i % 3, window=f"W{i // 3}", cell=cell, prompt_members=["9" * 64])
        | {"prompt_sha256": "9" * 64}
        for cell in ("short-b1", "=SUM(A1)")
        for i in range(6)
    ]
    archive_append(path, rows)
    return path


def test_head_is_a_checkpoint(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["archive", "head", str(archive)]) == 0
    assert json.loads(capsys.readouterr().out) == archive_head(archive).to_dict()
    assert main(["archive", "head", str(archive.with_name("none"))]) == 4
    assert "there is no such archive" in capsys.readouterr().err


def test_query_filters_and_writes_csv_json_and_lines(
    archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = ["archive", "query", str(archive), "--cell", "short-b1", "--window", "W1"]
    expected = archive_rows(archive)[3:6]
    assert main([*query, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main([*query, "--format", "jsonl", "--repeat", "1", "--repeat", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == expected[1:]
    assert main(query) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["repeat"] for row in table] == ["0", "1", "2"]
    assert table[0]["prompt_members"] == json.dumps(["9" * 64])
    assert table[0]["clock_caps_mhz"] == ""
    out = tmp_path / "rows.json"
    assert main(["archive", "query", str(archive), "--out", str(out), "--clock", "2300"]) == 0
    assert json.loads(out.read_text()) == []
    assert main(["archive", "query", str(archive), "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == archive_rows(archive)


def test_a_name_that_a_spreadsheet_would_run_is_quoted_in_csv(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["archive", "query", str(archive), "--cell", "=SUM(A1)", "--repeat", "0"])
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row["cell"] for row in table} == {"'=SUM(A1)"}


def test_parquet_without_a_library_is_one_clear_line_and_no_file(
    archive: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "pyarrow" else HIDDEN(name, *a),
    )
    out = tmp_path / "rows.parquet"
    assert main(["archive", "query", str(archive), "--out", str(out)]) == 4
    assert capsys.readouterr().err == (
        "dsv41 archive: Parquet needs pyarrow, which is not installed "
        "(pip install 'pytest-dsv41[parquet]'); valid without it: csv, json, jsonl\n"
    )
    assert not out.exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "parquet" in path.name) == []
    assert main(["archive", "query", str(archive), "--format", "parquet"]) == 4
    assert "needs --out FILE" in capsys.readouterr().err


def test_parquet_holds_the_rows(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows'.parquet"
    assert main(["archive", "query", str(archive), "--out", str(out)]) == 0
    parquet: Any = importlib.import_module("pyarrow.parquet")
    found = parquet.read_table(str(out)).to_pylist()
    assert [row["value"] for row in found] == [row["value"] for row in archive_rows(archive)]
    assert found[0]["prompt_members"] == json.dumps(["9" * 64])
    assert found[0]["clock_caps_mhz"] is None


def test_spread_prints_one_definition_a_paragraph(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive_append(archive, [example_row(i, window="W9", clock_cap_mhz=2300) for i in range(3)])
    command = ["archive", "spread", str(archive), "--cell", "short-b1", "--metric", "ms_per_round"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert out.count("CV of one repeat within a window") == 2
    assert main([*command, "--clock", "2300", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["clock_cap_mhz"], found["n"]) == (2300, 3)
    assert main([*command, "--clock", "1"]) == 0
    assert capsys.readouterr().out == "no such rows\n"


def drifting(path: Path, means: list[float]) -> Path:
    rows = [
        example_row(repeat, window=f"W{n:02}", value=mean + step)
        for n, mean in enumerate(means)
        for repeat, step in enumerate((-0.1, 0.1))
    ]
    archive_append(path, rows)
    return path


def charted(path: Path) -> Chart:
    days = {row["window"]: row["date"] for row in archive_rows(path)}
    return chart(archive_spread(path, "short-b1", "ms_per_round"), days)


STEADY = [50.0, 50.4, 49.8, 50.2, 49.9, 50.3, 49.7, 50.1]


@pytest.mark.parametrize(
    ("means", "named"),
    [
        (STEADY, []),
        ([*STEADY, 54.0], ["W08: 54 is above the limits"]),
        ([50.0, 50.1, 50.2, 50.3, 50.4, 50.5], ["windows in a row rising, by +1.00 %"]),
        ([50.5, 50.4, 50.3, 50.2, 50.1, 50.0], ["windows in a row falling, by -0.99 %"]),
        (
            [
                *(50.0 + 0.3 * (i % 2) for i in range(10)),
                *(51.2 + 0.3 * (i % 2) for i in range(10)),
            ],
            ["W00 to W09: 10 windows in a row below", "W10 to W19: 10 windows in a row above"],
        ),
        ([50.0, 60.0], []),
        ([50.0, 50.0, 50.0], []),
    ],
)
def test_drift_is_named_when_it_appears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], means: list[float], named: list[str]
) -> None:
    path = drifting(tmp_path / "a.jsonl", means)
    found = charted(path)
    text = " | ".join(found.drift)
    for part in named:
        assert part in text
    assert bool(found.drift) is bool(named)
    out = tmp_path / "plot.svg"
    command = ["archive", "plot", str(path), "--cell", "short-b1", "--metric", "ms_per_round"]
    assert main([*command, "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("DRIFT: ") == len(found.drift)
    page = ElementTree.fromstring(out.read_text())
    assert len(page.findall("{*}circle")) == len(means)


def test_the_limits_are_those_of_a_chart_of_individuals(tmp_path: Path) -> None:
    path = drifting(tmp_path / "a.jsonl", [10.0, 12.0, 11.0, 13.0])
    found = charted(path)
    # The moving ranges are 2, 1 and 2.
    assert found.centre == pytest.approx(11.5)
    assert found.high == pytest.approx(11.5 + 2.66 * 5 / 3)
    assert found.low == pytest.approx(11.5 - 2.66 * 5 / 3)


def test_windows_that_were_appended_late_stand_at_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    # Day and hour, and the slow rise that is only seen in the order of time.
    rising = [("1020", 9), ("1020", 15), ("1021", 3), ("1022", 3), ("1023", 8), ("1023", 10)]
    rows = [
        example_row(0, window=f"L-a-W-2026{day}T{hour:02}0000Z", date=f"2026{day}", value=50.0 + n)
        for n, (day, hour) in enumerate(rising)
    ]
    for n in (4, 5, 1, 0, 3, 2):
        archive_append(path, [rows[n]])
    command = ["archive", "plot", str(path), "--cell", "short-b1", "--metric", "ms_per_round"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:8]] == [
        [row["window"], f"{50 + n}"] for n, row in enumerate(rows)
    ]
    assert "DRIFT: L-a-W-20261020T090000Z to L-a-W-20261023T100000Z: 6 windows" in lines[8]


def test_a_hostile_window_name_is_harmless_in_the_plot(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    archive_append(path, [example_row(0, window="<script>alert(1)</script>")])
    page = svg([charted(path)])
    assert "<script" not in page
    ElementTree.fromstring(page)


def test_long_work_says_that_it_goes_on_and_short_work_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patience("archive verify"):
        pass
    assert capsys.readouterr() == ("", "")
    with patience("archive verify", after_s=0.0):
        for _ in range(1000):
            if told := capsys.readouterr().err:
                break
            threading.Event().wait(0.01)
    assert told == "archive verify: 0 s, at work\n"
