"""Target `local`: production and arms are server processes on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import string
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ..durable import dump_json
from ..errors import CommandFailed, RefusedByWorld, SpecError, StartFailed
from ..hosts import Host, LocalHost, Placeholder, Probe, Process
from ..hosts.local import boottime
from ..measure import Endpoint
from ..text import one_line
from .base import Arm, ClockCap, HoldSite, ProbeResult, Started, TargetContext, known_engine
from .filling import fill, same_command
from .tables import Table, read_table

__all__ = ["LocalTarget", "local_target"]

_POLL_S = 0.05


class _Server(Table):
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    cwd: str = ""
    port: int = Field(default=0, ge=0, le=65535)


class _Production(_Server):
    serve: Literal["always", "window"] = "always"


class _Table(Table):
    kind: Literal["local"] = "local"
    engine: str = "vllm"
    model: str = ""
    hold: str = ""
    command: tuple[str, ...] = ()
    commit: str = Field(default="", pattern="^([0-9a-f]{40})?$", description="40 hex digits")
    production: _Production
    experiment: _Server = _Server()


def local_target(table: Mapping[str, Any], context: TargetContext) -> LocalTarget:
    """Build the target of `kind = "local"`.

    Raises:
        SpecError: a key is unknown, missing, or of the wrong type.
    """
    return LocalTarget(read_table(_Table, table), context)


class LocalTarget:
    """Servers on this machine, found by their scope (arms) or by their port (production)."""

    holds = True

    def __init__(self, table: _Table, context: TargetContext) -> None:
        self._table = table
        self._context = context
        self._host = LocalHost(context.log, context.pause)
        self._engine = known_engine(table.engine)
        self.ephemeral = table.production.serve == "window"
        # What one window has started, it ends: an ephemeral production cannot outlive it.
        self.chains = not self.ephemeral
        if not (table.production.command or table.command):
            raise SpecError("target.production.command: missing, and target.command is too")
        if not table.production.port and not self.ephemeral:
            raise SpecError(
                "target.production.port: missing; a port of 0 is chosen freely only with "
                'serve = "window"'
            )
        # A spelling mistake in a placeholder is found now, not when production is down.
        self._production_argv(check=True)

    def check(self, arms: Sequence[Arm]) -> None:
        """Every placeholder of every arm's command must be known."""
        for arm in arms:
            self._arm_argv(arm, arm.name, check=True)

    # -- what is chosen once --------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Choose the ports that the table leaves open."""
        table = self._table
        production = table.production.port or self._host.free_port()
        experiment = table.experiment.port or self._host.free_port()
        while experiment == production and not table.experiment.port:
            experiment = self._host.free_port()
        return {"production_port": production, "experiment_port": experiment}

    def describe(self) -> dict[str, Any]:
        """Engine, command and environment names of production, with its placeholders in place."""
        production = self._table.production
        return {
            "kind": "local",
            "engine": self._table.engine,
            "model": self._table.model,
            "command": [*(production.command or self._table.command), *production.args],
            "env": sorted(production.env),
            "port": production.port,
        }

    def hosts(self) -> tuple[Host, ...]:
        """This machine."""
        return (self._host,)

    def identities(self) -> dict[str, str]:
        """This machine's boot."""
        return {self._host.name: self._host.identity()}

    def hold_sites(self) -> tuple[HoldSite, ...]:
        """The HOLD file: `target.hold`, or one that every campaign of this machine sees.

        Only an ephemeral production, which is the window's own, has it in the campaign's folder.
        """
        if self._table.hold:
            path = self._context.base / self._table.hold
        elif self.ephemeral:
            path = self._context.campaign / "HOLD"
        else:
            path = Path(f"/var/tmp/dsv41-HOLD-{self._production_port}")  # noqa: S108 - never followed
        return (self._context.hold_site(self._host, str(path)),)

    def hold_opened(self) -> None:
        """The file says enough on one machine."""

    def placeholders_up(self, owner: str) -> None:
        """None is needed: a placeholder keeps the queues of shared hosts away, not local users."""

    def placeholders(self, owner: str) -> dict[str, Placeholder]:  # noqa: ARG002
        """None is needed on one machine."""
        return {}

    def placeholders_down(self, owner: str) -> list[str]:  # noqa: ARG002
        """None was started."""
        return []

    def commit(self) -> str:
        """`target.commit`, or the sha1 of the production definition (it has no repository)."""
        if self._table.commit:
            return self._table.commit
        digest = hashlib.sha1(dump_json(self.describe()).encode(), usedforsecurity=False)
        return digest.hexdigest()

    # -- production ------------------------------------------------------------------------------

    def production(self) -> Endpoint:
        """Where production answers; the model's name is read from the server if not given."""
        return self._endpoint(self._production_port)

    def probe(self) -> ProbeResult:
        """UP when the engine says healthy, DOWN only when nothing listens."""
        if not self._production_port:
            return ProbeResult(Probe.DOWN, "no port was chosen yet: nothing is served by default")
        url = f"http://127.0.0.1:{self._production_port}"
        health = self._engine.health(url, timeout=5.0)
        if health == "up":
            return ProbeResult(Probe.UP, f"{url} is healthy", url)
        port = self._host.port(self._production_port)
        if port is Probe.DOWN:
            return ProbeResult(Probe.DOWN, f"nothing listens on {url}", url)
        return ProbeResult(Probe.UNKNOWN, f"{url} listens and is not healthy ({health})", url)

    def capture(self) -> dict[str, Any]:
        """The running server's command line, which must be the one that would be started again."""
        expected = self._production_argv()
        running = self._host.listeners(self._production_port)
        if not running:
            raise RefusedByWorld(
                f"no process that this user may see listens on production's port "
                f"{self._production_port}: it has died, or could not be started again"
            )
        for process in running:
            if not same_command(process.argv, expected):
                # The template's command has a seed, which suits a window's own production only.
                seeded = any("{seed}" in word for word in self._production_words())
                raise RefusedByWorld(
                    f"production runs {one_line(str(process))}, but the target would start "
                    f"{one_line(' '.join(expected))}; correct target.production first"
                    + (" ({seed} is another in every window)" if seeded else "")
                )
        return {
            "argv": list(running[0].argv),
            "pid": running[0].pid,
            "definition": self.describe(),
            "port": self._production_port,
        }

    def stop_production(self) -> None:
        """End the processes that listen on production's port, and their scope."""
        self._host.end(
            self._production_processes, name="production-stop", grace_s=self._limit("stop_s", 60.0)
        )

    def start_production(self) -> None:
        """Start production unless it is healthy, and wait for it."""
        if self.probe().state is Probe.UP:
            return
        self._launch(
            self._production_argv(),
            name="production-start",
            scope=self._production_scope,
            output=self._context.folder / "log" / "production.log"
            if self.ephemeral
            else self._context.campaign / "production.log",
            env=self._table.production.env,
            cwd=self._table.production.cwd,
            port=self._production_port,
        )

    def end_production(self) -> None:
        """End the production that the window itself started; nothing if it always serves."""
        if self.ephemeral:
            self._host.end(
                lambda: self._host.scope_processes(self._production_scope),
                name="production-end",
                grace_s=self._limit("stop_s", 60.0),
            )

    # -- arms --------------------------------------------------------------------------------------

    def start_arm(self, start: str, arm: Arm) -> Started:
        """Start the arm's server in a scope of its own and wait until its model answers."""
        self._launch(
            self._arm_argv(arm, start),
            name=f"{start}-start",
            scope=f"{self._scope}.{start}",
            output=self._context.folder / "log" / f"{start}.log",
            env={**self._table.experiment.env, **arm.env},
            cwd=self._table.experiment.cwd,
            port=self._experiment_port,
        )
        return Started(self._endpoint(self._experiment_port), ClockCap(1, "none"))

    def check_arm(self, start: str) -> str | None:
        """None while a process of the start lives."""
        if self._host.scope_processes(f"{self._scope}.{start}"):
            return None
        return f"the server of {start} has ended by itself; {self._last_words(start)}"

    def stop_arm(self, start: str) -> None:
        """End the start's scope."""
        self._host.end(
            lambda: self._host.scope_processes(f"{self._scope}.{start}"),
            name=f"{start}-stop",
            grace_s=self._limit("stop_s", 60.0),
        )

    def stop_all(self) -> None:
        """End every scope of this window's starts."""
        self._host.end(
            lambda: self._host.scope_processes(self._scope),
            name="stop-all",
            grace_s=self._limit("stop_s", 60.0),
        )

    def live_experiments(self) -> list[str]:
        """No process of a start may live, and the experiment port must refuse a connection."""
        problems = [f"{process} of {self._scope} lives" for process in self._experiment_processes()]
        state = self._host.port(self._experiment_port)
        if state is not Probe.DOWN:
            problems.append(
                f"the experiment port {self._experiment_port} is {state.value}, not closed"
            )
        return problems

    def quiet_problems(self) -> list[str]:
        """As `live_experiments`, and production's port must refuse a connection too."""
        problems = self.live_experiments()
        state = self._host.port(self._production_port)
        if state is not Probe.DOWN:
            problems.append(
                f"the production port {self._production_port} is {state.value}, not closed"
            )
        return problems

    def leftovers(self) -> list[str]:
        """What lives of this window: its starts, and an ephemeral production."""
        found = self._experiment_processes()
        if self.ephemeral:
            found += self._host.scope_processes(self._production_scope)
        return [str(process) for process in found]

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        # A window's id is unique in its campaign alone; two campaigns may share a second.
        campaign = os.fsencode(self._context.campaign)
        return hashlib.sha1(campaign, usedforsecurity=False).hexdigest()[:8]

    @property
    def _scope(self) -> str:
        return f"dsv41w-{self._where}-{self._context.window_id}"

    @property
    def _production_scope(self) -> str:
        if self.ephemeral:
            return f"dsv41p-{self._where}-{self._context.window_id}"
        return f"dsv41-production-{self._production_port}"

    @property
    def _production_port(self) -> int:
        return int(self._context.state.get("production_port", self._table.production.port))

    @property
    def _experiment_port(self) -> int:
        return int(self._context.state.get("experiment_port", self._table.experiment.port))

    def _limit(self, name: str, default: float) -> float:
        return float(self._context.limits.get(name, default))

    def _experiment_processes(self) -> list[Process]:
        return self._host.scope_processes(self._scope)

    def _production_processes(self) -> list[Process]:
        found = {p.pid: p for p in self._host.scope_processes(self._production_scope)}
        found.update({p.pid: p for p in self._host.listeners(self._production_port)})
        return list(found.values())

    def _endpoint(self, port: int) -> Endpoint:
        url = f"http://127.0.0.1:{port}"
        model = self._table.model
        if not model:
            try:
                models = self._engine.models(url)
            except OSError:
                models = []
            model = models[0] if models else ""
        return Endpoint(url=url, engine=self._table.engine, model=model)

    def _launch(
        self,
        argv: Sequence[str],
        *,
        name: str,
        scope: str,
        output: Path,
        env: Mapping[str, str],
        cwd: str,
        port: int,
    ) -> None:
        """Start a server and wait until it is healthy; ended again when it is not in time."""
        taken = self._host.port(port)
        if taken is not Probe.DOWN:
            raise StartFailed(f"{name}: port {port} is {taken.value}: somebody else uses it")
        limit = self._limit("start_s", 600.0)
        deadline = boottime() + limit
        mark = output.stat().st_size if output.exists() else 0
        try:
            process = self._host.spawn(
                argv,
                name=name,
                scope=scope,
                output=output,
                env=env,
                cwd=(self._context.base / cwd) if cwd else None,
            )
        except CommandFailed as error:
            raise StartFailed(str(error)) from error
        url = f"http://127.0.0.1:{port}"
        try:
            while self._engine.health(url, timeout=2.0) != "up":
                if self._host.process(process.pid) is None and not self._host.scope_processes(
                    scope
                ):
                    raise StartFailed(f"{name}: the server ended at once; {_tail(output, mark)}")
                if boottime() > deadline:
                    raise StartFailed(
                        f"{name}: not healthy within {limit:g} s; {_tail(output, mark)}"
                    )
                self._context.pause(_POLL_S)
        except BaseException:
            self._host.end(
                lambda: self._host.scope_processes(scope),
                name=f"{name}-undo",
                grace_s=self._limit("stop_s", 60.0),
            )
            raise

    def _last_words(self, start: str) -> str:
        return _tail(self._context.folder / "log" / f"{start}.log", 0)

    def _production_words(self) -> list[str]:
        production = self._table.production
        return [*(production.command or self._table.command), *production.args]

    def _production_argv(self, *, check: bool = False) -> list[str]:
        words = self._production_words()
        return self._fill(words, self._production_port, "target.production", "", check)

    def _arm_argv(self, arm: Arm, start: str, *, check: bool = False) -> list[str]:
        experiment = self._table.experiment
        words = [*(experiment.command or self._table.command), *experiment.args, *arm.args]
        if not words:
            raise SpecError("target.command: missing; it starts the arms' server")
        return self._fill(words, self._experiment_port, f"arms.{arm.name}", start, check)

    def _fill(
        self, words: Sequence[str], port: int, where: str, start: str, check: bool
    ) -> list[str]:
        # Every start has a seed of its own: equal noise in both arms would flatter the pairs.
        seed = (self._context.seed + zlib.crc32(start.encode())) % (1 << 31)
        values = {
            **self._context.variables,
            "python": sys.executable,
            "port": str(port),
            "seed": str(seed),
            "start": start or "production",
            "model": self._context.variables.get("model", self._table.model),
        }

        filled = fill(words, values, where)
        if check:
            return filled
        program = filled[0]
        if "/" in program:
            # As every relative path of the target's file, it starts in that file's folder.
            return [str(self._context.base / program), *filled[1:]]
        return [shutil.which(program) or program, *filled[1:]]


def _tail(path: Path, mark: int) -> str:
    """The last line that a server wrote after `mark`, for the message of a failed start."""
    try:
        with path.open("rb") as file:
            file.seek(max(mark, path.stat().st_size - 4000))
            lines = file.read().decode("utf-8", "replace").strip(string.whitespace).splitlines()
    except OSError:
        lines = []
    return f"its last line: {one_line(lines[-1])}" if lines else "it wrote nothing"
