"""Kernel stamps onto the monotonic clock: steps, lateness, merged packets. No real clocks here."""

from __future__ import annotations

from pytest_dsv41.measure.clock import stamps
from pytest_dsv41.measure.wire import Read

WALL = 1_790_000_000_000_000_000
MS = 1_000_000


def read(
    at_ms: float,
    came_ms: float | None,
    *,
    offset: int = WALL,
    stamp_offset: int | None = None,
    segments: int | None = 1,
    floor_ms: float | None = None,
    away: bool = False,
) -> Read:
    kernel = None
    if came_ms is not None:
        kernel = round(came_ms * MS) + (offset if stamp_offset is None else stamp_offset)
    floor = at_ms - 0.5 if floor_ms is None else floor_ms
    return Read(round(at_ms * MS), kernel, offset, 100, segments, round(floor * MS), away)


def test_the_kernels_time_is_used_however_late_the_read_was() -> None:
    (stamp,) = stamps([read(250, 50, floor_ms=10, away=True)], offset_ns=WALL, start_ns=0)
    assert (stamp.t_ns, stamp.source, stamp.late_ns) == (50 * MS, "kernel", 200 * MS)
    assert not stamp.spread


def test_without_a_stamp_the_reads_own_time_is_used() -> None:
    (stamp,) = stamps([read(20, None)], offset_ns=WALL, start_ns=0)
    assert (stamp.t_ns, stamp.source) == (20 * MS, "read")


def test_a_step_of_the_wall_clock_is_noticed_and_the_next_read_is_trusted_again() -> None:
    stepped = WALL - 3_000 * MS
    reads = [
        read(10, 9.9),
        read(20, 19.9, offset=stepped, stamp_offset=WALL),
        read(30, 29.9, offset=stepped),
    ]
    result = stamps(reads, offset_ns=WALL, start_ns=0)
    assert [stamp.source for stamp in result] == ["kernel", "read", "kernel"]
    assert [stamp.stepped for stamp in result] == [False, True, False]
    assert [stamp.t_ns for stamp in result] == [round(9.9 * MS), 20 * MS, round(29.9 * MS)]


def test_a_step_before_the_first_read_is_noticed_against_the_write() -> None:
    (stamp,) = stamps([read(10, 9.9, offset=WALL + 5000)], offset_ns=WALL + 900 * MS, start_ns=0)
    assert (stamp.source, stamp.stepped) == ("read", True)


def test_slewing_and_jitter_of_the_offset_are_no_steps() -> None:
    reads = [read(10 * i, 10 * i - 0.1, offset=WALL + 20_000 * i) for i in range(1, 6)]
    assert {stamp.source for stamp in stamps(reads, offset_ns=WALL, start_ns=0)} == {"kernel"}


def test_a_stamp_outside_what_is_possible_is_dropped() -> None:
    before_write = stamps([read(10, 1)], offset_ns=WALL, start_ns=5 * MS)
    after_read = stamps([read(10, 12)], offset_ns=WALL, start_ns=0)
    assert [stamp.source for stamp in before_write + after_read] == ["read", "read"]


def test_times_never_run_backwards() -> None:
    result = stamps([read(10, 9.95), read(10.1, 9.9)], offset_ns=WALL, start_ns=0)
    assert [stamp.t_ns for stamp in result] == sorted(stamp.t_ns for stamp in result)


def test_several_packets_read_late_are_spread() -> None:
    late = read(100, 90, segments=5, floor_ms=10, away=True)
    assert stamps([late], offset_ns=WALL, start_ns=0)[0].spread


def test_one_packet_read_late_is_no_spread() -> None:
    late = read(100, 20, segments=1, floor_ms=10, away=True)
    assert not stamps([late], offset_ns=WALL, start_ns=0)[0].spread


def test_several_packets_read_at_once_are_a_burst() -> None:
    prompt = read(90.05, 90, segments=4, floor_ms=10)
    assert not stamps([prompt], offset_ns=WALL, start_ns=0)[0].spread


def test_without_segment_counts_a_late_read_is_spread() -> None:
    late = read(100, 90, segments=None, floor_ms=10)
    assert stamps([late], offset_ns=WALL, start_ns=0)[0].spread
