"""Wrong words and odd files around the archive: one clear line, exit 4, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_dsv41.archive import ArchiveError, archive_append, archive_head
from pytest_dsv41.archive.testing import example_row
from pytest_dsv41.cli import main
from pytest_dsv41.durable import read_json_lines

Told = Callable[..., str]
DEEP = "[" * 100_000


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    archive_append(path, [example_row(repeat) for repeat in range(4)])
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Told:
    """Run a command that must end with 4 and one line, and give the line."""

    def run(*words: object) -> str:
        assert main([str(word) for word in words]) == 4
        out, err = capsys.readouterr()
        assert out == ""
        # On a slow machine a command says that it is at work.
        (line,) = (one for one in err.splitlines() if not one.endswith("at work"))
        return line

    return run


def names() -> list[str]:
    """What the current folder holds."""
    return sorted(path.name for path in Path().iterdir())


def outs(archive: Path) -> dict[str, Path]:
    """Names to which an answer must not be written."""
    folder = archive.parent
    (folder / "link").symlink_to(archive)
    (folder / "hard").hardlink_to(archive)
    other = folder / "other.jsonl"
    archive_append(other, [example_row(9)])
    os.mkfifo(folder / "pipe")
    (folder / "sub").mkdir()
    return {
        "itself": archive,
        "another way to it": folder / "sub" / ".." / archive.name,
        "a link to it": folder / "link",
        "its second name": folder / "hard",
        "its lock": folder / "a.jsonl.lock",
        "its index": folder / "a.jsonl.index",
        "an old copy": folder / "a.jsonl.v3-before-v4",
        "another archive": other,
        "a pipe": folder / "pipe",
        "a folder": folder / "sub",
        "no folder": folder / "none" / "x.csv",
    }


def test_an_answer_is_never_written_over_an_archive(archive: Path, refused: Told) -> None:
    query = ("archive", "query", archive, "--format", "csv")
    plot = ("archive", "plot", archive, "--cell", "none", "--metric", "none")
    found = outs(archive)
    before = {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    for name, out in found.items():
        line = refused(*query, "--out", out)
        assert f"--out {out}" in line, name
    assert before == {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    assert sorted(path.name for path in archive.parent.iterdir() if path.name[0] == ".") == []
    assert main([*map(str, plot), "--out", str(archive)]) == 0  # no such rows, nothing to draw
    assert archive_head(archive).rows == 4


def test_a_plot_is_written_whole_and_never_over_an_archive(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = example_row(0)
    plot = ["archive", "plot", str(archive), "--cell", row["cell"], "--metric", row["metric"]]
    assert main([*plot, "--out", str(archive)]) == 4
    assert "is a control archive" in capsys.readouterr().err
    assert archive_head(archive).rows == 4
    behind = archive.with_name("behind.svg")
    behind.write_text("old")
    link = archive.with_name("link.svg")
    link.symlink_to(behind)
    assert main([*plot, "--out", str(link)]) == 0
    assert link.is_symlink()
    assert behind.read_text().startswith("<svg")


@pytest.mark.parametrize("words", [("verify",), ("verify", "--fields"), ("head",), ("migrate",)])
@pytest.mark.parametrize("name", ["", "sub", "pipe", "/dev/null"])
def test_what_is_no_file_is_no_archive(
    tmp_path: Path,
    refused: Told,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("sub").mkdir()
    line = refused("archive", words[0], name, *words[1:])
    told = ("no such archive", "names no file", "no regular file", "is a folder")
    assert any(one in line for one in told)
    assert names() == ["pipe", "sub"]  # no lock file beside what is no archive


@pytest.mark.parametrize("name", ["", ".", "sub", "pipe"])
def test_nothing_is_appended_to_what_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("sub").mkdir()
    with pytest.raises(ArchiveError, match=r"names no file|no regular file|is a folder"):
        archive_append(name, [example_row(0)])
    assert names() == ["pipe", "sub"]


def test_a_folder_that_is_no_windows_is_named(tmp_path: Path, refused: Told) -> None:
    folder = tmp_path / "campaign"
    folder.mkdir()
    archive = tmp_path / "control-archive.jsonl"
    for words in (("archive", "append", folder), ("history", "backfill", folder)):
        line = refused(*words, "--archive", archive)
        assert "is no window's folder" in line
        assert "values.jsonl" in line


@pytest.mark.parametrize("hosts", ["0", "-1", "two", "1e1", "\u0662"])
def test_a_number_of_hosts_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hosts: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["archive", "append", str(tmp_path), f"--hosts={hosts}"])
    assert end.value.code == 4
    assert "is no number of hosts" in capsys.readouterr().err.splitlines()[-1]


def test_a_line_nested_too_deeply_is_no_line(tmp_path: Path, refused: Told) -> None:
    (tmp_path / "values.jsonl").write_text(f'{{"a": 1}}\n{DEEP}\n{{"b": 2}}\n')
    assert read_json_lines(tmp_path / "values.jsonl") == [{"a": 1}, {"b": 2}]
    assert "no measured control" in refused("history", "reanalyze", tmp_path, "--decision", "x")


RESOLUTION = ("resolution", "--cell", "x", "--design", "pairs:6", "--expected-gain")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("0",), "'0' is no positive fraction; valid: 0.03 or 3%"),
        (("3%", "--estimated-s", "nan"), "'nan' is no positive number of seconds"),
        (("3%", "--estimated-s=-4"), "'-4' is no positive number of seconds"),
        (("3%", "--estimated-s", "inf"), "'inf' is no positive number of seconds"),
    ],
)
def test_a_wrong_number_for_the_filter_is_named(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*RESOLUTION, *words])
    assert end.value.code == 4
    assert capsys.readouterr().err.splitlines()[-1].endswith(told)


def test_a_summary_nested_too_deeply_holds_no_spread(tmp_path: Path, refused: Told) -> None:
    file = tmp_path / "summary.json"
    file.write_text('{"a":' * 900 + "1" + "}" * 900)
    line = refused(*RESOLUTION, "3%", "--diff-cv", file)
    assert str(file) in line


def test_a_terminal_without_the_signs_still_gets_the_answer(archive: Path) -> None:
    row = example_row(0)
    words = ["resolution", "--archive", str(archive), "--cell", row["cell"], "--metric"]
    words += [row["metric"], "--design", "pairs:6", "--expected-gain", "0.0001%"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", *words],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert rb"half-width \xb1" in done.stdout


@pytest.mark.parametrize(
    ("version", "way"),
    [("v1", "archive migrate"), ("v3", "archive migrate"), ("v5", "a later version wrote it")],
)
def test_a_file_of_another_version_is_named_with_what_can_be_done(
    archive: Path, refused: Told, version: str, way: str
) -> None:
    archive.write_bytes(archive.read_bytes().replace(b"archive-v4", f"archive-{version}".encode()))
    line = refused("archive", "head", archive)
    assert f"is a dsv41-control-archive-{version} file" in line
    assert way in line
    with pytest.raises(ArchiveError, match=version):
        archive_append(archive, [example_row(9)])


LINE = {"item": "C1-0", "start": "C1", "arm": "control", "cell": "x", "repeat": 0}


@pytest.mark.parametrize("field", ["start", "cell", "repeat"])
@pytest.mark.parametrize("value", [["C1"], {"C1": 1}])
def test_a_line_of_a_window_with_a_list_for_a_name_is_named(
    tmp_path: Path, refused: Told, field: str, value: object
) -> None:
    line = {**LINE, "values": {"ms_per_round": 5.0}, field: value}
    (tmp_path / "values.jsonl").write_text(json.dumps(line) + "\n")
    told = f"{tmp_path / 'values.jsonl'}: {field}: must be a name or a number, got "
    assert told in refused("history", "backfill", tmp_path, "--archive", tmp_path / "a.jsonl")
    assert told in refused("history", "reanalyze", tmp_path, "--decision", "x")


def window(folder: Path, **line: object) -> Path:
    """A window whose one control line is wrong where `line` says."""
    (folder / "cmd").mkdir(parents=True)
    caps = "h1 clock cap 2150 MHz\nh2 clock cap 2150 MHz\n"
    (folder / "cmd" / "0001-C1-start.log").write_text(caps)
    summary = {"production_commit": "5" * 40, "window": "A-a-W-20261027T181314Z"}
    (folder / "summary.json").write_text(json.dumps(summary))
    whole = {**LINE, "values": {"ms_per_round": 5.0}, "prompt_sha256": "9" * 64, "max_tokens": 512}
    (folder / "values.jsonl").write_text(json.dumps({**whole, **line}) + "\n")
    return folder


def test_a_value_that_no_archive_takes_is_named_with_its_window(
    tmp_path: Path, refused: Told
) -> None:
    archive = tmp_path / "a.jsonl"
    folder = window(tmp_path / "w", max_tokens=0)
    line = refused("history", "backfill", folder, "--archive", archive)
    assert f"{folder}: row 0: max_tokens: must be a positive integer, got 0" in line
    assert not archive.exists()


def test_a_plan_with_lists_for_names_stops_nothing(tmp_path: Path) -> None:
    folder = window(tmp_path / "w")
    (folder / "plan.json").write_text('{"items": [{"start": ["a"], "id": ["b"]}]}')
    summary = json.loads((folder / "summary.json").read_bytes())
    (folder / "summary.json").write_text(json.dumps({**summary, "stopped": "by a signal"}))
    archive = tmp_path / "a.jsonl"
    assert main(["history", "backfill", str(folder), "--archive", str(archive)]) == 0
    assert archive_head(archive).rows == 1


def test_a_clock_log_that_is_no_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = window(tmp_path / "w", started_utc="2026-10-27T18:20:00Z")
    (folder / "cmd" / "0001-C1-start.log").unlink()
    log = tmp_path / "clock.log"
    log.write_bytes(b"\xff\xfe\n")
    words = ["history", "backfill", str(folder), "--archive", str(tmp_path / "a.jsonl")]
    assert main([*words, "--clock-log", str(log)]) == 0
    assert f"left out: {log}: line 1: " in capsys.readouterr().out


OLD = {
    "schema": "dsv41-control-archive-v3", "window": "W", "cell": "x", "metric": "ms_per_round",
    "value": 5.0, "max_tokens": 512, "date": "20261027", "commit": "5" * 40,
    "clock_cap_mhz": 2150, "start": "C1", "repeat": 0,
}  # fmt: skip


@pytest.mark.parametrize("field", ["window", "cell", "metric", "start", "repeat"])
def test_an_old_row_with_a_list_for_a_name_stops_a_migration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str
) -> None:
    archive = tmp_path / "a.jsonl"
    archive.write_text(json.dumps({**OLD, field: ["a"]}) + "\n")
    before = archive.read_bytes()
    prompts = tmp_path / "p.json"
    prompts.write_text(json.dumps({"W": {"x": "9" * 64}, "['a']": {"x": "9" * 64}}))
    words = ["archive", "migrate", str(archive), "--prompts", str(prompts), "--apply"]
    assert main(words) == 1
    assert capsys.readouterr().out.startswith("REFUSED: ")
    assert archive.read_bytes() == before


def test_who_could_read_an_archive_can_read_it_migrated(tmp_path: Path) -> None:
    archive = tmp_path / "a.jsonl"
    archive.write_text(json.dumps(OLD) + "\n")
    archive.chmod(0o640)
    prompts = tmp_path / "p.json"
    prompts.write_text(json.dumps({"W": {"x": "9" * 64}}))
    words = ["archive", "migrate", str(archive), "--prompts", str(prompts), "--apply"]
    assert main(words) == 0
    assert archive_head(archive).rows == 1
    assert archive.stat().st_mode & 0o777 == 0o640


def test_a_disk_that_is_full_is_named_with_what_was_not_written(
    archive: Path, refused: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = archive.with_name("x.csv")
    out.write_text("old")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("pytest_dsv41.archive.export.write_text", full)
    line = refused("archive", "query", archive, "--out", out)
    assert line == f"dsv41 archive: --out {out}: nothing was written: No space left on device"
    assert out.read_text() == "old"
