"""A pytest plugin for the tests: does something to the running session at a named step.

FAULT_AT is `<step>:<event>` of the journal (`start:K1:begin`), or `cell:<item id>` for the moment
before the item's call. FAULT_DO is a signal's name, sent to this process; a name twice, with a
comma, sends it again 0.2 s later; or `raise`, `exit`, `halt`, `keeper` (kills the
keeper), `full` (from now on this process finds the disk full).
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest

from pytest_dsv41 import durable

AT = os.environ.get("FAULT_AT", "")
DO = os.environ.get("FAULT_DO", "")
_done: list[str] = []


def _act() -> None:
    if _done:
        return
    _done.append(AT)
    if DO == "raise":
        raise RuntimeError("raised by the test")
    if DO == "exit":
        pytest.exit("left by the test", returncode=7)
    if DO == "keeper":
        for child in psutil.Process().children():
            if "keeper" in child.cmdline():
                child.kill()
        return
    if DO == "full":

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        durable._write_all = full
        return
    if DO == "halt":
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    first, *again = DO.split(",")
    for name in again:
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.Signals[name]))
        timer.daemon = True
        timer.start()
    os.kill(os.getpid(), signal.Signals[first])


def pytest_dsv41_step(name: str, event: str) -> None:
    if f"{name}:{event}" == AT:
        _act()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    callspec = getattr(item, "callspec", None)
    if callspec is not None and f"cell:{callspec.id}" == AT:
        _act()
    return (yield)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    if AT == "sessionfinish":
        raise RuntimeError("a hostile plugin")
