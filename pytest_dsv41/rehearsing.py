"""Rehearsals: any window file with the real code over two simulated hosts and the stub engine.

WIN2 "Rehearsal", level 1: a rehearsal catches faults of sequence, parsing, limits and refusals. It
measures nothing: every arm is the same stub, so the verdict means nothing. It has a campaign of its
own, and neither the window's machines nor its archive are touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from .errors import Dsv41Error, UsageError
from .hosts import CommandLog, Probe
from .hosts.fake import FAULTS, FakeWorld
from .lifecycle.lease import Lease
from .lifecycle.marker import marker_path
from .lifecycle.record import window_folder, windows
from .targets import TargetContext, spark_pair_target
from .text import one_line
from .window.spec import TargetTable, WindowSpec
from .window.summary import summary_path

__all__ = ["Fault", "Rehearsal", "rehearsed"]

HOSTS: Final = ("one", "two")
_STUB: Final = (
    "--round-ms", "0.3", "--prefill-ms", "0.2", "--prefill-ms-per-token", "0.00001",
    "--max-model-len", "1000000", "--kv-tokens", "4000000", "--max-running", "64",
)  # fmt: skip
_WATCH_S: Final = 1.0
_GUARD_S: Final = 0.5
_QUIET_LOOKS: Final = 6
_GUARD_LIMIT_S: Final = 600.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault at the beginning of one journalled step: `NAME@STEP` or `NAME/HOST@STEP`."""

    name: str
    host: str
    step: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read it.

        Raises:
            UsageError: no fault or host has that name, or there is no step.
        """
        what, at, step = text.partition("@")
        name, _, host = what.partition("/")
        valid = [fault for fault in FAULTS if fault not in ("enospc", "hang")]
        if not at or not step or name not in valid or host not in ("", *HOSTS):
            raise UsageError(
                f"--window-fault {one_line(text)}: write NAME@STEP or NAME/HOST@STEP; valid names: "
                f"{', '.join(valid)}; hosts: {', '.join(HOSTS)}; steps: as in journal.jsonl, "
                "such as hold, production-stop, start:K1, restore-start"
            )
        return cls(name, host or HOSTS[-1], step)

    def check(self, starts: Sequence[str]) -> None:
        """A start that it names must be one of the window's.

        Raises:
            UsageError: it is none of `starts`.
        """
        what, colon, start = self.step.partition(":")
        if colon and what in ("start", "stop", "quiet") and start not in starts:
            raise UsageError(
                f"--window-fault {self.name}@{one_line(self.step)}: the window has no such start; "
                f"valid: {', '.join(f'{what}:{name}' for name in starts)}"
            )


def rehearsed(spec: WindowSpec, folder: Path | None) -> WindowSpec:
    """The same window over simulated hosts, in `folder` or in a new one beside its results."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    base = folder or spec.out / f"REHEARSAL-{spec.lane}-{spec.name}-{stamp}"
    base = base.resolve()
    engine = str(spec.target.table.get("engine", "vllm"))
    dialect = "llamacpp" if engine == "llamacpp" else "vllm"
    command = ["dsv41", "stub", "--port", "{port}", "--engine", dialect, *_STUB]
    server = {"command": {HOSTS[0]: command}}
    table: dict[str, Any] = {
        "kind": "spark-pair",
        "engine": dialect,
        "model": "stub",
        "world": str(base / "world"),
        "hold": "/hold/HOLD",
        "clock": 2150,
        "hosts": {host: {} for host in HOSTS},
        "production": {"port": 8000, **server},
        "experiment": {"port": 18001, **server},
    }
    limits = spec.limits.model_copy(update={"watch_s": min(spec.limits.watch_s, _WATCH_S)})
    target = TargetTable(kind="spark-pair", table=table, where=spec.target.where)
    # The stub knows nothing of a real server's arguments and environment.
    arms = tuple(arm.model_copy(update={"args": (), "env": {}}) for arm in spec.arms)
    return spec.model_copy(
        update={
            "out": base,
            "campaign": base,
            "target": target,
            "limits": limits,
            "arms": arms,
        }
    )


class Rehearsal:
    """The simulated hosts under one session: production serves there, and faults strike there."""

    def __init__(self, spec: WindowSpec, faults: tuple[Fault, ...]) -> None:
        self._table = spec.target.table
        self._folder = Path(self._table["world"])
        self._faults = list(faults)
        self._spec = spec
        self.begin_world()

    def begin_world(self) -> None:
        """Make the world, or take the one of an earlier session of the same rehearsal."""
        if not self._folder.exists():
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            # The seed also chooses the hosts' loopback addresses: two rehearsals may run at once.
            seed = zlib.crc32(str(self._folder).encode())
            FakeWorld.create(self._folder, HOSTS, seed=seed, servers="real", kills="signal")
        self.world = FakeWorld(self._folder)

    def begin(self) -> None:
        """Let production serve, unless a chain of this rehearsal has left it down."""
        campaign = self._spec.campaign
        self._guard(campaign)
        if marker_path(campaign).exists():
            return
        limits = {k: float(v) for k, v in self._spec.limits.model_dump().items() if v is not None}
        context = TargetContext(
            window_id="rehearsal",
            folder=self._folder,
            campaign=campaign,
            base=self._folder,
            seed=0,
            limits={"window_s": 600.0, **limits},
            state={},
            variables={},
            log=CommandLog(self._folder / "cmd"),
            pause=lambda _seconds: None,
            epoch=Lease(campaign).newest(),
        )
        target = spark_pair_target(self._table, context)
        if target.probe().state is not Probe.UP:
            target.start_production()

    def _guard(self, campaign: Path) -> None:
        """Whoever is killed, the simulated hosts' real servers end when nobody works there."""
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pytest_dsv41.rehearsing",
                str(self._folder),
                str(campaign),
                str(os.getpid()),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ).returncode = 0  # it is meant to outlive this process

    def step(self, name: str, event: str) -> None:
        """Strike what is due at this step."""
        if event != "begin":
            return
        for fault in [fault for fault in self._faults if fault.step == name]:
            self._faults.remove(fault)
            self.world.inject(fault.name, fault.host)

    @property
    def not_struck(self) -> list[str]:
        """The faults whose step never came."""
        return [f"{fault.name}/{fault.host}@{fault.step}" for fault in self._faults]

    def end(self) -> None:
        """End every real server; the world's files stay to be looked at.

        A chain has left nothing that serves, and its placeholders are the next window's.
        """
        if marker_path(self._spec.campaign).exists():
            return
        with contextlib.suppress(Dsv41Error, OSError):
            self.world.shutdown()


def guard(folder: Path, campaign: Path, parent: int) -> None:
    """End the world's servers once `parent` is gone and nobody works there or is about to.

    A killed window's keeper may take a while to begin: its window has no summary until it is done.
    """
    with contextlib.suppress(psutil.Error):
        psutil.Process(parent).wait()
    quiet, limit = 0, time.monotonic() + _GUARD_LIMIT_S
    while quiet < _QUIET_LOOKS and time.monotonic() < limit:
        time.sleep(_GUARD_S)
        folders = (window_folder(campaign, name) for name in windows(campaign))
        open_still = any(folder and not summary_path(folder).exists() for folder in folders)
        working = open_still or Lease(campaign).held_by() is not None
        quiet = 0 if working else quiet + 1
    if marker_path(campaign).exists():
        return
    with contextlib.suppress(Dsv41Error, OSError):
        FakeWorld(folder).shutdown()


if __name__ == "__main__":
    guard(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
