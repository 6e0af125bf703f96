"""Two simulated hosts as a target, and windows, gates and recoveries run over them in one process.

The lifecycle's own code runs; simulated are the machines (`pytest_dsv41.hosts.fake`), the model's
answers, and the keeper's process, whose work the tests do by calling what it calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41 import durable
from pytest_dsv41.durable import append_json_line
from pytest_dsv41.errors import (
    CommandFailed,
    Dsv41Error,
    MeasurementFailed,
    RefusedByWorld,
    StartFailed,
    TransportError,
)
from pytest_dsv41.hosts import Host, Placeholder, Probe
from pytest_dsv41.hosts.fake import FakeHost, FakeWorld
from pytest_dsv41.lifecycle import finish, production, session
from pytest_dsv41.lifecycle.chain import ChainUse
from pytest_dsv41.lifecycle.closing import CloseResult
from pytest_dsv41.lifecycle.finish import refuse_window
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.record import TargetRecord
from pytest_dsv41.lifecycle.session import WindowRun
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.measure.greedy import Answer
from pytest_dsv41.targets import Arm, ClockCap, HoldSite, ProbeResult, Started, TargetContext
from pytest_dsv41.window.plan import Plan
from pytest_dsv41.window.summary import Summary

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from window_values import plan_of, values_of, window_text

HOSTS = ("alpha", "beta")
PRODUCTION, EXPERIMENT = 8000, 8001
TITLE = "vllm serve [DSV41-OFFLOAD hold] owner="
FIRST = ChainUse(requested=True)
LAST = ChainUse(requested=True, last=True)


def pair_target(table: Mapping[str, Any], context: TargetContext) -> PairTarget:
    """Build the target; `table["world"]` is the folder of the simulated hosts."""
    return PairTarget(Path(table["world"]), context)


class PairTarget:
    """Production and each arm are one server a host; a placeholder is a titled tmux pane."""

    holds = True
    ephemeral = False
    chains = True

    def __init__(self, world: Path, context: TargetContext) -> None:
        self._context = context
        self.world = FakeWorld(world)
        self._hosts = tuple(FakeHost(self.world, name, context.log) for name in HOSTS)

    def check(self, arms: Sequence[Arm]) -> None: ...

    def prepare(self) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"kind": "pair"}

    def commit(self) -> str:
        return "c" * 40

    def hosts(self) -> tuple[Host, ...]:
        return self._hosts

    def identities(self) -> dict[str, str]:
        return {host.name: host.identity() for host in self._hosts}

    def hold_sites(self) -> tuple[HoldSite, ...]:
        return tuple(self._context.hold_site(host, "/hold/HOLD") for host in self._hosts)

    # -- production --------------------------------------------------------------------------------

    def production(self) -> Endpoint:
        return Endpoint(url=f"http://pair/{self.world.folder}", engine="vllm", model="stub")

    def probe(self) -> ProbeResult:
        return self._listening(PRODUCTION)

    def capture(self) -> dict[str, Any]:
        return {"command": "vllm serve", "definition": self.describe()}

    def stop_production(self) -> None:
        self._end("production")

    def start_production(self) -> None:
        self._serve("production", PRODUCTION)

    def end_production(self) -> None: ...

    # -- arms --------------------------------------------------------------------------------------

    def start_arm(self, start: str, arm: Arm) -> Started:
        try:
            self._serve(f"arm-{start}", EXPERIMENT)
        except Dsv41Error as error:
            raise StartFailed(str(error)) from error
        return Started(self.production(), ClockCap(2150, "start-log"))

    def check_arm(self, start: str) -> str | None:
        return None

    def stop_arm(self, start: str) -> None:
        self._end(f"arm-{start}")

    def stop_all(self) -> None:
        self._end("arm-")

    def live_experiments(self) -> list[str]:
        return self._open(EXPERIMENT)

    def quiet_problems(self) -> list[str]:
        return self._open(EXPERIMENT) + self._open(PRODUCTION)

    def leftovers(self) -> list[str]:
        # An unreachable host proves nothing; the close says what it could not end.
        with contextlib.suppress(TransportError):
            return [f"port {EXPERIMENT} on {host.name}" for host in self._hosts
                    if host.port(EXPERIMENT) is Probe.UP]  # fmt: skip
        return []

    def hold_opened(self) -> None: ...

    # -- placeholders ------------------------------------------------------------------------------

    def placeholders_up(self, owner: str) -> None:
        for host in self._hosts:
            seen = _owners(host)
            if set(seen) - {owner}:
                raise RefusedByWorld(f"{host.name}: a placeholder of {seen[0] or 'nobody'}")
            if not seen:
                host.run(
                    ["/usr/bin/tmux", "-L", "default", "new-session", "-d", "-s", "dsv41-hold",
                     "--", "bash", "-c", 'exec -a "$1" cat', "hold", TITLE + owner],
                    name="placeholder-up", deadline_s=10, fence=self._fence(),
                )  # fmt: skip
        if any(seen is not Placeholder.UP for seen in self.placeholders(owner).values()):
            raise TransportError("a placeholder did not stay up")

    def placeholders(self, owner: str) -> dict[str, Placeholder]:
        found = {}
        for host in self._hosts:
            try:
                seen = _owners(host)
            except Dsv41Error:
                found[host.name] = Placeholder.UNKNOWN
                continue
            foreign = bool(set(seen) - {owner})
            up = Placeholder.UP if seen else Placeholder.DOWN
            found[host.name] = Placeholder.FOREIGN if foreign else up
        return found

    def placeholders_down(self, owner: str) -> list[str]:
        left = []
        for host in self._hosts:
            try:
                seen = _owners(host)
                if set(seen) - {owner}:
                    left.append(f"{host.name}: a placeholder of {seen[0] or 'nobody'}")
                elif seen:
                    _tmux(host, "default", "kill-session", "-t", "=dsv41-hold",
                          name="placeholder-down", fence=self._fence())  # fmt: skip
            except Dsv41Error as error:
                left.append(f"{host.name}: {error}")
        return left

    # -- inside ------------------------------------------------------------------------------------

    def _fence(self) -> Any:
        return self.hold_sites()[0].fence

    def _listening(self, port: int) -> ProbeResult:
        try:
            seen = {host.port(port) for host in self._hosts}
        except TransportError as error:
            return ProbeResult(Probe.UNKNOWN, str(error))
        if seen == {Probe.UP}:
            return ProbeResult(Probe.UP, "both serve")
        if seen == {Probe.DOWN}:
            return ProbeResult(Probe.DOWN, "neither serves")
        # Half a production answers nobody, and is started again whole.
        return ProbeResult(Probe.DOWN, "one of two serves")

    def _open(self, port: int) -> list[str]:
        found = []
        for host in self._hosts:
            try:
                state = host.port(port)
            except TransportError as error:
                found.append(str(error))
                continue
            if state is not Probe.DOWN:
                found.append(f"port {port} on {host.name} is {state.value}")
        return found

    def _serve(self, session: str, port: int) -> None:
        for host in self._hosts:
            if host.port(port) is Probe.UP:
                continue
            host.run(
                ["/usr/bin/tmux", "-L", "servers", "new-session", "-d", "-s", session,
                 "--", "vllm", "serve", "--port", str(port)],
                name=f"start-{session}", deadline_s=60, fence=self._fence(),
            )  # fmt: skip

    def _end(self, prefix: str) -> None:
        for host in self._hosts:
            try:
                listed = _tmux(host, "servers", "list-sessions", name="list")
            except CommandFailed:
                continue
            for name in listed.split():
                if name.startswith(prefix):
                    _tmux(host, "servers", "kill-session", "-t", f"={name}",
                          name=f"stop-{name}", fence=self._fence())  # fmt: skip


def _tmux(host: Host, socket: str, *words: str, name: str, fence: Any = None) -> str:
    argv = ["/usr/bin/tmux", "-L", socket, *words]
    return host.run(argv, name=name, deadline_s=10, fence=fence).stdout


def _owners(host: Host) -> list[str]:
    """The owners of the placeholders on a host; "" for one without an owner."""
    return [
        process.argv[0].partition(" owner=")[2]
        for process in host.processes()
        if process.argv and process.argv[0].startswith(TITLE[: TITLE.index(" owner=")])
    ]


SMALL = window_text(
    schedule="K/I",
    repeats="1",
    more='kind = "report"',
    cells='[[cells]]\nname = "decode-b1"\nprimary = "ms_per_round"\n',
)


class Killed(BaseException):
    """Stands for SIGKILL of the coordinator."""


class FakeKeeper:
    """A keeper whose process is not there; what it would do the test does."""

    pid = 0
    started = 0.0

    def alive(self) -> bool:
        return True

    def dismiss(self) -> None: ...


@dataclasses.dataclass
class Pair:
    """A campaign over two simulated hosts that serve."""

    root: Path
    world: FakeWorld
    number: int = 0
    on_step: Callable[[str, str], None] | None = None
    current: WindowRun | None = None
    """The window that was driven last, in whatever state it was left."""
    text: str = ""
    """A window file of the test's own."""
    small: bool = False
    """One start an arm and one repeat: as few acts as a window can have."""

    @property
    def campaign(self) -> Path:
        return self.root / "campaign"

    def target(self) -> PairTarget:
        """The machines as the newest holder of the lease has them."""
        epoch = Lease(self.campaign).newest()
        record = self.record("look", self.root)
        target, _ = record.build(self.root, epoch=epoch)
        assert isinstance(target, PairTarget)
        return target

    def record(self, window: str, base: Path) -> TargetRecord:
        limits = dict.fromkeys(("item_s", "start_s", "stop_s", "quiet_s"), 5.0)
        limits.update(watch_s=0.0, window_s=600.0, quiet_s=0.0)
        return TargetRecord(
            window=window,
            factory="pair:pair_target",
            table={"kind": "pair", "world": str(self.world.folder)},
            base=str(base),
            campaign=str(self.campaign),
            seed=1,
            limits=limits,
            variables={},
            state={},
            commit="c" * 40,
            date="20261101",
        )

    def window(self, chain: ChainUse = session.SINGLE) -> WindowRun:
        """A window that is not open yet."""
        self.number += 1
        folder = self.root / f"w{self.number}"
        folder.mkdir()
        text = self.text or (SMALL if self.small else "")
        plan = dataclasses.replace(plan_of(folder, text), window_id=f"L-w-W-{self.number:04d}")
        return WindowRun(
            plan,
            self.record(plan.window_id, folder),
            folder,
            pair_target,
            chain=chain,
            on_step=self.on_step,
        )

    def run(
        self, chain: ChainUse = session.SINGLE, *, items: int | None = None, stop: str = ""
    ) -> Summary:
        """A whole window: open, measure, close, as the session does it."""
        run = self.window(chain)
        return self.drive(run, items=items, stop=stop)

    def drive(self, run: WindowRun, *, items: int | None = None, stop: str = "") -> Summary:
        """Drive a window to its end; with `items` it is stopped after so many."""
        try:
            run.open()
        except Dsv41Error as error:
            if not run.opened:
                aborted = run.abort_chain()
                closed = aborted.closed if aborted else None
                if run.passed_over:
                    closed = CloseResult.of_chain()
                return refuse_window(run.folder, run.plan, run._record, str(error), None, closed)
            run.request_stop(str(error))
        else:
            try:
                measure(run, items)
            except Dsv41Error as error:
                run.request_stop(str(error))
        if stop:
            run.request_stop(stop)
        summary = run.close()
        assert summary is not None
        return summary

    # -- looking -----------------------------------------------------------------------------------

    def holds(self) -> dict[str, bytes | None]:
        """The HOLD's bytes on each host."""
        return {name: self.world.machine(name).load("/hold/HOLD") for name in HOSTS}

    def serving(self) -> dict[str, bool]:
        """Whether production listens on each host."""
        return {name: self.world.machine(name).listening(PRODUCTION) for name in HOSTS}

    def owners(self) -> dict[str, list[str]]:
        """The placeholders' owners on each host."""
        return {
            name: [
                process.argv[0].partition(" owner=")[2]
                for process in self.world.machine(name).processes.values()
                if process.argv and process.argv[0].startswith("vllm serve [")
            ]
            for name in HOSTS
        }

    def nothing_is_left(self) -> None:
        """Production serves, and no trace of a window or a chain is there."""
        assert self.serving() == {"alpha": True, "beta": True}
        assert self.holds() == {"alpha": None, "beta": None}
        assert self.owners() == {"alpha": [], "beta": []}
        left = [p.name for p in self.campaign.iterdir()]
        for name in ("intent.json", "marker.json", "marker.json.abort", "marker.json.refused"):
            assert name not in left, left
        for name in HOSTS:
            assert not self.world.machine(name).listening(EXPERIMENT)


def measure(run: WindowRun, items: int | None) -> None:
    """Every item of the plan gets the values of a candidate that is faster."""
    values = {row["item"]: row for row in values_of(run.plan, {("c1", "ms_per_round"): 0.9})}
    for number, item in enumerate(run.plan.items):
        if items is not None and number >= items:
            run.request_stop("stopped by the test")
            return
        run.before_item(item)
        append_json_line(run.folder / "values.jsonl", values[item.id])


def answers(world: Path) -> bool:
    """Whether production answers: both hosts listen, and the link is there."""
    machines = [FakeWorld(world).machine(name) for name in HOSTS]
    return all(m.up and m.linked and m.listening(PRODUCTION) for m in machines)


@contextlib.contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the model's answers come from the world, keepers be imagined, and syncs be quick."""

    def ask(
        endpoint: Endpoint, prompts: Sequence[str], *, max_tokens: int, deadline_s: float
    ) -> list[Answer]:  # fmt: skip
        if len(prompts) > 1 and not answers(Path(endpoint.url.removeprefix("http://pair/"))):
            raise MeasurementFailed("refused", f"nobody answers within {deadline_s:g} s")
        return [Answer(prompt, f"answer to {prompt}", "length", max_tokens) for prompt in prompts]

    monkeypatch.setattr(production, "greedy_answers", ask)
    monkeypatch.setattr(session, "greedy_answers", ask)
    monkeypatch.setattr(session, "spawn_keeper", lambda *_, **__: FakeKeeper())
    # Order is what these tests are about; the disk's own speed is not.
    monkeypatch.setattr(finish, "_software", lambda: {"python": "3"})
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    take = Lease.acquire

    def at_once(self: Lease, owner: str, seconds: float, *, wait_s: float = 0.0) -> None:
        # Nobody here lets a lease go while another waits for it.
        take(self, owner, seconds, wait_s=min(wait_s, 0.0))

    monkeypatch.setattr(Lease, "acquire", at_once)
    assert durable.os is os
    yield


def make_pair(root: Path, *, seed: int = 1) -> Pair:
    """Two hosts on which production serves."""
    world = FakeWorld.create(root / "world", HOSTS, seed=seed)
    pair = Pair(root, world)
    pair.campaign.mkdir()
    pair.target().start_production()
    return pair


def plan_arms(plan: Plan) -> tuple[str, ...]:
    """The names of the plan's arms."""
    return tuple(arm["name"] for arm in plan.spec["arms"])
