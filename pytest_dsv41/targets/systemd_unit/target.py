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
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from ...durable import dump_json, write_atomic
from ...errors import (
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
from ...hosts import CommandLog, Fence, Host, LocalHost, Placeholder, Probe
from ...hosts.fake import FakeHost, FakeWorld
from ...hosts.local import boottime
from ...hosts.quiet import spark_quiet
from ...hosts.sudo import SudoHost
from ...measure import Endpoint
from ...text import counted, one_line
from ...unit.envfile import check_changes
from ...unit.live import LiveUnit, UnitState
from ...unit.masking import masked_words
from ...unit.proof import Expected, mismatches
from ..base import Arm, ClockCap, HoldSite, ProbeResult, Started, TargetContext, known_engine
from ..filling import fill
from ..tables import read_table, ssh_host
from .preflight import Preflight
from .shape import UnitShape, argv_sha256, files_apart, hashed
from .starts import DROP_IN, MARK, StartFiles, sha256_of
from .table import UnitTable

__all__ = ["SystemdUnitTarget", "systemd_unit_target"]

_POLL_S: Final = 0.2


def systemd_unit_target(table: Mapping[str, Any], context: TargetContext) -> SystemdUnitTarget:
    """Build the target of `kind = "systemd-unit"`; the host is not asked anything yet.

    Raises:
        SpecError: a key is unknown, missing, or of the wrong type.
    """
    return SystemdUnitTarget(read_table(UnitTable, table), context)


class SystemdUnitTarget:
    """One unit on this machine or on one over ssh; see the module."""

    holds = True
    ephemeral = False
    chains = False
    """A chain leaves production down between windows; an enabled unit would not stay so."""

    def __init__(self, table: UnitTable, context: TargetContext) -> None:
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
        self._starts = StartFiles(self._root, self._unit, table, context, self._fence)
        self._shape = UnitShape(self._root, self._unit, table, context, self._starts)
        self._preflight = Preflight(
            self._login, self._root, self._unit, table, context, self._shape
        )

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
        self._preflight.law()
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
        for path in unit.drop_ins:
            if PurePosixPath(path).name >= DROP_IN:
                raise RefusedByWorld(
                    f"{path}: it sorts after {DROP_IN}, so no arm could be given over it"
                )
        if self._starts.lying() is not None:
            raise RefusedByWorld(
                f"{self._starts.drop_in}: a drop-in of a window's start lies there: "
                f"{self._starts.whose(self._starts.lying())}"
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
        shape = self._shape.of(unit, keep_bytes=True)
        if shape["env_file"] is None:
            raise RefusedByWorld(f"{self._login.name}:{self._table.env_file}: no such file")
        if not shape["argv"]:
            raise RefusedByWorld(f"{self._table.unit} has no main process that can be seen")
        env_file = base64.b64decode(shape["env_file"]["base64"])
        self._preflight.check(self._arms, unit, env_file)
        return {**shape, "definition": self.describe(), "payloads": self._preflight.payloads()}

    def stop_production(self) -> None:
        """Prove that the capture can bring the unit back, and stop it.

        Raises:
            WindowStopped: it is another window's start by now.
        """
        self._shape.captured()
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
            captured = self._shape.captured()
        written = captured is not None and self._shape.put_env_file_back(name, captured)
        unit = self._unit.look()
        # What was started with another's settings has them for as long as it runs.
        strange = [record["invocation"] for record in self._starts.records("not-as-captured")]
        begun = unit.down or written or unit.invocation in strange
        if captured is not None:
            begun = begun or argv_sha256(self._unit.argv(unit)) != captured["argv_sha256"]
        try:
            if begun:
                self._begin(name)
            self._wait(name, unit, strict=False)
            apart = self._shape.apart(captured) if captured is not None else []
            if captured is not None and apart and not begun:
                self._begin(name)
                self._wait(name, unit, strict=False)
                apart = self._shape.apart(captured)
        except (CommandFailed, TransportError) as error:
            raise StartFailed(f"{name}: {error}") from error
        if apart:
            began = self._unit.look().invocation
            self._starts.note({"event": "not-as-captured", "invocation": began, "apart": apart})
            raise StartFailed(f"{name}: {self._table.unit} is not as captured: {apart[0]}")
        if captured is not None:
            self._shape.tell_what_stays(captured)

    def end_production(self) -> None:
        """The unit serves always: nothing."""

    def _begin(self, name: str) -> None:
        """Reload, and start the unit in its own shape.

        A refused reload is no reason to leave production down, as long as what systemd has loaded
        is nothing of ours.
        """
        loaded = self._starts.drop_in in self._unit.look().drop_ins
        self._unit.reload(name, check=loaded)
        if self._experiment(self._unit.look()):
            raise StartFailed(
                f"{name}: systemd still has {self._starts.drop_in} loaded, and refuses to reload"
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
        captured = self._shape.captured()
        try:
            written = self._starts.write(name, start, arm, captured)
            self._unit.reload(name)
            unit = self._unit.look()
            meanwhile = self._changed(captured, unit)
            if not meanwhile and unit.drop_ins[-1:] != (self._starts.drop_in,):
                where = "not the last" if self._starts.drop_in in unit.drop_ins else "not loaded"
                meanwhile = [f"{self._starts.drop_in} is {where}"]
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
            there = self._starts.lying()
            if there is not None and not self._starts.is_somebodys(there):
                found.append(f"{self._starts.drop_in} lies there")
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
        for path, sha256 in self._starts.written():
            data = self._root.read(path)
            if path != self._starts.drop_in and data is not None:
                changed = ", changed by somebody" if sha256_of(data) != sha256 else ""
                left.append(f"{path} lies there{changed}")
        return list(dict.fromkeys(left))

    # -- for a rollback ----------------------------------------------------------------------------

    def prove_rollback(self) -> list[str]:
        """Prove what the way back needs, and say what was proved. Reads only.

        Raises:
            RefusedByWorld: the capture is damaged, or a payload is missing or another.
        """
        captured = self._shape.captured()
        payloads = self._preflight.payloads()
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
        live, captured = self.live_experiments(), self._shape.captured()
        unit = self._unit.look()
        foreign = self._changed(captured, unit)
        if foreign:
            raise RefusedByWorld(
                f"{self._login.name}: {foreign[0]} since the window's capture, and not by it; "
                "undo that first"
            )
        return live or self._shape.apart(captured)

    # -- inside: proofs ----------------------------------------------------------------------------

    def _changed(self, captured: Mapping[str, Any], unit: UnitState) -> list[str]:
        """What of the unit's files, as they are loaded, is not as captured and no start's."""
        if unit.load != "loaded":
            # Masked, or gone: there is no file to look into.
            return [f"it is {unit.load}"]
        return files_apart(captured, self._shape.files(unit, own=False))

    def _experiment(self, unit: UnitState) -> str:
        """Why the unit is not in its own shape, or nothing."""
        if not unit.down:
            mark = self._unit.environ(unit).get(MARK)
            if mark is not None:
                return f"{self._table.unit} runs as {one_line(mark)}, not as production"
        drop_in = self._starts.drop_in
        if drop_in in unit.drop_ins and not self._starts.is_somebodys(self._starts.lying()):
            return f"{self._table.unit} has {drop_in} loaded, not production's own shape"
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
        env_file, by_name = self._starts.variant_path(start), self._table.env_var
        wanted = {MARK: self._starts.mark(start)}
        wanted |= {by_name: env_file} if by_name else arm.env
        faults = mismatches(
            expected,
            argv=argv,
            environ=environ,
            wanted_environ=wanted,
            optional_environ=arm.env,
            models=self._engine.models(self._url),
            ledger=self._unit.ledger(text),
            law=self._preflight.law(),
        )
        # The name of the file that a start was given does not make it another arm.
        shown = [word.replace(env_file, "{env_file}") for word in argv]
        proof: dict[str, Any] = {
            "event": "proved",
            "start": start,
            "arm": arm.name,
            "argv": masked_words(shown),
            "ledger": dict(expected.ledger),
            "argv_sha256": argv_sha256(shown),
            "environment": hashed(environ),
            "main_pid": unit.pid,
            "invocation": unit.invocation,
            "faults": faults,
        }
        if faults:
            self._starts.note(proof)
            raise WindowStopped(f"{start} does not serve arm {arm.name}: {'; '.join(faults)}")
        for other in self._starts.records("proved"):
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
        self._starts.note(proof)
        self._alive[start] = (unit, self._login.identity())

    def _clear(self, name: str) -> None:
        """Stop the unit if it is a start's, and take away what this window's starts wrote.

        Raises:
            TransportError: something of a start is still there, or lies there and is not ours.
        """
        unit = self._unit.look()
        there = self._starts.lying()
        if self._starts.is_somebodys(there):
            # No start of any window: it stays, as any other drop-in of theirs does.
            there = None
        if there is not None and not self._starts.is_ours(there):
            raise TransportError(f"{name}: {self._starts.drop_in}: {self._starts.whose(there)}")
        runs_as = "" if unit.down else self._unit.environ(unit).get(MARK, "")
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
            self._root.remove(self._starts.drop_in, fence=self._fence)
        if there is not None or self._starts.drop_in in unit.drop_ins:
            self._unit.reload(name, check=False)
            if self._experiment(self._unit.look()):
                raise TransportError(
                    f"{name}: systemd refuses to reload and still has {self._starts.drop_in} loaded"
                )
        for path, sha256 in self._starts.written():
            data = self._root.read(path)
            if path != self._starts.drop_in and data is not None and sha256_of(data) == sha256:
                self._root.remove(path, fence=self._fence)

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
        for _ in range(30):
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

    def _limit(self, name: str, default: float) -> float:
        return self._context.limits.get(name, default)

    @property
    def _url(self) -> str:
        where = self._table.host.address if self._table.host else ""
        return self._table.url or f"http://{where or '127.0.0.1'}:{self._table.port}"
