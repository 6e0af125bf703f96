"""Ends a runner's process before or after its n-th durable act, as kill -9 does.

`python payload_kills.py WORDS…` reads numbers from standard input. For each it runs `dsv41 WORDS`
in a fork of itself, of which the n-th act (counted from 1) does not come back, and prints how that
ended: -9, or 77 where fewer acts were made and everything was done.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from pytest_dsv41 import durable
from pytest_dsv41.cli import main
from pytest_dsv41.payload import gates, step
from pytest_dsv41.quality import sealed


def kill_at(number: int) -> list[int]:
    left = [number]

    def counted(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            value = real(*args, **more)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return value

        return call

    for module, names in (
        (step, ("append_json_line", "remove", "write_sealed")),
        (sealed, ("create_exclusive",)),
        (gates, ("copy_scripts",)),
        (durable.os, ("link", "fsync")),
    ):
        for name in names:
            setattr(module, name, counted(getattr(module, name)))
    return left


def main_loop(words: list[str]) -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            remaining = kill_at(int(line))
            code = main(words)
            sys.stdout.flush()
            os._exit(77 if remaining[0] > 0 and code == 0 else code)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


class Killer:
    """The driver as a process of its own; `run` is one try."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, number: int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ended "):
                return int(line.split()[1])
        raise AssertionError("the driver has ended")

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.communicate()


if __name__ == "__main__":
    main_loop(sys.argv[1:])
