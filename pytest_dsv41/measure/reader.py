"""Reading streams in a process of its own, which no pause of the measuring process holds up.

Packets that queue unread are merged and lose their times. A process that does nothing but read is
not stopped by a garbage collection, a thread that keeps the interpreter, or a SIGSTOP elsewhere.
It is started per group, gets the requests over a pipe, and gives everything back at the end; when
its parent dies or asks it to stop, it ends and its sockets close.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.measure.wire import Call, Exchange, Failure, Finished, Loop
from pytest_dsv41.text import one_line

__all__ = ["main", "read_elsewhere"]

_LOOK_S = 0.05
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from pytest_dsv41.measure.reader import main; main()"
)


def read_elsewhere(
    calls: Sequence[Call],
    *,
    unix: str | None,
    deadline_ns: int,
    stop: threading.Event | None,
    keep_bytes: bool,
) -> list[Finished]:
    """Run `calls` as one group in a new process and return what it saw.

    Raises:
        MeasurementFailed: kinds `connect`, `stopped`, `reader` (the process itself failed).
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    got: list[bytes] = []
    collector = threading.Thread(target=lambda: got.append(_all(process)), daemon=True)
    collector.start()
    try:
        job = pickle.dumps((list(calls), unix, deadline_ns, keep_bytes))
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(len(job).to_bytes(8, "big") + job)
            process.stdin.flush()
        while collector.is_alive():
            collector.join(_LOOK_S)
            if stop is not None and stop.is_set():
                raise MeasurementFailed("stopped", "the measurement was stopped")
            if time.monotonic_ns() > deadline_ns + 5_000_000_000:
                raise MeasurementFailed("deadline", "not finished at the deadline")
    finally:
        process.kill()
        process.wait()
        collector.join()
        # The pipe's last bytes may belong to a reader that is gone.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
    if not got[0]:
        raise MeasurementFailed("reader", "the reader process ended without a result")
    # Our own child wrote this, from bytes that it did not interpret.
    result: list[Finished] | Failure = pickle.loads(got[0])  # noqa: S301
    if isinstance(result, Failure):
        raise MeasurementFailed(result.kind, result.message)
    return result


def _all(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.read()


def main() -> None:
    """Take a job from stdin, run it, write the outcome to stdout; end when stdin does."""
    size = int.from_bytes(sys.stdin.buffer.read(8), "big")
    # Our own parent wrote this.
    calls, unix, deadline_ns, keep_bytes = pickle.loads(  # noqa: S301
        sys.stdin.buffer.read(size)
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome = _run(calls, unix, deadline_ns, keep_bytes)
    sys.stdout.buffer.write(pickle.dumps(outcome))
    sys.stdout.buffer.flush()
    os._exit(0)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


def _run(
    calls: Sequence[Call], unix: str | None, deadline_ns: int, keep_bytes: bool
) -> list[Finished] | Failure:
    exchanges: list[Exchange] = []
    with Loop() as loop:
        try:
            for call in calls:
                exchange = Exchange(call, loop.connect(call.url, deadline_ns, unix=unix))
                exchange.keep_raw = keep_bytes
                exchanges.append(exchange)
        except OSError as error:
            return Failure("connect", f"no connection: {one_line(str(error))}")
        loop.run(exchanges, deadline_ns=deadline_ns, together=True)
    return [exchange.result() for exchange in exchanges]
