"""Whatever ends the session, production is back, itself, and nothing is left (SAFETY I11)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .running import (
    Ended,
    assert_ended_well,
    command,
    environment,
    keepers,
    leftovers,
    run,
    status,
    wait_for_keepers,
)

UNTOUCHED = (
    "keeper:begin",
    "keeper:end",
    "production-first:begin",
    "hold:begin",
    "hold:end",
    "capture:end",
)
TOUCHED = (
    "intent:end",
    "production-stop:begin",
    "production-stop:end",
    "quiet:end",
    "start:K1:begin",
    "start:K1:end",
    "cell:K1-decode-b1-r0",
    "cell:I1-decode-b1-r1",
    "stop:K1:begin",
    "quiet:K1:end",
    "start:I1:begin",
)
CLOSING = (
    "experiment-stop:begin",
    "restore-start:begin",
    "restore-start:end",
    "restore-check:begin",
    "hold-close:begin",
    "hold-close:end",
    "watch:begin",
    "watch:end",
    "intent-clear:begin",
    "intent-clear:end",
    "production-end:end",
    "archive:begin",
    "archive:end",
)
SIGNALS = ("SIGINT", "SIGINT,SIGINT", "SIGTERM", "SIGHUP", "SIGTSTP")


def _cases() -> list[object]:
    """Every signal at every phase; a few by default, the whole matrix behind `slow`."""
    sample = {
        ("cell:I1-decode-b1-r1", "SIGINT,SIGINT"),
        ("production-stop:end", "SIGKILL"),
    }
    cases = []
    for at in (*UNTOUCHED, *TOUCHED, *CLOSING):
        for do in (*SIGNALS, "SIGKILL"):
            if (at, do) == ("keeper:begin", "SIGKILL"):
                continue  # nobody is there yet to end it; a test of its own below
            marks = () if (at, do) in sample else (pytest.mark.slow,)
            cases.append(pytest.param(at, do, id=f"{do.replace(',', '-')}-at-{at}", marks=marks))
    return cases


@pytest.mark.parametrize(("at", "do"), _cases())
def test_a_signal_at_any_phase_brings_production_back(at: str, do: str, tmp_path: Path) -> None:
    ended = run(tmp_path, at=at, do=do)
    touched = at in (*TOUCHED, *CLOSING)
    assert_ended_well(ended, touched=touched)
    if do == "SIGKILL":
        assert ended.returncode == -signal.SIGKILL
        assert "the measuring process died" in ended.summary["stopped"]
        assert ended.summary["exit_code"] == 12
    elif at in CLOSING:
        # The window was over when the signal came: its verdict stands.
        assert ended.returncode == 0, ended.output
        assert ended.summary["status"] == "CANDIDATE"
    else:
        assert ended.returncode == 12, ended.output
        assert ended.summary["status"] == "INCOMPLETE"
        assert ended.summary["stopped"] == f"signal {do.partition(',')[0]}"
    assert "Traceback" not in ended.output


@pytest.mark.slow
def test_a_kill_before_the_keeper_exists_has_touched_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, at="keeper:begin", do="SIGKILL")
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "HOLD").exists()
    assert not (tmp_path / "intent.json").exists()
    assert leftovers(tmp_path) == []
    code, facts = status(tmp_path)
    assert code == 0
    assert facts["unfinished"] == [ended.folder.name]
    assert facts["command"].startswith("dsv41 recover")


@pytest.mark.slow
@pytest.mark.parametrize("do", ["raise", "exit"])
@pytest.mark.parametrize("at", ["cell:K1-decode-b1-r1", "start:I1:begin", "production-stop:end"])
def test_an_exception_on_the_way_brings_production_back(at: str, do: str, tmp_path: Path) -> None:
    ended = run(tmp_path, at=at, do=do)
    assert_ended_well(ended)
    assert ended.returncode == 12
    assert ended.summary["status"] == "INCOMPLETE"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["-x", "--maxfail=1"])
def test_stopping_at_the_first_failure_brings_production_back(word: str, tmp_path: Path) -> None:
    ended = run(tmp_path, word, at="cell:K1-decode-b1-r1", do="raise")
    assert_ended_well(ended)
    assert ended.returncode == 12
    assert [i for i in ended.steps() if i.startswith("start:")] == [
        "start:K1:begin",
        "start:K1:end",
    ]


@pytest.mark.slow
def test_a_hostile_plugin_at_the_sessions_end_changes_nothing(tmp_path: Path) -> None:
    ended = run(tmp_path, at="sessionfinish", do="raise")
    assert_ended_well(ended)
    assert ended.returncode == 0
    assert ended.summary["status"] == "CANDIDATE"
    assert "a hostile plugin" in ended.output


@pytest.mark.slow
def test_a_halted_process_is_the_keepers_case_at_the_deadline(tmp_path: Path) -> None:
    window = tmp_path / "halt.toml"
    shipped = Path(__file__).parents[2] / "pytest_dsv41/window/examples/demo-tiny.toml"
    window.write_text(shipped.read_text().replace("[limits]", "[limits]\nwindow_s = 6"))
    ended = run(tmp_path, at="cell:K1-decode-b1-r1", do="halt", window=str(window))
    assert_ended_well(ended)
    assert ended.returncode == -signal.SIGKILL
    assert "halted past the window's deadline" in ended.summary["stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["cell:K1-decode-b1-r1", "quiet:K2:end", "restore-start:begin"])
def test_a_full_disk_never_keeps_production_down(at: str, tmp_path: Path) -> None:
    ended = run(tmp_path, at=at, do="full")
    # The session could write no summary and said so; the keeper, who could, ended the window.
    assert ended.returncode == 21, ended.output
    assert "No space left on device" in ended.output
    assert not (tmp_path / "HOLD").exists()
    assert not (tmp_path / "intent.json").exists()
    assert leftovers(tmp_path) == []
    assert status(tmp_path)[0] == 0
    assert ended.summary["stopped"] == "the measuring process died"


@pytest.mark.slow
def test_a_dead_keeper_is_replaced_before_the_next_start(tmp_path: Path) -> None:
    ended = run(tmp_path, at="start:K1:end", do="keeper")
    assert_ended_well(ended)
    assert ended.returncode == 0
    assert "keeper-again:end" in ended.steps()


@pytest.mark.slow
def test_recover_finishes_a_window_whose_keeper_died_too(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*command(tmp_path), "-p", "phase_fault"],
        cwd=tmp_path,
        env=environment("cell:K1-decode-b1-r0", "halt"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        for keeper in keepers(tmp_path):
            keeper.kill()
        process.kill()
    assert leftovers(tmp_path)  # the servers live on: the check below can fail
    code, facts = status(tmp_path)
    assert code == 20
    assert facts["answer"] == "ALERT"
    assert facts["command"] == f"dsv41 recover --campaign {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "recover", "--campaign", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    wait_for_keepers(tmp_path)
    assert done.returncode == 0, done.stderr
    assert_ended_well(Ended(12, done.stdout, tmp_path))
