"""One way to measure against a stub with faults, for the tests of the wire."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused
from pytest_dsv41.measure import Endpoint, GroupResult, Request, Sampling, StreamRecord
from pytest_dsv41.measure.group import measure_group, stream_group
from pytest_dsv41.stub import Serving, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@contextmanager
def stub(**settings: Any) -> Iterator[Serving]:
    """A quick stub: one token a round unless told otherwise."""
    given = {"round_ms": 2.0, "prefill_ms": 2.0, "draft_tokens": 0, "realtime": False} | settings
    with serve(**given) as served:
        yield served


def requests(
    count: int = 1, *, tokens: int = 8, api: str = "completions", **sampling: Any
) -> list[Request]:
    """Equal requests but for their seeds."""
    return [
        Request(
            max_tokens=tokens,
            prompt=f"Tell me about the {member}. tree of the garden, and be brief.",
            api=api,  # type: ignore[arg-type]
            sampling=Sampling(**sampling),
            seed=member,
        )
        for member in range(count)
    ]


def measure(
    served: Serving, *faults: str, count: int = 1, deadline_s: float = 20.0, **rest: Any
) -> GroupResult:
    """Measure one group while `faults` hold for the streams (or for the path they name)."""
    sent = requests(count, **rest)
    path = CHAT if sent[0].api == "chat" else COMPLETIONS
    served.faults(*(fault if fault.startswith("/") else f"{path}:{fault}" for fault in faults))
    try:
        return measure_group(endpoint(served), sent, deadline_s=deadline_s)
    finally:
        served.faults()


def endpoint(served: Serving) -> Endpoint:
    """Where it answers."""
    return Endpoint(served.url, served.server.profile.engine, served.server.profile.model)


def one(served: Serving, *faults: str, **rest: Any) -> StreamRecord:
    """A single stream, without counters around it."""
    (sent,) = requests(1, **rest)
    served.faults(*faults)
    try:
        _, (stream,) = stream_group(
            endpoint(served),
            served.server.profile.model,
            [sent],
            deadline_ns=time.monotonic_ns() + 20 * 10**9,
        )
    finally:
        served.faults()
    return stream


def kind_of(served: Serving, *faults: str, **rest: Any) -> str:
    """`failed:kind` or `refused:kind` of a group that must not be measured."""
    try:
        measure(served, *faults, **rest)
    except MeasurementFailed as error:
        return f"failed:{error.kind}"
    except MeasurementRefused as error:
        return f"refused:{error.kind}"
    return "measured"


def left(served: Serving, kind: str = "") -> list[tuple[int, int]]:
    """(before, after) in ns of the newest request's writes: those with tokens, or of a kind."""
    lines = served.truth()
    newest = max(line["request"] for line in lines)
    return [
        (line["before_ns"], line["after_ns"])
        for line in lines
        if line["request"] == newest and (line["kind"] == kind if kind else line["tokens"])
    ]


def at(time_ns: int | None, write: tuple[int, int], slack_ns: int = 6_000_000) -> bool:
    """Whether a stamp lies at a write, with room for a busy machine on the late side only."""
    before, after = write
    return time_ns is not None and before - 100_000 <= time_ns <= after + slack_ns
