"""The coordinator lease: one mutating process a campaign, with an epoch that only grows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import psutil

from ..durable import FileLock, dump_json, write_atomic
from ..errors import RefusedByWorld
from ..hosts.local import boottime
from .journal import utc_now

__all__ = ["Lease", "LeaseFact"]


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
        self.epoch = max(self.newest(), above) + 1
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

    def _read(self) -> dict[str, Any]:
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}


def _number(record: dict[str, Any], key: str, default: float) -> float:
    """A number of the record; a damaged lease must not stop a close or a look."""
    value = record.get(key, default)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else default
