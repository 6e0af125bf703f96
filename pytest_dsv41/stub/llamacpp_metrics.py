"""llama.cpp's `/metrics`: no labels, no engine, six significant digits.

What was generated is counted at a request's end only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from pytest_dsv41.stub.engine import Engine, Job, Step
from pytest_dsv41.stub.profile import Profile

__all__ = ["LlamaLedger"]

_COUNTERS = (
    ("prompt_tokens_total", "Prompt tokens processed, without cached ones"),
    ("prompt_tokens_cached_total", "Prompt tokens taken from the cache"),
    ("prompt_seconds_total", "Seconds spent on prompts"),
    ("tokens_predicted_total", "Generated tokens"),
    ("tokens_predicted_seconds_total", "Seconds spent on generation"),
    ("n_decode_total", "Decode calls"),
    ("n_tokens_max", "Longest sequence seen"),
    ("spec_decode_num_draft_tokens_total", "Draft tokens"),
    ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens"),
    ("spec_decode_num_drafts_total", "Verification steps"),
)
_GAUGES = (
    ("prompt_tokens_seconds", "Prompt throughput"),
    ("predicted_tokens_seconds", "Generation throughput"),
    ("requests_processing", "Requests in slots"),
    ("requests_deferred", "Requests that wait"),
    ("n_busy_slots_per_decode", "Mean number of busy slots a decode call"),
)
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


class LlamaLedger:
    """Turns what the engine did into llama.cpp's metrics."""

    def __init__(
        self, profile: Profile, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self.profile = profile
        self.later = later
        self.engine: Engine | None = None
        self.slots: dict[int, Job] = {}
        self.reset()

    def reset(self) -> None:
        """Begin again at zero, as after a restart."""
        self.started = int(time.time())
        self._values = dict.fromkeys((name for name, _ in _COUNTERS), 0.0)
        self._positions: list[int] = []
        self._busy = 0

    def add_engine(self) -> None:
        """Do nothing: llama.cpp knows one engine."""

    def text(self, *, created: bool = True, without: Iterable[str] = ()) -> str:
        """Return the exposition. `created` changes nothing: there are no such families."""
        del created
        hidden = set(without)
        parts = []
        for name, text in _COUNTERS:
            parts.append((name, text, "counter", self._values[name]))
        for name, text in _GAUGES:
            parts.append((name, text, "gauge", self._gauge(name)))
        lines = [
            f"# HELP llamacpp:{name} {text}\n# TYPE llamacpp:{name} {kind}\n"
            f"llamacpp:{name} {value:g}\n"
            for name, text, kind, value in parts
            if f"llamacpp:{name}" not in hidden
        ]
        if self._positions and f"llamacpp:{_PER_POSITION}" not in hidden:
            name = f"llamacpp:{_PER_POSITION}"
            lines.append(f"# HELP {name} Accepted tokens by position\n# TYPE {name} counter\n")
            lines += [f'{name}{{position="{i}"}} {n}\n' for i, n in enumerate(self._positions)]
        return "".join(lines)

    def _gauge(self, name: str) -> float:
        engine, values = self.engine, self._values
        if name == "requests_processing":
            return len(engine.running) if engine else 0
        if name == "requests_deferred":
            return engine.waiting if engine else 0
        if name == "n_busy_slots_per_decode":
            return self._busy / max(1.0, values["n_decode_total"])
        if name == "prompt_tokens_seconds":
            return _rate(values["prompt_tokens_total"], values["prompt_seconds_total"])
        return _rate(values["tokens_predicted_total"], values["tokens_predicted_seconds_total"])

    # ---- the engine's news -----------------------------------------------------------------

    def scheduled(self, job: Job) -> None:
        """Remember which request a slot works on; nothing is counted yet."""
        self.slots[job.slot] = job

    def stepped(self, job: Job, step: Step, stamp: float, before: float | None) -> None:
        """Count a decode call; the prompt when it is through."""
        del before
        self.later(job.lag, lambda: self._count_step(job, step, stamp))

    def _count_step(self, job: Job, step: Step, stamp: float) -> None:
        values = self._values
        values["n_decode_total"] += 1
        self._busy += max(1, len(self.engine.running) if self.engine else 1)
        length = len(job.ask.prompt) + len(job.tokens)
        values["n_tokens_max"] = max(values["n_tokens_max"], length)
        if step.first and job.scheduled is not None:
            values["prompt_tokens_total"] += len(job.ask.prompt) - job.cached
            values["prompt_tokens_cached_total"] += job.cached
            values["prompt_seconds_total"] += stamp - job.scheduled

    def preempted(self, job: Job, times: int) -> None:
        """Count nothing: the server has no such counter."""

    def finished(self, job: Job, reason: str) -> None:
        """Count what was generated, at the end of the request only."""
        del reason
        self.later(job.lag, lambda: self._count_end(job))

    def _count_end(self, job: Job) -> None:
        values = self._values
        values["tokens_predicted_total"] += len(job.tokens)
        if job.first is not None and job.last is not None:
            values["tokens_predicted_seconds_total"] += job.last - job.first
        if not job.drafted:
            return
        values["spec_decode_num_draft_tokens_total"] += job.drafted
        values["spec_decode_num_accepted_tokens_total"] += job.accepted
        values["spec_decode_num_drafts_total"] += sum(1 for drafted, _ in job.steps if drafted)
        for _, accepted in job.steps:
            self._positions += [0] * (accepted - len(self._positions))
            for position in range(accepted):
                self._positions[position] += 1


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
