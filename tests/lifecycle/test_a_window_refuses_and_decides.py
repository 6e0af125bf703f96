"""What refuses a window, what a dead server costs, and that the folder alone decides again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .running import (
    PATIENCE_S,
    Ended,
    assert_ended_well,
    command,
    environment,
    run,
    wait_for_keepers,
)

TINY = Path(__file__).parents[2] / "pytest_dsv41/window/examples/demo-tiny.toml"


def own_cell(folder: Path, body: str, *, limits: str = "", tokens: int = 96) -> str:
    """A window like demo-tiny whose cell is `body`, a function's lines."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    (folder / "my_cells.py").write_text(
        "import os, signal, threading, time\n"
        "import psutil\n"
        "from pytest_dsv41 import Cell, for_cells\n\n"
        f"@for_cells(Cell('mine', prompts=('demo-1',), max_tokens={tokens}))\n"
        f"def test_mine(measure, endpoint, start):\n{lines}\n"
    )
    text = TINY.read_text().replace('name = "decode-b1"', 'name = "mine"')
    text = text.replace("[window]", '[window]\ncell_modules = ["my_cells.py"]')
    (folder / "w.toml").write_text(text.replace("[limits]", f"[limits]\n{limits}"))
    return str(folder / "w.toml")


@pytest.mark.parametrize(
    "content", ['{"owner": "somebody-else", "epoch": 3}', "not JSON at all", ""]
)
def test_a_hold_that_is_not_ours_is_refused_and_keeps_its_bytes(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "HOLD").write_text(content)
    ended = run(tmp_path)
    assert ended.returncode == 13, ended.output
    assert (tmp_path / "HOLD").read_text() == content
    assert [s for s in ended.output.splitlines() if s.startswith("REFUSED: HOLD")]
    assert ended.summary["status"] == "REFUSED"
    assert not (ended.folder / "journal.jsonl").exists()
    assert not (ended.folder / "log").exists()
    assert "window::open" in (ended.folder / "junit.xml").read_text()
    assert "Traceback" not in ended.output


@pytest.mark.slow
def test_a_second_window_is_refused_with_the_firsts_owner_and_age(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*command(tmp_path), "-p", "phase_fault"],
        cwd=tmp_path,
        env=environment("cell:K1-decode-b1-r0", "halt"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as first:
        os.waitid(os.P_PID, first.pid, os.WSTOPPED)
        (folder,) = (p for p in tmp_path.iterdir() if "-W-" in p.name)
        second = run(tmp_path / "again", "--window-campaign", str(tmp_path))
        assert second.returncode == 13, second.output
        (line,) = (s for s in second.output.splitlines() if s.startswith("REFUSED:"))
        assert folder.name in line
        assert f"pid {first.pid}, for " in line
        first.send_signal(signal.SIGCONT)
        output, _ = first.communicate(timeout=PATIENCE_S)
    shutil.rmtree(tmp_path / "again")
    assert_ended_well(Ended(first.returncode, output, tmp_path))
    assert first.returncode == 0, output


@pytest.mark.slow
def test_a_server_killed_in_mid_cell_fails_the_cell_and_production_comes_back(
    tmp_path: Path,
) -> None:
    window = own_cell(
        tmp_path,
        "port = int(endpoint.url.rpartition(':')[2])\n"
        "pids = {c.pid for c in psutil.net_connections('tcp')\n"
        "        if c.laddr.port == port and c.status == 'LISTEN'}\n"
        "if start.start == 'I1':\n"
        "    threading.Timer(0.2, lambda: [os.kill(p, signal.SIGKILL) for p in pids]).start()\n"
        "measure()",
        tokens=2000,
    )
    ended = run(tmp_path / "out", window=window)
    assert_ended_well(ended)
    assert ended.returncode == 12
    rows = [json.loads(s) for s in (ended.folder / "values.jsonl").read_text().splitlines()]
    by_item = {row["item"]: row for row in rows}
    assert by_item["K1-mine-r0"]["outcome"] == "measured"
    assert by_item["I1-mine-r0"]["outcome"] == "failed"
    assert by_item["I1-mine-r1"]["outcome"] in ("failed", "skipped")
    assert "I1" in by_item["I1-mine-r1"]["reason"]
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        pytest.param(("--timeout=1",), "", id="timeout", marks=pytest.mark.slow),
        pytest.param((), "item_s = 1.0", id="limits", marks=pytest.mark.slow),
    ],
)
def test_an_items_deadline_ends_the_item_and_reaches_no_restore(
    words: tuple[str, ...], limits: str, tmp_path: Path
) -> None:
    window = own_cell(
        tmp_path,
        "measure()\nif start.id == 'K1-mine-r1':\n    time.sleep(60)",
        limits=limits,
    )
    text = Path(window).read_text()
    if limits:
        text = text.replace("item_s = 10\n", "")
    # The restore and the watch last longer than the item's deadline.
    Path(window).write_text(text.replace("watch_s = 0.5", "watch_s = 2.0"))
    ended = run(tmp_path / "out", *words, window=window)
    assert_ended_well(ended)
    assert ended.returncode == 12
    rows = [json.loads(s) for s in (ended.folder / "values.jsonl").read_text().splitlines()]
    outcomes = {row["item"]: row["outcome"] for row in rows}
    assert outcomes.pop("K1-mine-r1") == "failed"
    assert set(outcomes.values()) == {"measured"}


@pytest.mark.slow
def test_a_debugger_is_bounded_by_the_windows_deadline(tmp_path: Path) -> None:
    window = own_cell(tmp_path, "breakpoint()\nmeasure()", limits="window_s = 8")
    campaign = tmp_path / "out"
    campaign.mkdir()
    read, write = os.pipe()
    with subprocess.Popen(
        command(campaign, "-s", window=window),
        cwd=campaign,
        env=environment(),
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output, _ = process.communicate(timeout=PATIENCE_S)
    os.close(read)
    os.close(write)
    wait_for_keepers(campaign)
    ended = Ended(process.returncode, output, campaign)
    assert_ended_well(ended)
    assert ended.returncode == 12
    assert ended.summary["stopped"] == "the window's deadline has passed"


@pytest.mark.slow
def test_the_same_decision_comes_from_the_folder_alone_after_a_move(tmp_path: Path) -> None:
    ended = run(tmp_path / "out")
    assert ended.returncode == 0, ended.output
    summary = ended.summary
    moved = tmp_path / "moved"
    shutil.move(ended.folder, moved)
    shutil.rmtree(tmp_path / "out")
    for name in ("summary.json", "junit.xml", "report.html"):
        (moved / name).unlink()
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "decide", str(moved), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert again["decisions"] == summary["decisions"]
    assert again["status"] == summary["status"] == "CANDIDATE"


@pytest.mark.slow
def test_a_deselected_decision_item_is_never_a_candidate(tmp_path: Path) -> None:
    ended = run(tmp_path, "-k", "not I2-decode-b1-r1")
    assert_ended_well(ended)
    assert ended.returncode == 12, ended.output
    assert ended.summary["promotion"] is None


@pytest.mark.slow
def test_every_control_repeat_is_in_the_archive_once(tmp_path: Path) -> None:
    ended = run(tmp_path)
    rows = [json.loads(s) for s in (tmp_path / "control-archive.jsonl").read_text().splitlines()]
    keys = [
        (r["window"], r["cell"], r["metric"], r["start"], r["repeat"])
        for r in rows
        if "metric" in r
    ]
    assert len(keys) == len(set(keys))
    of_primary = {(k[3], k[4]) for k in keys if k[2] == "ms_per_round"}
    assert of_primary == {("K1", 0), ("K1", 1), ("K2", 0), ("K2", 1)}
    assert ended.summary["archive"]["appended"] == len(keys)
    with contextlib.suppress(KeyError):
        assert {r["clock_source"] for r in rows if "metric" in r} == {"none"}


@pytest.mark.slow
def test_an_archive_shorter_than_a_checkpoint_gets_no_row_and_is_an_alert(tmp_path: Path) -> None:
    archive = tmp_path / "control-archive.jsonl"
    # As `dsv41 archive head` printed it on another host, while the archive was longer.
    (tmp_path / "archive-head.json").write_text(json.dumps({"rows": 99, "sha256": "5" * 64}))
    ended = run(tmp_path)
    assert ended.returncode == 21, ended.output
    assert not archive.exists()
    told = [line for line in ended.summary["alerts"] if line.startswith("archive: ")]
    assert len(told) == 1
    assert "has 0 rows, a checkpoint knows 99" in told[0]
    assert ended.summary["restore"]["status"] == "RESTORED"
    again = [sys.executable, "-m", "pytest_dsv41", "archive", "append", str(ended.folder)]
    refused = subprocess.run(again, capture_output=True, text=True, check=False)
    assert (refused.returncode, archive.exists()) == (4, False)
    (tmp_path / "archive-head.json").unlink()
    done = subprocess.run(again, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {json.loads(line)["start"] for line in archive.read_text().splitlines()} == {"K1", "K2"}
