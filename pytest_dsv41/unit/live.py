"""One unit as it lives: what systemd says of it, what its process is, and how it is told to change.

Everything that is read here may hold secrets of the server and stays out of the commands' records.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from typing import Final

from pytest_dsv41.errors import CommandFailed, Dsv41Error, TransportError
from pytest_dsv41.hosts import Fence, Host
from pytest_dsv41.hosts.local import boottime
from pytest_dsv41.text import one_line

from .memory import Ledger, parse_ledger
from .memory.ledger import DIALECTS

__all__ = ["BOOT_LOG", "LiveUnit", "UnitState"]

_DEADLINE_S: Final = 30.0
_LOG_S: Final = 60.0
_LEDGER_S: Final = 2.0
_POLL_S: Final = 0.2
_KILLED_S: Final = 10.0
_BOOT_BYTES: Final = 4_000_000
_PROPERTIES: Final = (
    *("LoadState", "ActiveState", "Result", "MainPID", "NRestarts", "InvocationID"),
    *("DropInPaths", "FragmentPath", "UnitFileState", "User", "DynamicUser", "EnvironmentFiles"),
)
# Those that a stop of this unit takes along, and that nothing starts again with it.
_DEPENDENTS: Final = ("RequiredBy", "RequisiteOf", "BoundBy", "ConsistsOf", "PropagatesStopTo")
_IGNORED: Final = " (ignore_errors="

# What `podman run --detach` prints.
_CONTAINER_ID: Final = re.compile("[0-9a-f]{64}")
# The journal learns late whose line it has: those of a process that ended at once may lie under the
# next try's invocation. What the unit has printed since this one began is then what there is.
BOOT_LOG: Final = f"""\
if journalctl --no-pager -q -n 1 -o cat "_SYSTEMD_INVOCATION_ID=$1" | grep -q .; then
  set -- "_SYSTEMD_INVOCATION_ID=$1"
else
  began=$(journalctl --no-pager -q -o short-unix "INVOCATION_ID=$1" + "USER_INVOCATION_ID=$1" |
    head -n 1 | cut -d ' ' -f 1)
  [ -n "$began" ] || exit 0
  set -- --since "@$began" "_SYSTEMD_UNIT=$2" + "_SYSTEMD_USER_UNIT=$2"
fi
journalctl --no-pager -q -o cat "$@" | head -c {_BOOT_BYTES}
"""
"""Arguments: an invocation's id, the unit. What that start printed, of whichever manager."""


@dataclasses.dataclass(frozen=True)
class UnitState:
    """What systemd says of the unit at one moment; `drop_ins` in the order they are applied."""

    load: str
    active: str
    result: str
    pid: int
    restarts: int
    invocation: str
    drop_ins: tuple[str, ...]
    fragment: str
    enabled: str
    user: str
    dynamic_user: bool
    environment_files: tuple[tuple[str, bool], ...]
    """Path as it is loaded, and whether it may be missing; in the order in which they are read."""

    @property
    def down(self) -> bool:
        """Whether nothing of it runs, nor will by itself."""
        return self.active in ("inactive", "failed") and not self.pid

    @property
    def serving(self) -> bool:
        """Whether systemd calls it started, and it has a main process."""
        return self.active in ("active", "reloading") and self.pid > 0


class LiveUnit:
    """The unit `name` on a host.

    `host` acts and reads as whoever may (root, for a system unit); `login` is the same machine as
    whoever logs in, who owns the containers. `container` names one whose argv is the server's.
    `fence` goes with every change; `pause` waits and may be stopped.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        *,
        login: Host | None = None,
        user: bool = False,
        container: str = "",
        dialect: str = "",
        fence: Fence | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.host = host
        self.name = name
        self.user = user
        self._login = login or host
        self._container = container
        self._dialect = dialect if dialect in DIALECTS else ""
        self._fence = fence
        self._pause = pause

    # -- reading -----------------------------------------------------------------------------------

    def look(self) -> UnitState:
        """Ask systemd.

        Raises:
            CommandFailed: it answers that it cannot tell.
            TransportError: no answer.
        """
        done = self.host.run(
            [*self._manager, "show", f"--property={','.join(_PROPERTIES)}", "--", self.name],
            name="unit",
            deadline_s=_DEADLINE_S,
        )
        lines = [line.partition("=")[::2] for line in done.stdout.splitlines() if "=" in line]
        found = dict(lines)
        if "ActiveState" not in found:
            raise CommandFailed(f"systemctl show {self.name}: no answer", 1)
        files = [v.rpartition(_IGNORED) for k, v in lines if k == "EnvironmentFiles" and v]
        return UnitState(
            load=found.get("LoadState", ""),
            active=found["ActiveState"],
            result=found.get("Result", ""),
            pid=_integer(found.get("MainPID", "")),
            restarts=_integer(found.get("NRestarts", "")),
            invocation=found.get("InvocationID", ""),
            drop_ins=tuple(_strings(found.get("DropInPaths", ""))),
            fragment=found.get("FragmentPath", ""),
            enabled=found.get("UnitFileState", ""),
            user=found.get("User", ""),
            dynamic_user=found.get("DynamicUser") == "yes",
            environment_files=tuple((path, may == "yes)") for path, _, may in files),
        )

    def dependents(self) -> list[str]:
        """The active units that a stop of this one takes along: its start brings none of them back.

        Raises:
            CommandFailed, TransportError: systemd does not tell.
        """
        asked = [*self._manager, "show", f"--property={','.join(_DEPENDENTS)}", "--", self.name]
        done = self.host.run(asked, name="dependents", deadline_s=_DEADLINE_S)
        lines = [line.partition("=")[2] for line in done.stdout.splitlines()]
        names = sorted({name for line in lines for name in _strings(line)})
        if not names:
            return []
        asked = [*self._manager, "show", "--property=Id,ActiveState", "--", *names]
        done = self.host.run(asked, name="dependents", deadline_s=_DEADLINE_S)
        each = [
            dict(x.partition("=")[::2] for x in b.splitlines()) for b in done.stdout.split("\n\n")
        ]
        up = ("active", "activating", "reloading", "refreshing")
        return [one["Id"] for one in each if one.get("ActiveState") in up and "Id" in one]

    def argv(self, state: UnitState) -> tuple[str, ...]:
        """The server's words: the main process's, or its container's."""
        if not self._container:
            return _words(self._proc(state, "cmdline"))
        seen = self._login.run(
            ["podman", "inspect", "--format", "{{json .Config}}", self._container],
            name="inspect",
            deadline_s=_DEADLINE_S,
            check=False,
            private=True,
        )
        try:
            config = json.loads(seen.stdout) if seen.returncode == 0 else {}
            entry = config.get("Entrypoint") or []
            words = [*([entry] if isinstance(entry, str) else entry), *(config.get("Cmd") or [])]
        except (ValueError, AttributeError, TypeError) as error:
            raise CommandFailed(f"podman inspect: {one_line(str(error))}", 1) from error
        return tuple(str(word) for word in words)

    def environ(self, state: UnitState) -> dict[str, str]:
        """The main process's environment; with a container that of the process that runs it."""
        words = _words(self._proc(state, "environ"))
        return {name: value for name, eq, value in (w.partition("=") for w in words) if eq}

    def _proc(self, state: UnitState, what: str) -> bytes:
        return (self.host.read(f"/proc/{state.pid}/{what}") or b"") if state.pid else b""

    # -- what a start printed ----------------------------------------------------------------------

    def boot_log(self, state: UnitState) -> str:
        """What this start printed; asked again while the journal lacks what always comes."""
        deadline = boottime() + _LEDGER_S
        while True:
            text = self._printed(state)
            if not self._dialect or not parse_ledger(text, self._dialect).missing:
                return text
            if boottime() > deadline:
                return text
            self._pause(_POLL_S)

    def ledger(self, text: str) -> Ledger | None:
        """The boot ledger in a start's log; None where the dialect has none."""
        return parse_ledger(text, self._dialect) if self._dialect else None

    def last_words(self, state: UnitState) -> str:
        """The last line that a start printed, for the message of its end."""
        try:
            # A start that ended before it had a container has said so in the journal alone, and a
            # container that an earlier start left has that one's words.
            lines = self._journal(state).strip().splitlines()
            if self._container and (not lines or _CONTAINER_ID.fullmatch(lines[-1])):
                lines = self._printed(state).strip().splitlines()
        except (Dsv41Error, OSError):
            return "its log cannot be read"
        return f"its last line: {one_line(lines[-1])}" if lines else "it printed nothing"

    def _printed(self, state: UnitState) -> str:
        if self._container:
            argv = ["podman", "logs", self._container]
            done = self._login.run(
                argv, name="boot-log", deadline_s=_LOG_S, check=False, private=True
            )
            if done.returncode == 0:
                return (done.stdout + done.stderr)[:_BOOT_BYTES]
        return self._journal(state)

    def _journal(self, state: UnitState) -> str:
        argv = ["sh", "-c", BOOT_LOG, "sh", state.invocation, self.name]
        done = self.host.run(argv, name="boot-log", deadline_s=_LOG_S, check=False, private=True)
        return done.stdout

    # -- changing ----------------------------------------------------------------------------------

    def reload(self, name: str, *, check: bool = True) -> None:
        """Reload systemd, whatever NeedDaemonReload says: it misses what it never looked into."""
        self._systemctl(name, "daemon-reload", check=check)

    def restart(self, name: str) -> None:
        """Tell systemd to start the unit anew, its restarts forgotten; does not wait.

        Raises:
            CommandFailed: systemd refuses.
        """
        self._systemctl(name, "reset-failed", self.name, check=False)
        self._systemctl(name, "restart", "--no-block", self.name)

    def settle(self, name: str) -> None:
        """Forget a failure, and the restarts that a loop would still make."""
        self._systemctl(name, "reset-failed", self.name, check=False)

    def stop(self, name: str, patience_s: float) -> None:
        """Stop the unit, a restart loop included, and wait; past the patience it is killed.

        Raises:
            TransportError: something of it is still there.
        """
        self._systemctl(name, "stop", "--no-block", self.name)
        begun = boottime()
        limit, killed = begun + patience_s, False
        while not (seen := self.look()).down:
            if boottime() > limit:
                if killed:
                    raise TransportError(
                        f"{name}: {self.name} is still {seen.active} after SIGKILL"
                    )
                self._systemctl(name, "kill", "--signal=SIGKILL", self.name, check=False)
                killed, limit = True, boottime() + _KILLED_S
            # Never `pause`: an end that has begun is finished whatever asks to stop.
            time.sleep(min(1.0, 0.05 + (boottime() - begun) / 30))
        self.settle(name)

    def _systemctl(self, name: str, *words: str, check: bool = True) -> None:
        self.host.run(
            [*self._manager, *words],
            name=f"{name}-{words[0]}",
            deadline_s=_DEADLINE_S,
            check=check,
            fence=self._fence,
        )

    @property
    def _manager(self) -> list[str]:
        return ["systemctl", "--user"] if self.user else ["systemctl"]


def _words(data: bytes) -> tuple[str, ...]:
    words = data.decode("utf-8", "surrogateescape").split("\0")
    return tuple(words[:-1] if words and not words[-1] else words)


def _strings(text: str) -> list[str]:
    """The strings of a list as `systemctl show` prints it: odd ones in quotes, with backslashes."""
    return [
        re.sub(r"\\(.)", r"\1", quoted) if quoted else plain
        for quoted, plain in re.findall(r'"((?:[^"\\]|\\.)+)"|(\S+)', text)
    ]


def _integer(text: str) -> int:
    return int(text) if text.isdigit() else 0
