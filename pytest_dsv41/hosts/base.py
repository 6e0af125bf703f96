"""What a window may do to a machine: one small interface with a local, an ssh and a simulated side.

A host answers or it does not, and the two are never mixed: `CommandFailed` is the host's own
answer (a command's exit code, 255 included, or a refused file), `TransportError` is no answer, and
then nobody knows whether the act happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import enum
import hashlib
import os
import re
import shlex
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol, runtime_checkable

from ..errors import CommandFailed, UsageError
from ..text import one_line, visible

__all__ = [
    "FENCED_OFF",
    "CommandLog",
    "CommandResult",
    "Fence",
    "Host",
    "Placeholder",
    "Probe",
    "Process",
]

_KEPT = re.compile(r"(\d{4,})-.*\.log")

FENCED_OFF = 83
"""The exit code of a command that a host refused because its epoch is no longer the newest."""


class Probe(enum.Enum):
    """What a probe saw. UNKNOWN is neither down nor quiet, and nothing is changed on it."""

    UP = "UP"
    DOWN = "DOWN"
    UNKNOWN = "UNKNOWN"


class Placeholder(enum.Enum):
    """What a look for a chain's placeholder saw on one host.

    FOREIGN: a placeholder that names another owner or none; it is never touched.
    """

    UP = "UP"
    DOWN = "DOWN"
    FOREIGN = "FOREIGN"
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


@dataclasses.dataclass(frozen=True)
class Fence:
    """The epoch that a mutating step carries, and the file where its host keeps the highest seen.

    The host compares and acts under one lock, so a coordinator that was paused before the act and
    overtaken meanwhile is refused however late it comes back (SAFETY I8).
    """

    path: str
    epoch: int

    @classmethod
    def beside(cls, hold: str, epoch: int, campaign: str = "") -> Fence:
        """The fence of the host whose HOLD lies at `hold`.

        Epochs of two campaigns are not comparable, so each has a file of its own there; between
        campaigns the HOLD decides.
        """
        path = PurePosixPath(hold)
        which = hashlib.sha256(os.fsencode(campaign)).hexdigest()[:12] if campaign else ""
        name = ".".join(filter(None, (path.name, which, "epoch")))
        return cls(str(path.with_name(name)), epoch)


def identity_of(boot_id: str, first_process: str) -> str:
    """A host's identity from its boot id and /proc/1/stat: the start is in ticks since boot."""
    return f"{boot_id.strip()}/{first_process.rpartition(')')[2].split()[19]}"


def usable(argv: Sequence[str], name: str) -> None:
    """Refuse a command line that no machine could take.

    Raises:
        UsageError: it is empty, or a null character stands in it.
    """
    if not argv or not argv[0]:
        raise UsageError(f"{name}: no command is given")
    if any("\0" in word for word in argv):
        raise UsageError(f"{name}: a null character stands in {one_line(repr(list(argv)))}")


def raise_for_code(name: str, result: CommandResult) -> None:
    """Raise CommandFailed with the command's last line, unless it ended with 0."""
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
        raise CommandFailed(
            f"{name}: exit {result.returncode}: {one_line(lines[-1])}", result.returncode
        )


def stale(what: str, host: str, seen: int, fence: Fence) -> str:
    """The line of a refused older epoch."""
    return (
        f"{what}: {host} has seen epoch {seen}, this is {fence.epoch}; "
        "another coordinator has taken over and nothing was changed"
    )


@runtime_checkable
class Host(Protocol):
    """One machine. Paths are absolute paths on that machine; every call is logged or reads only.

    Every method but `close` raises TransportError when the host does not answer, and
    CommandFailed when it answers that it cannot (a full disk, a missing program, a file that may
    not be read). A call that carries a `fence` raises StaleEpoch, with nothing changed, when the
    host has seen a newer epoch.
    """

    @property
    def name(self) -> str:
        """What messages call it; unique among the hosts of a target."""

    def identity(self) -> str:
        """Boot id and start of PID 1: another value means that the host was restarted."""

    def run(
        self,
        argv: Sequence[str],
        *,
        name: str,
        deadline_s: float,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        fence: Fence | None = None,
        private: bool = False,
    ) -> CommandResult:
        """Run `argv` to its end, log it as `name`, and return what it answered.

        With `private` its output, which may hold secrets, stays out of the record.

        Raises:
            CommandFailed: with `check`, it ended with another code than 0; 127: no such program.
            TransportError: no answer within `deadline_s` seconds, or the link was lost.
        """

    def read(self, path: str) -> bytes | None:
        """The file's bytes, or None when there is none."""

    def create(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """Create the file once, durably, with the folders above it.

        Raises:
            FileExistsError: something lies there; it is untouched.
        """

    def write(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """Replace the file durably: readers see the old bytes or the new ones."""

    def remove(self, path: str, *, fence: Fence | None = None) -> None:
        """Remove the file durably; a missing one is fine."""

    def port(self, port: int, host: str = "127.0.0.1") -> Probe:
        """Whether something listens, seen from this machine: DOWN only when it is refused."""

    def processes(self) -> list[Process]:
        """Every live process with its command line."""

    def close(self) -> None:
        """Give up the connection; the next call opens it again."""


class CommandLog:
    """Numbers every command of a window and keeps it as `cmd/NNNN-<name>.log`."""

    def __init__(self, folder: Path, *, synced: bool = True) -> None:
        self.folder = folder
        self.synced = synced
        """Whether a record is on disk before the command's caller goes on."""
        self._lock = threading.Lock()

    def record(self, host: str, name: str, result: CommandResult, *, private: bool = False) -> None:
        """Write the record of a command that answered; of a private one without its output."""
        said = ["stdout:", result.stdout, "stderr:", result.stderr]
        self.write(
            name,
            [
                f"host: {host}",
                f"argv: {list(result.argv)!r}",
                f"exit: {result.returncode} after {result.seconds:.3f} s",
                *(["output: private, not kept"] if private else said),
            ],
        )

    def write(self, name: str, lines: list[str]) -> None:
        """Write one command's record.

        A full disk loses the record and nothing else: the command has run, and what follows it may
        be what brings production back.
        """
        safe = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:64] or "command"
        with self._lock, contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Looked for each time: another process may keep its commands here too.
            with os.scandir(self.folder) as entries:
                matches = [_KEPT.match(entry.name) for entry in entries]
            taken = [int(match[1]) for match in matches if match]
            path = self.folder / f"{max(taken, default=0) + 1:04d}-{safe}.log"
            stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            text = visible("\n".join([f"written: {stamp}", *lines]), 1_000_000)
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{text}\n")
                file.flush()
                if self.synced:
                    os.fsync(file.fileno())
