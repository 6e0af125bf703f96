"""A command whose answer is wanted and nothing else of it: it ends in time, with all it started.

What it says is read as it comes and only the end of it is kept, so that no command's output fills
the memory of who asked.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["KEPT", "answer", "end_group"]

KEPT: Final = 200_000
"""Bytes of a command's output that are kept, from its end."""
_POLL_S: Final = 0.1
_GRACE_S: Final = 10.0


def answer(
    argv: Sequence[str],
    *,
    cwd: Path,
    deadline_s: float,
    env: Mapping[str, str] | None = None,
    look: Callable[[], None] | None = None,
) -> tuple[int, str]:
    """Run `argv` in a session of its own; return its code and the end of what it said.

    A child that holds its output after it belongs to it: it has not said everything before.

    Args:
        argv: the command.
        cwd: where it runs.
        deadline_s: then it is ended, with all that it started.
        env: its whole environment; None: this process's.
        look: called now and then; what it raises ends the command too.

    Raises:
        subprocess.TimeoutExpired: the deadline came.
        OSError: it could not be started.
    """
    until = time.monotonic() + deadline_s
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    said = bytearray()

    def listen() -> None:
        assert isinstance(process.stdout, io.BufferedReader)
        while part := process.stdout.read1(1 << 16):
            said.extend(part)
            del said[:-KEPT]

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        while not _has_ended(process) or listener.is_alive():
            if look is not None:
                look()
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(argv, deadline_s)
            listener.join(_POLL_S)
            if not listener.is_alive() and not _has_ended(process):
                time.sleep(_POLL_S)
    except BaseException:
        end_group(process)
        raise
    finally:
        listener.join(_POLL_S)
        if not listener.is_alive() and process.stdout is not None:
            process.stdout.close()
    return process.wait(), said.decode("utf-8", "replace")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has; it is not reaped, so that its number stays its own."""
    look = os.WEXITED | os.WNOWAIT | os.WNOHANG
    return os.waitid(os.P_PID, process.pid, look) is not None


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session, and every process of its group; it is reaped."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    limit = time.monotonic() + _GRACE_S
    # It is not reaped before the last signal, so that its number is nobody else's yet.
    with contextlib.suppress(ChildProcessError):
        while not _has_ended(process) and time.monotonic() < limit:
            time.sleep(_POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
