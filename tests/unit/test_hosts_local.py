"""This machine as a host: scopes find every child, ends are whole, UNKNOWN is not DOWN."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_dsv41.errors import CommandFailed, TransportError
from pytest_dsv41.hosts import CommandLog, LocalHost, Probe

FORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.execve("/bin/sleep", ["sleep", "600"], {})
"""


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    return LocalHost(CommandLog(tmp_path / "cmd"))


def logs(tmp_path: Path) -> list[str]:
    return [p.read_text() for p in sorted((tmp_path / "cmd").iterdir())]


def test_a_free_port_is_none_that_the_kernel_gives_out_by_itself() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for port in {LocalHost.free_port() for _ in range(20)}:
        assert not low <= port <= high
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_a_scope_holds_a_double_forked_child_and_one_without_environment(
    host: LocalHost, tmp_path: Path
) -> None:
    pidfile = tmp_path / "pid"
    started = host.spawn(
        [sys.executable, "-c", FORKER, str(pidfile)],
        name="forker",
        scope="dsv41w-test-1.C1",
        output=tmp_path / "out.log",
    )
    while not (pidfile.exists() and pidfile.read_text()):
        assert host.process(started.pid) is not None
    orphan = int(pidfile.read_text())
    found = {p.pid for p in host.scope_processes("dsv41w-test-1")}
    assert {orphan} <= found
    assert host.scope_processes("dsv41w-test-10") == []
    assert host.scope_processes("dsv41w-test") == []
    host.end(lambda: host.scope_processes("dsv41w-test-1.C1"), name="C1-stop", grace_s=0.1)
    assert host.process(orphan) is None
    assert host.scope_processes("dsv41w-test-1") == []
    assert any("SIGKILL" in text for text in logs(tmp_path))


def test_ending_nothing_is_fine(host: LocalHost) -> None:
    assert host.end(lambda: host.scope_processes("dsv41w-none"), name="none", grace_s=1.0) == 0


def test_a_command_is_an_argument_list_and_never_a_shell_line(
    host: LocalHost, tmp_path: Path
) -> None:
    odd = ["$(id)", "`id`", "a\nb", "-rf", "; true", "ü"]
    done = host.run(
        [sys.executable, "-c", "import sys; print(sys.argv[1:])", *odd],
        name="odd/../name",
        deadline_s=30.0,
    )
    assert done.stdout.strip() == repr(odd)
    names = [p.name for p in (tmp_path / "cmd").iterdir()]
    assert names == ["0001-odd-..-name.log"]


@pytest.mark.parametrize("code", [1, 127, 255])
def test_a_failing_command_is_told_from_one_that_did_not_answer(host: LocalHost, code: int) -> None:
    with pytest.raises(CommandFailed, match=f"exit {code}: sorry") as failed:
        host.run(["sh", "-c", f"echo sorry >&2; exit {code}"], name="fails", deadline_s=30.0)
    assert failed.value.returncode == code
    with pytest.raises(TransportError, match="no answer within"):
        host.run(["sleep", "60"], name="hangs", deadline_s=0.1)
    with pytest.raises(CommandFailed, match="No such file"):
        host.run(["/no/such/program"], name="missing", deadline_s=1.0)


def test_a_command_killed_by_a_signal_says_so(host: LocalHost) -> None:
    with pytest.raises(CommandFailed) as failed:
        host.run(["sh", "-c", "kill -9 $$"], name="killed", deadline_s=30.0)
    assert failed.value.returncode == -9


def test_every_command_is_logged_with_its_exit_and_output(host: LocalHost, tmp_path: Path) -> None:
    host.run(["echo", "hello \x1b[31m"], name="first", deadline_s=30.0)
    host.run(["echo", "again"], name="second", deadline_s=30.0)
    names = sorted(p.name for p in (tmp_path / "cmd").iterdir())
    assert names == ["0001-first.log", "0002-second.log"]
    text = logs(tmp_path)[0]
    assert "exit: 0" in text
    assert "hello \\x1b[31m" in text
    assert "\x1b" not in text


def test_a_port_is_down_only_when_the_connection_is_refused(host: LocalHost) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert host.port(port) is Probe.DOWN
        server.listen()
        assert host.port(port) is Probe.UP
        assert [p.pid for p in host.listeners(port)] == [os.getpid()]
    assert host.port(port, "192.0.2.1.invalid") is Probe.UNKNOWN


def test_a_server_does_not_inherit_what_belongs_to_the_test_session(
    host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "x")
    monkeypatch.setenv("KEPT", "yes")
    output = tmp_path / "env.log"
    started = host.spawn(["env"], name="env", scope="dsv41w-env", output=output)
    while host.process(started.pid) is not None:
        pass
    lines = output.read_text().splitlines()
    assert "KEPT=yes" in lines
    assert "DSV41_SCOPE=dsv41w-env" in lines
    assert not [line for line in lines if line.startswith("PYTEST_")]


def test_the_identity_is_the_boot_and_the_first_process(host: LocalHost) -> None:
    boot = subprocess.run(
        ["cat", "/proc/sys/kernel/random/boot_id"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert host.identity().startswith(boot)
