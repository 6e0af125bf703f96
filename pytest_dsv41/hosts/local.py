"""This machine as a host: processes started in named scopes, found again, and ended whole.

A scope is a name carried in the environment of everything started under it. The kernel hands the
environment to every child, so the scope's processes are found after a double fork and after the
death of the one that started them; the session id finds those that cleared their environment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import psutil

from .. import durable
from ..errors import CommandFailed, StaleEpoch, TransportError
from ..text import counted
from .base import (
    FENCED_OFF,
    CommandLog,
    CommandResult,
    Fence,
    Probe,
    Process,
    identity_of,
    raise_for_code,
    stale,
    usable,
)

__all__ = ["LocalHost"]

SCOPE_VARIABLE: Final = "DSV41_SCOPE"
_POLL_S: Final = 0.02
_TRIES: Final = 100
_LOWEST_PORT: Final = 20000
"""Below it lie the ports of well-known services."""
_ENOUGH_PORTS: Final = 1000
# What belongs to the running test session and not to a server that may outlive it.
_NOT_INHERITED: Final = ("PYTEST_", "DSV41_", "COV_", "COVERAGE_")


def boottime() -> float:
    """Seconds since boot, suspend included: comparable between processes of one boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextlib.contextmanager
def _answering(act: str, path: str) -> Iterator[None]:
    """Turn the file system's refusal into the host's answer; that a file exists stays itself."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise CommandFailed(f"{act} {path}: {error.strerror}", error.errno or 1) from error
    except ValueError as error:
        raise CommandFailed(f"{act} {path}: unreadable ({error})", 1) from error


def _make_folder(path: str) -> None:
    """Make the folders above `path`; one that is a file is no file that exists."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error


def _sink(output: Path) -> BinaryIO:
    """Open a server's log for appending; a full disk must not keep the server from starting."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        return output.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")


def _lasting_ports() -> Sequence[int]:
    """The ports that are nobody's until somebody names them; whichever, if the kernel has all."""
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    below, above = range(_LOWEST_PORT, low), range(high + 1, 65536)
    longest = max(below, above, key=len)
    return longest if len(longest) >= _ENOUGH_PORTS else (0,)


class LocalHost:
    """The machine pytest runs on. `pause` is called while waiting, so that a stop can end it."""

    name = "local"

    def __init__(self, log: CommandLog, pause: Callable[[float], None] = time.sleep) -> None:
        self.log = log
        self.pause = pause

    def identity(self) -> str:
        """Boot id and start time of PID 1: another value means that the host was restarted."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return identity_of(boot, Path("/proc/1/stat").read_text("utf-8", "replace"))

    # -- processes ----------------------------------------------------------------------------

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
        """Run `argv` to its end and log it; past the deadline it is killed (see `Host.run`)."""
        usable(argv, name)
        with self._fenced(fence, name):
            result = self._run(argv, name, deadline_s, stdin, env or {}, private)
        if check:
            raise_for_code(name, result)
        return result

    def _run(
        self,
        argv: Sequence[str],
        name: str,
        deadline_s: float,
        stdin: str,
        env: Mapping[str, str],
        private: bool,
    ) -> CommandResult:
        begun = time.monotonic()
        try:
            done = subprocess.run(
                list(argv),
                input=stdin,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=deadline_s,
                env=self._environment(env),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            self.log.write(name, [f"argv: {list(argv)!r}", f"no answer within {deadline_s:g} s"])
            raise TransportError(f"{name}: no answer within {deadline_s:g} s") from error
        except OSError as error:
            said = f"{argv[0]}: {error.strerror}"
            self.log.write(name, [f"argv: {list(argv)!r}", f"not started: {said}"])
            return CommandResult(tuple(argv), 127, "", said, time.monotonic() - begun)
        seconds = time.monotonic() - begun
        result = CommandResult(tuple(argv), done.returncode, done.stdout, done.stderr, seconds)
        self.log.record(self.name, name, result, private=private)
        return result

    def spawn(
        self,
        argv: Sequence[str],
        *,
        name: str,
        scope: str,
        output: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Process:
        """Start a server in `scope`, in a session of its own, its output appended to `output`.

        Raises:
            CommandFailed: the program could not be started.
        """
        with _sink(output) as sink:
            try:
                child = subprocess.Popen(
                    list(argv),
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=self._environment({**(env or {}), SCOPE_VARIABLE: scope}),
                    cwd=cwd,
                    start_new_session=True,
                )
            except OSError as error:
                self.log.write(name, [f"argv: {list(argv)!r}", f"not started: {error}"])
                raise CommandFailed(f"{name}: {argv[0]}: {error.strerror}", 127) from error
        # Popen warns when it is collected while the child runs; this child is meant to outlive it.
        child.returncode = 0
        process = self.process(child.pid) or Process(child.pid, 0.0, tuple(argv))
        self.log.write(
            name,
            [f"argv: {list(argv)!r}", f"scope: {scope}", f"pid: {child.pid}", f"output: {output}"],
        )
        return process

    def process(self, pid: int) -> Process | None:
        """Return the live process `pid`, or None; a zombie is not alive."""
        try:
            found = psutil.Process(pid)
            if found.status() == psutil.STATUS_ZOMBIE:
                return None
            return Process(pid, found.create_time(), tuple(found.cmdline()))
        except psutil.Error:
            return None

    def scope_processes(self, prefix: str) -> list[Process]:
        """Every live process of the scopes whose name is `prefix` or begins with `prefix` + "."."""
        members: dict[int, Process] = {}
        sessions: set[int] = set()
        everyone: list[tuple[psutil.Process, int]] = []
        for found in psutil.process_iter():
            try:
                if found.pid == os.getpid() or found.status() == psutil.STATUS_ZOMBIE:
                    continue
                session = os.getsid(found.pid)
                everyone.append((found, session))
                scope = found.environ().get(SCOPE_VARIABLE, "")
            except (psutil.Error, OSError):
                continue
            if scope == prefix or scope.startswith(prefix + "."):
                members[found.pid] = self._describe(found)
                # Only a session that was led by a member of the scope: never the caller's own.
                if session != os.getsid(0):
                    sessions.add(session)
        for found, session in everyone:
            if session in sessions and found.pid not in members:
                members[found.pid] = self._describe(found)
        return list(members.values())

    @staticmethod
    def _describe(found: psutil.Process) -> Process:
        try:
            return Process(found.pid, found.create_time(), tuple(found.cmdline()))
        except psutil.Error:
            return Process(found.pid, 0.0, ())

    def end(self, find: Callable[[], list[Process]], *, name: str, grace_s: float) -> int:
        """End every process that `find` returns: SIGTERM, then SIGKILL; returns how many.

        `find` is asked again until it is empty, so that a child born meanwhile is ended too.

        Raises:
            TransportError: some are still there after SIGKILL (uninterruptible, or not ours).
        """
        lines: list[str] = []
        ended: set[tuple[int, float]] = set()
        patience = boottime() + grace_s
        limit = patience + 10.0
        sent: dict[tuple[int, float], int] = {}
        while alive := find():
            now = boottime()
            wanted = signal.SIGTERM if now < patience else signal.SIGKILL
            for process in alive:
                key = (process.pid, process.started)
                ended.add(key)
                if sent.get(key) != wanted:
                    sent[key] = wanted
                    lines.append(f"{wanted.name} to {process}")
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(process.pid, wanted)
                self._reap(process.pid)
            if now > limit:
                self.log.write(name, [*lines, f"still alive: {', '.join(map(str, alive))}"])
                raise TransportError(f"{name}: still alive after SIGKILL: {alive[0]}")
            # Never `self.pause`: an end that has begun is finished whatever asks to stop.
            time.sleep(_POLL_S)
        for pid, _ in ended:
            self._reap(pid)
        self.log.write(
            name, [*lines, f"{counted(len(ended), 'process', 'processes')} ended, none left"]
        )
        return len(ended)

    @staticmethod
    def _reap(pid: int) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    # -- files --------------------------------------------------------------------------------

    def read(self, path: str) -> bytes | None:
        """See `Host.read`."""
        with _answering("read", path):
            try:
                # A pipe that somebody put there would keep the reader waiting for ever.
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                if Path(path).is_symlink():
                    raise ValueError("a link to nothing") from None
                return None
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise ValueError("not a file")
                with os.fdopen(fd, "rb", closefd=False) as file:
                    return file.read()
            finally:
                os.close(fd)

    def create(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.create`."""
        with self._fenced(fence, f"create {path}"), _answering("create", path):
            _make_folder(path)
            durable.create_exclusive(Path(path), data)

    def write(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.write`."""
        with self._fenced(fence, f"write {path}"), _answering("write", path):
            _make_folder(path)
            durable.write_atomic(Path(path), data)

    def remove(self, path: str, *, fence: Fence | None = None) -> None:
        """See `Host.remove`."""
        with self._fenced(fence, f"remove {path}"), _answering("remove", path):
            durable.remove(Path(path))

    @contextlib.contextmanager
    def _fenced(self, fence: Fence | None, what: str) -> Iterator[None]:
        """Hold the fence's lock while the body acts, having refused an older epoch."""
        if fence is None:
            yield
            return
        path = Path(fence.path)
        with _answering("fence", fence.path):
            _make_folder(fence.path)
            lock = durable.FileLock(path.with_name(f"{path.name}.lock"))
            lock.acquire(blocking=True)
        try:
            with _answering("fence", fence.path):
                seen = int(path.read_bytes()) if path.exists() else 0
                if seen > fence.epoch:
                    raise StaleEpoch(stale(what, self.name, seen, fence), FENCED_OFF)
                if seen < fence.epoch:
                    durable.write_atomic(path, f"{fence.epoch}\n")
            yield
        finally:
            lock.release()

    def processes(self) -> list[Process]:
        """See `Host.processes`."""
        return [self._describe(found) for found in psutil.process_iter()]

    def close(self) -> None:
        """There is no connection."""

    # -- ports --------------------------------------------------------------------------------

    def port(self, port: int, host: str = "127.0.0.1") -> Probe:
        """Whether something listens: DOWN only when the connection is refused."""
        try:
            with socket.create_connection((host, port), timeout=2.0):
                return Probe.UP
        except ConnectionRefusedError:
            return Probe.DOWN
        except OSError:
            return Probe.UNKNOWN

    def listeners(self, port: int) -> list[Process]:
        """The processes that listen on TCP `port` (those this user may see)."""
        pids = {
            found.pid
            for found in psutil.net_connections(kind="tcp")
            if found.status == psutil.CONN_LISTEN
            and found.laddr
            and found.laddr.port == port
            and found.pid
        }
        return [process for pid in sorted(pids) if (process := self.process(pid))]

    @staticmethod
    def free_port() -> int:
        """A TCP port that nothing listens on now, outside of those that the kernel gives out.

        One of the kernel's own could be anybody's next connection or server by the time that a
        server is started on it.
        """
        for _ in range(_TRIES):
            port = secrets.choice(_lasting_ports())
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
        raise TransportError(f"no free port on this machine after {_TRIES} tries")

    @staticmethod
    def _environment(extra: Mapping[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_INHERITED)}
        return {**kept, **extra}
