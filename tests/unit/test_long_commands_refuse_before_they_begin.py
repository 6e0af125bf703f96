"""What can be told from the words alone is told before the first request, with exit code 4."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_dsv41.cli import main

# Nothing listens there: a command that sent something first would say so and end with 1.
NOBODY = "http://127.0.0.1:1"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    try:
        code: object = main(words)
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr().err
    assert code == 4, told
    assert len(told.strip().splitlines()) == 1 or told.startswith("usage:"), told
    assert "Traceback" not in told
    return told


def probe(out: Path, *more: str) -> tuple[str, ...]:
    return ("dist-gate", "probe", NOBODY, "--subset", "short", "--out", str(out), *more)


def greedy(out: Path, *more: str) -> tuple[str, ...]:
    return ("greedy", "run", NOBODY, "--out", str(out), *more)


def pilot(out: Path, *more: str) -> tuple[str, ...]:
    words = ("aa-pilot", "run", "--url", NOBODY, "--start", "A", "--subset", "none", "--no-bridge")
    return (*words, "--out", str(out), *more)


@pytest.mark.parametrize("words", [probe, greedy, pilot], ids=["probe", "greedy", "pilot"])
def test_a_place_that_cannot_take_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: object
) -> None:
    assert callable(words)
    missing = tmp_path / "nowhere" / "x.json"
    assert f"its folder {missing.parent} does not exist" in refused(capsys, *words(missing))
    there = tmp_path / "there.json"
    there.write_text("kept")
    assert "exists" in refused(capsys, *words(there))
    assert there.read_text() == "kept"
    assert "exists" in refused(capsys, *words(tmp_path))
    dangling = tmp_path / "dangling.json"
    dangling.symlink_to(tmp_path / "gone")
    assert "exists" in refused(capsys, *words(dangling))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling.json", "there.json"]


def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere, so the kernel's answer to another user is played.
    monkeypatch.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)
    assert "cannot be written to" in refused(capsys, *probe(tmp_path / "x.json"))


@pytest.mark.parametrize("words", [probe, greedy, pilot], ids=["probe", "greedy", "pilot"])
@pytest.mark.parametrize("deadline", ["nan", "inf", "0", "-1", "soon", "1e10"])
def test_a_deadline_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: object, deadline: str
) -> None:
    assert callable(words)
    told = refused(capsys, *words(tmp_path / "x.json", f"--deadline={deadline}"))
    assert f"{deadline}: valid: above 0 to 1e9 seconds" in told


@pytest.mark.parametrize(
    "words",
    [
        ("fleet-probe", NOBODY, "--engine", "vllm", "--deadline"),
        ("calib", "push", "none.jsonl", NOBODY, "--until-tokens", "1", "--timeout"),
    ],
    ids=["fleet-probe", "calib"],
)
@pytest.mark.parametrize("limit", ["nan", "inf", "0", "-1"])
def test_a_limit_of_the_payloads_commands_that_is_none(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], limit: str
) -> None:
    told = refused(capsys, *words[:-1], f"{words[-1]}={limit}")
    assert f"{limit}: valid: above 0 to 1e9 seconds" in told


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--commit", "xyz"), "--commit xyz: 40 hex digits"),
        (("--clock", "-5"), "--clock -5: at least 1 MHz"),
        (("--bridge-sampling", "[1]"), "--bridge-sampling: a JSON object"),
    ],
)
def test_a_pilots_words_without_execute(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    assert named in refused(capsys, *pilot(tmp_path / "x.json", *words))


@pytest.mark.parametrize("limit", ["nan", "inf", "-0.1"])
def test_a_near_tie_that_is_no_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    told = refused(capsys, *greedy(tmp_path / "x.json", f"--near-tie-nats={limit}"))
    assert "--near-tie-nats" in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--depth", "3k", "--depth", "x"], "--depth x: valid: a number of tokens, 3k for 3072"),
        (["--slots", "1025"], "--slots 1025: valid: 1 to 1,024"),
        (["--text", "{pipe}"], "pipe: not a regular file"),
        (["--text", "/dev/zero"], "/dev/zero: not a regular file"),
    ],
)
def test_a_probe_whose_words_are_wrong_asks_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], told: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    words = [word.format(pipe=tmp_path / "pipe") for word in more]
    assert told in refused(capsys, "probe", NOBODY, "ladder", "--engine", "vllm", *words)
