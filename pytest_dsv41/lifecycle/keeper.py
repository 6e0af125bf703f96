"""The keeper: a small process that finishes a window's teardown when the measuring process cannot.

It lives in a session of its own, started before production is touched. It acts when the process
that opened the window dies without a summary, when that process is halted (SIGSTOP) past the
window's deadline, or when it is past the deadline and its close is overdue too. A process that is
only halted is killed first: woken up later, it could act on machines that are somebody else's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ..errors import RefusedByWorld, StartFailed
from ..hosts.local import boottime

__all__ = ["KeeperHandle", "keep", "spawn_keeper"]

_LOOK_S = 0.5
_READY = b"ready\n"


class KeeperHandle:
    """The keeper as the window's process sees it."""

    def __init__(self, process: subprocess.Popen[bytes], started: float) -> None:
        self._process = process
        self.pid = process.pid
        self.started = started

    def alive(self) -> bool:
        """Whether the keeper still watches."""
        return self._process.poll() is None

    def dismiss(self) -> None:
        """Tell the keeper that the window has ended, and wait until it is gone."""
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.write(b"done\n")
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        if self.alive():
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def spawn_keeper(folder: Path, deadline: float, budget_s: float) -> KeeperHandle:
    """Start the keeper of the window in `folder` and wait until it says that it watches.

    Raises:
        StartFailed: it did not come up; production must not be touched without it.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "DSV41_"))}
    with (folder / "keeper.log").open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest_dsv41",
                "keeper",
                str(folder),
                "--parent",
                str(os.getpid()),
                "--deadline",
                repr(deadline),
                "--budget",
                repr(budget_s),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], 30.0)
    if not readable or os.read(process.stdout.fileno(), len(_READY)) != _READY:
        process.kill()
        process.wait()
        raise StartFailed(f"the keeper did not start; see {folder / 'keeper.log'}")
    return KeeperHandle(process, psutil.Process(process.pid).create_time())


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
    os.write(sys.stdout.fileno(), _READY)
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
