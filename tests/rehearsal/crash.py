"""Breaking a flow at its n-th act: a kill, a full disk, one write without space.

An act is anything that outlives the process: a write, a link, a rename or a removal of a file, and
every change of a simulated host. After a kill nothing more happens: whatever the dead process would
still try raises, however broadly it is caught.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pair import FIRST, LAST, Killed, Pair

from pytest_dsv41.archive import archive_rows
from pytest_dsv41.cli import main
from pytest_dsv41.durable import FileLock, read_json_lines
from pytest_dsv41.errors import CommandFailed, Dsv41Error
from pytest_dsv41.hosts.fake import FakeHost
from pytest_dsv41.lifecycle.abort import abort, new_abort_folder
from pytest_dsv41.lifecycle.finish import ARCHIVE_NAME
from pytest_dsv41.lifecycle.gate import end_by_hand, gate
from pytest_dsv41.lifecycle.journal import Journal
from pytest_dsv41.lifecycle.lease import Lease
from pytest_dsv41.lifecycle.observer import Answer
from pytest_dsv41.lifecycle.recover import Status, look, recover_campaign, recover_window
from pytest_dsv41.lifecycle.session import SINGLE, WindowRun
from pytest_dsv41.lifecycle.watchdog import pass_once
from pytest_dsv41.window.summary import read_summary

Flow = Callable[[Pair], WindowRun | None]


class Breaker:
    """Counts acts and breaks at one of them."""

    def __init__(self, world: Path) -> None:
        self.world = world
        self.count = 0
        self.at = 0
        self.how = ""
        self.broken = False
        self.names: list[str] = []
        self.locks: list[FileLock] = []

    def process_exit(self) -> None:
        """The kernel frees what a dead process held."""
        for lock in self.locks:
            lock.release()
        self.locks.clear()

    def arm(self, how: str, at: int) -> None:
        """Break the `at`-th act from now: "kill", "full" (from then on) or "enospc" (that one)."""
        self.count, self.at, self.how, self.broken, self.names = 0, at, how, False, []

    def disarm(self) -> None:
        self.arm("", 0)

    def counts(self, name: str, path: str) -> bool:
        """Whether a change of this file is an act: the simulation and the commands' logs are not.

        A log of a command is nobody's fact, and a name without a file is gone before it is removed.
        """
        if not path.startswith(str(self.world.parent)) or path.startswith(str(self.world)):
            return False
        return "/cmd/" not in path and not (name == "unlink" and path.endswith(".tmp"))

    def act(self, name: str, *, disk: bool = False) -> None:
        if not self.how:
            return
        self.count += 1
        self.names.append(name)
        here = self.count == self.at
        after = 0 < self.at <= self.count
        self.broken = self.broken or here
        if self.how == "kill" and after:
            raise Killed
        if disk and ((self.how == "full" and after) or (self.how == "enospc" and here)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def breaking(world: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Breaker]:
    """Put the breaker below every durable file and every simulated host."""
    breaker = Breaker(world)

    def file(name: str, *, disk: bool) -> None:
        real = getattr(os, name)

        def broken(*words: Any, **options: Any) -> Any:
            if breaker.how:
                where = words[0]
                if isinstance(where, int):
                    where = Path(f"/proc/self/fd/{where}").readlink()
                if breaker.counts(name, os.fspath(where)):
                    breaker.act(f"{name} {Path(where).name}", disk=disk)
            return real(*words, **options)

        monkeypatch.setattr(os, name, broken)

    for name in ("write", "pwrite", "link"):
        file(name, disk=True)
    for name in ("rename", "unlink"):
        file(name, disk=False)
    act = FakeHost._act

    def host(self: FakeHost, what: str, *words: Any, **options: Any) -> Any:
        reads = what.startswith(("read ", "port ", "identity", "processes", "list"))
        if not reads:
            writes = what.startswith(("create ", "write "))
            try:
                breaker.act(f"{self.name}: {what}", disk=writes)
            except OSError as error:
                # What a host says of its own full disk.
                raise CommandFailed(f"{what}: {error.strerror}", error.errno or 1) from error
        elif breaker.broken and breaker.how == "kill":
            raise Killed
        return act(self, what, *words, **options)

    monkeypatch.setattr(FakeHost, "_act", host)
    acquire = FileLock.acquire

    def taken(self: FileLock, *, blocking: bool = False) -> bool:
        breaker.locks.append(self)
        return acquire(self, blocking=blocking)

    monkeypatch.setattr(FileLock, "acquire", taken)
    yield breaker


# -- flows -----------------------------------------------------------------------------------------


def _driven(pair: Pair, chain: Any, **options: Any) -> WindowRun:
    run = pair.window(chain)
    pair.current = run
    pair.drive(run, **options)
    return run


def single(pair: Pair) -> WindowRun:
    """A window outside a chain."""
    return _driven(pair, SINGLE)


def chained_end(pair: Pair) -> WindowRun:
    """The chain's first window."""
    return _driven(pair, FIRST)


def chained_start(pair: Pair) -> WindowRun:
    """A window in the middle: production is down before and after it."""
    return _driven(pair, FIRST)


def last(pair: Pair) -> WindowRun:
    """The chain's last window: restore, watch, end."""
    return _driven(pair, LAST)


def stopped(pair: Pair) -> WindowRun:
    """A chained window that is stopped in its middle."""
    return _driven(pair, FIRST, items=1)


def refused(pair: Pair) -> WindowRun:
    """A chained window that may not begin: it ends its chain."""
    return _driven(pair, FIRST)


def recovery(pair: Pair) -> None:
    """A gate that refuses, and the one automatic recovery."""
    pair.current = None
    gate(pair.campaign, pair.root / "nothing", wait_s=0.0)


def end(pair: Pair) -> None:
    """Production is up under a marker: verified, watched, ended by hand."""
    pair.current = None
    end_by_hand(pair.campaign)


def before_nothing(pair: Pair) -> None:
    """Production serves."""


def before_chained(pair: Pair) -> None:
    """A chain has left production down."""
    pair.run(FIRST)


def before_refused(pair: Pair) -> None:
    """As `before_chained`, and a host was restarted in the gap."""
    pair.run(FIRST)
    pair.world.inject("reboot", "beta")


def before_end(pair: Pair) -> None:
    """As `before_chained`, and somebody has started production."""
    pair.run(FIRST)
    pair.target().start_production()


FLOWS: dict[str, tuple[Callable[[Pair], None], Flow]] = {
    "single": (before_nothing, single),
    "chained-end": (before_nothing, chained_end),
    "chained-start": (before_chained, chained_start),
    "last": (before_chained, last),
    "stopped": (before_chained, stopped),
    "refused": (before_refused, refused),
    "recovery": (before_chained, recovery),
    "end": (before_end, end),
}


class Stage:
    """A flow's beginning, put back for every break of it."""

    def __init__(self, pair: Pair, name: str) -> None:
        before, self.flow = FLOWS[name]
        before(pair)
        self.pair = pair
        self.number = pair.number
        self.kept = pair.root.with_name(pair.root.name + "-kept")
        shutil.copytree(pair.root, self.kept)

    def reset(self) -> None:
        shutil.rmtree(self.pair.root)
        shutil.copytree(self.kept, self.pair.root)
        self.pair.number = self.number
        self.pair.current = None
        self.pair.world = type(self.pair.world)(self.pair.world.folder)

    def run(self) -> None:
        """Run the flow; whatever ends it, its process is gone afterwards."""
        with contextlib.suppress(Killed, Dsv41Error, OSError):
            self.flow(self.pair)


# -- afterwards ------------------------------------------------------------------------------------


def keeper_acts(pair: Pair) -> None:
    """What the window's keeper does when its process is gone without a summary."""
    run = pair.current
    if run is None or not (run.folder / "journal.jsonl").exists():
        return
    if not Journal(run.folder).ended("keeper") or run.summary is not None:
        return
    recover_window(run.folder, stopped="the measuring process died")


def never_clean_while_down(pair: Pair, status: Status) -> None:
    """I1: production that is down by us is never called clean, and somebody has to look."""
    if all(pair.serving().values()):
        return
    answer = status.observation.answer
    assert answer is not Answer.CLEAN, status.to_json()
    if answer is Answer.CHAIN_WAITING:
        assert status.marker is not None
        assert not status.marker.overdue
    else:
        assert status.command, status.to_json()


def follow(pair: Pair, status: Status) -> None:
    """Do what `dsv41 status` says, as a person or the watchdog would."""
    command = status.command
    campaign = pair.campaign
    if status.observation.answer is Answer.RECOVER:
        pass_once(campaign)
    elif command.startswith("dsv41 recover"):
        recover_campaign(campaign)
    elif command.startswith("dsv41 chain end"):
        end_by_hand(campaign)
    elif command == "start production by hand":
        # A host was restarted while production served: no window has to do with it.
        pair.target().start_production()
    elif command.startswith("dsv41 chain abort --again"):
        lease = Lease(campaign)
        lease.acquire("by hand", 60.0)
        try:
            abort(campaign, new_abort_folder(campaign), lease=lease, again=True)
        finally:
            lease.release()
    else:
        raise AssertionError(f"nobody can follow this: {status.to_json()}")


def settle(pair: Pair) -> None:
    """Follow the facts until production is back and nothing is left, or a chain waits in order."""
    for _ in range(12):
        status = look(pair.campaign)
        never_clean_while_down(pair, status)
        if status.observation.answer is Answer.CLEAN:
            if status.unfinished:
                recover_campaign(pair.campaign)
                continue
            if status.leftovers:
                # One owner after the other: each chain has its own.
                owner = status.leftovers[0].owner
                assert status.command.startswith(f"dsv41 chain end --owner {owner}")
                end_by_hand(pair.campaign, owner=owner)
                continue
            pair.nothing_is_left()
            break
        if status.observation.answer is Answer.CHAIN_WAITING:
            if all(pair.serving().values()):
                # Somebody had started production: a person ends the chain.
                end_by_hand(pair.campaign)
                continue
            if status.unfinished:
                # A window of the chain that died before its HOLD: it ends the chain.
                recover_campaign(pair.campaign)
                continue
            assert pair.holds() == {"alpha": None, "beta": None}
            assert status.marker is not None
            owner = status.marker.placeholder_owner
            assert pair.owners() == {"alpha": [owner], "beta": [owner]}
            pair.run(LAST)
            pair.nothing_is_left()
            break
        follow(pair, status)
    else:
        raise AssertionError(f"it never settles: {look(pair.campaign).to_json()}")
    every_finished_row_is_archived_once(pair)


def every_finished_row_is_archived_once(pair: Pair) -> None:
    """Each window's measured control values are in the archive once, and nothing else is."""
    expected: set[tuple[str, str, str, int]] = set()
    for folder in pair.root.glob("w[0-9]*"):
        summary = read_summary(folder) if (folder / "summary.json").exists() else None
        if summary is not None and any("dsv41 archive append" in x for x in summary.alerts):
            # The archive itself found no space, and the alert names the command.
            assert main(["archive", "append", str(folder)]) == 0
        for value in read_json_lines(folder / "values.jsonl"):
            if value["arm"] == "control":
                window = f"L-w-W-{int(folder.name[1:]):04d}"
                expected |= {
                    (window, value["start"], metric, value["repeat"]) for metric in value["values"]
                }
    path = pair.campaign / ARCHIVE_NAME
    rows = [
        (row["window"], row["start"], row["metric"], row["repeat"])
        for row in (archive_rows(path) if path.exists() else ())
    ]
    assert len(rows) == len(set(rows))
    assert set(rows) == expected
