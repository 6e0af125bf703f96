"""Target `systemd-unit`: one unit of one host serves, and the arms are changes of its environment.

Production is the unit in its own shape. A start writes a variant of the unit's environment file and
a drop-in in /run that sorts after every other and names it, reloads systemd, restarts the unit,
waits until it is healthy, and proves that what runs is the arm. Ending a start stops the unit, and
takes both files away again when they are proved to be this window's. Neither outlives a reboot: a
host that comes up again serves production's own shape, and is only verified.

Production is DOWN whenever the unit does not serve its own shape: also while it serves an arm.
What restoring must bring back is the shape: environment file, drop-ins, unit file, the main
process's argv and environment, and what its boot ledger says; all must be equal.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ..durable import append_json_line, dump_json, read_json_lines, write_atomic
from ..errors import (
    CommandFailed,
    Dsv41Error,
    MeasurementRefused,
    RefusedByWorld,
    SpecError,
    StartFailed,
    TransportError,
    UsageError,
    WindowStopped,
)
from ..hosts import CommandLog, Fence, Host, LocalHost, Placeholder, Probe
from ..hosts.fake import FakeHost, FakeWorld
from ..hosts.local import boottime
from ..hosts.quiet import spark_quiet
from ..hosts.sudo import SudoHost
from ..measure import Endpoint
from ..text import counted, one_line
from ..unit.drift import drift, load_checkout, unregistered
from ..unit.envfile import check_changes, variant
from ..unit.knob_gate import judge_knobs
from ..unit.lawful import law_refusals
from ..unit.live import LiveUnit, UnitState
from ..unit.masking import masked_words
from ..unit.memory import Law, Ledger, read_law, shipped_laws
from ..unit.proof import Expected, mismatches
from ..unit.unitfile import parse_environment_file
from ..window.served import STARTS
from .base import Arm, ClockCap, HoldSite, ProbeResult, Started, TargetContext, known_engine
from .filling import fill
from .tables import HostTable, Table, beside, read_table, ssh_host

__all__ = ["SystemdUnitTarget", "systemd_unit_target"]

_MARK: Final = "DSV41_UNIT_START"
_DROP_IN: Final = "zzzz-dsv41.conf"
_HEADER: Final = "dsv41 start of window "
_POLL_S: Final = 0.2
_DEADLINE_S: Final = 30.0
_UNIT: Final = r"^[A-Za-z0-9:_.@\\-]{1,200}\.service$"
_OF_A_START: Final = frozenset(
    {
        *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MAINPID", "WATCHDOG_PID"),
        *("NOTIFY_SOCKET", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "WATCHDOG_USEC"),
        *("CREDENTIALS_DIRECTORY", "LISTEN_PID", "LISTEN_PIDFDID", "MANAGERPIDFDID"),
        *("TRIGGER_UNIT", "TRIGGER_PATH", "TRIGGER_TIMER_REALTIME_USEC"),
        *("TRIGGER_TIMER_MONOTONIC_USEC", "MONITOR_SERVICE_RESULT", "MONITOR_EXIT_CODE"),
        *("MONITOR_EXIT_STATUS", "MONITOR_INVOCATION_ID", "MONITOR_UNIT", "DEBUG_INVOCATION"),
        _MARK,
    }
)
"""What systemd gives each start anew or by what has started it, and our own mark: no part of a
shape (systemd.exec(5))."""
# What a card or an allocator decides anew at every boot; all other facts follow from the shape.
_OF_A_BOOT: Final = frozenset(
    {"settled free", "unclaimed", "not accounted", "weights pool free", "mover took"}
)


class _Host(HostTable):
    name: str = Field(default="host", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")


class _Knobs(Table):
    paths: tuple[Annotated[str, Field(pattern="^/")], ...] = Field(min_length=1)
    unit: Literal["pages", "bytes", "kib", "mib"] = "pages"
    floor_mib: int = Field(ge=1)


class _Table(Table):
    kind: Literal["systemd-unit"] = "systemd-unit"
    engine: str = "llamacpp"
    model: str = Field(min_length=1)
    commit: str = Field(default="", pattern="^([0-9a-f]{40})?$")
    unit: str = Field(pattern=_UNIT)
    manager: Literal["system", "user"] = "system"
    sudo: bool = False
    env_file: str = Field(pattern="^/[^\\s\"'%\\\\$]+$")
    env_var: str = Field(default="", pattern="^([A-Za-z_][A-Za-z0-9_]*)?$")
    runtime: Literal["process", "podman"] = "process"
    container: str = ""
    port: int = Field(ge=1, le=65535)
    url: str = ""
    health: tuple[str, ...] = ()
    payloads: dict[str, str] = Field(default_factory=dict)
    checkout: str = ""
    registered_drift: tuple[str, ...] = ()
    knobs: _Knobs | None = None
    law: str = ""
    hold: str = Field(default="/var/lib/dsv41/HOLD", pattern="^/")
    label: str = ""
    world: str = ""
    host: _Host | None = None


def systemd_unit_target(table: Mapping[str, Any], context: TargetContext) -> SystemdUnitTarget:
    """Build the target of `kind = "systemd-unit"`; the host is not asked anything yet.

    Raises:
        SpecError: a key is unknown, missing, or of the wrong type.
    """
    return SystemdUnitTarget(read_table(_Table, table), context)


class SystemdUnitTarget:
    """One unit on this machine or on one over ssh; see the module."""

    holds = True
    ephemeral = False
    chains = False
    """A chain leaves production down between windows; an enabled unit would not stay so."""

    def __init__(self, table: _Table, context: TargetContext) -> None:
        self._table = table
        self._context = context
        self._engine = known_engine(table.engine)
        if table.runtime == "podman" and not table.container:
            raise SpecError("target.container: missing; runtime podman needs the container's name")
        if table.sudo and table.manager == "user":
            raise SpecError('target.sudo: a unit of manager "user" needs none')
        for path, sha256 in table.payloads.items():
            if not path.startswith("/") or not re.fullmatch("([0-9a-f]{64})?", sha256):
                raise SpecError(
                    f"target.payloads.{one_line(path, 120)}: valid: an absolute path, and its "
                    "sha256 (64 hex digits) or nothing"
                )
        self._login = self._host(context.log)
        self._root: Host = SudoHost(self._login) if table.sudo else self._login
        self._fence: Fence | None = None
        if context.epoch:
            self._fence = Fence.beside(table.hold, context.epoch, str(context.campaign))
        self._unit = LiveUnit(
            self._root,
            table.unit,
            login=self._login,
            user=table.manager == "user",
            container=table.container if table.runtime == "podman" else "",
            dialect=table.engine,
            fence=self._fence,
            pause=context.pause,
        )
        self._alive: dict[str, tuple[UnitState, str]] = {}
        self._arms: tuple[Arm, ...] = ()
        self._runtime_folder = "/run" if table.manager == "system" else ""

    def _host(self, log: CommandLog) -> Host:
        where = self._table.host
        if self._table.world:
            world = FakeWorld(self._context.base / self._table.world)
            return FakeHost(world, where.name if where else world.names()[0], log)
        if where is None:
            return LocalHost(log, self._context.pause)
        return ssh_host(where.name, where, "target.host", self._context.base, log)

    # -- what is said beforehand -------------------------------------------------------------------

    def check(self, arms: Sequence[Arm]) -> None:
        """An arm is its `env`, no two are the same, and its `settings` say what it must show."""
        seen: dict[str, str] = {}
        for arm in arms:
            if arm.args:
                raise SpecError(
                    f"arms.{arm.name}.args: an arm of target systemd-unit is changes of the "
                    "unit's environment file: write them in env"
                )
            try:
                check_changes(arm.env, f"arms.{arm.name}.env")
            except UsageError as error:
                raise SpecError(str(error)) from None
            Expected.of(arm.settings, f"arms.{arm.name}.settings")
            other = seen.setdefault(dump_json(dict(arm.env)), arm.name)
            if other != arm.name:
                raise SpecError(
                    f"arms.{arm.name}.env: the same as that of arm {other}; they would be one arm"
                )
        self._law()
        self._arms = tuple(arms)

    def prepare(self) -> dict[str, Any]:
        """Nothing is chosen: unit, files and port are the table's."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Unit, files, port, engine and model."""
        table = self._table
        return {
            "kind": "systemd-unit",
            "engine": table.engine,
            "model": table.model,
            "unit": table.unit,
            "manager": table.manager,
            "env_file": table.env_file,
            "env_var": table.env_var,
            "runtime": table.runtime,
            "container": table.container,
            "port": table.port,
        }

    def commit(self) -> str:
        """`target.commit`, or the sha1 of the production definition."""
        if self._table.commit:
            return self._table.commit
        digest = hashlib.sha1(dump_json(self.describe()).encode(), usedforsecurity=False)
        return digest.hexdigest()

    def hosts(self) -> tuple[Host, ...]:
        """The unit's host."""
        return (self._login,)

    def identities(self) -> dict[str, str]:
        """The host's boot."""
        return {self._login.name: self._login.identity()}

    def hold_sites(self) -> tuple[HoldSite, ...]:
        """`target.hold` on the unit's host."""
        return (self._context.hold_site(self._login, self._table.hold),)

    def hold_opened(self) -> None:
        """The file says enough on one machine."""

    def placeholders_up(self, owner: str) -> None:
        """There is no chain."""

    def placeholders(self, owner: str) -> dict[str, Placeholder]:  # noqa: ARG002
        """There is no chain."""
        return {}

    def placeholders_down(self, owner: str) -> list[str]:  # noqa: ARG002
        """There is no chain."""
        return []

    # -- production --------------------------------------------------------------------------------

    def production(self) -> Endpoint:
        """Where the unit answers, by the declared model's name."""
        return Endpoint(url=self._url, engine=self._table.engine, model=self._table.model)

    def probe(self) -> ProbeResult:
        """UP when the unit is active, healthy, and in its own shape; DOWN when it is not serving.

        A healthy unit that serves an arm is DOWN: production is what is not served.
        """
        try:
            unit = self._unit.look()
            experiment = self._experiment(unit)
            if experiment:
                return ProbeResult(Probe.DOWN, experiment)
            healthy, said = self._healthy()
            port = Probe.UP if healthy else self._login.port(self._table.port)
        except (Dsv41Error, OSError) as error:
            return ProbeResult(Probe.UNKNOWN, one_line(str(error)))
        name = self._table.unit
        if healthy and unit.serving:
            return ProbeResult(Probe.UP, f"{name} is active, {self._url} is healthy")
        if healthy:
            return ProbeResult(
                Probe.UNKNOWN, f"{self._url} answers, and {name} is {unit.active}: who serves?"
            )
        if port is Probe.DOWN:
            return ProbeResult(
                Probe.DOWN, f"{name} is {unit.active}, nothing listens on {self._table.port}"
            )
        return ProbeResult(
            Probe.UNKNOWN, f"{name} is {unit.active}, not healthy ({said}), port {port.value}"
        )

    def capture(self) -> dict[str, Any]:
        """The unit's shape, which must be undrifted, and the payloads that it and the arms name."""
        unit = self._unit.look()
        if unit.load != "loaded":
            raise RefusedByWorld(f"{self._table.unit} is {unit.load} on {self._login.name}")
        self._knobs_clear_their_floor()
        for path in unit.drop_ins:
            if PurePosixPath(path).name >= _DROP_IN:
                raise RefusedByWorld(
                    f"{path}: it sorts after {_DROP_IN}, so no arm could be given over it"
                )
        if self._root.read(self._drop_in) is not None:
            raise RefusedByWorld(
                f"{self._drop_in}: a drop-in of a window's start lies there: "
                f"{self._whose(self._root.read(self._drop_in))}"
            )
        try:
            models = self._engine.models(self._url)
        except MeasurementRefused as error:
            raise RefusedByWorld(str(error)) from error
        if self._table.model not in models:
            raise RefusedByWorld(
                f"{self._url}/v1/models lists {one_line(', '.join(models))}, "
                f"target.model is {one_line(self._table.model)}"
            )
        shape = self._shape(unit, keep_bytes=True)
        if shape["env_file"] is None:
            raise RefusedByWorld(f"{self._login.name}:{self._table.env_file}: no such file")
        if not shape["argv"]:
            raise RefusedByWorld(f"{self._table.unit} has no main process that can be seen")
        self._given_by(unit)
        along = self._unit.dependents()
        if along:
            raise RefusedByWorld(
                f"a stop of {self._table.unit} also stops {one_line(', '.join(along))}, which "
                "nothing starts again: stop them first"
            )
        self._undrifted()
        self._lawful(unit)
        self._named_by_arms(base64.b64decode(shape["env_file"]["base64"]))
        return {**shape, "definition": self.describe(), "payloads": self._payloads()}

    def stop_production(self) -> None:
        """Prove that the capture can bring the unit back, and stop it.

        Raises:
            WindowStopped: it is another window's start by now.
        """
        self._captured()
        experiment = self._experiment(self._unit.look())
        if experiment:
            raise WindowStopped(f"production-stop: {experiment}; not touched")
        self._unit.stop("production-stop", self._limit("stop_s", 60.0))

    def start_production(self) -> None:
        """Bring the unit back in its own shape, wait for it, and hold it against the capture.

        A unit that came up by itself, after a reboot, is left running where it is as captured.
        """
        name = "production-start"
        live = self.live_experiments()
        if live:
            raise StartFailed(f"{name}: {live[0]}")
        captured = None
        with contextlib.suppress(RefusedByWorld):
            captured = self._captured()
        written = captured is not None and self._put_env_file_back(name, captured)
        unit = self._unit.look()
        # What was started with another's settings has them for as long as it runs.
        strange = [record["invocation"] for record in self._records("not-as-captured")]
        begun = unit.down or written or unit.invocation in strange
        if captured is not None:
            begun = begun or _argv_sha256(self._unit.argv(unit)) != captured["argv_sha256"]
        try:
            if begun:
                self._begin(name)
            self._wait(name, unit, strict=False)
            apart = self._apart(captured) if captured is not None else []
            if captured is not None and apart and not begun:
                self._begin(name)
                self._wait(name, unit, strict=False)
                apart = self._apart(captured)
        except (CommandFailed, TransportError) as error:
            raise StartFailed(f"{name}: {error}") from error
        if apart:
            invocation = self._unit.look().invocation
            self._note({"event": "not-as-captured", "invocation": invocation, "apart": apart})
            raise StartFailed(f"{name}: {self._table.unit} is not as captured: {apart[0]}")
        if captured is not None:
            self._tell_what_stays(captured)

    def end_production(self) -> None:
        """The unit serves always: nothing."""

    def _begin(self, name: str) -> None:
        """Reload, and start the unit in its own shape.

        A refused reload is no reason to leave production down, as long as what systemd has loaded
        is nothing of ours.
        """
        loaded = self._drop_in in self._unit.look().drop_ins
        self._unit.reload(name, check=loaded)
        if self._experiment(self._unit.look()):
            raise StartFailed(
                f"{name}: systemd still has {self._drop_in} loaded, and refuses to reload"
            )
        self._unit.restart(name)

    # -- arms --------------------------------------------------------------------------------------

    def start_arm(self, start: str, arm: Arm) -> Started:
        """Start the unit as `arm`, and prove that it is.

        Raises:
            StartFailed: it did not come up, or systemd refused; the unit is stopped.
            WindowStopped: it came up and is not what the arm says; the unit is stopped.
        """
        name = f"{start}-start"
        captured = self._captured()
        try:
            written = self._write_start(name, start, arm, captured)
            self._unit.reload(name)
            unit = self._unit.look()
            meanwhile = _files_apart(captured, self._files(unit, own=False))
            if not meanwhile and unit.drop_ins[-1:] != (self._drop_in,):
                there = self._drop_in in unit.drop_ins
                meanwhile = [f"{self._drop_in} is {'not the last' if there else 'not loaded'}"]
            if meanwhile:
                raise WindowStopped(f"{name}: {self._table.unit}: {meanwhile[0]}, by somebody else")
            self._unit.restart(name)
            unit = self._wait(name, unit, strict=True)
            self._prove(start, arm, unit)
            model = Expected.of(arm.settings, "").model or self._table.model
            endpoint = Endpoint(url=self._url, engine=self._table.engine, model=model)
            return Started(endpoint, ClockCap(1, "none"), f"env file sha256 {written}")
        except (CommandFailed, TransportError, UsageError, MeasurementRefused) as error:
            self._undo(name)
            raise StartFailed(f"{name}: {error}") from error
        except BaseException:
            self._undo(name)
            raise

    def check_arm(self, start: str) -> str | None:
        """None while the main process of the start lives; systemd may have put another there."""
        if start not in self._alive:
            return f"{start} is not up"
        began, boot = self._alive[start]
        unit = self._unit.look()
        if (unit.pid, unit.invocation) == (began.pid, began.invocation) and unit.serving:
            return None
        if self._login.identity() != boot:
            return f"{self._login.name} was restarted during {start}"
        what = "was started again" if unit.pid else f"is {unit.active}"
        return f"{self._table.unit} {what} during {start}; {self._unit.last_words(began)}"

    def stop_arm(self, start: str) -> None:
        """Stop the unit, and take the start's files away.

        Raises:
            WindowStopped: it is stopped, and was not the start any more: what was measured last may
                have been another server's.
        """
        dead = self.check_arm(start) if start in self._alive else None
        self._alive.pop(start, None)
        self._clear(f"{start}-stop")
        if dead is not None:
            raise WindowStopped(dead)

    def stop_all(self) -> None:
        """As `stop_arm`, whatever start of this window has left something."""
        self._clear("stop-all")

    def _undo(self, name: str) -> None:
        """Take a failed start away; what fails here is met again by the window's close."""
        with contextlib.suppress(Dsv41Error, OSError):
            self._clear(f"{name}-undo")

    # -- proofs ------------------------------------------------------------------------------------

    def live_experiments(self) -> list[str]:
        """The unit must not run as an arm, and no drop-in of a start may lie or be loaded."""
        try:
            unit = self._unit.look()
            found = [self._experiment(unit)]
            there = self._root.read(self._drop_in)
            if there is not None and not self._somebodys(there):
                found.append(f"{self._drop_in} lies there")
        except (Dsv41Error, OSError) as error:
            return [f"{self._login.name}: cannot tell: {one_line(str(error))}"]
        return [line for line in found if line]

    def quiet_problems(self) -> list[str]:
        """The unit is stopped, and `spark_quiet`: GPU, containers, port, scopes of any window."""
        problems: list[str] = []
        try:
            unit = self._unit.look()
        except (Dsv41Error, OSError) as error:
            return [f"{self._login.name}: cannot tell: {one_line(str(error))}"]
        if not unit.down:
            problems.append(f"{self._table.unit} is {unit.active}, not stopped")
        ports = (self._table.port,)
        return problems + spark_quiet(self._login, ports=ports, label=self._table.label)

    def leftovers(self) -> list[str]:
        """What lies or runs of this window's starts."""
        left = self.live_experiments()
        for path, sha256 in self._written():
            data = self._root.read(path)
            if path != self._drop_in and data is not None:
                changed = ", changed by somebody" if _sha256(data) != sha256 else ""
                left.append(f"{path} lies there{changed}")
        return list(dict.fromkeys(left))

    # -- for a rollback ----------------------------------------------------------------------------

    def prove_rollback(self) -> list[str]:
        """Prove what the way back needs, and say what was proved. Reads only.

        Raises:
            RefusedByWorld: the capture is damaged, or a payload is missing or another.
        """
        captured = self._captured()
        payloads = self._payloads()
        kept = captured["env_file"]
        return [
            f"{kept['path']}: {counted(len(base64.b64decode(kept['base64'])), 'byte')}, "
            f"sha256 {kept['sha256'][:12]}",
            *(
                f"{path}: there{', sha256 as listed' if sha else ''}"
                for path, sha in payloads.items()
            ),
        ]

    def apart(self) -> list[str]:
        """What of the unit, its files and what runs is not as captured. Reads only.

        Raises:
            RefusedByWorld: unit file or drop-ins of others changed since: no rollback undoes that.
        """
        live, captured = self.live_experiments(), self._captured()
        unit = self._unit.look()
        foreign = _files_apart(captured, self._files(unit, own=False))
        if foreign:
            raise RefusedByWorld(
                f"{self._login.name}: {foreign[0]} since the window's capture, and not by it; "
                "undo that first"
            )
        return live or self._apart(captured)

    # -- inside: the unit's shape ------------------------------------------------------------------

    def _shape(self, unit: UnitState, *, keep_bytes: bool = False) -> dict[str, Any]:
        """What the unit is and runs, as JSON; values of the environment are kept as hashes."""
        argv = self._unit.argv(unit)
        ledger = None
        if unit.pid:
            ledger = self._unit.ledger(self._unit.boot_log(unit))
        return {
            "unit": self._table.unit,
            **self._files(unit),
            "environment_files": [list(each) for each in unit.environment_files],
            "enabled": unit.enabled,
            "argv": masked_words(argv),
            "argv_sha256": _argv_sha256(argv),
            "environment": _hashed(self._unit.environ(unit)),
            "env_file": self._env_file(keep_bytes),
            "ledger": None if ledger is None or ledger.missing else _kept_facts(ledger),
        }

    def _files(self, unit: UnitState, *, own: bool = True) -> dict[str, Any]:
        """The loaded unit file and drop-ins by sha256; without `own` the start's is left out."""
        own = own or self._somebodys(self._root.read(self._drop_in))
        drop_ins = [path for path in unit.drop_ins if own or path != self._drop_in]
        return {
            "fragment": {unit.fragment: self._digest(unit.fragment)} if unit.fragment else {},
            "drop_ins": {path: self._digest(path) for path in drop_ins},
        }

    def _env_file(self, keep_bytes: bool) -> dict[str, str] | None:
        path = self._table.env_file
        data = self._root.read(path)
        if data is None:
            return None
        said = self._read_command(["stat", "-L", "-c", "%a %u:%g", "--", path], "env-file")
        mode, owner = said.split()
        # A link stays a link: what is written is what it leads to.
        kept = {"path": path, "sha256": _sha256(data), "mode": mode, "owner": owner}
        kept["real"] = self._real(path)
        if keep_bytes:
            kept["base64"] = base64.b64encode(data).decode("ascii")
        return kept

    def _apart(self, captured: Mapping[str, Any]) -> list[str]:
        """What of the unit's shape is not as captured, one line each."""
        now = self._shape(self._unit.look())
        found = _files_apart(captured, now)
        was, is_now = captured["env_file"], now["env_file"]
        if is_now is None or any(was[key] != is_now[key] for key in ("sha256", "mode", "owner")):
            leads = self._real(was["path"])
            to = "" if leads == was["real"] else f": it leads to {one_line(leads, 200)}"
            found.append(f"{was['path']} is not as it was{to}")
        if now["argv_sha256"] != captured["argv_sha256"]:
            found.append(f"it runs {one_line(shlex.join(now['argv']), 600) or 'nothing'}")
        before, after = captured["environment"], now["environment"]
        changed = [n for n in sorted({*before, *after}) if before.get(n) != after.get(n)]
        if changed:
            found.append(f"its environment differs in {one_line(', '.join(changed))}")
        if captured["ledger"] is not None:
            was_said = {(s, n): v for s, n, v in captured["ledger"]}
            is_said = {(s, n): v for s, n, v in now["ledger"] or ()}
            found += [
                f"its boot ledger says {s} {n} {is_said.get((s, n))}, not {was_said.get((s, n))}"
                for s, n in dict.fromkeys([*was_said, *is_said])
                if was_said.get((s, n)) != is_said.get((s, n))
            ]
        return found

    def _captured(self) -> dict[str, Any]:
        """The window's capture, whose payload must be whole.

        Raises:
            RefusedByWorld: it cannot be read, or its bytes are not those of its sha256.
        """
        path = self._context.folder / "rollback.json"
        try:
            configuration: dict[str, Any] = json.loads(path.read_text("utf-8"))["configuration"]
            kept = configuration["env_file"]
            data = base64.b64decode(kept["base64"], validate=True)
            whole = _sha256(data) == kept["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedByWorld(
                f"{path}: no capture to go back to: {one_line(str(error))}"
            ) from error
        if not whole:
            raise RefusedByWorld(f"{path}: the environment file's sha256 does not fit its bytes")
        return configuration

    def _put_env_file_back(self, name: str, captured: Mapping[str, Any]) -> bool:
        """Write the captured bytes where others lie now; those are kept in the window's folder.

        Whether anything had to be written. What somebody did to the file meanwhile is told.
        """
        kept = captured["env_file"]
        path, real = kept["path"], kept["real"]
        leads = self._real(path)
        if path != real != leads:
            # A link that somebody has turned: what it led to is as it was, and the link is theirs.
            return False
        what = "was gone"
        try:
            now = self._env_file(keep_bytes=False)
        except CommandFailed:
            now, what = None, "was no file any more"
        if now is not None and all(now[key] == kept[key] for key in ("sha256", "mode", "owner")):
            return False
        data = None if now is None else self._root.read(path)
        changed = data is not None and _sha256(data) != kept["sha256"]
        if data is not None and changed:
            found = f"env-found-{_sha256(data)[:12]}"
            write_atomic(self._context.folder / found, data)
            what = f"was changed (what lay there is kept as {found})"
        if leads != real:
            what = f"was made a link to {one_line(leads, 200)} (which is not touched)"
        elif now is not None and not changed:
            what = f"had mode {now['mode']} and owner {now['owner']}"
        # Whoever else was killed between the bytes and their owner has told of the bytes.
        if not what.startswith("had") or not self._records("told"):
            self._tell(f"{path} {what}, by somebody during the window; the captured one goes back")
        try:
            self._install(real, base64.b64decode(kept["base64"]), kept["mode"], kept["owner"])
        except CommandFailed as error:
            raise StartFailed(f"{name}: {error}") from error
        return True

    def _tell_what_stays(self, captured: Mapping[str, Any]) -> None:
        """Tell what somebody did to the unit that is no part of its shape, and stays as it is."""
        now, real = self._unit.look().enabled, self._real(captured["env_file"]["path"])
        if now != captured["enabled"]:
            self._tell(
                f"{self._table.unit} is {now or 'nothing'} now and was {captured['enabled']}, by "
                "somebody during the window; it is left so"
            )
        if real != captured["env_file"]["real"]:
            self._tell(
                f"{captured['env_file']['path']} leads to {one_line(real, 200)} now, by somebody "
                "during the window, with the same bytes; it is left so"
            )

    def _tell(self, line: str) -> None:
        """Keep a line for the window's alerts, once."""
        if line not in [record["line"] for record in self._records("told")]:
            self._note({"event": "told", "line": line})

    def _knobs_clear_their_floor(self) -> None:
        """The kernel's limit allows a start, so that what is stopped can come up again. Reads only.

        Raises:
            RefusedByWorld: it does not, or cannot be known.
        """
        asked = self._table.knobs
        if asked is None:
            return
        try:
            page = int(self._read_command(["getconf", "PAGE_SIZE"], "page-size"))
            found = {path: self._root.read(path) for path in asked.paths}
        except (Dsv41Error, OSError, ValueError) as error:
            raise RefusedByWorld(
                f"target.knobs: {self._login.name}: cannot be read: {one_line(str(error))}"
            ) from error
        report = judge_knobs(found, unit=asked.unit, floor_mib=asked.floor_mib, page_bytes=page)
        if not report.passed:
            told = next(line for line in report.lines if line.startswith("REFUSED: "))
            raise RefusedByWorld(
                f"target.knobs: {self._login.name}: {told.removeprefix('REFUSED: ')}"
            )

    def _undrifted(self) -> None:
        """The unit is what its files say: a restart would start what runs now.

        Raises:
            RefusedByWorld: it is not, and that is not registered.
        """
        checkout = beside(self._context.base, self._table.checkout)
        findings = drift(
            self._login,
            self._table.unit,
            checkout=load_checkout(checkout) if checkout else None,
            user=self._table.manager == "user",
            become=("sudo", "-n", "--") if self._table.sudo else (),
        )
        left = unregistered(findings, self._table.registered_drift)
        if left:
            more = f", and {len(left) - 1} more" if len(left) > 1 else ""
            raise RefusedByWorld(
                f"{self._table.unit} has drifted: [{left[0].id}] {left[0].kind}: {left[0]}{more}; "
                "dsv41 unit drift says all; what is accepted goes into target.registered_drift"
            )

    def _given_by(self, unit: UnitState) -> None:
        """The unit is given `env_file`, in the way that the table says, and an arm's in its place.

        Raises:
            RefusedByWorld: it reads another file, or an arm's would not be read.
        """
        table, name = self._table, self._table.env_var
        files = [path for path, _ in unit.environment_files]
        if not name:
            if table.env_file not in files:
                reads = f"reads {one_line(', '.join(files))}" if files else "reads none"
                raise RefusedByWorld(
                    f"{table.unit} {reads} by EnvironmentFile=, and target.env_file is "
                    f"{table.env_file}: name it as the unit does, or the variable by which the "
                    "unit is given it (target.env_var)"
                )
            return
        given = self._unit.environ(unit).get(name, table.env_file)
        if given != table.env_file and self._real(given) != self._real(table.env_file):
            raise RefusedByWorld(
                f"{table.unit} runs with {name} {one_line(given, 200)}, and target.env_file is "
                f"{table.env_file}"
            )
        for path in files:
            if name in parse_environment_file(self._root.read(path) or b""):
                raise RefusedByWorld(
                    f"{path}: it sets {name} for {table.unit}, and goes over what an arm would "
                    "be given; leave target.env_var out and name that file in target.env_file"
                )
        if unit.dynamic_user and table.manager == "system":
            raise RefusedByWorld(
                f"{table.unit} has DynamicUser=yes: no file can be given to a user that is there "
                "only while it runs; leave target.env_var out, and systemd reads the file"
            )

    def _real(self, path: str) -> str:
        return self._read_command(["readlink", "-m", "--", path], "real-path").strip()

    def _lawful(self, unit: UnitState) -> None:
        """Every arm fits the memory law, and the budget that production's own boot has left.

        Raises:
            RefusedByWorld: one does not.
        """
        law = self._law()
        if law is None:
            return
        argv, ledger = self._unit.argv(unit), self._unit.ledger(self._unit.boot_log(unit))
        for arm in self._arms:
            stated = Expected.of(arm.settings, f"arms.{arm.name}.settings").flags
            refused = law_refusals(law, argv, stated, ledger)
            if refused:
                raise RefusedByWorld(f"arms.{arm.name}: target.law: {'; '.join(refused)}")

    def _law(self) -> Law | None:
        """The model's memory law. Read when it is asked for: the way back needs none."""
        name = self._table.law
        if not name:
            return None
        try:
            law = read_law(
                name if name in shipped_laws() else str(beside(self._context.base, name)),
                "target.law",
            )
        except UsageError as error:
            raise SpecError(str(error)) from error
        if law.dialect != self._table.engine:
            raise SpecError(
                f"target.law: {one_line(name, 120)} is of dialect {law.dialect}, target.engine is "
                f"{self._table.engine}"
            )
        return law

    def _named_by_arms(self, env_file: bytes) -> None:
        """Every arm's variant can be written, and the paths that it names are there."""
        for arm in self._arms:
            try:
                variant(
                    env_file,
                    arm.env,
                    header="",
                    where=self._table.env_file,
                    sourced=bool(self._table.env_var),
                )
            except UsageError as error:
                raise RefusedByWorld(f"arms.{arm.name}.env: {error}") from error
            for name, value in arm.env.items():
                if value.startswith("/") and not self._exists(value):
                    raise RefusedByWorld(
                        f"arms.{arm.name}.env.{name}: {self._login.name}:{one_line(value)}: "
                        "no such file"
                    )

    def _payloads(self) -> dict[str, str]:
        """The table's payloads, each proved to be there and to hash."""
        for path, sha256 in self._table.payloads.items():
            if not self._exists(path):
                raise RefusedByWorld(f"target.payloads: {self._login.name}:{path}: no such file")
            if not sha256 or not (self._context.folder / "plan.json").exists():
                continue
            done = self._root.run(
                ["sha256sum", "--", path], name="payload", deadline_s=self._limit("start_s", 600.0)
            )
            if done.stdout.split()[0].lstrip("\\") != sha256:
                raise RefusedByWorld(
                    f"target.payloads: {self._login.name}:{path}: its sha256 is "
                    f"{one_line(done.stdout.split()[0], 80)}"
                )
        return dict(self._table.payloads)

    def _exists(self, path: str) -> bool:
        seen = self._root.run(
            ["test", "-e", path], name="exists", deadline_s=_DEADLINE_S, check=False
        )
        return seen.returncode == 0

    # -- inside: proofs ----------------------------------------------------------------------------

    def _experiment(self, unit: UnitState) -> str:
        """Why the unit is not in its own shape, or nothing."""
        if not unit.down:
            mark = self._unit.environ(unit).get(_MARK)
            if mark is not None:
                return f"{self._table.unit} runs as {one_line(mark)}, not as production"
        if self._drop_in in unit.drop_ins and not self._somebodys(self._root.read(self._drop_in)):
            return f"{self._table.unit} has {self._drop_in} loaded, not production's own shape"
        return ""

    def _prove(self, start: str, arm: Arm, unit: UnitState) -> None:
        """Hold what runs against the arm, and against the starts of the other arms.

        Raises:
            WindowStopped: it is not the arm, or no other than another arm.
        """
        expected = Expected.of(arm.settings, f"arms.{arm.name}.settings")
        if not expected.model:
            expected = dataclasses.replace(expected, model=self._table.model)
        argv, environ = self._unit.argv(unit), self._unit.environ(unit)
        text = self._unit.boot_log(unit)
        folder = self._context.folder / "ledger"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"{start}.log", text)
        env_file, by_name = self._variant(start), self._table.env_var
        wanted = {_MARK: self._mark(start)}
        wanted |= {by_name: env_file} if by_name else arm.env
        faults = mismatches(
            expected,
            argv=argv,
            environ=environ,
            wanted_environ=wanted,
            optional_environ=arm.env,
            models=self._engine.models(self._url),
            ledger=self._unit.ledger(text),
            law=self._law(),
        )
        # The name of the file that a start was given does not make it another arm.
        shown = [word.replace(env_file, "{env_file}") for word in argv]
        proof: dict[str, Any] = {
            "event": "proved",
            "start": start,
            "arm": arm.name,
            "argv": masked_words(shown),
            "ledger": dict(expected.ledger),
            "argv_sha256": _argv_sha256(shown),
            "environment": _hashed(environ),
            "main_pid": unit.pid,
            "invocation": unit.invocation,
            "faults": faults,
        }
        if faults:
            self._note(proof)
            raise WindowStopped(f"{start} does not serve arm {arm.name}: {'; '.join(faults)}")
        for other in self._records("proved"):
            alike = other["argv_sha256"] == proof["argv_sha256"]
            if other["arm"] == arm.name and not other["faults"]:
                was, now = other["environment"], proof["environment"]
                names = {n for n in {*was, *now} - {by_name} if was.get(n) != now.get(n)}
                differs = ["the command line"] if not alike else []
                differs += [one_line(f"the environment ({', '.join(sorted(names))})")] * bool(names)
                if differs:
                    raise WindowStopped(
                        f"{start} and {other['start']} are both arm {arm.name}, and differ in "
                        f"{' and '.join(differs)}: something that the unit reads was changed "
                        "between them"
                    )
            if not alike or other["arm"] == arm.name or other["faults"]:
                continue
            # A change that only the environment holds may have been read by nobody.
            if not any(other["ledger"].get(n, v) != v for n, v in proof["ledger"].items()):
                raise WindowStopped(
                    f"{start} runs with the argv of {other['start']}: arms {arm.name} and "
                    f"{other['arm']} are one, as far as can be seen; arms that differ in their "
                    "environment alone need a fact in settings.ledger that tells them apart"
                )
        self._note(proof)
        self._alive[start] = (unit, self._login.identity())

    # -- inside: files of a start ------------------------------------------------------------------

    @property
    def _drop_in(self) -> str:
        return f"{self._run}/systemd/{self._table.manager}/{self._table.unit}.d/{_DROP_IN}"

    def _variant(self, start: str) -> str:
        return f"{self._run}/dsv41/{self._context.window_id}/{start}.env"

    @property
    def _run(self) -> str:
        """The folder of runtime state: /run, or that of the login's user."""
        if not self._runtime_folder:
            uid = self._read_command(["id", "-u"], "whose").strip()
            self._runtime_folder = f"/run/user/{uid}"
        return self._runtime_folder

    def _mark(self, start: str) -> str:
        return f"{self._context.window_id}/{start}"

    def _write_start(self, name: str, start: str, arm: Arm, captured: Mapping[str, Any]) -> str:
        """Record what will be written, then write it: the variant, and the drop-in naming it.

        Returns the variant's sha256.
        """
        path = self._variant(start)
        data = variant(
            base64.b64decode(captured["env_file"]["base64"]),
            arm.env,
            header=f"{_HEADER}{self._context.window_id}, {start}",
            where=self._table.env_file,
            sourced=bool(self._table.env_var),
        )
        given = [f"Environment={self._table.env_var}={path}"]
        if not self._table.env_var:
            # In its own place among the unit's files: each goes over those before it.
            given = ["EnvironmentFile="]
            for file, optional in captured["environment_files"]:
                shown = path if file == self._table.env_file else file
                given.append(f"EnvironmentFile={'-' if optional else ''}{shown.replace('%', '%%')}")
        lines = [
            f"# {_HEADER}{self._context.window_id}, {start}",
            "# Taken away when the start ends; a reboot takes it away too.",
            "[Service]",
            f"Environment={_MARK}={self._mark(start)}",
            *given,
        ]
        drop_in = ("\n".join(lines) + "\n").encode()
        there = self._root.read(self._drop_in)
        if there is not None and not self._is_ours(there):
            raise StartFailed(f"{name}: {self._drop_in}: {self._whose(there)}")
        self._note(
            {
                "event": "write",
                "start": start,
                "arm": arm.name,
                "files": {path: _sha256(data), self._drop_in: _sha256(drop_in)},
            }
        )
        unit = self._unit.look()
        if not unit.down:
            raise WindowStopped(f"{name}: {self._table.unit} is {unit.active}: somebody started it")
        # What reads the file: systemd itself, or the service as its user.
        reader = unit.user if self._table.env_var and self._table.manager == "system" else ""
        self._install(path, data, "600", reader)
        self._install(self._drop_in, drop_in, "644", "")
        return _sha256(data)

    def _install(self, path: str, data: bytes, mode: str, owner: str) -> None:
        """Write a file durably, of `mode` and `owner`; the folders above may be looked through."""
        folder = str(PurePosixPath(path).parent)
        if path.startswith(f"{self._run}/"):
            self._act(["install", "-d", "-m", "755", "--", folder], f"folder {folder}")
        self._root.write(path, data, fence=self._fence)
        if owner:
            self._act(["chown", "--", owner, path], f"owner {path}")
        self._act(["chmod", mode, "--", path], f"mode {path}")

    def _clear(self, name: str) -> None:
        """Stop the unit if it is a start's, and take away what this window's starts wrote.

        Raises:
            TransportError: something of a start is still there, or lies there and is not ours.
        """
        unit = self._unit.look()
        there = self._root.read(self._drop_in)
        if self._somebodys(there):
            # No start of any window: it stays, as any other drop-in of theirs does.
            there = None
        if there is not None and not self._is_ours(there):
            raise TransportError(f"{name}: {self._drop_in}: {self._whose(there)}")
        runs_as = "" if unit.down else self._unit.environ(unit).get(_MARK, "")
        if runs_as and not runs_as.startswith(f"{self._context.window_id}/"):
            raise TransportError(
                f"{name}: {self._table.unit} runs as {one_line(runs_as)}, not this window's; "
                "not touched"
            )
        if self._experiment(unit) and not unit.down:
            self._unit.stop(name, self._limit("stop_s", 60.0))
        elif there is not None and unit.down:
            self._unit.settle(name)
        if there is not None:
            self._root.remove(self._drop_in, fence=self._fence)
        if there is not None or self._drop_in in unit.drop_ins:
            self._unit.reload(name, check=False)
            if self._experiment(self._unit.look()):
                raise TransportError(
                    f"{name}: systemd refuses to reload and still has {self._drop_in} loaded"
                )
        for path, sha256 in self._written():
            data = self._root.read(path)
            if path != self._drop_in and data is not None and _sha256(data) == sha256:
                self._root.remove(path, fence=self._fence)

    def _is_ours(self, data: bytes) -> bool:
        """Whether a drop-in is one of this window's starts, by its header and its bytes."""
        header = f"# {_HEADER}{self._context.window_id}, ".encode()
        known = {sha256 for path, sha256 in self._written() if path == self._drop_in}
        return data.startswith(header) and _sha256(data) in known

    def _somebodys(self, data: bytes | None) -> bool:
        """Whether a drop-in lies in the place of a start's and is no window's."""
        return data is not None and not data.startswith(f"# {_HEADER}".encode())

    def _whose(self, data: bytes | None) -> str:
        first = (data or b"").partition(b"\n")[0].decode("utf-8", "replace")
        if first.startswith(f"# {_HEADER}{self._context.window_id}, "):
            return "this window's, and somebody has changed it; not touched: move it away first"
        if first.startswith(f"# {_HEADER}"):
            return f"it says it is of {one_line(first.removeprefix(f'# {_HEADER}'))}; not touched"
        return "it is not a window's; not touched"

    def _note(self, record: Mapping[str, Any]) -> None:
        append_json_line(self._context.folder / STARTS, {"schema": "dsv41-unit-v1", **record})

    def _records(self, event: str) -> list[dict[str, Any]]:
        lines = read_json_lines(self._context.folder / STARTS)
        return [line for line in lines if line.get("event") == event]

    def _written(self) -> list[tuple[str, str]]:
        return [item for line in self._records("write") for item in line["files"].items()]

    # -- inside: waiting ---------------------------------------------------------------------------

    def _wait(self, name: str, before: UnitState, *, strict: bool) -> UnitState:
        """Wait until the unit is active and healthy; what systemd says of it then.

        `before` is what it was when it was told to start. `strict`: a start that systemd had to
        repeat has failed; without it production may take as many as it needs.

        Raises:
            StartFailed: it has failed, has ended, or is not healthy in time.
        """
        limit = self._limit("start_s", 600.0)
        deadline = boottime() + limit
        seen = began = self._unit.look()
        while True:
            began = seen if seen.pid else began
            ended = seen.active == "inactive" and seen.invocation != before.invocation
            if seen.active == "failed" or ended or (strict and seen.restarts):
                # Between two tries of a loop systemd has no result to tell.
                told = [seen.result] if seen.result != "success" else []
                told += [counted(seen.restarts, "restart")] if seen.restarts else []
                raise StartFailed(
                    f"{name}: {self._table.unit} failed ({', '.join(told) or 'it ended'}); "
                    f"{self._last_words(before, seen, began)}"
                )
            healthy, said = self._healthy()
            if healthy and seen.serving:
                return seen
            if boottime() > deadline:
                raise StartFailed(
                    f"{name}: {self._table.unit} is {seen.active}, not healthy within {limit:g} s "
                    f"({said}); {self._last_words(before, seen, began)}"
                )
            # Each look is a record: a boot of half an hour must not make thousands.
            self._context.pause(min(5.0, _POLL_S + (limit - (deadline - boottime())) / 30))
            seen = self._unit.look()

    def _last_words(self, before: UnitState, *seen: UnitState) -> str:
        """What the newest start said last; an earlier server's words are not its.

        The journal may lag behind a start that ended at once, so it is asked again for a while.
        """
        own = [state for state in seen if state.invocation != before.invocation]
        told = "it printed nothing"
        for _ in range(10):
            for state in own:
                told = self._unit.last_words(state)
                if told.startswith("its last line"):
                    return told
            time.sleep(_POLL_S / 2)
        return told

    def _healthy(self) -> tuple[bool, str]:
        """Whether the server says so: by the table's health command, or over HTTP."""
        if not self._table.health:
            seen = self._engine.health(self._url, timeout=5.0)
            return seen == "up", str(seen)
        argv = fill(self._table.health, {"port": str(self._table.port)}, "target.health")
        done = self._login.run(argv, name="health", deadline_s=10.0, check=False)
        return done.returncode == 0, f"exit {done.returncode}"

    def _read_command(self, argv: Sequence[str], name: str) -> str:
        return self._root.run(argv, name=name, deadline_s=_DEADLINE_S).stdout

    def _act(self, argv: Sequence[str], name: str) -> None:
        self._root.run(argv, name=name, deadline_s=_DEADLINE_S, fence=self._fence)

    def _digest(self, path: str) -> str | None:
        data = self._root.read(path)
        return None if data is None else _sha256(data)

    def _limit(self, name: str, default: float) -> float:
        return self._context.limits.get(name, default)

    @property
    def _url(self) -> str:
        where = self._table.host.address if self._table.host else ""
        return self._table.url or f"http://{where or '127.0.0.1'}:{self._table.port}"


def _files_apart(captured: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which of the unit file and the drop-ins changed, one line each."""
    found: list[str] = []
    for key in ("fragment", "drop_ins"):
        was, is_now = captured[key], now[key]
        for path in dict.fromkeys([*was, *is_now]):
            if was.get(path) != is_now.get(path):
                new = "is new" if path not in was else "is gone"
                found.append(f"{path} {'changed' if path in was and path in is_now else new}")
    return found


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _argv_sha256(argv: Sequence[str]) -> str:
    """What tells two command lines apart; a secret in one is in no artefact."""
    return _sha256("\0".join(argv).encode("utf-8", "surrogateescape"))


def _hashed(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment as an artefact may hold it: names, and hashes of the values."""
    return {
        name: _sha256(f"{name}={value}".encode("utf-8", "surrogateescape"))[:16]
        for name, value in sorted(environ.items())
        if name not in _OF_A_START
    }


def _kept_facts(ledger: Ledger) -> list[list[Any]]:
    """The facts that follow from the shape, as JSON: subject, name, value."""
    return [[f.subject, f.name, f.value] for f in ledger.facts if f.name not in _OF_A_BOOT]
