"""Does a server owe N conversations of its whole window at once, and answer each one exactly?

N prompts that leave only room for their short answers are sent at one time, each with a password of
its own at its head. Beside them one prompt is sent that is a single token too long: it must be
refused, for a server that cuts it instead forgets a conversation's head without a word.
FRANK-ARCHON "Capacity probe".
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from pytest_dsv41.engines import get_engine
from pytest_dsv41.engines.served import Served
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused
from pytest_dsv41.measure.cell import Request, Sampling
from pytest_dsv41.measure.group import Endpoint, GroupResult, Progress, measure_group, stream_group
from pytest_dsv41.measure.probes.laws import obey, said
from pytest_dsv41.measure.probes.prompts import Fitted, PromptMaker
from pytest_dsv41.measure.probes.shape import asking, window_of
from pytest_dsv41.measure.reader import Reader
from pytest_dsv41.measure.stream import StreamRecord
from pytest_dsv41.text import one_line

__all__ = [
    "ANSWER_TOKENS",
    "Capacity",
    "Check",
    "Refusal",
    "capacity_requests",
    "judge_capacity",
    "measure_capacity",
    "too_long",
]

ANSWER_TOKENS: Final = 32
"""Room for the answer: a prompt of full height is the window less this."""

_STOP: Final = ("\n", ".")
_EDGES: Final = re.compile(r"^[\s\"'`*.,]+|[\s\"'`*.,]+$")
_REFUSED: Final = frozenset(("http-400", "http-413", "http-422", "error-event"))


@dataclass(frozen=True)
class Check:
    """One thing that must hold: whether it does (None: it cannot be seen), and what was seen."""

    name: str
    passed: bool | None
    told: str


@dataclass(frozen=True)
class Refusal:
    """What became of the prompt that is one token too long; `tokens` with its one answer token."""

    tokens: int
    window: int
    refused: bool
    said: str


@dataclass(frozen=True)
class Capacity:
    """The answer of a capacity probe.

    `rows` has one object a stream: asked, answered, prompt tokens, cached, finish, wall seconds,
    prefill tokens/s. `height` is in tokens, `wall_s` from the first request to the last end.
    """

    shape: Served
    streams: int
    height: int
    checks: tuple[Check, ...]
    rows: tuple[dict[str, Any], ...]
    refusal: Refusal
    wall_s: float

    @property
    def prompt_tokens(self) -> int:
        """Of all streams together, as the server counted them."""
        return sum(row["prompt"] or 0 for row in self.rows)

    @property
    def prefill_tok_s(self) -> float:
        """All prompt tokens over the wall: what the streams' prefill comes to together."""
        return self.prompt_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def verdict(self) -> str:
        """PASS, FAIL, or NOT PROVED where something could not be seen."""
        if any(check.passed is False for check in self.checks):
            return "FAIL"
        return "NOT PROVED" if any(check.passed is None for check in self.checks) else "PASS"

    @property
    def reason(self) -> str:
        """The checks that do not hold, in one line; empty for PASS."""
        lacking = [check for check in self.checks if check.passed is not True]
        return "; ".join(f"{check.name}: {check.told}" for check in lacking)

    def to_json(self) -> dict[str, Any]:
        """Return it for a record."""
        return {
            "verdict": self.verdict,
            "shape": self.shape.to_json(),
            "streams": self.streams,
            "height": self.height,
            "checks": [asdict(check) for check in self.checks],
            "rows": list(self.rows),
            "prompt_tokens": self.prompt_tokens,
            "wall_s": self.wall_s,
            "prefill_tok_s": self.prefill_tok_s,
            "refusal": asdict(self.refusal),
        }


def capacity_requests(
    maker: PromptMaker, shape: Served, streams: int
) -> tuple[list[Fitted], list[Request]]:
    """Return the prompts of full height, and the requests that send them.

    Raises:
        MeasurementRefused: kind `shape`: the server tells no window, or has fewer slots.
        UsageError: the window holds no prompt.
    """
    height = window_of(shape, streams=streams) - ANSWER_TOKENS
    prompts = [maker.marked(height, member) for member in range(streams)]
    sampling = Sampling(temperature=0.0, ignore_eos=False, cache="cold")
    requests = [
        maker.request(
            prompt,
            ANSWER_TOKENS,
            sampling=sampling,
            # A chat ends by itself; a text would go on for ever.
            stop=_STOP if maker.api == "completions" else (),
            salt=f"capacity-{member}",
        )
        for member, prompt in enumerate(prompts)
    ]
    return prompts, requests


def too_long(
    maker: PromptMaker, shape: Served, *, deadline_s: float, stop: threading.Event | None = None
) -> Refusal:
    """Send a prompt that leaves no room for a single token, and return what became of it.

    Raises:
        MeasurementRefused: kinds `shape`, `height`.
        MeasurementFailed: the request ended in another way than refused or answered.
    """
    window = window_of(shape)
    prompt = maker.exactly(window)
    request = maker.request(
        prompt, 1, sampling=Sampling(temperature=0.0, ignore_eos=False, cache="cold")
    )
    try:
        _, (stream,) = stream_group(
            maker.endpoint,
            maker.model,
            [request],
            deadline_ns=time.monotonic_ns() + int(deadline_s * 1e9),
            stop=stop,
        )
    except MeasurementFailed as error:
        if error.kind not in _REFUSED:
            raise
        told = str(error)
        return Refusal(prompt.tokens + 1, window, True, one_line(told, 200))
    took = stream.prompt_tokens
    cut = took is not None and took < prompt.tokens
    return Refusal(
        prompt.tokens + 1,
        window,
        False,
        f"answered with 200 to {took} of {prompt.tokens} prompt tokens"
        + (": cut in silence" if cut else ""),
    )


def judge_capacity(
    shape: Served,
    prompts: Sequence[Fitted],
    result: GroupResult,
    refusal: Refusal,
) -> Capacity:
    """Hold what came against what a server of this shape owes; pure.

    Raises:
        MeasurementRefused: kind `law-thinking`.
    """
    rows = [_row(prompt, stream) for prompt, stream in zip(prompts, result.streams, strict=True)]
    count = len(rows)

    def every(name: str, good: Callable[[dict[str, Any]], bool | None], key: str) -> Check:
        found = [good(row) for row in rows]
        kept = sum(one is True for one in found)
        lacking = [row[key] for row, one in zip(rows, found, strict=True) if one is not True]
        told = f"{kept} of {count}"
        if lacking:
            told += f", not {', '.join(one_line(str(value), 60) for value in lacking[:4])}"
        passed = False if False in found else None if None in found else True
        return Check(name, passed, told)

    beside, preempted = result.beside, result.server.preemptions
    checks = (
        every("exact answers", lambda row: row["exact"], "answer"),
        every("finish stop", lambda row: row["finish"] == "stop", "finish"),
        every("cached 0", lambda row: _same(row["cached"], 0), "cached"),
        every("prompt tokens as sent", lambda row: _same(row["prompt"], row["sent"]), "prompt"),
        Check(
            "nothing preempted", _same(preempted, 0),
            f"{'?' if preempted is None else preempted} preemptions",
        ),
        Check(
            "all alive together", None if beside is None else beside >= count,
            f"{'?' if beside is None else beside} of {count} ran before the first had ended",
        ),
        Check(
            "one token too many refused", refusal.refused,
            f"{refusal.tokens} tokens of a window of {refusal.window}: {refusal.said}",
        ),
    )  # fmt: skip
    begun = min(stream.start_ns for stream in result.streams)
    ended = max(stream.end_ns for stream in result.streams)
    height = min(prompt.tokens for prompt in prompts)
    return Capacity(
        shape, count, height, checks, tuple(rows), refusal, wall_s=(ended - begun) / 1e9
    )


def _same(value: object, wanted: int) -> bool | None:
    return None if value is None else value == wanted


def _row(prompt: Fitted, stream: StreamRecord) -> dict[str, Any]:
    answer, channel = said(stream)
    prefill = (stream.prompt_tokens or 0) * 1e3 / stream.ttft_ms if stream.ttft_ms > 0 else 0.0
    return {
        "asked": prompt.marker,
        "answer": one_line(answer.strip(), 120),
        "channel": channel,
        "exact": _EDGES.sub("", answer) == prompt.marker,
        "sent": prompt.tokens,
        "prompt": stream.prompt_tokens,
        "cached": stream.cached_tokens,
        "finish": stream.finish_reason,
        "wall_s": (stream.end_ns - stream.start_ns) / 1e9,
        "prefill_tok_s": prefill,
    }


def measure_capacity(
    endpoint: Endpoint,
    shape: Served,
    streams: int,
    *,
    maker: PromptMaker,
    deadline_s: float,
    stop: threading.Event | None = None,
    progress: Callable[[Progress], None] | None = None,
    reader: Reader | None = None,
) -> tuple[Capacity, GroupResult]:
    """Run the whole probe: the prompt too long first, which costs nothing, then the N of them.

    Raises:
        MeasurementRefused: `warm-cache`, `law-thinking`, `shape`, and as `measure_group`.
        MeasurementFailed: a request did not deliver.
    """
    until = time.monotonic() + deadline_s
    refusal = too_long(maker, shape, deadline_s=deadline_s, stop=stop)
    with asking(endpoint) as client:
        health = get_engine(endpoint.engine).health(endpoint.url, client=client)
    if health != "up":
        raise MeasurementRefused(
            "too-long", f"the server is {health} after a prompt that is too long: {health.reason}"
        )
    prompts, requests = capacity_requests(maker, shape, streams)
    result = measure_group(
        endpoint,
        requests,
        deadline_s=max(0.0, until - time.monotonic()),
        stop=stop,
        progress=progress,
        reader=reader,
        beside=True,
    )
    return judge_capacity(shape, prompts, result, refusal), obey(result)
