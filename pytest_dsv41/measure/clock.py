"""From reads to times: the kernel's stamp where it can be trusted, the read's own where not.

A kernel stamp is wall-clock time. It becomes monotonic by the offset between the two clocks,
sampled at every read. Where that offset moved since the read before, the wall clock was stepped
and the stamp means nothing; the read's own monotonic time is used and the step is noted.
Slewing (NTP) moves both clocks alike and leaves the offset alone.

Packets that queue while nobody reads are merged by the kernel and keep the last one's stamp.
Such a read is `merged`: more than one TCP segment, spread over more than a millisecond as far
as anyone can know, found by a reader that was late. Only the last event of it has a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytest_dsv41.measure.wire import Read

__all__ = ["Stamp", "stamps"]

STEP_NS: Final = 200_000
"""A clock offset that moved by more than this between two reads is a step of the wall clock."""
_SLACK_NS: Final = 100_000
_SPREAD_NS: Final = 1_000_000
_LATE_NS: Final = 300_000


@dataclass(frozen=True, slots=True)
class Stamp:
    """When the last byte of a read came, in ns of the monotonic clock, and how that is known."""

    t_ns: int
    source: str
    """`kernel` or `read`."""
    late_ns: int
    """How long the bytes lay before they were read (0 where only the read's own time is known)."""
    stepped: bool
    """The wall clock was stepped since the read before."""
    spread: bool
    """If the read holds several events, they may have come more than 1 ms apart."""


def stamps(reads: Sequence[Read], *, offset_ns: int, start_ns: int) -> list[Stamp]:
    """Return one stamp a read.

    Args:
        reads: the reads of one connection in order.
        offset_ns: wall minus monotonic clock when the request was written.
        start_ns: when the request was written; nothing can have come before it.
    """
    result: list[Stamp] = []
    earliest = start_ns
    before = offset_ns
    for read in reads:
        stepped = abs(read.offset_ns - before) > STEP_NS
        before = read.offset_ns
        time_ns, source = read.at_ns, "read"
        if read.kernel_ns is not None and not stepped:
            kernel = read.kernel_ns - read.offset_ns
            if earliest - _SLACK_NS <= kernel <= read.at_ns + _SLACK_NS:
                time_ns, source = min(max(kernel, earliest), read.at_ns), "kernel"
        late = read.at_ns - time_ns
        spread = (
            read.segments != 1
            and time_ns - read.floor_ns > _SPREAD_NS
            and (read.away or late > _LATE_NS)
        )
        result.append(Stamp(time_ns, source, late, stepped, spread))
        earliest = time_ns
    return result
