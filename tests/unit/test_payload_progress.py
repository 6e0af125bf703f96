"""What a long step shows: nothing for two seconds, then where it is and how long it still takes."""

from __future__ import annotations

import io

from pytest_dsv41.payload.shown import Shown


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_quick_step_shows_nothing() -> None:
    clock, stream = Clock(), io.StringIO()
    with Shown(stream, clock=clock) as show:
        for tenth in range(19):
            clock.now = 100 + tenth / 10
            show("hashing", tenth / 20)
    assert stream.getvalue() == ""


def test_a_pipe_gets_a_line_every_five_seconds_with_the_time_left() -> None:
    clock, stream = Clock(), io.StringIO()
    with Shown(stream, clock=clock) as show:
        for second in range(41):
            clock.now = 100 + second
            show("hashing", second / 100)
    lines = stream.getvalue().splitlines()
    # One per cent a second: at 2 s there are 98 left.
    assert lines[0] == "hashing, 2%, 2 min left"
    assert len(lines) == 8
    assert lines[-1] == "hashing, 37%, 1 min left"


def test_a_resumed_step_is_timed_by_what_it_did_itself() -> None:
    """Half was done before; a tenth of the whole in ten seconds leaves forty."""
    clock, stream = Clock(), io.StringIO()
    with Shown(stream, clock=clock) as show:
        show("hashing", 0.5)
        clock.now += 10
        show("hashing", 0.6)
    assert stream.getvalue() == "hashing, 60%, 40 s left\n"


def test_a_step_without_a_measure_shows_how_long_it_runs() -> None:
    clock, stream = Clock(), io.StringIO()
    with Shown(stream, clock=clock) as show:
        show("the command runs")
        clock.now += 7200
        show("the command runs: layer 3\x1b[2J")
    assert stream.getvalue() == "the command runs: layer 3\\x1b[2J, 2.0 h\n"


def test_on_a_terminal_one_line_is_rewritten_and_taken_away() -> None:
    clock, stream = Clock(), Terminal()
    with Shown(stream, clock=clock) as show:
        show("a", 0.0)
        clock.now += 3
        show("a", 0.5)
        clock.now += 0.3
        show("b", 0.6)
    assert stream.getvalue() == "\r\x1b[Ka, 50%, 3 s left\r\x1b[Kb, 60%, 2 s left\r\x1b[K"


def test_a_reader_that_has_left_does_not_end_the_step() -> None:
    clock = Clock()
    with Shown(Gone(), clock=clock) as show:
        show("a", 0.0)
        clock.now += 60
        show("a", 0.5)
