"""The progress line: below pytest's output on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pytest_dsv41.report.progress import Progress, ProgressState, progress_line, seconds_left


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """The few things of a terminal that the progress line uses, on a grid that scrolls."""

    def __init__(self, rows: int, columns: int = 80) -> None:
        self.grid = [[" "] * columns for _ in range(rows)]
        self.row = self.column = 0
        self.saved = (0, 0)

    def _down(self) -> None:
        if self.row == len(self.grid) - 1:
            self.grid.append([" "] * len(self.grid.pop(0)))
        else:
            self.row += 1

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[0-9]*[A-Z]|\x1b.|.|\n", text, re.S):
            match token:
                case "\n":
                    self._down()
                    self.column = 0
                case "\r":
                    self.column = 0
                case "\x1bD":
                    self._down()
                case "\x1bM":
                    assert self.row > 0
                    self.row -= 1
                case "\x1b7":
                    self.saved = (self.row, self.column)
                case "\x1b8":
                    self.row, self.column = self.saved
                case "\x1b[B":
                    self.row = min(self.row + 1, len(self.grid) - 1)
                case "\x1b[2K":
                    self.grid[self.row] = [" "] * len(self.grid[self.row])
                case _:
                    assert len(token) == 1, token
                    self.grid[self.row][self.column] = token
                    self.column += 1

    def lines(self) -> list[str]:
        return [text for row in self.grid if (text := "".join(row).rstrip())]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def drain(stream: io.StringIO) -> str:
    text = stream.getvalue()
    stream.seek(0)
    stream.truncate()
    return text


@pytest.mark.parametrize("rows", [2, 3, 24])
def test_pytests_line_is_left_alone_also_on_the_last_row(rows: int, clock: Clock) -> None:
    screen, stream = Screen(rows), io.StringIO()
    progress = Progress(stream, live=True, clock=clock)
    screen.feed("collected 4 items\ncells.py ")
    for number in range(1, 5):
        clock.now += 1
        progress.update(start="K1", cell="short-b1", repeat=number, repeats=4, item=number, items=4)
        screen.feed(drain(stream))
        assert screen.lines()[-2:] == [
            f"cells.py {'.' * (number - 1)}".rstrip(),
            f"window: {number}/4, K1, short-b1 {number} of 4",
        ]
        progress.erase()
        screen.feed(drain(stream) + ".")
    progress.close()
    screen.feed(drain(stream) + " [100%]\n4 passed")
    assert screen.lines()[-2:] == ["cells.py .... [100%]", "4 passed"]


def test_a_guarded_stream_finds_the_line_gone(clock: Clock) -> None:
    screen = Screen(6)

    class Shared(io.StringIO):
        """Both streams write to one terminal."""

        def write(self, text: str) -> int:
            screen.feed(text)
            return len(text)

    progress = Progress(Shared(), live=True, clock=clock)
    out = progress.guard(Shared())
    out.write("cells.py ")
    for number in range(1, 4):
        clock.now += 1
        progress.update(item=number, items=3)
        assert screen.lines()[-1] == f"window: {number}/3"
        out.write(".")
        assert screen.lines() == [f"cells.py {'.' * number}"]
    progress.update(items=3, phase="done")
    out.write(" [100%]\n3 passed")
    assert screen.lines() == ["cells.py ... [100%]", "3 passed"]
    assert out.writable()


def test_a_plain_line_is_a_line_of_its_own_in_a_shared_pipe(clock: Clock) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as out, os.fdopen(os.dup(write), "w") as err:
        progress = Progress(err, clock=clock)
        guarded = progress.guard(out)
        guarded.write("cells.py ..")
        progress.update(item=2, items=3)
        guarded.write(". [100%]\n")
        clock.now += 9
        progress.update(item=3, items=3)
        guarded.write("3 passed\n")
        guarded.flush()
        told = os.read(read, 1000).decode()
    os.close(read)
    assert told.splitlines() == [
        "cells.py ..",
        "window: 2/3",
        ". [100%]",
        "window: 3/3",
        "3 passed",
    ]


def test_a_plain_line_elsewhere_has_no_line_break_before_it(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=clock)
    progress.guard(io.StringIO()).write("cells.py ..")
    progress.update(item=2, items=3)
    assert drain(stream) == "window: 2/3\n"


def test_updates_in_quick_succession_are_not_all_written(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=True, clock=clock)
    progress.update(item=1, items=9)
    drain(stream)
    progress.update(item=2, items=9)
    assert drain(stream) == ""
    progress.update(item=2, items=9, production="restoring")
    assert "restoring" in drain(stream)


def test_plain_lines_every_few_seconds_and_at_each_change(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, clock=clock)
    for second in range(12):
        clock.now = 100.0 + second
        progress.update(item=second + 1, items=12, production="down")
    assert drain(stream).splitlines() == [
        "window: 1/12, production down",
        "window: 6/12, production down",
        "window: 11/12, production down",
    ]
    progress.update(items=12, phase="stopping", production="down")
    assert drain(stream) == ""
    progress.update(items=12, phase="restore", production="starting")
    progress.erase()
    assert drain(stream) == "window: 12/12, restore, production starting\n"


def test_off_writes_nothing(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=True, enabled=False, clock=clock)
    progress.update(item=1, items=2)
    progress.erase()
    progress.close()
    assert stream.getvalue() == ""


def test_after_close_nothing_more_is_written(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream, live=True, clock=clock)
    progress.update(item=1, items=2)
    progress.close()
    drain(stream)
    progress.update(item=2, items=2)
    progress.erase()
    progress.close()
    assert stream.getvalue() == ""


def test_a_lost_terminal_never_ends_the_window(clock: Clock) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    progress = Progress(Gone(), live=True, clock=clock)
    progress.update(item=1, items=2)
    progress.close()
    closed = io.StringIO()
    closed.close()
    progress = Progress(closed, clock=clock)
    progress.update(item=1, items=2)
    progress.close()


@pytest.mark.parametrize(
    ("term", "tty", "live"), [("xterm", True, True), ("dumb", True, False), ("xterm", False, False)]
)
def test_cursor_controls_only_on_a_terminal_that_has_them(
    term: str, tty: bool, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return tty

    monkeypatch.setenv("TERM", term)
    stream = Stream()
    Progress(stream).update(item=1, items=2)
    assert ("\x1b" in stream.getvalue()) is live


def test_the_line_says_where_the_window_is() -> None:
    state = ProgressState(
        phase="measuring",
        start="C1",
        cell="short-b1",
        repeat=2,
        repeats=3,
        item=5,
        items=24,
        seconds_left=96,
        production="down",
    )
    line = "window: 5/24, measuring, C1, short-b1 2 of 3, 1.6 min left, production down"
    assert progress_line(state) == line
    assert progress_line(state, 20) == line[:19] + "…"
    assert progress_line(ProgressState(seconds_left=12.4)) == "window: 12 s left"
    assert progress_line(ProgressState(seconds_left=1500)) == "window: 25 min left"


def test_hostile_names_move_no_cursor() -> None:
    assert "\x1b" not in progress_line(ProgressState(cell="a\x1b[2Jb\r\nc"))


def test_seconds_left_follow_the_pace() -> None:
    items = [{"cell": "a"}, {"cell": "a"}, {"cell": "b"}, {"cell": "b"}]
    estimates = {"a": 2.0, "b": 10.0}
    assert seconds_left(items, estimates, 0) == 24
    assert seconds_left(items, estimates, 2, other_s=5) == 25
    # The first two took twice what was expected: so will the others.
    assert seconds_left(items, estimates, 2, spent_s=8) == 40
    assert seconds_left(items, estimates, 4, spent_s=48) == 0


@contextlib.contextmanager
def stderr_in_a_pipe() -> Iterator[int]:
    """Descriptor 2 writes to a pipe; yields the end to read from."""
    read, write = os.pipe()
    kept = os.dup(2)
    os.dup2(write, 2)
    os.close(write)
    try:
        yield read
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(read)


def test_the_duplicate_outlives_a_later_redirection() -> None:
    with stderr_in_a_pipe() as read:
        progress = Progress()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)
        progress.update(item=1, items=2)
        progress.close()
        assert os.read(read, 100) == b"window: 1/2\n"


def test_a_closed_stderr_is_no_error() -> None:
    code = (
        "import os; os.close(2)\n"
        "from pytest_dsv41.report.progress import Progress\n"
        "progress = Progress(); progress.update(item=1, items=2); progress.close(); print('fine')"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"fine\n"
