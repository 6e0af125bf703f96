"""Target `spark-pair`: one model served by several hosts over ssh, the first of which answers.

Everything that runs on a host runs in a scope of its `systemd --user`: production in one that the
table names, each start in one named by the window, the epoch and the start, which the host itself
ends when the window's time is over. What changes a host carries the window's epoch and is refused
there once a newer one has been seen. Production's configuration files are captured with their
sha256 and put back before it starts again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from pydantic import Field

from ..durable import dump_json
from ..errors import (
    CommandFailed,
    Dsv41Error,
    RefusedByWorld,
    SpecError,
    StartFailed,
    TransportError,
)
from ..hosts import Fence, Host, Placeholder, Probe
from ..hosts.fake import FakeHost, FakeWorld
from ..hosts.local import boottime
from ..hosts.quiet import labelled_containers, spark_quiet
from ..hosts.scopes import ScopeName, end_scopes, live_scopes, run_scoped
from ..hosts.tmux import (
    HOLD_HEAD,
    START,
    placeholder_down,
    placeholder_state,
    placeholder_up,
    window_placeholder_up,
)
from ..measure import Endpoint
from ..text import one_line
from .base import Arm, ClockCap, HoldSite, ProbeResult, Started, TargetContext, known_engine
from .filling import fill, same_command
from .tables import HostTable, Table, read_table, ssh_host

__all__ = ["SparkPairTarget", "spark_pair_target"]

_POLL_S: Final = 0.05
_HOLD_SCOPE: Final = "hold"
_CAP: Final = re.compile(r"(\S+) clock cap (\d+) MHz")
_HOST_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_START_DEADLINE_S: Final = 60.0


class _Server(Table):
    port: int = Field(ge=1, le=65535)
    url: str = ""
    command: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)
    start_script: str = ""
    stop_script: str = ""
    health: tuple[str, ...] = ()


class _Production(_Server):
    scope: str = Field(
        default="dsv41-production",
        pattern="^dsv41-[A-Za-z0-9._]+$",
        description="a name that begins with dsv41-",
    )
    args: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


class _Table(Table):
    kind: Literal["spark-pair"] = "spark-pair"
    engine: str = "vllm"
    model: str = ""
    commit: str = Field(default="", pattern="^([0-9a-f]{40})?$", description="40 hex digits")
    hold: str = Field(default="/var/lib/dsv41/HOLD", pattern="^/", description="an absolute path")
    label: str = ""
    placeholder: str = Field(default=HOLD_HEAD, pattern="^[ -~]+$")
    clock: int = Field(default=0, ge=0)
    logs: str = Field(default="/var/log/dsv41", pattern="^/", description="an absolute path")
    world: str = ""
    hosts: dict[str, HostTable] = Field(min_length=1)
    production: _Production
    experiment: _Server


def spark_pair_target(table: Mapping[str, Any], context: TargetContext) -> SparkPairTarget:
    """Build the target of `kind = "spark-pair"`; no host is asked anything yet.

    Raises:
        SpecError: a key is unknown, missing, or of the wrong type.
    """
    return SparkPairTarget(read_table(_Table, table), context)


def _kept(data: bytes) -> dict[str, str]:
    """A file as the capture keeps it."""
    return {
        "sha256": hashlib.sha256(data).hexdigest(),
        "base64": base64.b64encode(data).decode("ascii"),
    }


class SparkPairTarget:
    """Servers on hosts over ssh, in scopes and tmux. The first host of the table is the head."""

    holds = True
    ephemeral = False
    chains = True

    def __init__(self, table: _Table, context: TargetContext) -> None:
        self._table = table
        self._context = context
        self._engine = known_engine(table.engine)
        for name in table.hosts:
            if not _HOST_NAME.fullmatch(name):
                raise SpecError(
                    f"target.hosts.{one_line(name)}: valid: letters, digits, '.', '_', '-', "
                    "at most 64, beginning with a letter or digit"
                )
        self._addresses: dict[str, str] = {}
        self._hosts = tuple(self._host(name, where) for name, where in table.hosts.items())
        self._head = self._hosts[0]
        self._fence: Fence | None = None
        if context.epoch:
            self._fence = Fence.beside(table.hold, context.epoch, str(context.campaign))
        self._scripts: dict[str, str] = {}
        for kind, server in (("production", table.production), ("experiment", table.experiment)):
            for name in server.command:
                if name not in table.hosts:
                    raise SpecError(
                        f"target.{kind}.command.{name}: no such host; valid: "
                        + ", ".join(table.hosts)
                    )
            if self._head.name not in server.command:
                raise SpecError(
                    f"target.{kind}.command.{self._head.name}: missing; it starts the server that "
                    "answers"
                )
            for key, written in (("start", server.start_script), ("stop", server.stop_script)):
                self._scripts[f"{kind}-{key}"] = self._read_script(
                    written, f"target.{kind}.{key}_script"
                )
        if table.production.port == table.experiment.port:
            raise SpecError("target.experiment.port: it is production's; choose another")
        for host in self._hosts:
            self._production_argv(host)

    def _host(self, name: str, where: HostTable) -> Host:
        log = self._context.log
        if self._table.world:
            world = FakeWorld(self._context.base / self._table.world)
            self._addresses[name] = world.machine(name).address
            return FakeHost(world, name, log)
        host = ssh_host(name, where, f"target.hosts.{name}", self._context.base, log)
        self._addresses[name] = where.address
        return host

    # -- what is said beforehand -------------------------------------------------------------------

    def check(self, arms: Sequence[Arm]) -> None:
        """Every placeholder must be known, and an arm's arguments must reach a host."""
        for arm in arms:
            taken = [self._arm_argv(host, arm, arm.name) for host in self._hosts]
            words = [w for command in self._table.experiment.command.values() for w in command]
            if arm.args and "{args}" not in words:
                raise SpecError(
                    f"arms.{arm.name}.args: no command of target.experiment.command has the word "
                    "{args} for them"
                )
            ScopeName(self._context.window_id or "window", 0, arm.name)
            if not any(taken):
                raise SpecError(f"arms.{arm.name}: nothing would be started")

    def prepare(self) -> dict[str, Any]:
        """Nothing is chosen: ports and hosts are the table's."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Hosts, commands, environment names and ports of production."""
        production = self._table.production
        return {
            "kind": "spark-pair",
            "engine": self._table.engine,
            "model": self._table.model,
            "hosts": self._addresses,
            "command": {name: list(words) for name, words in production.command.items()},
            "args": list(production.args),
            "env": sorted(production.env),
            "port": production.port,
            "clock": self._table.clock,
        }

    def commit(self) -> str:
        """`target.commit`, or the sha1 of the production definition."""
        if self._table.commit:
            return self._table.commit
        digest = hashlib.sha1(dump_json(self.describe()).encode(), usedforsecurity=False)
        return digest.hexdigest()

    # -- hosts, HOLD and placeholders --------------------------------------------------------------

    def hosts(self) -> tuple[Host, ...]:
        """The hosts in the table's order."""
        return self._hosts

    def identities(self) -> dict[str, str]:
        """Each host's boot."""
        return {host.name: host.identity() for host in self._hosts}

    def hold_sites(self) -> tuple[HoldSite, ...]:
        """`target.hold` on every host."""
        return tuple(self._context.hold_site(host, self._table.hold) for host in self._hosts)

    def hold_opened(self) -> None:
        """Start the window's own placeholder on every host, in a scope of the window."""
        for host in self._hosts:
            unit = self._unit(_HOLD_SCOPE)
            if unit not in live_scopes(host):
                window_placeholder_up(
                    host,
                    unit,
                    longest_s=self._longest_s(),
                    head=self._table.placeholder,
                    fence=self._fence,
                )

    def placeholders_up(self, owner: str) -> None:
        """Start the chain's placeholder on every host."""
        for host in self._hosts:
            placeholder_up(host, owner, head=self._table.placeholder, fence=self._fence)

    def placeholders(self, owner: str) -> dict[str, Placeholder]:
        """What lies on each host's default tmux socket."""
        head = self._table.placeholder
        return {host.name: placeholder_state(host, owner, head=head) for host in self._hosts}

    def placeholders_down(self, owner: str) -> list[str]:
        """End the chain's placeholder on every host that answers."""
        head = self._table.placeholder
        left = (placeholder_down(host, owner, head=head, fence=self._fence) for host in self._hosts)
        return [why for why in left if why is not None]

    # -- production --------------------------------------------------------------------------------

    def production(self) -> Endpoint:
        """Where production answers."""
        return self._endpoint(self._table.production)

    def probe(self) -> ProbeResult:
        """UP when it is healthy; DOWN only when the head's port refuses a connection."""
        server = self._table.production
        healthy, said = self._healthy(server)
        where = self._url(server)
        if healthy:
            return ProbeResult(Probe.UP, f"{where} is healthy", where)
        try:
            port = self._head.port(server.port)
        except (Dsv41Error, OSError) as error:
            return ProbeResult(Probe.UNKNOWN, one_line(str(error)), where)
        if port is Probe.DOWN:
            nobody = f"nothing listens on {self._head.name}:{server.port}"
            return ProbeResult(Probe.DOWN, nobody, where)
        unwell = f"{where} is not healthy ({said}), its port {port.value}"
        return ProbeResult(Probe.UNKNOWN, unwell, where)

    def capture(self) -> dict[str, Any]:
        """The running commands, which must be those that would be started, and the files."""
        running: dict[str, list[str]] = {}
        for host in self._hosts:
            expected = self._production_argv(host)
            if not expected:
                continue
            found = [p for p in host.processes() if same_command(p.argv, expected)]
            if not found:
                raise RefusedByWorld(
                    f"{host.name}: production does not run as the target would start it: "
                    f"{one_line(' '.join(expected))}; correct target.production first"
                )
            where = host.read(f"/proc/{found[0].pid}/cgroup") or b""
            if (
                f"/{self._production_unit}\n".encode() not in where
                and not (self._scripts["production-stop"])
            ):
                raise RefusedByWorld(
                    f"{host.name}: production runs outside of {self._production_unit} and could "
                    "not be stopped; start it in that scope, or give target.production a "
                    "stop_script"
                )
            running[host.name] = list(found[0].argv)
        files: dict[str, dict[str, Any]] = {}
        for host in self._hosts:
            files[host.name] = {}
            for path in self._table.production.files:
                data = host.read(path)
                files[host.name][path] = None if data is None else _kept(data)
        return {"argv": running, "definition": self.describe(), "files": files}

    def stop_production(self) -> None:
        """End production on every host, after each has answered: half of it serves nobody."""
        for host in self._hosts:
            live_scopes(host)
        self._everywhere(lambda host: self._stop_production_on(host))
        self._closed(self._table.production, "production-stop")

    def _stop_production_on(self, host: Host) -> None:
        self._graceful(host, "production", "production-stop")
        end_scopes(
            host,
            [self._production_unit],
            name="production-stop",
            patience_s=self._limit("stop_s", 60.0),
            fence=self._fence,
        )

    def start_production(self) -> None:
        """Put the captured files back and start production, unless it is up or coming up."""
        up = self.probe().state is Probe.UP
        live = [self._production_unit in live_scopes(host) for host in self._hosts]
        wanted = [bool(self._production_argv(host)) for host in self._hosts]
        if up and not any(live):
            # Somebody else's start of it, outside of our scopes.
            return
        if live != wanted or not any(live):
            # Half of it is none of it, whatever its head says; one that is loading is waited for.
            self._everywhere(lambda host: self._stop_production_on(host))
            self._put_files_back()
            for host in self._hosts:
                self._start_on(
                    host,
                    "production",
                    self._production_argv(host),
                    unit=self._production_unit,
                    name="production-start",
                    session="production",
                    env=self._table.production.env,
                    longest_s=0.0,
                )
        self._wait_healthy(self._table.production, "production-start", self._production_unit)

    def end_production(self) -> None:
        """Production serves always: nothing."""

    def _put_files_back(self) -> None:
        """Write every captured file whose bytes are others now."""
        try:
            record = json.loads((self._context.folder / "rollback.json").read_text("utf-8"))
            captured = record["configuration"]["files"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        for host in self._hosts:
            for path, kept in captured.get(host.name, {}).items():
                data = host.read(path)
                if kept is None:
                    if data is not None:
                        host.remove(path, fence=self._fence)
                    continue
                wanted = base64.b64decode(kept["base64"])
                if hashlib.sha256(wanted).hexdigest() != kept["sha256"]:
                    raise StartFailed(f"{host.name}:{path}: the capture's sha256 does not fit it")
                if data != wanted:
                    host.write(path, wanted, fence=self._fence)

    # -- arms --------------------------------------------------------------------------------------

    def start_arm(self, start: str, arm: Arm) -> Started:
        """Start the arm on every host, prove the clock cap, and wait until its model answers."""
        name = f"{start}-start"
        said = ""
        taken = self._head.port(self._table.experiment.port)
        if taken is not Probe.DOWN:
            raise StartFailed(
                f"{name}: port {self._table.experiment.port} of {self._head.name} is "
                f"{taken.value}: somebody else uses it"
            )
        try:
            for host in self._hosts:
                said += self._start_on(
                    host,
                    "experiment",
                    self._arm_argv(host, arm, start),
                    unit=self._unit(start),
                    name=name,
                    session=start,
                    env={**self._table.experiment.env, **arm.env},
                    longest_s=self._longest_s(),
                )
            cap = self._clock_cap(name, said)
            self._wait_healthy(self._table.experiment, name, self._unit(start))
            return Started(self._endpoint(self._table.experiment), cap)
        except (CommandFailed, TransportError) as error:
            self.stop_arm(start)
            raise StartFailed(str(error)) from error
        except BaseException:
            self.stop_arm(start)
            raise

    def check_arm(self, start: str) -> str | None:
        """None while the start's scope holds a process on every host that has a command.

        Servers that a stop script ends may live elsewhere: theirs must be healthy.
        """
        if self._scripts["experiment-stop"]:
            healthy, said = self._healthy(self._table.experiment)
            return None if healthy else f"the server of {start} is not healthy ({said})"
        for host in self._hosts:
            if not self._table.experiment.command.get(host.name):
                continue
            if not any(name.what == start for name in self._scopes(host)):
                return f"the server of {start} has ended on {host.name}; {self._tail(host, start)}"
        return None

    def stop_arm(self, start: str) -> None:
        """End the start's scopes on every host."""
        self._everywhere(lambda host: self._end(host, start, f"{start}-stop"))

    def stop_all(self) -> None:
        """End every scope of this window, of whatever epoch, on every host."""
        self._everywhere(lambda host: self._end(host, None, "stop-all"))

    def _end(self, host: Host, start: str | None, name: str) -> None:
        self._graceful(host, "experiment", name)
        names = [scope for scope in self._scopes(host) if start in (None, scope.what)]
        end_scopes(
            host,
            [scope.unit for scope in names],
            name=name,
            patience_s=self._limit("stop_s", 60.0),
            fence=self._fence,
        )

    # -- proofs ------------------------------------------------------------------------------------

    def live_experiments(self) -> list[str]:
        """No scope of a start may hold a process, no container of ours may run, and the
        experiment's port must be closed.
        """
        problems: list[str] = []
        for host in self._hosts:
            try:
                problems += [
                    f"{host.name}: {scope.unit} lives"
                    for scope in self._scopes(host)
                    if scope.what != _HOLD_SCOPE
                ]
                problems += labelled_containers(host, self._table.label)
                state = host.port(self._table.experiment.port)
            except (Dsv41Error, OSError) as error:
                problems.append(f"{host.name}: cannot tell: {one_line(str(error))}")
                continue
            if state is not Probe.DOWN:
                problems.append(
                    f"{host.name}: the experiment port {self._table.experiment.port} is "
                    f"{state.value}, not closed"
                )
        return problems

    def quiet_problems(self) -> list[str]:
        """`spark_quiet` on every host: GPU, containers, both ports, scopes of any window."""
        ports = (self._table.production.port, self._table.experiment.port)
        problems: list[str] = []
        for host in self._hosts:
            try:
                held = [s.unit for s in self._scopes(host) if s.what == _HOLD_SCOPE]
            except (Dsv41Error, OSError) as error:
                problems.append(f"{host.name}: cannot tell: {one_line(str(error))}")
                continue
            problems += spark_quiet(host, ports=ports, label=self._table.label, scopes=held)
        return problems

    def leftovers(self) -> list[str]:
        """Scopes of this window that hold a process, its placeholder's included."""
        return [f"{host.name}: {s.unit}" for host in self._hosts for s in self._scopes(host)]

    # -- inside: scopes ----------------------------------------------------------------------------

    @property
    def _production_unit(self) -> str:
        return f"{self._table.production.scope}.scope"

    def _unit(self, what: str) -> str:
        return ScopeName(self._context.window_id, self._context.epoch, what).unit

    def _scopes(self, host: Host) -> list[ScopeName]:
        """The live scopes of this window on a host, of whatever epoch."""
        names = (ScopeName.parse(unit) for unit in live_scopes(host))
        return [name for name in names if name and name.tag == self._context.window_id]

    def _everywhere(self, act: Callable[[Host], None]) -> None:
        """Do it on every host, whatever happens on one; then say what failed first."""
        failed: list[Dsv41Error | OSError] = []
        for host in self._hosts:
            try:
                act(host)
            except (Dsv41Error, OSError) as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _longest_s(self) -> float:
        """How long a scope of this window may live: the window's time and that of its close."""
        limits = self._context.limits
        close = 2 * (self._limit("stop_s", 60.0) + self._limit("start_s", 600.0))
        return limits.get("window_s", 6 * 3600.0) + close

    # -- inside: starting and waiting --------------------------------------------------------------

    def _start_on(
        self,
        host: Host,
        kind: str,
        command: list[str],
        *,
        unit: str,
        name: str,
        session: str,
        env: Mapping[str, str],
        longest_s: float,
    ) -> str:
        """Run the start script on a host, in a scope; what it printed."""
        if not command:
            return ""
        script = self._scripts[f"{kind}-start"] or START
        words = [host.name, str(self._table.clock), session, self._log(session), *command]
        done = run_scoped(
            host,
            unit,
            ["sh", "-s", "--", *words],
            name=name,
            deadline_s=min(_START_DEADLINE_S, self._limit("start_s", 600.0)),
            longest_s=longest_s,
            stdin=script,
            env=env,
            fence=self._fence,
        )
        return done.stdout

    def _graceful(self, host: Host, kind: str, name: str) -> None:
        """Run the table's stop script where there is one; the scope is ended after it anyhow."""
        script = self._scripts[f"{kind}-stop"]
        if script:
            host.run(
                ["sh", "-s", "--", host.name],
                name=name,
                deadline_s=self._limit("stop_s", 60.0),
                stdin=script,
                check=False,
                fence=self._fence,
            )

    def _read_script(self, written: str, where: str) -> str:
        if not written:
            return ""
        path = self._context.base / written
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpecError(f"{where}: {path}: {error}") from error

    def _clock_cap(self, name: str, said: str) -> ClockCap:
        """The cap that the start's own output proves: every host's line, and one value.

        Raises:
            StartFailed: a line is missing, doubled, of another host, or of another value.
        """
        wanted = [h.name for h in self._hosts if self._table.experiment.command.get(h.name)]
        found = [(m[1], int(m[2])) for line in said.splitlines() if (m := _CAP.fullmatch(line))]
        if self._table.clock == 0 and not found:
            return ClockCap(1, "none")
        caps = {mhz for _, mhz in found}
        if sorted(host for host, _ in found) != sorted(wanted) or len(caps) != 1:
            shown = ", ".join(f"{host} {mhz} MHz" for host, mhz in found) or "no line"
            raise StartFailed(
                f"{name}: the clock cap is not proved: {shown}; every host must print "
                f"`<host> clock cap N MHz` once, all the same N"
            )
        return ClockCap(caps.pop(), "start-log")

    def _wait_healthy(self, server: _Server, name: str, unit: str) -> None:
        limit = self._limit("start_s", 600.0)
        deadline = boottime() + limit
        # What a stop script ends may live elsewhere, and its scope be empty.
        watched = [h for h in self._hosts if server.command.get(h.name) and not server.stop_script]
        while True:
            healthy, said = self._healthy(server)
            if healthy:
                return
            for host in watched:
                if unit not in live_scopes(host):
                    session = ScopeName.parse(unit)
                    what = session.what if session else "production"
                    raise StartFailed(
                        f"{name}: the server on {host.name} ended at once; {self._tail(host, what)}"
                    )
            if boottime() > deadline:
                raise StartFailed(f"{name}: not healthy within {limit:g} s ({said})")
            self._context.pause(_POLL_S)

    def _healthy(self, server: _Server) -> tuple[bool, str]:
        """Whether the server says so: by the table's health command, or over HTTP."""
        if not server.health:
            seen = self._engine.health(self._url(server), timeout=5.0)
            return seen == "up", seen
        argv = fill(server.health, {"port": str(server.port)}, "target.health")
        try:
            done = self._head.run(argv, name="health", deadline_s=10.0, check=False)
        except (Dsv41Error, OSError) as error:
            return False, one_line(str(error))
        return done.returncode == 0, f"exit {done.returncode}"

    def _closed(self, server: _Server, name: str) -> None:
        """Wait until the head's port refuses a connection.

        Raises:
            TransportError: it still does not; something lives outside of the scope.
        """
        deadline = boottime() + self._limit("stop_s", 60.0)
        while (state := self._head.port(server.port)) is not Probe.DOWN:
            if boottime() > deadline:
                raise TransportError(
                    f"{name}: port {server.port} of {self._head.name} is still {state.value}: what "
                    f"listens there is not in {self._production_unit}; give target.production "
                    "a stop_script"
                )
            self._context.pause(_POLL_S)

    def _tail(self, host: Host, session: str) -> str:
        """The last line of a server's log, for the message of a failed start."""
        argv = ["tail", "-n", "1", self._log(session)]
        try:
            done = host.run(argv, name="last-words", deadline_s=10.0, check=False)
        except (Dsv41Error, OSError):
            return "its log cannot be read"
        line = one_line(done.stdout)
        return f"its last line: {line}" if line else "it wrote nothing"

    def _log(self, session: str) -> str:
        tag = "" if session == "production" else f"{self._context.window_id}-"
        return f"{self._table.logs}/{tag}{session}.log"

    # -- inside: words -----------------------------------------------------------------------------

    def _limit(self, name: str, default: float) -> float:
        return self._context.limits.get(name, default)

    def _url(self, server: _Server) -> str:
        if self._table.world and server is self._table.production:
            # A test's own: the variable is refused over real hosts (WIN2, "Test-only overrides").
            override = os.environ.get("DSV41_CHAIN_PRODUCTION_URL")
            if override:
                return override
        return server.url or f"http://{self._addresses[self._head.name]}:{server.port}"

    def _endpoint(self, server: _Server) -> Endpoint:
        model = self._context.variables.get("model", self._table.model)
        url = self._url(server)
        if not model:
            models = self._engine.models(url)
            if not models:
                raise StartFailed(f"{url} serves no model")
            model = models[0]
        return Endpoint(url=url, engine=self._table.engine, model=model)

    def _production_argv(self, host: Host) -> list[str]:
        production = self._table.production
        return self._words(host, production, production.args, "", "target.production.command")

    def _arm_argv(self, host: Host, arm: Arm, start: str) -> list[str]:
        return self._words(host, self._table.experiment, arm.args, start, f"arms.{arm.name}")

    def _words(
        self, host: Host, server: _Server, args: Sequence[str], start: str, where: str
    ) -> list[str]:
        words: list[str] = []
        for word in server.command.get(host.name, ()):
            words += list(args) if word == "{args}" else [word]
        values = {
            **self._context.variables,
            "python": sys.executable,
            "host": host.name,
            "address": self._addresses[host.name],
            "head": self._addresses[self._head.name],
            "port": str(server.port),
            "model": self._context.variables.get("model", self._table.model),
        }
        if start:
            # Production is the same in every window, so only a start has a seed of its own.
            values["start"] = start
            values["seed"] = str((self._context.seed + zlib.crc32(start.encode())) % (1 << 31))
        return fill(words, values, where)
