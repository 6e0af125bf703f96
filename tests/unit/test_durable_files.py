"""Durable files: old bytes or new ones, created once, one holder of a lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_dsv41.durable import (
    FileLock,
    append_json_line,
    create_exclusive,
    read_json_lines,
    remove,
    write_atomic,
)


def test_an_atomic_write_that_fails_leaves_the_old_bytes_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fact.json"
    write_atomic(path, "old")
    for name in ("fsync", "write"):
        with monkeypatch.context() as patch:

            def fail(*_: object) -> int:
                raise OSError(28, "No space left on device")

            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="No space"):
                write_atomic(path, "new")
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["fact.json"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, bytes(data)[:3]))
    write_atomic(tmp_path / "a", "0123456789")
    append_json_line(tmp_path / "b", {"key": "value"})
    assert (tmp_path / "a").read_text() == "0123456789"
    assert read_json_lines(tmp_path / "b") == [{"key": "value"}]


def test_exclusive_creation_never_changes_anothers_bytes(tmp_path: Path) -> None:
    path = tmp_path / "HOLD"
    path.write_text("theirs")
    with pytest.raises(FileExistsError):
        create_exclusive(path, "ours")
    assert path.read_text() == "theirs"
    assert [p.name for p in tmp_path.iterdir()] == ["HOLD"]


def test_a_symlink_is_not_followed_on_creation(tmp_path: Path) -> None:
    (tmp_path / "HOLD").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        create_exclusive(tmp_path / "HOLD", "ours")
    assert not (tmp_path / "elsewhere").exists()


def test_a_line_torn_by_a_kill_never_swallows_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_json_line(path, {"n": 1})
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        append_json_line(path, {"n": 2})
        rows = read_json_lines(path)
        assert rows[-1] == {"n": 2}
        assert rows in ([{"n": 2}], [{"n": 1}, {"n": 2}])


def test_removing_twice_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "intent.json"
    write_atomic(path, "x")
    remove(path)
    remove(path)
    assert not path.exists()


def test_a_lock_has_one_holder_and_is_freed_when_its_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "lease.lock"
    mine = FileLock(path)
    assert mine.acquire()
    assert mine.acquire()
    theirs = FileLock(path)
    assert not theirs.acquire()
    assert theirs.held_elsewhere()
    mine.release()
    mine.release()
    assert not theirs.held_elsewhere()
    assert theirs.acquire()
    theirs.release()


def test_looking_at_a_lock_creates_nothing(tmp_path: Path) -> None:
    assert not FileLock(tmp_path / "lease.lock").held_elsewhere()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_replaced_is_taken_on_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "lease.lock"
    old = FileLock(path)
    assert old.acquire()
    path.unlink()
    new = FileLock(path)
    assert new.acquire()
    assert FileLock(path).held_elsewhere()
    new.release()
    old.release()


def test_a_folder_that_takes_no_file_is_told_by_the_files_own_name(tmp_path: Path) -> None:
    path = tmp_path / "none" / "x.json"
    for write in (write_atomic, create_exclusive):
        with pytest.raises(FileNotFoundError) as refused:
            write(path, "x")
        assert refused.value.filename == str(path)
