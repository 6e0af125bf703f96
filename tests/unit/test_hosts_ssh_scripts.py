"""The scripts that do an ssh host's file acts, run by this machine's shell; links: tests/real."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_dsv41.hosts import FENCED_OFF, CommandLog, Fence, LocalHost
from pytest_dsv41.hosts.ssh import _FENCED, _READ, _REMOVE, _STORE

ODD = ["plain", "two words", "new\nline", "-rf", "$(id)", "ü", "'\"\\", "*"]


def sh(script: str, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["sh", "-c", script, "sh", *arguments], input=stdin, capture_output=True, check=False
    )


def store(how: str, path: Path, data: bytes, size: int | None = None) -> int:
    length = str(len(data) if size is None else size)
    return sh(_STORE, how, str(path), length, stdin=data).returncode


@pytest.mark.parametrize("name", ODD)
def test_a_path_is_an_argument_whatever_stands_in_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / f"HOLD {name}"
    assert store("create", path, b"a\0b") == 0
    assert store("create", path, b"other") == 73
    assert path.read_bytes() == b"a\0b"
    assert store("write", path, b"new") == 0
    done = sh(_READ, str(path))
    assert (done.returncode, done.stdout) == (0, b"new")
    assert sh(_REMOVE, str(path)).returncode == 0
    assert sh(_REMOVE, str(path)).returncode == 0
    assert sh(_READ, str(path)).returncode == 66
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("how", ["create", "write"])
def test_data_that_a_broken_link_cut_short_never_get_the_name(tmp_path: Path, how: str) -> None:
    path = tmp_path / "HOLD"
    path.write_text("old") if how == "write" else None
    assert store(how, path, b"half of i", size=20) == 74
    assert [p.name for p in tmp_path.iterdir()] == (["HOLD"] if how == "write" else [])
    assert not path.exists() or path.read_text() == "old"


def test_nothing_is_written_through_a_link_or_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("safe")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "folder").mkdir()
    for name in ("link", "dangling", "folder"):
        assert store("create", tmp_path / name, b"x") == 73
    assert store("write", tmp_path / "folder", b"x") == 74
    assert store("write", tmp_path / "link", b"x") == 0
    assert (tmp_path / "elsewhere").read_text() == "safe"
    assert not (tmp_path / "nowhere").exists()
    assert list((tmp_path / "folder").iterdir()) == []


def test_the_shells_fence_and_this_machines_are_one(tmp_path: Path) -> None:
    """A host that is also the coordinator's machine is fenced by whoever comes first."""
    hold = tmp_path / "HOLD"
    local = LocalHost(CommandLog(tmp_path / "cmd"))
    old, new = Fence.beside(str(hold), 4), Fence.beside(str(hold), 5)

    def fenced(fence: Fence, *argv: str) -> subprocess.CompletedProcess[bytes]:
        return sh(_FENCED, fence.path, str(fence.epoch), *argv)

    assert fenced(old, "echo", "in").stdout == b"in\n"
    local.write(str(hold), "new owner", fence=new)
    late = fenced(old, "rm", str(hold))
    assert late.returncode == FENCED_OFF
    assert late.stderr == b"dsv41-fence 5\n"
    assert fenced(new, "sh", "-c", "exit 9").returncode == 9
    assert hold.read_text() == "new owner"


@pytest.mark.parametrize("content", ["", "five\n", "-1\n", "5; rm -rf /\n"])
def test_a_damaged_epoch_stops_every_act(tmp_path: Path, content: str) -> None:
    fence = Fence.beside(str(tmp_path / "HOLD"), 6)
    Path(fence.path).write_text(content)
    done = sh(_FENCED, fence.path, "6", "touch", str(tmp_path / "late"))
    assert done.returncode == 74
    assert not (tmp_path / "late").exists()
