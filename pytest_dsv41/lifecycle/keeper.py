"""The keeper: a small process that finishes a window's teardown when the measuring process cannot.

It lives in a session of its own, started before production is touched. It acts when the process
that opened the window dies without a summary, when that process is halted (SIGSTOP) past the
window's deadline, or when it is past the deadline and its close is overdue too. A process that is
only halted is killed first: woken up later, it could act on machines that are somebody else's.

Where the campaign asks for it, the keeper is a transient unit of the user's systemd, outside of the
cgroup that it was started from: what kills a login session, a container's shell or the scope that
the window runs in as a whole does not kill it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import psutil

from ..errors import RefusedByWorld, StartFailed
from ..hosts.local import boottime

__all__ = ["KeeperHandle", "keep", "spawn_keeper"]

_LOOK_S: Final = 0.5
_READY_S: Final = 30.0
_READY: Final = re.compile(rb"ready (\d+)\n")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class KeeperHandle:
    """The keeper as the window's process sees it: the child that was started, and the keeper.

    Both are one process, unless the keeper is a unit: then the child only hands its pipes on.
    """

    def __init__(self, child: subprocess.Popen[bytes], keeper: psutil.Process) -> None:
        self._child = child
        self._keeper = keeper
        self.pid = keeper.pid
        self.started = keeper.create_time()

    def alive(self) -> bool:
        """Whether the keeper still watches."""
        # A dead child is reaped first, so that it is not taken for a living one.
        self._child.poll()
        try:
            return self._keeper.is_running() and self._keeper.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def dismiss(self) -> None:
        """Tell the keeper that the window has ended, and wait until it is gone."""
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.write(b"done\n")
                self._child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(10.0)
        if self.alive():
            with contextlib.suppress(psutil.Error):
                self._keeper.kill()
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()


def spawn_keeper(
    folder: Path, deadline: float, budget_s: float, *, as_unit: bool = False
) -> KeeperHandle:
    """Start the keeper of the window in `folder` and wait until it says that it watches.

    `as_unit` makes it a transient unit of the user's systemd, which outlives the cgroup of this
    process (SAFETY).

    Raises:
        StartFailed: it did not come up; production must not be touched without it.
    """
    kept = {
        k: v
        for k, v in os.environ.items()
        if k.startswith("DSV41_CHAIN_") or not k.startswith(("PYTEST_", "DSV41_"))
    }
    environment = {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [
        *(sys.executable, "-m", "pytest_dsv41", "keeper", str(folder)),
        *("--parent", str(os.getpid())),
        *("--deadline", repr(deadline), "--budget", repr(budget_s)),
    ]
    if as_unit:
        argv = _unit(argv, environment)
    failed = StartFailed(f"the keeper did not start; see {folder / 'keeper.log'}")
    with (folder / "keeper.log").open("ab") as log:
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise StartFailed(f"the keeper did not start: {argv[0]}: {error.strerror}") from error
    assert child.stdout is not None
    said = _READY.fullmatch(_first_line(child.stdout))
    try:
        if said is None:
            raise failed
        return KeeperHandle(child, psutil.Process(int(said[1])))
    except (StartFailed, psutil.Error):
        child.kill()
        child.wait()
        raise failed from None


def _first_line(pipe: IO[bytes]) -> bytes:
    """What the child says first; less than a line when it ends, or takes too long."""
    said, limit = b"", time.monotonic() + _READY_S
    while not said.endswith(b"\n") and (left := limit - time.monotonic()) > 0:
        readable, _, _ = select.select([pipe], [], [], left)
        chunk = os.read(pipe.fileno(), 64) if readable else b""
        if not chunk:
            break
        said += chunk
    return said


def _unit(argv: list[str], environment: Mapping[str, str]) -> list[str]:
    """The same command as a transient unit with this process's pipes.

    A variable is named and not told, since a command line is everybody's to read. What the keeper
    starts on this machine must outlive it: systemd ends the unit's main process alone.

    Raises:
        StartFailed: there is no systemd-run here.
    """
    program = shutil.which("systemd-run")
    if program is None:
        raise StartFailed("keeper_units in campaign.toml: systemd-run is not installed here")
    try:
        helped = subprocess.run(
            [program, "--help"], capture_output=True, text=True, timeout=10.0, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StartFailed(f"keeper_units in campaign.toml: {program}: {error}") from error
    if "--expand-environment" in helped.stdout:
        no_expansion = ["--expand-environment=no"]
    else:
        # Before 254 the manager expands the command's variables, and a doubled one stands for $.
        no_expansion, argv = [], [word.replace("$", "$$") for word in argv]
    return [
        *(program, "--user", "--pipe", "--same-dir", "--quiet", "--collect"),
        f"--unit=dsv41-keeper-{secrets.token_hex(8)}",
        "--property=KillMode=process",
        # A window's own endings with production back; 20 and 21 are failures to be seen.
        "--property=SuccessExitStatus=10 11 12",
        *no_expansion,
        *(f"--setenv={name}" for name in sorted(environment) if _NAME.fullmatch(name)),
        "--",
        *argv,
    ]


def keep(folder: Path, parent: int, deadline: float, budget_s: float) -> int:
    """Watch `parent` until the window has ended; finish the window if it cannot. The exit code.

    `deadline` is in seconds since boot, `budget_s` what the close may take after it.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    try:
        watched = psutil.Process(parent)
        started = watched.create_time()
    except psutil.NoSuchProcess:
        watched, started = None, 0.0
    os.write(sys.stdout.fileno(), b"ready %d\n" % os.getpid())
    why = _wait(watched, started, deadline, budget_s)
    if why is None:
        return 0
    # Imported only now: while all goes well the keeper stays a few megabytes small.
    from .recover import recover_window

    say(f"{why}: finishing the window in {folder}")
    limit = boottime() + budget_s
    while True:
        try:
            summary = recover_window(folder, stopped=why, wait_s=5.0)
        except RefusedByWorld as error:
            # Somebody else holds the lease: an operator's recover does the same work.
            say(str(error))
            if boottime() > limit:
                return 21
            time.sleep(1.0)
            continue
        say(f"ended: {summary.status}, exit code {summary.exit_code}")
        return summary.exit_code


def _wait(
    watched: psutil.Process | None, started: float, deadline: float, budget_s: float
) -> str | None:
    """Block until the window ended well (None) or must be finished by the keeper (why)."""
    stdin = sys.stdin.fileno()
    told = b""
    open_pipe = True
    while True:
        if open_pipe:
            readable, _, _ = select.select([stdin], [], [], _LOOK_S)
            if readable:
                chunk = os.read(stdin, 64)
                told += chunk
                open_pipe = bool(chunk)
        else:
            time.sleep(0.02)
        if b"done" in told:
            return None
        state = _state(watched, started)
        if state == "gone":
            return "the measuring process died"
        over = boottime() - deadline
        if (over > 0 and state == "halted") or over > budget_s:
            assert watched is not None
            why = "halted" if state == "halted" else "still at work long"
            with contextlib.suppress(psutil.NoSuchProcess):
                watched.kill()
                watched.wait(10.0)
            return f"the measuring process was {why} past the window's deadline"


def _state(watched: psutil.Process | None, started: float) -> str:
    if watched is None:
        return "gone"
    try:
        if watched.create_time() != started:
            return "gone"
        status = psutil.Process(watched.pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    return "halted" if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP) else "alive"


def say(line: str) -> None:
    """Write one line to the keeper's log."""
    with contextlib.suppress(OSError):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
