"""Reading streams in a process of its own, which no pause of the measuring process holds up.

Packets that queue unread are merged and lose their times. A process that does nothing but read is
not stopped by a garbage collection, a thread that keeps the interpreter, or a SIGSTOP elsewhere;
and where it may (root, CAP_SYS_NICE) it reads before everything else that the machine does.

It lives as long as its `Reader`, gets each group as a line of JSON, and gives back what it saw as
one. When its parent dies or gives up on a group, it ends and its sockets close.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pytest_dsv41.errors import MeasurementFailed
from pytest_dsv41.measure.progress import Progress, decodes, how_far
from pytest_dsv41.measure.wire import Call, Exchange, Failure, Finished, Limits, Loop, Read
from pytest_dsv41.text import error_line

__all__ = ["Reader", "main"]

_LOOK_S: Final = 0.05
_GRACE_NS: Final = 5_000_000_000
_START: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from pytest_dsv41.measure.reader import main; main()"
)


class Reader:
    """The process, started by the first group and kept for the next ones. Not for two threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def read(
        self,
        calls: Sequence[Call],
        *,
        unix: str | None,
        deadline_ns: int,
        stop: threading.Event | None,
        late: Sequence[bool] = (),
        keep_bytes: bool = False,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[Finished]:
        """Run `calls` as one group and return what was seen of each.

        Those marked `late` are sent once all the others decode.

        Raises:
            MeasurementFailed: kinds `connect`, `stopped`, `deadline`, `reader` (the process
                itself failed).
        """
        job = {
            "calls": [_call_out(call) for call in calls],
            "late": list(late or [False] * len(calls)),
            "unix": unix,
            "deadline_ns": deadline_ns,
            "keep_bytes": keep_bytes,
            "progress": progress is not None,
        }
        try:
            self._send(job)
            return self._result(deadline_ns, stop, progress)
        except BaseException:
            # Whatever it is still doing belongs to a group that is over.
            self.close()
            raise

    def close(self) -> None:
        """End the process, with the streams that it may still read."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            # The pipe's last bytes may belong to a reader that is gone.
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, job: Mapping[str, Any]) -> None:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = process = subprocess.Popen(
                [sys.executable, "-c", _START, str(Path(__file__).parents[2])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            self._lines = queue.SimpleQueue()
            threading.Thread(target=_collect, args=(process, self._lines), daemon=True).start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def _result(
        self,
        deadline_ns: int,
        stop: threading.Event | None,
        progress: Callable[[Progress], None] | None,
    ) -> list[Finished]:
        while True:
            if stop is not None and stop.is_set():
                raise MeasurementFailed("stopped", "the measurement was stopped")
            if time.monotonic_ns() > deadline_ns + _GRACE_NS:
                raise MeasurementFailed("deadline", "not finished at the deadline")
            try:
                line = self._lines.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if not line:
                raise MeasurementFailed("reader", "the reader process ended without a result")
            told = json.loads(line)
            if "progress" in told:
                if progress is not None:
                    progress(Progress(**told["progress"]))
            elif "failure" in told:
                raise MeasurementFailed(*told["failure"])
            else:
                return [_finished_in(row) for row in told["finished"]]


def _collect(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Hand over every line, and an empty one at the end."""
    assert process.stdout is not None
    with contextlib.suppress(OSError, ValueError):
        while line := process.stdout.readline():
            lines.put(line)
    lines.put(b"")


# -- what goes over the pipe -----------------------------------------------------------------------


def _call_out(call: Call) -> dict[str, Any]:
    return {**asdict(call), "headers": dict(call.headers), "body": _text(call.body)}


def _call_in(row: Mapping[str, Any]) -> Call:
    limits = Limits(**row["limits"])
    return Call(**{**row, "body": base64.b64decode(row["body"]), "limits": limits})


def _finished_out(one: Finished) -> dict[str, Any]:
    return {
        "status": one.status,
        "headers": dict(one.headers),
        "failure": one.failure,
        "write_start_ns": one.write_start_ns,
        "write_end_ns": one.write_end_ns,
        "end_ns": one.end_ns,
        "offset_ns": one.offset_ns,
        "reads": one.reads,
        "pieces": [(index, _text(piece)) for index, piece in one.pieces],
        "raw": [_text(piece) for piece in one.raw],
    }


def _finished_in(row: Mapping[str, Any]) -> Finished:
    return Finished(
        **{
            **row,
            "failure": Failure(*row["failure"]) if row["failure"] else None,
            "reads": [Read(*read) for read in row["reads"]],
            "pieces": [(index, base64.b64decode(piece)) for index, piece in row["pieces"]],
            "raw": [base64.b64decode(piece) for piece in row["raw"]],
        }
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# -- the process -----------------------------------------------------------------------------------


def main() -> None:
    """Run every group that comes over stdin, until stdin ends."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    gc.disable()
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        outcome = _run(json.loads(jobs.get()))
        sys.stdout.buffer.write(json.dumps(outcome).encode() + b"\n")
        sys.stdout.buffer.flush()
        gc.collect()


def _listen(jobs: queue.SimpleQueue[bytes]) -> None:
    """Take the parent's lines; end with it, whatever is being read."""
    for line in sys.stdin.buffer:
        jobs.put(line)
    os._exit(0)


def _run(job: Mapping[str, Any]) -> dict[str, Any]:
    exchanges: list[Exchange] = []
    deadline_ns = job["deadline_ns"]
    with Loop() as loop:
        try:
            for call in map(_call_in, job["calls"]):
                exchange = Exchange(call, loop.connect(call.url, deadline_ns, unix=job["unix"]))
                exchange.keep_raw = job["keep_bytes"]
                exchanges.append(exchange)
        except OSError as error:
            return {"failure": Failure("connect", f"no connection: {error_line(error)}")}
        early = [one for one, late in zip(exchanges, job["late"], strict=True) if not late]
        started = time.monotonic_ns()
        loop.run(
            exchanges,
            deadline_ns=deadline_ns,
            gates={
                index: lambda: all(map(decodes, early))
                for index, late in enumerate(job["late"])
                if late
            },
            tick=(lambda: _tell(how_far(exchanges, started))) if job["progress"] else None,
            together=True,
        )
        for exchange in exchanges:
            exchange.connection.close()
    return {"finished": [_finished_out(exchange.result()) for exchange in exchanges]}


def _tell(now: Progress) -> None:
    """Say how far it is, unless the parent has stopped listening: reading must not wait for it."""
    if select.select((), (sys.stdout,), (), 0)[1]:
        sys.stdout.buffer.write(json.dumps({"progress": asdict(now)}).encode() + b"\n")
        sys.stdout.buffer.flush()
