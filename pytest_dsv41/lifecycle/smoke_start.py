"""Smoke starts: does a candidate arm come up at all, before a window is spent on it?

WIN2 "Process rules as code", item 1. Five steps an arm: start, health and models, one greedy
prompt, one seeded request of 64 tokens whose rounds must move, stop. The arm is always stopped,
whatever failed before, and an arm that does not stop is never passed over: the error goes up, the
HOLD stays, and production comes back by the restore. A smoke is counted nowhere: no cap,
no archive, no decision.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from ..engines import get_engine
from ..errors import UsageError
from ..hosts.local import boottime
from ..measure import Endpoint, Request, Sampling, greedy_answers, measure_group
from ..targets import Arm, Target
from ..text import one_line

__all__ = [
    "BOUND_S",
    "STEPS",
    "Backend",
    "SmokeResult",
    "TargetBackend",
    "chain_head",
    "load_backend",
    "plan_text",
    "smoke",
    "x_first",
]

STEPS: Final = ("start", "health and models", "greedy prompt", "seeded request", "stop")
BOUND_S: Final = 900.0
"""Seconds within which an arm has to pass; 15 minutes (WIN2)."""
TOKENS: Final = 64
_PROMPT: Final = "Name three rivers and the seas they flow into."
_SEED: Final = 20_261_027


@runtime_checkable
class Backend(Protocol):
    """The host side of a smoke: what starts, asks and stops one arm by its name.

    Every method raises on failure, with one line that says what failed. A backend of one's own is
    built by a factory `module:factory`, called with the experiment and the output folder.
    """

    def start(self, arm: str, deadline_s: float) -> None:
        """Start the arm's server and wait until it answers."""

    def models(self, arm: str) -> Sequence[str]:
        """Ask /health and /v1/models: the names that are served; none is a failure."""

    def greedy(self, arm: str, prompt: str, deadline_s: float) -> str:
        """The answer to one prompt at temperature 0."""

    def rounds(self, arm: str, prompt: str, tokens: int, seed: int, deadline_s: float) -> float:
        """Send one seeded request of exactly `tokens` tokens: the rounds that it took."""

    def stop(self, arm: str) -> None:
        """Stop the arm and prove it gone; idempotent."""


@dataclasses.dataclass(frozen=True)
class SmokeResult:
    """How one arm's smoke went: seconds by step, and the step and reason of a failure."""

    arm: str
    passed: bool
    seconds: Mapping[str, float]
    failed: str = ""
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """The result as it is recorded."""
        return {"schema": "dsv41-smoke-v1", **dataclasses.asdict(self)}

    @property
    def line(self) -> str:
        """The result in one line."""
        took = f"{sum(self.seconds.values()):.1f} s"
        if self.passed:
            return f"smoke {self.arm}: PASS in {took}"
        return f"smoke {self.arm}: FAIL at {self.failed} after {took}: {self.reason}"


def smoke(
    live: Backend,
    arm: str,
    *,
    bound_s: float = BOUND_S,
    progress: Callable[[str, float], None] = lambda _what, _left: None,
) -> SmokeResult:
    """Take one arm through the five steps; it is stopped whatever happens.

    Raises:
        Exception: it could not be stopped. The HOLD stays, production is restored.
    """
    begun = boottime()
    seconds: dict[str, float] = {}
    failed = reason = ""

    def left() -> float:
        return bound_s - (boottime() - begun)

    acts: tuple[Callable[[], None], ...] = (
        lambda: live.start(arm, left()),
        lambda: _served(live.models(arm)),
        lambda: _said(live.greedy(arm, _PROMPT, left())),
        lambda: _moved(live.rounds(arm, _PROMPT, TOKENS, _SEED, left())),
    )
    try:
        for step, act in zip(STEPS, acts, strict=False):
            progress(f"smoke {arm}: {step}", max(0.0, left()))
            at = boottime()
            try:
                act()
                if left() < 0:
                    raise UsageError(f"the bound of {bound_s:g} s has passed")
            except Exception as error:  # noqa: BLE001 - a backend of the user's own
                failed, reason = step, one_line(str(error) or type(error).__name__)
            seconds[step] = boottime() - at
            if failed:
                break
    finally:
        progress(f"smoke {arm}: {STEPS[-1]}", 0.0)
        at = boottime()
        live.stop(arm)
        seconds[STEPS[-1]] = boottime() - at
    return SmokeResult(arm, not failed, seconds, failed, reason)


def chain_head(
    live: Backend,
    arms: Sequence[str],
    *,
    bound_s: float = BOUND_S,
    progress: Callable[[str, float], None] = lambda _what, _left: None,
) -> tuple[SmokeResult, ...]:
    """Smoke every candidate at a chain's head; the windows of those that fail are not started."""
    return tuple(smoke(live, arm, bound_s=bound_s, progress=progress) for arm in arms)


def x_first(
    live: Backend,
    arm: str,
    *,
    bound_s: float = BOUND_S,
    progress: Callable[[str, float], None] = lambda _what, _left: None,
) -> SmokeResult:
    """Smoke the candidate as a window's first start; a failure ends the window before its cells."""
    return smoke(live, arm, bound_s=bound_s, progress=progress)


def _served(models: Sequence[str]) -> None:
    if not models:
        raise UsageError("it serves no model")


def _said(text: str) -> None:
    if not text.strip():
        raise UsageError("the greedy answer is empty")


def _moved(rounds: float) -> None:
    if not rounds > 0:
        raise UsageError(f"{TOKENS} tokens came and no round was counted")


def plan_text(experiment: str, arms: Sequence[str], mode: str, bound_s: float = BOUND_S) -> str:
    """What would be done, for people."""
    lines = [f"smoke {experiment} ({mode}), bound {bound_s / 60:g} min an arm, nothing is counted:"]
    for arm in arms:
        lines += [f"  {arm}: {number}. {step}" for number, step in enumerate(STEPS, start=1)]
    lines.append(
        "  an arm that fails is dropped: its window is not started"
        if mode == "chain-head"
        else "  a failure ends the window before any control start"
    )
    return "\n".join(lines)


def load_backend(name: str, experiment: Path, out: Path) -> Backend:
    """Import `module:factory` and build the backend.

    Raises:
        UsageError: there is no such factory, or it fails.
    """
    module, _, attribute = name.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
        backend = factory(experiment, out)
    except (Exception, SystemExit) as error:  # foreign code, whatever it raises
        why = one_line(str(error) or type(error).__name__)
        raise UsageError(f"smoke backend {one_line(name)}: {why}") from error
    if not isinstance(backend, Backend):
        raise UsageError(
            f"smoke backend {one_line(name)}: {type(backend).__name__} lacks one of start, models, "
            "greedy, rounds, stop"
        )
    return backend


class TargetBackend:
    """The backend over a window's own target: its starts are named `SMOKE-<arm>`."""

    def __init__(self, target: Target, arms: Mapping[str, Arm]) -> None:
        self._target = target
        self._arms = arms
        self._endpoint: Endpoint | None = None

    def start(self, arm: str, deadline_s: float) -> None:
        """Start it as a window would; the target's own limit of a start holds too."""
        if deadline_s <= 0:
            raise UsageError("no time is left to start it")
        self._endpoint = self._target.start_arm(f"SMOKE-{arm}", self._arms[arm]).endpoint

    def models(self, arm: str) -> Sequence[str]:
        """Health, then the models' names."""
        endpoint = self._started(arm)
        engine = get_engine(endpoint.engine)
        health = engine.health(endpoint.url, timeout=5.0)
        if health != "up":
            raise UsageError(f"{endpoint.url} is {health}")
        return engine.models(endpoint.url)

    def greedy(self, arm: str, prompt: str, deadline_s: float) -> str:
        """One prompt, greedily."""
        (answer,) = greedy_answers(
            self._started(arm), (prompt,), max_tokens=32, deadline_s=deadline_s
        )
        return answer.text

    def rounds(self, arm: str, prompt: str, tokens: int, seed: int, deadline_s: float) -> float:
        """One seeded request; its rounds by the server's counters."""
        request = Request(
            max_tokens=tokens, prompt=prompt, sampling=Sampling(cache="any"), seed=seed
        )
        found = measure_group(
            self._started(arm), (request,), deadline_s=deadline_s, require=("rounds",)
        )
        return found.values["rounds"].value

    def stop(self, arm: str) -> None:
        """End the start and whatever it left."""
        self._endpoint = None
        self._target.stop_arm(f"SMOKE-{arm}")

    def _started(self, arm: str) -> Endpoint:
        if self._endpoint is None:
            raise UsageError(f"{arm} is not started")
        return self._endpoint
