"""One generation request, from admission to the last byte, for every dialect."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

from pytest_dsv41.errors import UsageError
from pytest_dsv41.stub.engine import Ask, Job, Step
from pytest_dsv41.stub.faults import Faults
from pytest_dsv41.stub.http import BadRequest, Request, dumps, respond
from pytest_dsv41.stub.language import recalled
from pytest_dsv41.stub.loop import Connection, Gate, Gone, Task, Wait
from pytest_dsv41.stub.profile import Profile, make_profile
from pytest_dsv41.stub.shape import Regroup, Shaper
from pytest_dsv41.stub.spoil import spoil
from pytest_dsv41.stub.truth import Mark
from pytest_dsv41.stub.wire import Event, Stream

if TYPE_CHECKING:
    from pytest_dsv41.stub.server import Server

__all__ = ["Answer", "generate"]


class Answer(Protocol):
    """What a dialect says about one job."""

    ask: Ask
    shaper: Shaper
    done_mark: bool
    ping_seconds: int

    def begin(self, job: Job, request_id: str) -> None:
        """Take the job the engine made."""

    def role(self) -> Event | None:
        """Return the role chunk, for a fault that sends it early."""

    def events(self, step: Step) -> list[Event]:
        """Return the events of one step."""

    def needs_record(self, step: Step) -> bool:
        """Say whether the step's events are complete only when it is recorded."""

    def seal(self, events: list[Event]) -> list[Event]:
        """Complete the events of a recorded step."""

    def tail(self) -> list[Event]:
        """Return what follows the finish."""

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""


def generate(
    server: Server,
    connection: Connection,
    request: Request,
    answer: Answer,
    *,
    streamed: bool,
    joined: bool = False,
    content_type: str = "text/event-stream; charset=utf-8",
    whole_type: str = "application/json",
) -> Generator[Wait, None, None]:
    """Serve one request whose shape is `answer`. `joined`: one write a step."""
    run = _Run(server, connection, request, answer, streamed, joined)
    try:
        yield from run.all(content_type, whole_type)
    finally:
        server.engine.leave(run.job, "abort")
        run.over()


class _Run:
    """The state of one request being answered."""

    def __init__(
        self,
        server: Server,
        connection: Connection,
        request: Request,
        answer: Answer,
        streamed: bool,
        joined: bool,
    ) -> None:
        self.server = server
        self.connection = connection
        self.request = request
        self.answer = answer
        self.faults = faults = request.faults
        self.regroup = Regroup(faults)
        self.ask = _faulted(answer.ask, faults)
        index = min(1, faults.count("engine")) if "engine" in faults else 0
        if index:
            server.ledger.add_engine()
        self.job = server.engine.submit(
            self.ask,
            arrival=time.monotonic(),
            wall=server.wall(),
            profile=_paced(server, faults),
            engine_index=index,
            lag=faults.seconds("metrics-lag") if "metrics-lag" in faults else 0.0,
        )
        name = request.headers.get("x-request-id", "")
        answer.begin(self.job, name)
        mark = Mark(self.job.number, "arrived", 0, name)
        server.truth.sent(connection, mark, connection.arrived_ns, connection.read_ns, 0, 0)
        json_instead = "json-body" in faults
        self.stream: Stream | None = None
        if streamed and not json_instead:
            self.stream = Stream(connection, self.job.number, faults, joined=joined)
        self.count = 0
        self.foreign: list[Gate] = []

    def over(self) -> None:
        """The request has ended: let a foreign one that waited for it go on."""
        for gate in self.foreign:
            gate.open()

    def all(self, content_type: str, whole_type: str) -> Generator[Wait, None, None]:
        server, job, stream, faults = self.server, self.job, self.stream, self.faults
        engine = server.engine
        if stream is not None:
            stream.open(content_type, self.request.keep_alive)
            if "flood" in faults:
                yield from stream.flood(faults.parts("flood")[0], faults.count("flood", 1))
        yield job.gate
        assert job.scheduled is not None
        when = job.scheduled + job.prefill_seconds
        yield from self._early_role(when)
        at = [job.arrival + ms / 1000.0 for ms in faults.numbers("at")]
        while True:
            if self.count < len(at):
                when = at[self.count]
            step = engine.next_step(job)
            events = self._tell(step)
            early = not self.answer.needs_record(step)
            packets = stream.frame(events) if stream is not None and early else []
            yield from self._until(when)
            stamp = time.monotonic()
            if not early:
                engine.record(job, step, stamp)
                events = self.answer.seal(events)
                packets = stream.frame(events) if stream is not None else []
            try:
                later = stream.write_now(packets) if stream is not None else []
            finally:
                # The engine made the tokens, whatever became of the connection.
                if early:
                    engine.record(job, step, stamp)
            if self.answer.shaper.failed:
                engine.leave(job, "error")
            elif step.finish is not None:
                engine.leave(job, step.finish)
            if later and stream is not None:
                yield from stream.write_later(later)
            self.count += 1
            self._happenings()
            if step.finish is not None or self.answer.shaper.failed:
                break
            when += engine.round_seconds(job)
            if "stall" in faults and self.count == faults.count("stall", 1):
                when += faults.seconds("stall")
        if stream is not None:
            shaper = self.answer.shaper
            if shaper.failed:
                last = [Event("done", None)] if self.answer.done_mark else []
            else:
                last = shaper.tail(self.answer.tail())
            yield from self.write(last, last=True)
            stream.close()
            if "plain-body" in faults:
                raise Gone
        else:
            respond(self.connection, 200, self._whole(), whole_type)

    def _whole(self) -> bytes:
        body = self.answer.whole()
        if "logprobs" in self.faults:
            return spoil(body, self.faults.parts("logprobs")[0], self.server.last_whole)
        raw = dumps(body)
        self.server.last_whole = raw
        return raw

    def write(self, events: list[Event], *, last: bool = False) -> Generator[Wait, None, None]:
        """Write events that belong to no engine step."""
        assert self.stream is not None
        later = self.stream.write_now(self.stream.frame(events, last=last))
        yield from self.stream.write_later(later)

    def _tell(self, step: Step) -> list[Event]:
        answer = self.answer
        events: list[Event] = []
        for told in self.regroup.steps(step):
            events += answer.events(told)
        if self.stream is None:
            return []
        if step.finish is not None and answer.shaper.usage == "last-choice":
            answer.shaper.move_usage(events, answer.tail())
        return answer.shaper.step(events)

    def _early_role(self, first: float) -> Generator[Wait, None, None]:
        if self.stream is None or "role-early" not in self.faults:
            return
        role = self.answer.role()
        if role is None:
            return
        yield min(first, self.job.arrival + self.faults.seconds("role-early"))
        yield from self.write(self.answer.shaper.step([role]))

    def _until(self, when: float) -> Generator[Wait, None, None]:
        distance: float = self.answer.ping_seconds
        if "ping" in self.faults:
            distance = self.faults.seconds("ping")
        if self.stream is not None and distance > 0:
            while (next_ping := time.monotonic() + distance) < when:
                yield next_ping
                self.stream.ping()
        yield when

    def _happenings(self) -> None:
        """Play the faults that happen beside the stream after the event just told."""
        faults, server = self.faults, self.server
        if not faults:
            return
        if "wall-step" in faults and self.count == faults.count("wall-step", 1):
            server.step_wall(faults.number("wall-step"))
        if "metrics-restart" in faults and self.count == max(1, faults.count("metrics-restart")):
            server.restart_counters()
        if self.count == 1 and "preempt" in faults:
            server.ledger.preempted(self.job, faults.count("preempt"))
        if self.count == 1 and "foreign" in faults:
            Task(server.loop, server.foreign(faults.count("foreign")))
        if self.count == 1 and "foreign-running" in faults:
            gate = Gate()
            self.foreign.append(gate)
            Task(server.loop, server.foreign_until(gate, faults.seconds("foreign-running")))


def _paced(server: Server, faults: Faults) -> Profile | None:
    """Return the profile with the request's own pace; None without such a fault."""
    pace = faults.pace()
    if not pace:
        return None
    if "prefill_ms" in pace:
        pace["prefill_ms_per_token"] = 0
    if pace.get("draft_tokens") and not server.profile.draft_tokens:
        raise BadRequest("fault draft-tokens: this server was started without drafts")
    try:
        return make_profile(pace, base=server.profile)
    except UsageError as error:
        raise BadRequest(f"fault {error}") from None


def _faulted(ask: Ask, faults: Faults) -> Ask:
    if not faults:
        return ask
    if "finish-early" in faults:
        reason = faults.parts("finish-early")[1]
        ask = ask._replace(stop_at=faults.count("finish-early"), stop_at_reason=reason)
    if "recall" in faults:
        other = faults.parts("recall")[0] == "other"
        ask = ask._replace(script=recalled(ask.prompt, other=other) or None)
    if "no-salt" in faults:
        ask = ask._replace(salt="", use_cache=True)
    if "endless" in faults:
        ask = ask._replace(endless=True)
    if "count-cut-drafts" in faults:
        ask = ask._replace(count_cut=True)
    sizes = faults.numbers("step-tokens")
    if sizes:
        ask = ask._replace(step_tokens=tuple(max(1, int(size)) for size in sizes))
    return ask
