"""The simulated engine: admission, prefill, rounds, prefix cache, and the stamps of each request.

Times are absolute monotonic seconds. A round's end is the former round's end plus one round
time, never "now plus": k rounds of r ms take k·r ms. Counters do not live here: the engine tells
a `Ledger` what happened, and the dialect turns that into metrics.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pytest_dsv41.stub.draws import gauss, key_of, uniform
from pytest_dsv41.stub.language import EOS, Choice, Model, Sampling
from pytest_dsv41.stub.loop import Gate
from pytest_dsv41.stub.profile import Profile

__all__ = ["Ask", "Engine", "Job", "Ledger", "Step"]

_FASTEST_ROUND = 0.05


class Ask(NamedTuple):
    """What a request wants, whatever the dialect."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = 0
    salt: str = ""
    use_cache: bool = True
    want_top: bool = False
    natural_end: bool = False
    stop_at: int | None = None
    stop_at_reason: str = "length"
    step_tokens: tuple[int, ...] = ()
    endless: bool = False
    count_cut: bool = False
    script: tuple[int, ...] | None = None
    """The answer, where it is not the model's."""


class Step(NamedTuple):
    """One engine step of one request: its tokens, and what the drafter did in it."""

    choices: tuple[Choice, ...]
    first: bool
    drafted: int
    accepted: int
    finish: str | None


class Job:
    """One request in the engine. Stamps are monotonic seconds, None until they happened."""

    def __init__(
        self, number: int, ask: Ask, arrival: float, model: Model, profile: Profile
    ) -> None:
        self.number = number
        self.ask = ask
        self.model = model
        self.arrival = arrival
        self.arrival_wall = 0.0
        self.scheduled: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.gate = Gate()
        self.cached = 0
        self.prefill_seconds = 0.0
        self.pace = 1.0
        self.tokens: list[int] = []
        self.steps: list[tuple[int, int]] = []
        self.state = "waiting"
        self.finish: str | None = None
        self.stop_reason: int | str | None = None
        self.slot = 0
        self.round = 0
        self.draft_key = 0
        self.engine_index = 0
        self.lag = 0.0
        self.profile = profile

    @property
    def accepted(self) -> int:
        """Draft tokens accepted so far."""
        return sum(accepted for _, accepted in self.steps)

    @property
    def drafted(self) -> int:
        """Draft tokens proposed so far."""
        return sum(drafted for drafted, _ in self.steps)

    @property
    def rounds(self) -> int:
        """Engine steps after the first token so far."""
        return len(self.steps)


class Ledger(Protocol):
    """Who wants to know what happened, in the order it happened."""

    def scheduled(self, job: Job) -> None:
        """The job was admitted."""

    def stepped(self, job: Job, step: Step, stamp: float, before: float | None) -> None:
        """A step's tokens came out at `stamp`; the job's former step at `before`."""

    def preempted(self, job: Job, times: int) -> None:
        """The job lost its place and was computed anew so many times."""

    def finished(self, job: Job, reason: str) -> None:
        """The job left the engine."""


class Engine:
    """Admits jobs by (priority, arrival) up to `max_running`, and paces them."""

    def __init__(self, profile: Profile, ledger: Ledger) -> None:
        self.profile = profile
        self.ledger = ledger
        self.running: dict[int, Job] = {}
        self._waiting: list[tuple[int, int, Job]] = []
        self._blocks: dict[int, None] = {}
        self._count = 0
        self._served = 0

    # ---- admission -------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return sum(1 for _, _, job in self._waiting if job.state == "waiting")

    @property
    def kv_usage(self) -> float:
        """The part of the KV cache that running requests hold, 0 to 1."""
        held = sum(len(j.ask.prompt) + len(j.tokens) for j in self.running.values())
        return min(1.0, held / self.profile.kv_tokens)

    def submit(
        self,
        ask: Ask,
        *,
        arrival: float,
        wall: float,
        profile: Profile | None = None,
        engine_index: int = 0,
        lag: float = 0.0,
    ) -> Job:
        """Queue a request. Its gate opens when it is admitted.

        `profile` holds other settings for this request's own pace; it is counted on engine
        `engine_index`, `lag` seconds late.
        """
        self._count += 1
        profile, number = profile or self.profile, self._count
        seed = ask.seed if ask.seed is not None else key_of(profile.seed, number, 3)
        sampling = Sampling(ask.temperature, ask.top_p, ask.top_k, seed)
        model = Model(profile.model, ask.prompt, sampling, profile.perturb)
        job = Job(number, ask, arrival, model, profile)
        job.arrival_wall = wall
        job.engine_index = engine_index
        job.lag = lag
        job.pace = max(
            _FASTEST_ROUND,
            (1.0 + profile.noise * gauss(key_of(profile.seed, number, 1)))
            * (1.0 + profile.drift * self._served),
        )
        # A greedy answer and its drafts are the prompt's alone, unless the request has a seed.
        greedy = ask.temperature <= 0 and ask.seed is None
        job.draft_key = key_of(job.model.key, 0 if greedy else seed, 11)
        heapq.heappush(self._waiting, (ask.priority, number, job))
        self._admit()
        return job

    def _admit(self) -> None:
        while self._waiting and len(self.running) < self.profile.max_running:
            job = heapq.heappop(self._waiting)[2]
            if job.state == "waiting":
                self._schedule(job)

    def _schedule(self, job: Job) -> None:
        profile, ask = job.profile, job.ask
        job.state = "running"
        job.scheduled = time.monotonic()
        taken = {other.slot for other in self.running.values()}
        job.slot = next(i for i in range(len(taken) + 1) if i not in taken)
        self.running[job.number] = job
        job.cached = self._look_up(ask) if ask.use_cache else 0
        fresh = len(ask.prompt) - job.cached
        draw = 1.0 + profile.noise * gauss(key_of(profile.seed, job.number, 2))
        job.prefill_seconds = (
            (profile.prefill_ms + profile.prefill_ms_per_token * fresh) * max(0.0, draw) / 1000.0
        )
        self.ledger.scheduled(job)
        job.gate.open()

    # ---- time ------------------------------------------------------------------------------

    def round_seconds(self, job: Job) -> float:
        """Return how long the job's next round takes, beside the requests that run now."""
        beside = max(0, len(self.running) - 1)
        return job.profile.round_ms * job.pace * (1 + job.profile.batch_cost * beside) / 1000.0

    # ---- tokens ----------------------------------------------------------------------------

    def next_step(self, job: Job) -> Step:
        """Decide the tokens of the job's next step. Nothing is counted before `record`."""
        ask, first = job.ask, not job.tokens
        drafted = 0 if first else job.profile.draft_tokens
        accepted = 0
        while accepted < drafted and self._accepts(job, accepted):
            accepted += 1
        if job.round < len(ask.step_tokens):
            accepted = ask.step_tokens[job.round] - 1
        job.round += 1
        choices: list[Choice] = []
        finish: str | None = None
        count = len(job.tokens)
        while len(choices) <= accepted and finish is None:
            if self._at_end(job, count):
                choices.append(Choice(EOS, -0.01, ()))
                finish = "stop"
            else:
                choices.append(self._choice(job, count))
            count += 1
            if finish is None:
                finish = self._limit(job, count)
        # What the limit cuts off was accepted all the same; only a fault counts it.
        made = 0 if first else accepted if ask.count_cut else len(choices) - 1
        return Step(tuple(choices), first, max(drafted, made), made, finish)

    def _accepts(self, job: Job, position: int) -> bool:
        key = key_of(job.draft_key, job.round, position)
        return uniform(key) < job.profile.accepts(position)

    def _at_end(self, job: Job, count: int) -> bool:
        ask = job.ask
        if ask.script is not None:
            return count >= len(ask.script)
        if ask.ignore_eos or ask.endless or count < ask.min_tokens:
            return False
        if self.profile.eos_tokens:
            return count >= self.profile.eos_tokens
        # Without any limit asked for, an answer ends where the prompt says: 64 to 191 tokens.
        return ask.natural_end and count >= 64 + job.draft_key % 128

    def _choice(self, job: Job, count: int) -> Choice:
        if job.ask.script is not None:
            return Choice(job.ask.script[count], -0.01, ())
        return job.model.next(job.ask.want_top)

    def _limit(self, job: Job, count: int) -> str | None:
        ask = job.ask
        if ask.endless:
            return None
        if ask.stop_at is not None and count >= ask.stop_at:
            return ask.stop_at_reason
        return "length" if count >= ask.max_tokens else None

    # ---- what happened ---------------------------------------------------------------------

    def record(self, job: Job, step: Step, stamp: float) -> None:
        """Count a step whose tokens came out at the monotonic second `stamp`."""
        before = job.last
        if step.first:
            job.first = stamp
            if self._keeps(job):
                self._remember(job.ask.prompt, job.ask.salt)
        else:
            job.steps.append((step.drafted, step.accepted))
        job.last = stamp
        job.tokens.extend(choice.token for choice in step.choices)
        self.ledger.stepped(job, step, stamp, before)

    def leave(self, job: Job, reason: str) -> None:
        """Take the job out, finished or aborted, and admit whoever waits."""
        if job.state == "done":
            return
        was_running = job.state == "running"
        job.state = "done"
        job.finish = reason
        self.running.pop(job.number, None)
        if was_running:
            self._served += 1
            if self._keeps(job) and job.tokens:
                self._remember([*job.ask.prompt, *job.tokens], job.ask.salt)
        self.ledger.finished(job, reason)
        self._admit()

    def _keeps(self, job: Job) -> bool:
        """Whether the cache keeps the job's tokens; a llama.cpp slot does whatever was asked."""
        return job.ask.use_cache or self.profile.engine == "llamacpp"

    # ---- prefix cache ----------------------------------------------------------------------

    def _keys(self, tokens: Sequence[int], salt: str) -> list[int]:
        size = self.profile.block_size
        key = hash(("salt", salt))
        keys = []
        for start in range(0, len(tokens) - size + 1, size):
            key = hash((key, tuple(tokens[start : start + size])))
            keys.append(key)
        return keys

    def _look_up(self, ask: Ask) -> int:
        """Return how many prompt tokens are cached: whole blocks, and never the last token."""
        found = 0
        for key in self._keys(ask.prompt[:-1], ask.salt):
            if key not in self._blocks:
                break
            found += self.profile.block_size
        return found

    def _remember(self, tokens: Sequence[int], salt: str) -> None:
        for key in self._keys(tokens, salt):
            self._blocks.pop(key, None)
            self._blocks[key] = None
        surplus = len(self._blocks) - self.profile.kv_tokens // self.profile.block_size
        for key in list(self._blocks)[: max(0, surplus)]:
            del self._blocks[key]

    def forget(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests hold blocks."""
        if self.running:
            return False
        self._blocks.clear()
        return True
