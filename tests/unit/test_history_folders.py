"""What a window's folder proves: commit, clock cap, date; backfill and scoring again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.archive import HistoryUnknown, KeyConflict, archive_rows
from pytest_dsv41.archive.history import (
    backfill,
    clock_caps_mhz,
    control_rows,
    parse_utc,
    production_commit,
    role_of,
    start_clock_cap,
    window_date,
    window_folders,
    window_id,
)
from pytest_dsv41.archive.verify import verify_archive
from pytest_dsv41.cli import main

COMMIT = "596ba1c" + "0" * 33
OTHER = "a" * 40
PROMPT = "9" * 64
CLOCK_LOG = """# what the clock cap was, UTC
2026-10-22T00:00:00Z 2150
2026-10-27T13:27:18Z 2300 MHz
2026-10-27T13:36:27Z 2150 MHz
2026-10-27T19:23:25Z GPU_CLOCK_CAP=2300
"""


def line(start: str, repeat: int, value: float, **changes: Any) -> dict[str, Any]:
    """Return a line of values.jsonl."""
    return {
        "item": f"{start}-short-b1-r{repeat}",
        "start": start,
        "arm": "control" if start.startswith("C") else "fast",
        "cell": "short-b1",
        "repeat": repeat,
        "outcome": "measured",
        "values": {
            "ms_per_round": {"value": value, "unit": "ms", "lower_is_better": True},
            "accepted_per_round": {"value": 1.25, "unit": "", "lower_is_better": False},
        },
        "prompt_sha256": PROMPT,
        "prompt_members": [PROMPT],
        "max_tokens": 512,
        "started_utc": "2026-10-27T18:20:00Z",
        "duration_s": 30.0,
        **changes,
    }


CONTROL = [line("C1", 0, 50.0), line("C1", 1, 50.5), line("C2", 0, 49.5), line("C2", 1, 50.25)]


def folder(
    root: Path,
    name: str = "PC1-threshold512-W-20261027T181314Z",
    *,
    summary: dict[str, Any] | None = None,
    values: list[dict[str, Any]] | None = None,
    logs: dict[str, str] | None = None,
) -> Path:
    """Write an older window's folder."""
    out = root / name
    (out / "cmd").mkdir(parents=True)
    shown = {"status": "INCONCLUSIVE", "production_commit": COMMIT} if summary is None else summary
    (out / "summary.json").write_text(json.dumps(shown))
    text = "".join(json.dumps(one) + "\n" for one in (CONTROL if values is None else values))
    (out / "values.jsonl").write_text(text)
    both = "head-a clock cap 2150 MHz\nworker-b clock cap 2150 MHz\n"
    for number, (start, log) in enumerate((logs or {"C1": both, "C2": both}).items()):
        (out / "cmd" / f"{number:04}-{start}-start.log").write_text(log)
    return out


@pytest.mark.parametrize(
    ("summary", "rollback", "commit"),
    [
        ({"production_commit": COMMIT, "production": OTHER}, {"commit": OTHER}, COMMIT),
        ({"production": COMMIT, "experiment_commit": OTHER}, {}, COMMIT),
        ({"production": {"commit": COMMIT}}, {}, COMMIT),
        ({"production_commit": "596ba1c"}, {"production_commit": COMMIT}, COMMIT),
        ({}, {"commit": COMMIT, "experiment_commit": OTHER}, COMMIT),
        ({"experiment_commit": OTHER}, {"experiment_commit": OTHER}, None),
        ({"production_commit": "Z" * 40}, {}, None),
    ],
)
def test_the_production_commit_comes_from_summary_then_rollback_never_the_experiment(
    tmp_path: Path, summary: dict[str, Any], rollback: dict[str, Any], commit: str | None
) -> None:
    out = folder(tmp_path, summary=summary)
    (out / "rollback.json").write_text(json.dumps(rollback))
    if commit is not None:
        assert production_commit(out) == commit
    else:
        with pytest.raises(HistoryUnknown, match="no production commit of 40 hex digits"):
            production_commit(out)


def test_the_start_log_proves_the_cap_only_if_both_hosts_printed_it_and_agree(
    tmp_path: Path,
) -> None:
    out = folder(
        tmp_path,
        logs={
            "C1": "x\nhead-a clock cap 2300 MHz\nnoise\nworker-b clock cap 2300 MHz\n",
            "C2": "head-a clock cap 2300 MHz\n",
            "C3": "head-a clock cap 2300 MHz\nworker-b clock cap 2150 MHz\n",
            "C4": "nvidia-smi failed\n",
            "C10": "a clock cap 2150 MHz\nb clock cap 2150 MHz\n",
        },
    )
    assert start_clock_cap(out, "C1") == (2300, "start-log")
    assert start_clock_cap(out, "C10") == (2150, "start-log")
    with pytest.raises(HistoryUnknown, match=r"1 of 2 hosts proved a clock cap .head-a 2300"):
        start_clock_cap(out, "C2")
    assert start_clock_cap(out, "C2", hosts=1) == (2300, "start-log")
    with pytest.raises(HistoryUnknown, match=r"the clock caps differ .head-a 2300, worker"):
        start_clock_cap(out, "C3")
    with pytest.raises(HistoryUnknown, match=r"0 of 2 hosts proved a clock cap .none"):
        start_clock_cap(out, "C4")


@pytest.mark.parametrize(
    ("began", "seconds", "cap"),
    [
        ("2026-10-27T13:00:00Z", 60.0, 2150),
        ("2026-10-27T13:27:18Z", 100.0, 2300),
        ("2026-10-27T13:27:17Z", 0.5, 2150),
        ("2026-10-27T13:27:17Z", 1.0, None),
        ("2026-10-27T13:20:00Z", 3600.0, None),
        ("2026-10-27T13:36:27Z", 60.0, 2150),
        ("2026-10-27T19:23:39Z", 9000.0, 2300),
        ("2026-10-20T00:00:00Z", 1.0, None),
    ],
)
def test_a_start_without_a_log_is_placed_in_the_clock_log_and_refused_if_it_straddles(
    tmp_path: Path, began: str, seconds: float, cap: int | None
) -> None:
    log = tmp_path / "CLOCK.log"
    log.write_text(CLOCK_LOG)
    values = [line("C1", 0, 50.0, started_utc=began, duration_s=seconds)]
    out = folder(tmp_path, values=values, logs={"C9": ""})
    if cap is not None:
        assert start_clock_cap(out, "C1", clock_log=log) == (cap, "clock-log")
    else:
        with pytest.raises(HistoryUnknown, match=r"straddles the change from|begins after C1"):
            start_clock_cap(out, "C1", clock_log=log)
    with pytest.raises(HistoryUnknown, match="no start log, and no clock log was given"):
        start_clock_cap(out, "C1")
    with pytest.raises(HistoryUnknown, match="neither a start log nor checkpoint times"):
        start_clock_cap(out, "C2", clock_log=log)


def test_a_clock_log_line_that_is_none_is_named(tmp_path: Path) -> None:
    log = tmp_path / "CLOCK.log"
    log.write_text(CLOCK_LOG + "yesterday 2300\n")
    out = folder(tmp_path, logs={"C9": ""})
    with pytest.raises(HistoryUnknown, match="line 6: 'yesterday 2300' is not '<UTC> <MHz>'"):
        start_clock_cap(out, "C1", clock_log=log)


def test_the_caps_of_a_window_are_all_its_starts_or_unknown(tmp_path: Path) -> None:
    high = "head-a clock cap 2300 MHz\nworker-b clock cap 2300 MHz\n"
    low = high.replace("2300", "2150")
    out = folder(tmp_path, logs={"C1": high, "C2": low})
    assert clock_caps_mhz(out) == [2150, 2300]
    out = folder(tmp_path, "PC1-b-W-20261027T181314Z", logs={"C1": high})
    assert clock_caps_mhz(out) == "unknown"


def test_a_target_without_clocks_has_cap_1(tmp_path: Path) -> None:
    out = folder(tmp_path, logs={"C9": ""})
    steps = [{"step": f"start:{s}", "event": "end", "clock_source": "none"} for s in ("C1", "C2")]
    (out / "journal.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert start_clock_cap(out, "C1") == (1, "none")
    assert clock_caps_mhz(out) == [1]


@pytest.mark.parametrize(
    ("name", "summary", "day"),
    [
        (
            "PC1-threshold512-W-20261027T181314Z",
            {"started_utc": "2026-10-28T00:00:01Z"},
            "20261027",
        ),
        ("old", {"started_utc": "2026-10-28T00:00:01Z"}, "20261028"),
        ("old", {}, "20261027"),
    ],
)
def test_a_window_is_dated_by_its_id_then_what_it_recorded(
    tmp_path: Path, name: str, summary: dict[str, Any], day: str
) -> None:
    assert window_date(folder(tmp_path, name, summary=summary)) == day


def test_a_window_that_nothing_dates_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(HistoryUnknown, match="nothing dates this window"):
        window_date(folder(tmp_path, "old", summary={}, values=[]))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HYPOTHESIS PC1 tried twice 2026-10-27T18:13:14Z", "2026-10-27 18:13:14"),
        ("2026-10-27 18:13 UTC", "2026-10-27 18:13:00"),
        ("20261027T181314Z", "2026-10-27 18:13:14"),
        ("from 2026-10-26T00:00Z to 2026-10-27T00:00:00.5+00:00.", "2026-10-27 00:00:00"),
        ("2026-10-27T18:13:14", None),
        ("2026-13-27T18:13:14Z", None),
        ("2026-10-27T18:13:14+02:00", None),
    ],
)
def test_a_utc_timestamp_is_found_in_text_and_local_time_is_none(
    text: str, shown: str | None
) -> None:
    found = parse_utc(text)
    assert (f"{found:%Y-%m-%d %H:%M:%S}" if found else None) == shown


@pytest.mark.parametrize(
    ("role", "expected"),
    [("control", "control"), ("K", "control"), ("off", "control"), ("H", "control"), ("on", "on")],
)
def test_the_documents_control_roles_are_controls(tmp_path: Path, role: str, expected: str) -> None:
    out = folder(tmp_path, summary={"arms": [{"name": "a", "role": role}]})
    assert role_of(out, "a") == expected
    assert role_of(out, role) == expected


def test_backfill_is_idempotent_and_reads_a_window_named_twice_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign, archive = tmp_path / "c", tmp_path / "a.jsonl"
    out = folder(
        campaign, values=[*CONTROL, line("X", 0, 40.0), line("C2", 2, 1, outcome="failed")]
    )
    link = campaign / "again"
    link.symlink_to(out)
    assert window_folders(campaign) == [link]
    done = backfill(archive, [out, out, link, f"{out}/../{out.name}"])
    assert done.windows == ((out.name, 8, 8),)
    rows = archive_rows(archive)
    assert rows == control_rows(out)
    assert rows[0] == {
        "cell": "short-b1",
        "metric": "accepted_per_round",
        "max_tokens": 512,
        "clock_cap_mhz": 2150,
        "commit": COMMIT,
        "prompt_sha256": PROMPT,
        "value": 1.25,
        "window": "PC1-threshold512-W-20261027T181314Z",
        "start": "C1",
        "repeat": 0,
        "date": "20261027",
        "clock_source": "start-log",
        "prompt_members": [PROMPT],
    }
    assert main(["history", "backfill", "--archive", str(archive), str(out)]) == 0
    assert "8 control rows, 0 new" in capsys.readouterr().out
    assert verify_archive(archive, fields=True).ok
    values = out / "values.jsonl"
    values.write_text(values.read_text().replace("50.5", "50.6"))
    with pytest.raises(KeyConflict, match=r"C1, 1: line 4 has this key and differs: value 50.6"):
        backfill(archive, [out])
    assert main(["history", "backfill", "--archive", str(archive), str(out)]) == 4


def test_a_start_whose_cap_is_not_proved_is_left_out_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = "head-a clock cap 2150 MHz\nworker-b clock cap 2150 MHz\n"
    out = folder(tmp_path, logs={"C1": log, "C2": "head-a clock cap 2150 MHz\n"})
    assert main(["archive", "append", str(out)]) == 0
    text = capsys.readouterr().out
    assert "4 control rows, 4 new" in text
    assert "left out" in text
    assert "1 of 2 hosts proved a clock cap" in text
    rows = archive_rows(tmp_path / "control-archive.jsonl")
    assert {row["start"] for row in rows} == {"C1"}


def test_an_admission_window_gives_no_rows(tmp_path: Path) -> None:
    out = folder(tmp_path, summary={"window": {"id": "w", "kind": "admission"}})
    assert window_id(out) == "w"
    assert control_rows(out) == []


# -- scoring again ---------------------------------------------------------------------------------


def scored(root: Path, arms: dict[str, list[float]]) -> Path:
    values = [line(f"C{i // 2 + 1}", i % 2, v) for i, v in enumerate((100.0, 101.0, 99.5, 100.5))]
    values = [{**one, "arm": "K"} for one in values]
    for arm, numbers in arms.items():
        values += [{**line(f"X{arm}", i, v), "arm": arm} for i, v in enumerate(numbers)]
    return folder(root, values=values)


def test_each_other_role_is_an_arm_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = scored(tmp_path, {"fast": [90.0, 90.5, 91.0], "slow": [110.0, 111.0, 110.5]})
    command = ["history", "reanalyze", "--decision", "short-b1", str(out)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "fast: CANDIDATE" in text
    assert "slow: NOT A CANDIDATE" in text
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"]["fast"]["rule"] == "win2-v1"
    assert found["arms"]["fast"]["rule_revision"] == 3
    series = found["arms"]["fast"]["cells"]["short-b1"]["series"]
    assert [(one["metric"], one["n_control"], one["n_candidate"]) for one in series] == [
        ("ms_per_round", 4, 3),
        ("accepted_per_round", 4, 3),
    ]


def test_the_code_is_the_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, numbers, code in (
        ("a", [100.0, 101.0, 100.5], 10),
        ("b", [110.0, 111.0, 110.5], 11),
        ("c", [90.0, 91.0], 12),
    ):
        out = scored(tmp_path / name, {"fast": numbers})
        assert main(["history", "reanalyze", "--decision", "short-b1", str(out)]) == code
    assert "fast: cannot be judged" in capsys.readouterr().out


def test_more_than_two_decision_cells_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [word for cell in "abc" for word in ("--decision", cell)]
    assert main(["history", "reanalyze", *cells, str(tmp_path)]) == 4
    assert "3 decision cells; at most 2" in capsys.readouterr().err
