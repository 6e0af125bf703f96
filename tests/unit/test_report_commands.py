"""`dsv41 report | windows | compare | schema`: what they print, their exit codes, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_folder import (
    decide,
    demo_folder,
    make_plan,
    make_summary,
    make_values,
    write_folder,
)

from pytest_dsv41.cli import main
from pytest_dsv41.window import spec


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_report_makes_both_views_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = demo_folder(tmp_path / "w", gain=-0.08)
    code, out, _ = run(capsys, "report", str(folder))
    # Making a view is no verdict: 0 also for NOT A CANDIDATE.
    assert code == 0
    assert "DEMO demo: NOT A CANDIDATE" in out
    assert out.splitlines()[-2:] == [str(folder / "junit.xml"), str(folder / "report.html")]
    code, out, _ = run(capsys, "report", "-q", str(folder))
    assert out.splitlines() == [str(folder / "junit.xml"), str(folder / "report.html")]


@pytest.mark.parametrize(
    "words",
    [("report", "nothing"), ("compare", "nothing", "nothing"), ("windows", "--campaign=nothing")],
)
def test_a_missing_folder_is_one_line_and_exit_4(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *words)
    assert (code, out) == (4, "")
    assert err.startswith(f"dsv41 {words[0]}: nothing: no such folder")
    assert err.count("\n") == 1


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    """Three windows that ended, one damaged, one killed, and something else."""
    folder = tmp_path / "windows"
    demo_folder(folder / "DEMO-b", 0.08, started_utc="2026-11-29T10:00:00Z")
    demo_folder(folder / "DEMO-a", 0.0, started_utc="2026-11-30T10:00:00Z")
    plan = make_plan()
    other = make_summary(
        plan,
        {},
        window={"id": "PC1-x-W-20261101T000000Z", "lane": "PC1", "name": "x"},
        status="INCOMPLETE",
        exit_code=20,
        started_utc="2026-11-01T00:00:00Z",
        ended_utc=None,
        stopped="SIGTERM",
        restore={"status": "FAILED"},
    )
    write_folder(folder / "PC1-x-W-20261101T000000Z", plan, [], other)
    write_folder(folder / "DEMO-demo-W-20261201T000000Z", plan, [], None)
    write_folder(folder / "DEMO-damaged-W-20261202T000000Z", None, [], None)
    (folder / "DEMO-damaged-W-20261202T000000Z" / "summary.json").write_text("{")
    (folder / "notes").mkdir()
    (folder / "control-archive.jsonl").write_text("")
    return folder


def test_windows_lists_them_oldest_first(
    campaign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "windows", "--campaign", str(campaign), "--json")
    listed: list[dict[str, Any]] = json.loads(out)
    assert code == 0
    assert [(one["status"], one["exit_code"]) for one in listed] == [
        ("INCOMPLETE", 20),
        ("CANDIDATE", 0),
        ("INCONCLUSIVE", 10),
        ("NO SUMMARY", None),
        ("DAMAGED", None),
    ]
    assert listed[1]["promotion"] == {"arm": "fast", "profile": "single", "cells": ["short-b1"]}


def test_windows_of_one_lane(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "windows", "PC1", "--campaign", str(campaign))
    assert code == 0
    (head, line) = out.splitlines()
    assert head.split() == ["window", "status", "exit", "took", "restore", "note"]
    assert line.split() == [
        "PC1-x-W-20261101T000000Z",
        "INCOMPLETE",
        "20",
        "–",
        "FAILED",
        "SIGTERM",
    ]
    code, out, _ = run(capsys, "windows", "PC", "--campaign", str(campaign))
    assert (code, out) == (0, "no windows\n")


def test_windows_elsewhere_are_found_by_the_register(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = tmp_path / "campaign"
    (campaign / "windows").mkdir(parents=True)
    inside = demo_folder(campaign / "inside", started_utc="2026-11-29T10:00:00Z")
    outside = demo_folder(tmp_path / "out" / "outside", started_utc="2026-11-29T11:00:00Z")
    gone = tmp_path / "gone"
    for number, folder in enumerate((inside, outside, gone)):
        record = campaign / "windows" / f"{number}.json"
        record.write_text(json.dumps({"folder": str(folder)}))
    (campaign / "windows" / "torn.json").write_text('{"fol')
    _, out, _ = run(capsys, "windows", "--campaign", str(campaign), "--json")
    assert [one["folder"] for one in json.loads(out)] == [str(inside), str(outside)]


@pytest.mark.parametrize(("gain", "expected"), [(0.08, 0), (0.0, 10), (-0.08, 11)])
def test_compare_ends_with_the_code_of_the_second(
    gain: float, expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = demo_folder(tmp_path / "a", 0.08)
    second = demo_folder(tmp_path / "b", gain)
    code, out, _ = run(capsys, "compare", str(first), str(second))
    assert code == expected
    assert ("the two intervals do not touch" in out) is (gain != 0.08)
    code, out, _ = run(capsys, "compare", str(first), str(second), "--json")
    data = json.loads(out)
    assert data["exit_code"] == expected
    assert len(data["series"]) == 6
    assert data["series"][0]["control_shift"] == 0
    assert data["differences"] == []


def test_compare_says_what_was_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = demo_folder(tmp_path / "a")
    plan = make_plan()
    # The document's own trap: the same cell at 512 and at 1,500 tokens.
    plan["cells"]["short-b1"]["max_tokens"] = 1500
    values = make_values(plan, {"fast": 0.08})
    for line in values:
        line["values"]["ms_per_round"]["value"] *= 81 / 72
    summary = make_summary(
        plan,
        {"fast": decide(plan, values, "fast")},
        production_commit="f" * 40,
        software={"python": "3.13.1", "engine": "stub 1"},
    )
    second = write_folder(tmp_path / "b", plan, values, summary)
    _, out, _ = run(capsys, "compare", str(first), str(second))
    flat = " ".join(out.split())
    assert "cell short-b1 is defined differently: max_tokens 256 / 1500" in flat
    assert "production commit: 596ba1c000" in flat
    assert "python: 3.12.4 / 3.13.1" in flat
    assert "pytest-dsv41: 0.1.0 / none" in flat
    # 81 / 72 = 1.125: the control moved by 12.5 %.
    assert "+12.5 %" in flat


def test_compare_calls_a_gate_a_gate_and_a_quality_cell_quality(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = demo_folder(tmp_path / "a")
    summary = json.loads((folder / "summary.json").read_text())
    cells = summary["decisions"]["fast"]["cells"]
    judged = {"verdict": "PASS", "decides": True, "reason": "as asked", "series": []}
    cells["floor"] = judged | {"gate": {"kind": "throughput"}}
    cells["same"] = judged | {"gate": {"positions": 8}}
    (folder / "summary.json").write_text(json.dumps(summary))
    _, out, _ = run(capsys, "compare", str(folder), str(demo_folder(tmp_path / "b")))
    assert "   gate fast, floor: PASS: as asked" in out.splitlines()
    assert "   quality fast, same: PASS: as asked" in out.splitlines()


def test_compare_with_a_killed_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan()
    first = demo_folder(tmp_path / "a")
    second = write_folder(tmp_path / "b", plan, [], None)
    code, out, _ = run(capsys, "compare", str(first), str(second))
    assert code == 12
    assert "no summary" in out


def test_schema_summary_fits_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "schema", "summary")
    assert code == 0
    folder = demo_folder(tmp_path / "w")
    jsonschema.validate(json.loads((folder / "summary.json").read_text()), json.loads(out))


def test_schema_window_is_the_shipped_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "schema", "window")
    assert code == 0
    assert json.loads(out)["title"] == "dsv41-window-v1"
    assert out == (Path(spec.__file__).parent / "schemas" / "window-v1.json").read_text()


def test_an_unknown_schema_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["schema", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_an_unknown_command_is_one_line_with_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["statu"])
    assert ended.value.code == 4
    told = capsys.readouterr().err
    assert told.startswith(
        "dsv41: unknown command 'statu'; did you mean 'status'?; valid: aa-pilot, ab, "
    )
    assert told.count("\n") == 1
    assert "keeper" not in told
