"""A simulated host: the `Host` interface over a machine of a `FakeWorld`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ...errors import CommandFailed, StaleEpoch, TransportError
from ..base import (
    FENCED_OFF,
    CommandLog,
    CommandResult,
    Fence,
    Probe,
    Process,
    raise_for_code,
    stale,
    usable,
)
from .machine import Machine
from .programs import Call, execute
from .world import FakeWorld, State

__all__ = ["FakeHost"]

_Answer = TypeVar("_Answer")
# What an act's answer does not survive when it strikes after the act.
_SILENT: Final = ("partition", "reboot", "power-loss", "hang")


class FakeHost:
    """One host of a world. Every act happens whole and under the world's lock, or not at all."""

    def __init__(self, world: FakeWorld, name: str, log: CommandLog) -> None:
        self.world = world
        self.name = name
        # Simulated acts are many, and no power loss of this machine is survived by them anyhow.
        self.log = CommandLog(log.folder, synced=False)
        world.check(name)

    def identity(self) -> str:
        """See `Host.identity`."""
        return self._act(
            "identity", lambda _s, m: f"{m.boot_id}/{m.booted_at:.3f}", deadline_s=10.0
        )

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
        """See `Host.run`."""

        usable(argv, name)

        def act(state: State, machine: Machine) -> CommandResult:
            self._fence(machine, fence, name)
            known = set(machine.processes)
            reply = execute(
                Call(
                    machine,
                    tuple(argv),
                    stdin,
                    dict(env or {}),
                    programs=self.world.programs(state),
                    servers=state.servers,
                )
            )
            if reply is None:
                # It stays in the foreground: past the deadline it is killed, as a host does.
                for pid in set(machine.processes) - known:
                    if not machine.processes[pid].scope and not machine.processes[pid].session:
                        machine.kill(pid)
                state.advance(deadline_s)
                raise TransportError(f"{name}: no answer within {deadline_s:g} s")
            return CommandResult(tuple(argv), reply.code, reply.out, reply.err, 0.0)

        lines = [f"host: {self.name}", f"argv: {list(argv)!r}"]
        try:
            result = self._act(name, act, deadline_s=deadline_s, argv=list(argv))
        except Exception as error:
            self.log.write(name, [*lines, str(error)])
            raise
        self.log.record(self.name, name, result, private=private)
        if check:
            raise_for_code(name, result)
        return result

    def read(self, path: str) -> bytes | None:
        """See `Host.read`."""
        return self._act(f"read {path}", lambda _s, m: m.load(path), deadline_s=10.0)

    def create(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.create`."""
        what = f"create {path}"

        def act(_state: State, machine: Machine) -> None:
            self._fence(machine, fence, what)
            if path in machine.files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._store(machine, path, data, what)

        self._act(what, act, deadline_s=10.0)

    def write(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.write`."""
        what = f"write {path}"

        def act(_state: State, machine: Machine) -> None:
            self._fence(machine, fence, what)
            self._store(machine, path, data, what)

        self._act(what, act, deadline_s=10.0)

    def remove(self, path: str, *, fence: Fence | None = None) -> None:
        """See `Host.remove`."""
        what = f"remove {path}"

        def act(_state: State, machine: Machine) -> None:
            self._fence(machine, fence, what)
            machine.delete(path, synced=True)

        self._act(what, act, deadline_s=10.0)

    def port(self, port: int, host: str = "127.0.0.1") -> Probe:
        """See `Host.port`; another host of the world is asked by its name or address."""

        def act(state: State, machine: Machine) -> Probe:
            asked = machine
            if host not in ("127.0.0.1", "localhost", machine.name, machine.address):
                found = [m for m in state.machines.values() if host in (m.name, m.address)]
                if not found or not (found[0].up and found[0].linked):
                    return Probe.UNKNOWN
                asked = found[0]
            return Probe.UP if asked.listening(port) else Probe.DOWN

        return self._act(f"port {port}", act, deadline_s=2.0)

    def processes(self) -> list[Process]:
        """See `Host.processes`."""
        return self._act(
            "processes",
            lambda _s, m: [Process(p.pid, p.started, tuple(p.argv)) for p in m.processes.values()],
            deadline_s=10.0,
        )

    def close(self) -> None:
        """There is no connection."""

    # -- inside --------------------------------------------------------------------------------

    def _act(
        self,
        what: str,
        act: Callable[[State, Machine], _Answer],
        *,
        deadline_s: float,
        argv: list[str] | None = None,
    ) -> _Answer:
        """Do one act on the machine, with the faults that are armed for it, and note it."""
        kill = done = False
        with self.world.transaction() as state:
            state.acts += 1
            state.advance(state.draw().uniform(0.001, 0.005))
            machine = state.machines[self.name]
            outcome = "killed before it"
            try:
                before = state.due(what, self.name, after=False)
                for fault in before:
                    state.strike(fault, machine)
                kill = "kill" in before
                if not kill:
                    self._reach(state, machine, before, what, deadline_s)
                    machine.full, full = machine.full or "enospc" in before, machine.full
                    try:
                        answer = act(state, machine)
                    finally:
                        machine.full = full
                    done, outcome = True, _told(answer)
                    after = state.due(what, self.name, after=True)
                    for fault in after:
                        state.strike(fault, machine)
                    kill = "kill" in after
                    if any(fault in _SILENT for fault in after):
                        state.advance(deadline_s)
                        raise TransportError(
                            f"{what}: {self.name} gave no answer within {deadline_s:g} s"
                        )
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                outcome = f"done, then {told}" if done else told
                raise
            finally:
                self.world.note(
                    {
                        "act": state.acts,
                        "t": round(state.now, 6),
                        "host": self.name,
                        "what": what,
                        "outcome": outcome,
                        **({"argv": argv} if argv is not None else {}),
                    }
                )
        if kill:
            self.world.kill_caller()
        return answer

    def _reach(
        self, state: State, machine: Machine, struck: Sequence[str], what: str, deadline_s: float
    ) -> None:
        if machine.up and machine.linked and not any(f in ("hang", "reboot") for f in struck):
            return
        state.advance(deadline_s)
        raise TransportError(f"{what}: {self.name} gave no answer within {deadline_s:g} s")

    def _fence(self, machine: Machine, fence: Fence | None, what: str) -> None:
        if fence is None:
            return
        raw = machine.load(fence.path)
        try:
            seen = 0 if raw is None else int(raw)
        except ValueError as error:
            raise CommandFailed(f"fence {fence.path}: unreadable ({error})", 1) from error
        if seen > fence.epoch:
            raise StaleEpoch(stale(what, self.name, seen, fence), FENCED_OFF)
        if seen < fence.epoch:
            self._store(machine, fence.path, f"{fence.epoch}\n", what)

    @staticmethod
    def _store(machine: Machine, path: str, data: bytes | str, what: str) -> None:
        if machine.full:
            raise CommandFailed(f"{what}: {os.strerror(errno.ENOSPC)}", errno.ENOSPC)
        machine.store(path, data.encode() if isinstance(data, str) else data, synced=True)


def _told(answer: Any) -> str:
    if isinstance(answer, CommandResult):
        return f"exit {answer.returncode}"
    if isinstance(answer, Probe):
        return answer.value
    return "done"
