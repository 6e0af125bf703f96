"""A host through sudo: answers as the host below it; a password prompt is a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_dsv41.errors import CommandFailed, StaleEpoch
from pytest_dsv41.hosts import CommandLog, Fence, Host, LocalHost
from pytest_dsv41.hosts.sudo import SudoHost

SUDO = """\
#!/bin/sh
[ "$1" = -n ] && [ "$2" = -- ] || exit 9
shift 2
[ ! -e {refuses} ] || {{ echo "sudo: a password is required" >&2; exit 1; }}
exec "$@"
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SudoHost:
    tool = tmp_path / "bin" / "sudo"
    tool.parent.mkdir()
    tool.write_text(SUDO.format(refuses=tmp_path / "refuses"))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    return SudoHost(LocalHost(CommandLog(tmp_path / "cmd")))


def test_it_is_a_host_with_files(host: SudoHost, tmp_path: Path) -> None:
    assert isinstance(host, Host)
    path = str(tmp_path / "new" / "file")
    assert host.read(path) is None
    host.write(path, b"one\0\xff\n")
    assert host.read(path) == b"one\0\xff\n"
    assert Path(path).stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        host.create(path, "two")
    assert host.read(path) == b"one\0\xff\n"
    host.remove(path)
    host.remove(path)
    host.create(path, "two")
    assert host.read(path) == b"two"
    assert [p.name for p in Path(path).parent.iterdir()] == ["file"]


def test_commands_words_and_codes(host: SudoHost) -> None:
    done = host.run(["printf", "%s|", "a b", "$HOME"], name="words", deadline_s=5.0)
    assert done.stdout == "a b|$HOME|"
    done = host.run(["env"], name="env", deadline_s=5.0, env={"GIVEN": "x y"})
    assert "GIVEN=x y\n" in done.stdout
    with pytest.raises(CommandFailed) as told:
        host.run(["sh", "-c", "exit 7"], name="seven", deadline_s=5.0)
    assert told.value.returncode == 7


def test_what_is_written_stands_in_no_record(host: SudoHost, tmp_path: Path) -> None:
    host.write(str(tmp_path / "file"), "canary-4")
    host.read(str(tmp_path / "file"))
    for path in (tmp_path / "cmd").iterdir():
        text = path.read_text()
        assert "canary-4" not in text
        assert "Y2FuYXJ5LTQ" not in text


def test_a_password_prompt_is_a_refusal(host: SudoHost, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("kept")
    (tmp_path / "refuses").touch()
    for act in (
        lambda: host.read(str(path)),
        lambda: host.write(str(path), "new"),
        lambda: host.remove(str(path)),
        lambda: host.run(["true"], name="act", deadline_s=5.0),
    ):
        with pytest.raises(CommandFailed, match="a password is required"):
            act()
    assert path.read_text() == "kept"


def test_an_older_epoch_is_refused_by_the_host(host: SudoHost, tmp_path: Path) -> None:
    hold = str(tmp_path / "HOLD")
    host.write(str(tmp_path / "file"), "new", fence=Fence.beside(hold, 4))
    with pytest.raises(StaleEpoch):
        host.write(str(tmp_path / "file"), "old", fence=Fence.beside(hold, 3))
    assert host.read(str(tmp_path / "file")) == b"new"
