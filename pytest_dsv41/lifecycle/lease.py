"""The coordinator lease: one mutating process a campaign, with an epoch that only grows."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any, Final

import psutil

from ..durable import FileLock, dump_json, parse_json, read_json_lines, sweep, write_atomic
from ..errors import RefusedByWorld
from ..hosts.local import boottime
from .journal import utc_now

__all__ = ["Lease", "LeaseFact"]

_LARGEST: Final = 2**53


@dataclasses.dataclass(frozen=True)
class LeaseFact:
    """Who holds the lease now, as an observer reads it. `age_s` and `overdue_s` in seconds."""

    owner: str
    pid: int
    age_s: float
    overdue_s: float
    """How long past its deadline; negative while there is time."""

    def __str__(self) -> str:
        return f"{self.owner} (pid {self.pid}, for {self.age_s:.0f} s)"


class Lease:
    """`lease.lock` is the lock, `lease.json` says whose it is; process exit frees it."""

    def __init__(self, campaign: Path) -> None:
        self._lock = FileLock(campaign / "lease.lock")
        self._path = campaign / "lease.json"
        self.epoch = 0

    def acquire(self, owner: str, seconds: float, *, wait_s: float = 0.25, above: int = 0) -> None:
        """Take the lease for `owner` until `seconds` from now, with the next epoch.

        `above`: an epoch known to be used, where the campaign's own count was lost.

        Raises:
            RefusedByWorld: somebody else holds it; names the owner and for how long.
        """
        deadline = time.monotonic() + wait_s
        # An observer's look at the lock lasts microseconds and must not refuse a window.
        while not self._lock.acquire():
            if time.monotonic() > deadline:
                held = self.held_by()
                raise RefusedByWorld(
                    "another command works on this campaign: "
                    + (str(held) if held else "it has not said its name yet")
                )
            time.sleep(0.01)
        sweep(self._path.parent)
        self.epoch = max(self.newest(), self._told(), above) + 1
        self._write(owner, seconds)

    def renew(self, owner: str, seconds: float) -> None:
        """Move the deadline: the close has its own."""
        self.check()
        self._write(owner, seconds)

    def _write(self, owner: str, seconds: float) -> None:
        write_atomic(
            self._path,
            dump_json(
                {
                    "schema": "dsv41-lease-v1",
                    "epoch": self.epoch,
                    "owner": owner,
                    "pid": os.getpid(),
                    "utc": utc_now(),
                    "since": boottime(),
                    "deadline": boottime() + seconds,
                }
            )
            + "\n",
        )

    def check(self) -> None:
        """Refuse to act for a lease that somebody has taken over (SAFETY I8).

        Raises:
            RefusedByWorld: a newer epoch exists.
        """
        now = self.newest()
        if now != self.epoch:
            raise RefusedByWorld(
                f"lease lost: epoch {now} is at work, this process has {self.epoch}"
            )

    def newest(self) -> int:
        """The newest epoch that anybody has had; 0 before the first."""
        return int(_number(self._read(), "epoch", 0))

    def release(self) -> None:
        """Give it back; the epoch stays."""
        self._lock.release()

    def held_by(self) -> LeaseFact | None:
        """Who else holds it now, or None; reads only."""
        if not self._lock.held_elsewhere():
            return None
        record = self._read()
        pid = int(_number(record, "pid", 0))
        owner = str(record.get("owner", "unknown"))
        with contextlib.suppress(psutil.Error):
            if pid and not psutil.pid_exists(pid):
                owner = f"unknown, after {owner}"
        now = boottime()
        return LeaseFact(
            owner,
            pid,
            now - _number(record, "since", now),
            now - _number(record, "deadline", now),
        )

    def _told(self) -> int:
        """The newest epoch that the campaign's other records tell: a lease that was lost or cut
        must not begin again at 1, which every host would refuse.
        """
        campaign = self._path.parent
        told = [_record(campaign / "intent.json"), _record(campaign / "marker.json")]
        told += map(_record, (campaign / "windows").glob("*.json"))
        if not self.newest():
            # A recovery in a window's own folder is told by its journal alone.
            for path in map(Path, {str(record.get("folder", "")) for record in told}):
                with contextlib.suppress(OSError, ValueError):
                    told += read_json_lines(path / "journal.jsonl")
        return max((int(_number(record, "epoch", 0)) for record in told), default=0)

    def _read(self) -> dict[str, Any]:
        return _record(self._path)


def _record(path: Path) -> dict[str, Any]:
    """A record as far as it can be read; a damaged one must not stop a close or a look."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _number(record: dict[str, Any], key: str, default: float) -> float:
    """A number of the record, neither infinite nor absurd."""
    value = record.get(key, default)
    usable = isinstance(value, (int, float)) and -_LARGEST < value < _LARGEST
    return value if usable else default
