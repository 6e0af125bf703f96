"""Production's identity: captured before it goes down, proved when it is back, and watched."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..durable import dump_json, parse_json, write_atomic
from ..errors import MeasurementFailed, RefusedByWorld, UsageError
from ..hosts import Probe
from ..hosts.local import boottime
from ..measure import greedy_answers
from ..targets import Target
from ..text import one_line
from .journal import utc_now

__all__ = [
    "CAPTURE_PROMPTS",
    "Check",
    "Watch",
    "capture",
    "captured",
    "check",
    "read_rollback",
    "watch",
]

CAPTURE_PROMPTS = (
    "Name the four seasons of the year and one thing that grows in each of them.",
    "Count from one to twelve, then count back to one.",
    "Explain in a few plain sentences how a lock on a canal lifts a boat.",
    "List the days of the week in reverse order.",
    "Write two lines about a lighthouse in fog.",
    "What is seventeen times six? Show each step.",
)
"""Six distinct prompts, asked greedily before production goes down and again when it is back."""

_TOKENS = 32


@dataclasses.dataclass(frozen=True)
class Check:
    """Whether the restored production is the captured one. `identical` counts of `asked`."""

    passed: bool
    identical: int
    asked: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Watch:
    """What the watch saw: `seconds` on a monotonic clock, `samples`, `largest_gap_s`."""

    passed: bool
    seconds: float
    samples: int
    largest_gap_s: float
    reason: str = ""


def capture(target: Target, folder: Path, *, deadline_s: float) -> tuple[Path, str]:
    """Write `rollback.json` and return its path and sha256.

    Raises:
        RefusedByWorld: production does not answer the six prompts as a model would.
    """
    configuration = target.capture()
    try:
        answers = _ask(target, deadline_s)
    except MeasurementFailed as error:
        raise RefusedByWorld(
            f"production does not answer the capture's prompts: {error}"
        ) from error
    faults = _faults(answers)
    if faults:
        raise RefusedByWorld(f"production cannot be captured: {faults[0]}")
    record = {
        "schema": "dsv41-rollback-v1",
        "utc": utc_now(),
        "production_commit": target.commit(),
        "configuration": configuration,
        "answers": answers,
    }
    path = folder / "rollback.json"
    text = dump_json(record) + "\n"
    write_atomic(path, text)
    return path, hashlib.sha256(text.encode()).hexdigest()


def captured(folder: Path) -> dict[str, Any] | None:
    """The window's capture as it lies in its folder, to look at; None without one."""
    try:
        record: dict[str, Any] = parse_json((folder / "rollback.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    return record


def read_rollback(path: Path, sha256: str) -> dict[str, Any]:
    """Read a capture and check it against the sha256 that the intent keeps.

    Raises:
        UsageError: it is missing or was changed.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: the capture cannot be read ({error})") from error
    if hashlib.sha256(raw).hexdigest() != sha256:
        raise UsageError(f"{path}: the capture is not the one that was sealed (sha256 differs)")
    record: dict[str, Any] = parse_json(raw)
    return record


def check(target: Target, rollback: dict[str, Any], *, deadline_s: float) -> Check:
    """Ask the six prompts again: strict identity, and no empty, cut or doubled answer."""
    expected = rollback["answers"]
    try:
        answers = _ask(target, deadline_s)
    except MeasurementFailed as error:
        return Check(False, 0, len(expected), f"production does not answer: {one_line(str(error))}")
    identical = sum(
        then["prompt"] == now["prompt"] and then["text"] == now["text"]
        for then, now in zip(expected, answers, strict=True)
    )
    faults = _faults(answers)
    reason = faults[0] if faults else ""
    if identical < len(expected):
        reason = f"{len(expected) - identical} of {len(expected)} answers differ from the capture"
    return Check(not reason, identical, len(expected), reason)


def watch(
    target: Target,
    *,
    seconds: float,
    pause: Callable[[float], None] = time.sleep,
    tick: Callable[[float], None] = lambda _left: None,
) -> Watch:
    """Look at production for `seconds`; it must be UP at every sample.

    `tick` gets the seconds left. One more sample is allowed after an UNKNOWN, since a busy server
    may miss one; DOWN ends the watch at once.
    """
    begun = boottime()
    interval = min(15.0, max(0.2, seconds / 8))
    last, largest, samples, unknown = begun, 0.0, 0, 0
    while True:
        seen = target.probe()
        now = boottime()
        largest = max(largest, now - last)
        last = now
        samples += 1
        unknown = unknown + 1 if seen.state is Probe.UNKNOWN else 0
        if seen.state is Probe.DOWN or unknown > 1:
            return Watch(False, now - begun, samples, largest, f"{seen.state.value}: {seen.detail}")
        left = seconds - (now - begun)
        tick(max(0.0, left))
        if left <= 0 and not unknown:
            break
        pause(min(interval, max(left, 0.05)))
    if largest > max(60.0, 4 * interval):
        return Watch(
            False, last - begun, samples, largest, f"nobody looked for {largest:.0f} seconds"
        )
    return Watch(True, last - begun, samples, largest)


def _ask(target: Target, deadline_s: float) -> list[dict[str, Any]]:
    return [
        {"prompt": a.prompt, "text": a.text, "finish": a.finish, "tokens": a.tokens}
        for a in greedy_answers(
            target.production(), CAPTURE_PROMPTS, max_tokens=_TOKENS, deadline_s=deadline_s
        )
    ]


def _faults(answers: list[dict[str, Any]]) -> list[str]:
    """What makes answers useless as an identity: empty, not finished, or equal to each other."""
    faults = [f"answer {i + 1} is empty" for i, a in enumerate(answers) if not a["text"].strip()]
    faults += [
        f"answer {i + 1} has no end (finish {a['finish']!r})"
        for i, a in enumerate(answers)
        if a["finish"] not in ("stop", "length")
    ]
    seen: dict[str, int] = {}
    for i, answer in enumerate(answers):
        if answer["text"] in seen:
            faults.append(f"answers {seen[answer['text']] + 1} and {i + 1} are the same")
        seen.setdefault(answer["text"], i)
    return faults
