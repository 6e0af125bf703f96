"""One simulated machine as plain data: files, processes, scopes, tmux servers, ports, clock.

Nothing here knows of links, faults or locks: a machine is what a program running on it can see and
change. It is loaded from and stored to JSON, so that several real processes share one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
from typing import Any

import psutil

__all__ = ["Container", "FakeProcess", "Machine", "Service"]

_PROC = ("cmdline", "cgroup", "environ")


@dataclasses.dataclass(frozen=True)
class Service:
    """A program that stays: the process it becomes until something ends it.

    `title` replaces its command line (as `exec -a` does). `ready_s` seconds pass before its ports
    listen; after `lives_s` it ends by itself. `real` is a command on this machine that is started
    with the process and killed with it: a server that really answers.
    """

    ports: tuple[int, ...] = ()
    gpu: bool = False
    title: tuple[str, ...] = ()
    ready_s: float = 0.0
    lives_s: float | None = None
    real: tuple[str, ...] = ()


@dataclasses.dataclass
class FakeProcess:
    """A live process. `scope` is its systemd scope, `socket` and `session` its tmux server's."""

    pid: int
    argv: list[str]
    started: float
    scope: str = ""
    socket: str = ""
    session: str = ""
    ports: list[int] = dataclasses.field(default_factory=list)
    gpu: bool = False
    listens_at: float = 0.0
    ends_at: float | None = None
    real: int = 0
    real_started: float = 0.0
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def is_tmux_server(self) -> bool:
        """Whether this is a tmux server itself and no pane of one."""
        return bool(self.socket) and not self.session


@dataclasses.dataclass
class Container:
    """A running container, which lives outside every scope."""

    name: str
    labels: dict[str, str]
    ports: list[int] = dataclasses.field(default_factory=list)
    gpu: bool = False


@dataclasses.dataclass
class Machine:
    """The state of one host; `now` is the world's clock in seconds."""

    name: str
    address: str
    now: float = 0.0
    up: bool = True
    linked: bool = True
    boots: int = 1
    booted_at: float = 0.0
    clock_offset: float = 0.0
    """What steps of the wall clock have added to it, in seconds."""
    full: bool = False
    gpu: bool = True
    next_pid: int = 1000
    disk: dict[str, str] = dataclasses.field(default_factory=dict)
    """What a power loss leaves: the synced files, their bytes as latin-1 text."""
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """What a reader sees now."""
    processes: dict[int, FakeProcess] = dataclasses.field(default_factory=dict)
    expiry: dict[str, float] = dataclasses.field(default_factory=dict)
    """Scope to the world's second at which RuntimeMaxSec ends it."""
    containers: list[Container] = dataclasses.field(default_factory=list)

    # -- time and identity ---------------------------------------------------------------------

    @property
    def boot_id(self) -> str:
        """Another one after every boot."""
        return f"{self.name}-boot-{self.boots}"

    @property
    def wall(self) -> float:
        """The wall clock: seconds since 2026-01-01, steps included."""
        return self.now + self.clock_offset

    def settle(self) -> None:
        """Do what was due by `now`, the earliest first: processes end, scopes expire."""
        due: list[tuple[float, int, str]] = [
            (process.ends_at, process.pid, "")
            for process in self.processes.values()
            if process.ends_at is not None and process.ends_at <= self.now
        ]
        due += [(at, 0, scope) for scope, at in self.expiry.items() if at <= self.now]
        for _, pid, scope in sorted(due):
            if scope:
                self.kill_scope(scope)
            else:
                self.kill(pid)

    # -- files ---------------------------------------------------------------------------------

    def store(self, path: str, data: bytes, *, synced: bool) -> None:
        """Write a file; unsynced data is what a power loss takes away."""
        text = data.decode("latin-1")
        self.files[path] = text
        if synced:
            self.disk[path] = text

    def load(self, path: str) -> bytes | None:
        """Return the file's bytes, or None; what /proc says of a process too."""
        head, _, tail = path.removeprefix("/proc/").partition("/")
        if path.startswith("/proc/") and head.isdigit() and tail in _PROC:
            process = self.processes.get(int(head))
            if process is None:
                return None
            if tail == "cgroup":
                return f"0::/user.slice/{process.scope or 'session-1.scope'}\n".encode()
            if tail == "environ":
                return "".join(f"{name}={value}\0" for name, value in process.env.items()).encode()
            return "".join(f"{word}\0" for word in process.argv).encode()
        text = self.files.get(path)
        return None if text is None else text.encode("latin-1")

    def delete(self, path: str, *, synced: bool) -> None:
        """Remove a file; an unsynced removal comes undone by a power loss."""
        self.files.pop(path, None)
        if synced:
            self.disk.pop(path, None)

    # -- processes -----------------------------------------------------------------------------

    def start(
        self,
        argv: list[str],
        service: Service | None = None,
        *,
        scope: str = "",
        socket: str = "",
        session: str = "",
        env: dict[str, str] | None = None,
    ) -> FakeProcess:
        """Start a process that stays."""
        service = service or Service()
        process = FakeProcess(
            pid=self.next_pid,
            argv=list(service.title or argv),
            started=self.now - self.booted_at,
            scope=scope,
            socket=socket,
            session=session,
            ports=list(service.ports),
            gpu=service.gpu and self.gpu,
            listens_at=self.now + service.ready_s,
            ends_at=None if service.lives_s is None else self.now + service.lives_s,
            env=dict(env or {}),
        )
        self.next_pid += 1
        if service.real:
            process.real, process.real_started = _spawn(service.real, env or {})
        self.processes[process.pid] = process
        return process

    def kill(self, pid: int) -> None:
        """End a process, and what cannot live without it: panes, an empty tmux server."""
        process = self.processes.pop(pid, None)
        if process is None:
            return
        _end_real(process)
        if process.is_tmux_server:
            for pane in [p for p in self.processes.values() if p.socket == process.socket]:
                self.kill(pane.pid)
        elif process.session and not self.panes(process.socket):
            server = self.tmux_server(process.socket)
            if server is not None:
                self.kill(server.pid)
        self._collect()

    def kill_scope(self, scope: str) -> int:
        """End every process of a scope; how many there were."""
        members = [p.pid for p in self.processes.values() if p.scope == scope]
        for pid in members:
            self.kill(pid)
        self.expiry.pop(scope, None)
        return len(members)

    def scopes(self) -> list[str]:
        """The scopes that hold a process, sorted."""
        return sorted({p.scope for p in self.processes.values() if p.scope})

    def _collect(self) -> None:
        populated = self.scopes()
        self.expiry = {scope: at for scope, at in self.expiry.items() if scope in populated}

    def listening(self, port: int) -> bool:
        """Whether a process or a container listens on `port`."""
        return any(
            port in p.ports and p.listens_at <= self.now for p in self.processes.values()
        ) or any(port in c.ports for c in self.containers)

    # -- tmux ----------------------------------------------------------------------------------

    def tmux_server(self, socket: str) -> FakeProcess | None:
        """The server that owns `socket`."""
        return next(
            (p for p in self.processes.values() if p.socket == socket and p.is_tmux_server), None
        )

    def panes(self, socket: str) -> list[FakeProcess]:
        """The panes of a socket's server, in the order in which they were started."""
        return [p for p in self.processes.values() if p.socket == socket and p.session]

    # -- the machine as a whole ----------------------------------------------------------------

    def shut_down(self, *, power_loss: bool = False) -> None:
        """Everything that runs is gone; after a power loss unsynced files are too."""
        for process in list(self.processes.values()):
            _end_real(process)
        self.processes.clear()
        self.expiry.clear()
        self.containers.clear()
        if power_loss:
            self.files = dict(self.disk)
        else:
            self.disk = dict(self.files)
        volatile = ("/run/", "/tmp/")  # noqa: S108 - paths of a simulated machine
        for files in (self.files, self.disk):
            for path in [path for path in files if path.startswith(volatile)]:
                del files[path]
        self.up = False

    def boot(self) -> None:
        """Start the machine again; its identity is another one."""
        self.up = True
        self.boots += 1
        self.booted_at = self.now

    def freeze_real(self, frozen: bool) -> None:
        """Stop or continue the real servers: nobody answers over a link that is cut."""
        for process in self.processes.values():
            real = _real(process)
            if real is not None:
                with contextlib.suppress(psutil.Error):
                    real.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    # -- storing -------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The state as JSON."""
        record = dict(self.__dict__)
        record["processes"] = [dict(p.__dict__) for p in self.processes.values()]
        record["containers"] = [dict(c.__dict__) for c in self.containers]
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Machine:
        """What `to_json` wrote."""
        machine = cls(**record)
        found = [FakeProcess(**p) for p in record["processes"]]
        machine.processes = {p.pid: p for p in found}
        machine.containers = [Container(**c) for c in record["containers"]]
        return machine


def _spawn(argv: tuple[str, ...], env: dict[str, str]) -> tuple[int, float]:
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
        start_new_session=True,
    )
    started = psutil.Process(child.pid).create_time()
    # It outlives this process as a server outlives the command that started it.
    child.returncode = 0
    return child.pid, started


def _real(process: FakeProcess) -> psutil.Process | None:
    if not process.real:
        return None
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.real)
        if found.create_time() == process.real_started:
            return found
    return None


def _end_real(process: FakeProcess) -> None:
    real = _real(process)
    if real is not None:
        with contextlib.suppress(psutil.Error):
            real.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(real.pid, 0)
