"""One way to measure against a stub with faults, for the tests of the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

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
        return _unheld(
            lambda: measure_group(endpoint(served), sent, deadline_s=deadline_s),
            lambda result: result.streams,
        )
    finally:
        served.faults()


_Result = TypeVar("_Result")


def _unheld(
    run: Callable[[], _Result], streams: Callable[[_Result], Sequence[StreamRecord]]
) -> _Result:
    """The first of five runs in which no token's time was lost to a reader that was held up.

    The stub runs in a thread of this process and takes the interpreter from the reader. Such a
    read is `merged` in the record, which is what tests/stub/test_wire_pauses.py shows.
    """
    for _ in range(5):
        result = run()
        if not any(event.merged for stream in streams(result) for event in stream.events):
            break
    return result


def endpoint(served: Serving) -> Endpoint:
    """Where it answers."""
    return Endpoint(served.url, served.server.profile.engine, served.server.profile.model)


def one(served: Serving, *faults: str, **rest: Any) -> StreamRecord:
    """A single stream, without counters around it."""
    (sent,) = requests(1, **rest)
    served.faults(*faults)
    try:
        _, (stream,) = _unheld(
            lambda: stream_group(
                endpoint(served),
                served.server.profile.model,
                [sent],
                deadline_ns=time.monotonic_ns() + 20 * 10**9,
            ),
            lambda result: result[1],
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


def at(time_ns: int | None, write: tuple[int, int]) -> bool:
    """Whether a stamp lies within 1 ms of a write: of the time its system call took."""
    return time_ns is not None and off_by(time_ns, write) < 1_000_000


def off_by(time_ns: int, write: tuple[int, int]) -> int:
    """How far a stamp is from the truth, in ns; a sender that is held up in a write is not wrong.

    `write` is when the system call was entered and when it had returned: the bytes left between.
    """
    before, after = write
    return max(before - time_ns, time_ns - after, 0)
