"""An acknowledged row survives a kill, a power failure, a failing disk; a batch is all or none."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.archive import (
    RowRefused,
    archive_append,
    archive_head,
    archive_rows,
    archive_spread,
)
from pytest_dsv41.archive.testing import (
    CrashDisk,
    FaultyDisk,
    crash_states,
    example_row,
    put_files,
)
from pytest_dsv41.archive.verify import verify_archive

NAME = "control-archive.jsonl"
Row = dict[str, Any]


def rows(first: int, count: int) -> list[Row]:
    return [example_row(i) for i in range(first, first + count)]


# -- a kill ----------------------------------------------------------------------------------------

APPENDER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from pytest_dsv41.archive import archive_append
    from pytest_dsv41.archive.testing import example_row

    archive, start, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    print("ready", flush=True)
    first = 0
    while True:
        batch = [example_row(i, start=start) for i in range(first, first + size)]
        archive_append(archive, batch)
        first += size
        print(first, flush=True)
    """
)


def killed_appender(archive: Path, start: str, size: int, lines: int, delay: float) -> int:
    """Run an appender, SIGKILL it after `lines` acknowledgements and a moment; return its rows."""
    process = subprocess.Popen(
        [sys.executable, "-c", APPENDER, str(archive), start, str(size)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        acknowledged = 0
        for _ in range(lines + 1):
            line = process.stdout.readline().strip()
            acknowledged = 0 if line == "ready" else int(line)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delay)
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            if line.endswith("\n"):
                acknowledged = int(line)
    process.wait()
    return acknowledged


def check_killed(archive: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    acknowledged: dict[str, int] = {}
    for kill in range(kills):
        start, size = f"K{kill}", chance.choice((1, 2, 50))
        acknowledged[start] = killed_appender(
            archive, start, size, chance.randrange(3), chance.random() * 0.02
        )
        found = verify_archive(archive) if archive.exists() else None
        assert found is None or found.ok, found.findings
        there = {
            name: {row["repeat"] for row in archive_rows(archive, {"start": name})}
            for name in (start, f"K{max(kill - 1, 0)}")
        }
        for name, repeats in there.items():
            assert repeats >= set(range(acknowledged[name])), name
        # A batch that was not acknowledged is there whole or not at all.
        assert len(there[start]) % size == 0
    head = archive_append(archive, rows(0, 1))
    assert head.rows == len(archive_rows(archive)) > sum(acknowledged.values())
    for start, count in acknowledged.items():
        there = {row["repeat"] for row in archive_rows(archive, {"start": start})}
        assert there >= set(range(count)), start
    assert verify_archive(archive, fields=True).ok


def test_sigkill_at_random_moments_loses_no_acknowledged_row(tmp_path: Path) -> None:
    check_killed(tmp_path / NAME, 12, seed=1)


@pytest.mark.slow
def test_sigkill_at_300_random_moments_loses_no_acknowledged_row(tmp_path: Path) -> None:
    check_killed(tmp_path / NAME, 300, seed=2)


# -- two at once -----------------------------------------------------------------------------------

WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from pytest_dsv41.archive import archive_append
    from pytest_dsv41.archive.testing import example_row

    archive, start, total, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    for first in range(0, total, size):
        archive_append(archive, [example_row(i, start=start) for i in range(first, first + size)])
    """
)


def write_at_once(archive: Path, total: int, size: int) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(archive), start, str(total), str(size)])
        for start in ("A", "B")
    ]
    for process in processes:
        assert process.wait(300) == 0


def test_two_processes_append_10000_rows_each_at_once(tmp_path: Path) -> None:
    archive = tmp_path / NAME
    write_at_once(archive, 10_000, 250)
    assert archive_head(archive).rows == 20_000
    assert verify_archive(archive).ok
    keys = {(row["start"], row["repeat"]) for row in archive_rows(archive)}
    assert keys == set(itertools.product("AB", range(10_000)))


@pytest.mark.slow
def test_two_processes_append_10000_rows_each_one_by_one(tmp_path: Path) -> None:
    archive = tmp_path / NAME
    write_at_once(archive, 10_000, 1)
    assert archive_head(archive).rows == 20_000
    assert verify_archive(archive, fields=True).ok


# -- a cut at every byte ---------------------------------------------------------------------------


def check_cuts(folder: Path, sizes: tuple[int, ...], step: int) -> None:
    whole = folder / "whole.jsonl"
    first = 0
    ends = []
    for size in sizes:
        archive_append(whole, rows(first, size))
        first += size
        ends.append(first)
    data = whole.read_bytes()
    lines = data.splitlines(keepends=True)
    borders = list(itertools.accumulate(map(len, lines), initial=0))
    archive = folder / NAME
    every = sorted({*range(0, len(data), step), *borders, *(b - 1 for b in borders[1:])})
    for cut in every:
        # The index of the file as it was stays in place: it must not bring anything back.
        archive.write_bytes(data[:cut])
        left = sum(border <= cut for border in borders) - 1
        # A row that lost just its newline is still whole.
        kept = left + (cut in (b - 1 for b in borders[1:]))
        found = verify_archive(archive)
        where_an_append_ended = cut == borders[kept] and kept in (0, *ends)
        assert found.ok == where_an_append_ended, cut
        if not found.ok:
            assert {finding.change for finding in found.findings} == {"truncated"}
        head = archive_append(archive, [example_row(900)], disk=CrashDisk(folder))
        assert head.rows == kept + 1
        assert archive_rows(archive) == [*rows(0, kept), example_row(900)]
        found = verify_archive(archive)
        assert found.ok == (kept in (0, *ends)), cut
        for aside in folder.glob(f"{NAME}.torn-*"):
            assert data.startswith(aside.read_bytes(), borders[left])
            aside.unlink()


def test_a_cut_at_any_byte_loses_no_row_before_it_and_is_told(tmp_path: Path) -> None:
    check_cuts(tmp_path, (5, 1, 6), step=61)


@pytest.mark.slow
def test_a_cut_at_every_byte_loses_no_row_before_it_and_is_told(tmp_path: Path) -> None:
    check_cuts(tmp_path, (20, 1, 29), step=1)


# -- a failing disk --------------------------------------------------------------------------------

FAULTS = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "Input/output error"),
    InterruptedError(errno.EINTR, "Interrupted system call"),
    KeyboardInterrupt(),
)


def prepare(archive: Path, scene: str) -> tuple[list[Row], list[Row]]:
    """Make the archive of a scene; return its rows and the batch to append."""
    if scene == "new":
        return [], rows(0, 3)
    archive_append(archive, rows(0, 4))
    if scene == "unfinished":
        line = b"\0" + archive.read_bytes()[1:300]
        archive.write_bytes(archive.read_bytes() + line)
    elif scene == "cut":
        archive_append(archive, [example_row(77)])
        archive.write_bytes(archive.read_bytes()[:-40])
    elif scene == "newline":
        archive.write_bytes(archive.read_bytes()[:-1])
    return rows(0, 4), rows(2, 4)


@pytest.mark.parametrize("scene", ["new", "old", "unfinished", "cut", "newline"])
@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda e: type(e).__name__ + str(getattr(e, "errno", ""))
)
def test_any_effect_that_fails_is_an_error_and_changes_no_row(
    tmp_path: Path, scene: str, fault: BaseException
) -> None:
    # A full disk takes half of what it is given.
    half = isinstance(fault, OSError) and fault.errno == errno.ENOSPC
    for n in itertools.count(1):
        folder = tmp_path / str(n)
        folder.mkdir()
        archive = folder / NAME
        old, batch = prepare(archive, scene)
        disk = FaultyDisk(n, fault, half=half)
        try:
            archive_append(archive, batch, disk=disk)
        except type(fault):
            assert len(disk.effects) >= n
        else:
            # Either the fault never came, or an undo that did not matter was all that failed.
            assert len(disk.effects) < n
            break
        assert archive_rows(archive) == old
        assert (
            not archive.exists()
            or verify_archive(archive).findings == ()
            or scene
            in (
                "cut",
                "newline",
            )
        )
        head = archive_append(archive, batch)
        assert archive_rows(archive) == [*old, *(row for row in batch if row not in old)]
        assert head.rows == len(archive_rows(archive))
    assert n > 3


CALLS = (
    "open",
    "pwrite",
    "write",
    "fsync",
    "fdatasync",
    "link",
    "rename",
    "unlink",
    "ftruncate",
    "pread",
)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_any_system_call_that_fails_is_an_error_or_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    real: Callable[..., Any] = getattr(os, name)
    for n in range(1, 40):
        folder = tmp_path / str(n)
        folder.mkdir()
        archive = folder / NAME
        archive_append(archive, rows(0, 4))
        calls = itertools.count(1)

        def failing(*args: Any, _n: int = n, _calls: Iterator[int] = calls, **kwargs: Any) -> Any:
            if next(_calls) == _n:
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            try:
                head = archive_append(archive, rows(2, 4))
            except OSError:
                head = None
        came = next(calls) > n
        there = archive_rows(archive)
        assert there in (rows(0, 4), rows(0, 6))
        assert head is None or (head == archive_head(archive) and there == rows(0, 6))
        assert verify_archive(archive).ok
        archive_append(archive, rows(2, 4))
        assert archive_rows(archive) == rows(0, 6)
        if not came:
            break
    assert n < 39


def test_writes_that_come_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data)[:7], at))
    archive_append(tmp_path / NAME, rows(0, 5))
    monkeypatch.undo()
    assert archive_rows(tmp_path / NAME) == rows(0, 5)
    assert verify_archive(tmp_path / NAME).ok


def test_a_write_that_makes_no_progress_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive_append(tmp_path / NAME, rows(0, 2))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match="no progress"):
        archive_append(tmp_path / NAME, rows(2, 2))
    monkeypatch.undo()
    assert archive_rows(tmp_path / NAME) == rows(0, 2)


def test_a_broken_index_costs_no_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    from pytest_dsv41.archive.index import Index

    archive = tmp_path / NAME
    archive_append(archive, rows(0, 2))

    def no_room(self: Index, *args: Any, **kwargs: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "bind", no_room)
        assert archive_append(archive, rows(2, 2)).rows == 4
    assert archive_rows(archive, {"cell": "short-b1"}) == rows(0, 4)
    assert archive_spread(archive, "short-b1", "ms_per_round").n == 4


# -- a power failure -------------------------------------------------------------------------------

# An append is its first row and its size; the last one repeats rows that are there.
OPERATIONS = ((0, 1), (10, 3), (20, 2), (10, 1))


def check_power_failures(tmp_path: Path, length: int) -> int:
    """Crash at every effect of every sequence of `length` appends; return how many states."""
    states = 0
    for place, sequence in enumerate(itertools.product(OPERATIONS, repeat=length)):
        folder = tmp_path / f"live{length}-{place}"
        folder.mkdir()
        disk = CrashDisk(folder)
        present: list[Row] = []
        for first, size in sequence[:-1]:
            archive_append(folder / NAME, rows(first, size), disk=disk)
            present += [row for row in rows(first, size) if row not in present]
        before = len(disk.log)
        archive_append(folder / NAME, rows(*sequence[-1]), disk=disk)
        after = present + [row for row in rows(*sequence[-1]) if row not in present]
        dead = tmp_path / "dead"
        dead.mkdir(exist_ok=True)
        for at in range(before, len(disk.log) + 1):
            for files in crash_states(disk.log, at):
                states += 1
                put_files(dead, files)
                there = archive_rows(dead / NAME)
                acknowledged = after if at == len(disk.log) else present
                assert there in (acknowledged, after), (sequence, at)
                head = archive_append(dead / NAME, rows(50, 2), disk=CrashDisk(dead))
                assert archive_rows(dead / NAME) == there + rows(50, 2)
                assert head.rows == len(there) + 2
                assert verify_archive(dead / NAME).ok
    return states


def test_a_power_failure_leaves_each_append_whole_or_absent(tmp_path: Path) -> None:
    assert check_power_failures(tmp_path, 1) + check_power_failures(tmp_path, 2) > 100


@pytest.mark.slow
@pytest.mark.parametrize("length", [3, 4])
def test_a_power_failure_in_up_to_four_appends(tmp_path: Path, length: int) -> None:
    assert check_power_failures(tmp_path, length) > 300


def test_a_power_failure_while_an_unfinished_end_is_settled(tmp_path: Path) -> None:
    for scene in ("unfinished", "cut", "newline"):
        folder = tmp_path / scene
        folder.mkdir()
        old, batch = prepare(folder / NAME, scene)
        disk = CrashDisk(folder)
        archive_append(folder / NAME, batch, disk=disk)
        after = archive_rows(folder / NAME)
        dead = tmp_path / f"{scene}-dead"
        dead.mkdir()
        for at in range(len(disk.log) + 1):
            for files in crash_states(disk.log, at):
                if NAME not in files:
                    assert at == 0
                    continue
                put_files(dead, files)
                there = archive_rows(dead / NAME)
                assert there == after if at == len(disk.log) else there in (old, after)
                archive_append(dead / NAME, batch, disk=CrashDisk(dead))
                assert archive_rows(dead / NAME) == after


def test_the_crash_layer_itself_drops_what_was_not_synced(tmp_path: Path) -> None:
    disk = CrashDisk(tmp_path)
    fd = disk.open(tmp_path / "f", create=True)
    disk.sync_folder(tmp_path)
    disk.write(fd, b"ab", 0)
    disk.sync(fd)
    disk.write(fd, b"cd", 2)
    disk.write(fd, b"X", 0)
    disk.close(fd)
    found = {files["f"] for files in crash_states(disk.log, len(disk.log))}
    assert found == {
        b"ab",
        b"abcd",
        b"Xbcd",
        b"Xb",
        b"abc",
        b"Xbc",
        b"ab\0d",
        b"Xb\0d",
        b"ab\0\0",
        b"Xb\0\0",
    }
    assert list(crash_states(disk.log, 0)) == [{}]


def test_a_refused_batch_leaves_no_file_behind(tmp_path: Path) -> None:
    with pytest.raises(RowRefused):
        archive_append(tmp_path / NAME, [example_row(0), example_row(1, commit="x")])
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_half_a_batch(tmp_path: Path) -> None:
    archive = tmp_path / NAME
    archive_append(archive, rows(0, 1))
    seen = []

    class Watching(CrashDisk):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            # As another process without the lock sees the file at this moment.
            copy = tmp_path / "copy.jsonl"
            copy.write_bytes(archive.read_bytes())
            seen.append(len(archive_rows(copy)))

    archive_append(archive, rows(1, 5), disk=Watching(tmp_path))
    assert seen == [1, 6]
    assert json.loads(archive.read_bytes().splitlines()[1])["batch"] == 5
