"""The vocabulary of hosts: probes, processes, command results, and the log of every command."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import re
import shlex
import threading
from pathlib import Path

from ..durable import write_atomic
from ..text import visible

__all__ = ["CommandLog", "CommandResult", "Probe", "Process"]


class Probe(enum.Enum):
    """What a probe saw. UNKNOWN is neither down nor quiet, and nothing is changed on it."""

    UP = "UP"
    DOWN = "DOWN"
    UNKNOWN = "UNKNOWN"


@dataclasses.dataclass(frozen=True)
class Process:
    """One process. Pids are reused, so `started` (seconds since boot) belongs to its identity."""

    pid: int
    started: float
    argv: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"pid {self.pid} ({shlex.join(self.argv) if self.argv else 'no command line'})"


@dataclasses.dataclass(frozen=True)
class CommandResult:
    """What a command answered. `returncode` is negative for a signal; times in seconds."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float


class CommandLog:
    """Numbers every command of a window and keeps it as `cmd/NNNN-<name>.log`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()

    def write(self, name: str, lines: list[str]) -> None:
        """Write one command's record.

        A full disk loses the record and nothing else: the command has run, and what follows it may
        be what brings production back.
        """
        safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:64] or "command"
        with self._lock, contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            taken = [int(p.name[:4]) for p in self.folder.glob("[0-9][0-9][0-9][0-9]-*.log")]
            path = self.folder / f"{max(taken, default=0) + 1:04d}-{safe}.log"
            write_atomic(path, visible("\n".join(lines), 1_000_000) + "\n")
