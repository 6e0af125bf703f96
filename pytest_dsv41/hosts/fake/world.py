"""A world of simulated hosts that several real processes can share, with faults by name.

The whole state lies in files under one lock, so a window, its keeper, a watchdog and two gates see
the same machines, each from its own process. Nothing waits: time is the world's own and moves by
the seeded latency of every act, and by `advance`. The same seed and the same acts give the same
trace (SAFETY I12).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from ...durable import FileLock
from ...errors import UsageError
from .machine import Machine
from .programs import BUILT_IN, Program, load_program

__all__ = ["FAULTS", "CallerKilled", "FakeWorld"]

FAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "partition": "the link is cut until `heal`; the machine lives on",
        "reboot": "the machine restarts: nothing runs any more, its files stay",
        "power-loss": "the machine is off until `boot`; what was not synced is gone",
        "full-disk": "every write is refused until `heal`; what exists stays readable",
        "enospc": "this one write finds no space",
        "hang": "this one command never answers",
        "kill": "the calling process is killed",
        "clock-forward": "the wall clock jumps an hour ahead",
        "clock-back": "the wall clock jumps an hour back",
    }
)
"""Faults by name. Each can be injected now, or armed at a named act, before it or after it."""

_JUMP_S: Final = 3600.0
# Written in turns and never cut: a writer that is killed leaves the other one whole, and no file
# is replaced, which disks answer slowly.
_SLOTS: Final = ("world.0", "world.1")
_EVENTS: Final = "events.jsonl"


class CallerKilled(BaseException):
    """Stands for SIGKILL of the calling process in tests that crash in one process."""


@dataclasses.dataclass
class Armed:
    """A fault that waits for an act: the `left`-th one called `at`, on `host` or on any."""

    fault: str
    at: str
    host: str
    after: bool
    left: int


@dataclasses.dataclass
class State:
    """Everything a world knows, as it is stored."""

    seed: int
    kills: str
    servers: str
    programs: dict[str, str]
    machines: dict[str, Machine]
    now: float = 0.0
    acts: int = 0
    armed: list[Armed] = dataclasses.field(default_factory=list)

    def advance(self, seconds: float) -> None:
        """Let time pass; what was due happens."""
        self.now += seconds
        for machine in self.machines.values():
            machine.now = self.now
            machine.settle()

    def draw(self) -> random.Random:
        """The random numbers of this act: the same for the same seed and the same act."""
        return random.Random(f"{self.seed}/{self.acts}")  # noqa: S311 - a simulation

    def due(self, at: str, host: str, *, after: bool) -> list[str]:
        """The faults that strike this act now; each strikes once."""
        struck = []
        for armed in list(self.armed):
            if armed.at != at or armed.host not in ("", host) or armed.after != after:
                continue
            armed.left -= 1
            if armed.left == 0:
                self.armed.remove(armed)
                struck.append(armed.fault)
        return struck

    def strike(self, fault: str, machine: Machine) -> None:
        """Change the machine as the fault says; those of a single act are the act's."""
        if fault == "partition":
            machine.linked = False
            machine.freeze_real(True)
        elif fault == "reboot":
            machine.shut_down()
            machine.boot()
        elif fault == "power-loss":
            machine.shut_down(power_loss=True)
        elif fault == "full-disk":
            machine.full = True
        elif fault == "clock-forward":
            machine.clock_offset += _JUMP_S
        elif fault == "clock-back":
            machine.clock_offset -= _JUMP_S

    def to_json(self) -> dict[str, Any]:
        """The state as JSON."""
        record = dict(self.__dict__)
        record["machines"] = [machine.to_json() for machine in self.machines.values()]
        record["armed"] = [dict(armed.__dict__) for armed in self.armed]
        return record

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> State:
        """What `to_json` wrote."""
        machines = [Machine.from_json(machine) for machine in record["machines"]]
        return cls(
            **{
                **record,
                "machines": {machine.name: machine for machine in machines},
                "armed": [Armed(**armed) for armed in record["armed"]],
            }
        )


class FakeWorld:
    """Simulated hosts whose state lies in `folder`. Make one with `create`, open it by its folder.

    It is meant for users too: give a target a `FakeHost(world, name, log)` for each of its hosts
    and break what you like (docs/hosts.md).
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._slots = tuple(str(folder / name) for name in _SLOTS)
        self._events = str(folder / _EVENTS)
        self._lock = FileLock(folder / "lock")
        self._threads = threading.RLock()
        self._depth = 0
        self._seen = -1
        self._state: State | None = None
        self._programs: dict[str, Program] | None = None
        if not (folder / _SLOTS[0]).is_file():
            raise UsageError(f"{folder}: no world lies there; FakeWorld.create makes one")

    @classmethod
    def create(
        cls,
        folder: Path,
        hosts: Sequence[str] = ("alpha", "beta"),
        *,
        seed: int = 0,
        servers: str = "simulated",
        kills: str = "raise",
        programs: Mapping[str, str] = MappingProxyType({}),
    ) -> FakeWorld:
        """Make a world with these hosts, all up and empty.

        `servers`: "simulated" (a port that listens, in the simulation alone) or "real" (the
        embedded stub server runs on a loopback address of its own for each host and lives as long
        as its simulated process). `kills`: what the fault `kill` does, "raise" CallerKilled or
        "signal" SIGKILL. `programs`: further programs by name, or scripts by their text, as
        `module:function`.

        Raises:
            UsageError: an argument is not valid, or a world lies there already.
        """
        for what, value, valid in (
            ("servers", servers, ("simulated", "real")),
            ("kills", kills, ("raise", "signal")),
        ):
            if value not in valid:
                raise UsageError(f"{what}: {value!r}; valid: {', '.join(valid)}")
        for name in programs.values():
            load_program(name)
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / _SLOTS[0]).exists():
            raise UsageError(f"{folder}: a world lies there already")
        machines = {
            name: Machine(name, f"127.{77 + seed // 251 % 150}.{seed % 251}.{number}")
            for number, name in enumerate(hosts, start=2)
        }
        state = State(seed, kills, servers, dict(programs), machines)
        _save(str(folder / _SLOTS[0]), 0, state)
        return cls(folder)

    # -- faults and time -----------------------------------------------------------------------

    def inject(self, fault: str, host: str = "") -> None:
        """Let a fault strike now, on one host or on all.

        Raises:
            UsageError: no fault or host has that name.
            CallerKilled: the fault is `kill`, and kills are raised.
        """
        _known(fault)
        if fault == "kill":
            self.kill_caller()
        with self.transaction() as state:
            for machine in self._chosen(state, host):
                state.strike(fault, machine)

    def arm(
        self, fault: str, at: str, *, host: str = "", after: bool = False, count: int = 1
    ) -> None:
        """Let a fault strike at the `count`-th act called `at`, before it or after it.

        An act is called by the name its command is logged with, or `create`, `write`, `remove`
        and `read` with the path: "create /var/lib/HOLD". After the act its answer is lost where
        the fault takes the link, the machine or the caller.

        Raises:
            UsageError: no fault or host has that name.
        """
        _known(fault)
        with self.transaction() as state:
            if host:
                self._chosen(state, host)
            state.armed.append(Armed(fault, at, host, after, count))

    def heal(self, host: str = "") -> None:
        """Join cut links again, free the disks, boot what is off, forget armed faults."""
        with self.transaction() as state:
            for machine in self._chosen(state, host):
                machine.linked = True
                machine.full = False
                machine.freeze_real(False)
                if not machine.up:
                    machine.boot()
            state.armed = [armed for armed in state.armed if host and armed.host != host]

    def boot(self, host: str) -> None:
        """Switch a machine on again."""
        with self.transaction() as state:
            for machine in self._chosen(state, host):
                if not machine.up:
                    machine.boot()

    def advance(self, seconds: float) -> None:
        """Let the world's time pass."""
        with self.transaction() as state:
            state.advance(seconds)

    def step_clock(self, host: str, seconds: float) -> None:
        """Step a machine's wall clock; its time since boot goes on evenly."""
        with self.transaction() as state:
            for machine in self._chosen(state, host):
                machine.clock_offset += seconds

    def kill_caller(self) -> None:
        """Kill the calling process, or raise CallerKilled in its place."""
        if self._read().kills == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise CallerKilled

    def shutdown(self) -> None:
        """End every real server of the world; the files stay to be looked at."""
        with self.transaction() as state:
            for machine in state.machines.values():
                for pid in list(machine.processes):
                    machine.kill(pid)

    # -- looking -------------------------------------------------------------------------------

    def names(self) -> tuple[str, ...]:
        """The hosts of the world."""
        return tuple(self._read().machines)

    def check(self, host: str) -> None:
        """Refuse what is no host's name.

        Raises:
            UsageError: the world has no host of that name.
        """
        self._chosen(self._read(), host)

    def machine(self, host: str) -> Machine:
        """A copy of a machine's state, to look at; changing it changes nothing."""
        with self._locked():
            (machine,) = self._chosen(self._read(), host)
            return Machine.from_json(json.loads(json.dumps(machine.to_json())))

    def events(self) -> list[dict[str, Any]]:
        """The trace: every act on every host in its order, with what it answered."""
        path = self.folder / _EVENTS
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]

    # -- inside: used by FakeHost --------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[State]:
        """Read, change and store the state under the world's lock, whatever the body raises."""
        with self._locked():
            state = self._read()
            try:
                yield state
            finally:
                self._store(state)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # The file's lock tells processes apart, not the threads of one, nor an act within an act.
        with self._threads:
            self._depth += 1
            try:
                if self._depth == 1:
                    self._lock.acquire(blocking=True)
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._lock.release()

    def programs(self, state: State) -> dict[str, Program]:
        """The built-in programs and the world's own."""
        if self._programs is None:
            own = {name: load_program(where) for name, where in state.programs.items()}
            self._programs = {**BUILT_IN, **own}
        return self._programs

    def note(self, event: Mapping[str, Any]) -> None:
        """Append one event to the trace."""
        line = json.dumps(event, sort_keys=True) + "\n"
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self._events, how, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)

    def _read(self) -> State:
        newest, slot = max((_number(path), path) for path in self._slots)
        if self._state is not None and self._seen == newest:
            return self._state
        for path in (slot, *self._slots):
            state = _load(path)
            if state is not None:
                self._state, self._seen = state
                return self._state
        raise UsageError(f"{self.folder}: the world's state cannot be read")

    def _store(self, state: State) -> None:
        self._seen += 1
        _save(self._slots[self._seen % 2], self._seen, state)

    @staticmethod
    def _chosen(state: State, host: str) -> list[Machine]:
        if not host:
            return list(state.machines.values())
        if host not in state.machines:
            raise UsageError(f"host {host!r}; valid: {', '.join(state.machines)}")
        return [state.machines[host]]


def _number(path: str) -> int:
    """How many times the world was stored when this file was, or -1."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        return int(os.pread(fd, 20, 0))
    except ValueError:
        return -1
    finally:
        os.close(fd)


def _load(path: str) -> tuple[State, int] | None:
    """The state of one file, or None when it is missing or was not written to its end."""
    try:
        head, _, rest = Path(path).read_bytes().partition(b"\n")
        number, length, check = (int(word) for word in head.split())
    except (OSError, ValueError):
        return None
    if zlib.crc32(rest[:length]) != check:
        return None
    return State.from_json(json.loads(rest[:length])), number


def _save(path: str, number: int, state: State) -> None:
    text = json.dumps(state.to_json()).encode()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # The head comes last: until then the file is the older one of the two.
        os.pwrite(fd, text, 80)
        os.pwrite(fd, b"%-20d %-20d %-37d\n" % (number, len(text), zlib.crc32(text)), 0)
    finally:
        os.close(fd)


def _known(fault: str) -> None:
    if fault not in FAULTS:
        raise UsageError(f"fault {fault!r}; valid: {', '.join(FAULTS)}")
