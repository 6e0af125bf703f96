"""A long step's folder: one runner at a time, a journal as it goes, a receipt as its last act.

`receipt.json` exists only when everything of the step is done: the old one is taken away before
anything else happens, the new one is written, in one piece and sealed, after the last check. A
kill at any point leaves a folder without a receipt, and a later run with `resume` trusts a receipt
only if it is whole, is that of this step, and every input still has the bytes it names.

The lock is inherited by the commands a step starts: a command that outlives a killed runner still
holds it, so that no second one is started beside it.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from pytest_dsv41 import __version__
from pytest_dsv41.durable import FileLock, append_json_line, read_json_lines, remove
from pytest_dsv41.errors import Dsv41Error, RefusedByWorld, UsageError, WindowStopped
from pytest_dsv41.payload.hashing import hash_file, identity
from pytest_dsv41.quality.sealed import read_sealed, write_sealed
from pytest_dsv41.text import one_line

__all__ = ["RECEIPT", "Step", "Untrusted", "refuse_foreign"]

RECEIPT: Final = "dsv41-receipt-v1"
"""The schema of `receipt.json`."""


_OWN: Final = frozenset(("receipt.json", "journal.jsonl", "output.log", "scripts", "lock"))
_LEFT: Final = re.compile(r"runner-\d+|\..+\.tmp")


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that is no step's: a run takes away what an earlier one has left there.

    Raises:
        UsageError: it holds what no run has put there.
    """
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    strange = sorted(name for name in names - _OWN if _LEFT.fullmatch(name) is None)
    if not strange and "lock" not in names:
        # Every run has made its lock first.
        strange = sorted(names & _OWN)
    if strange:
        raise UsageError(
            f"{folder}: holds {one_line(strange[0], 80)}, which no run has put there; a step needs "
            "a folder of its own"
        )


class Untrusted(Dsv41Error):
    """There is no receipt that proves the step done. The message says why."""


class Step:
    """One step's folder, held for as long as the `with` block lasts.

    Args:
        folder: made where it is missing.
        kind: the command, `gate run`.
        code: sha256 of the code that runs, for the receipt.
    """

    def __init__(self, folder: Path, kind: str, *, code: str = "") -> None:
        self.folder = folder
        self.kind = kind
        self.receipt = folder / "receipt.json"
        self.journal = folder / "journal.jsonl"
        self.output = folder / "output.log"
        self.lock = FileLock(folder / "lock")
        self._code = code
        self._started = ""
        self._clock = 0.0

    def __enter__(self) -> Step:
        """Take the folder.

        Raises:
            RefusedByWorld: a runner, or a command that outlived one, is at work there.
            UsageError: it cannot be made, or is no step's.
        """
        refuse_foreign(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            taken = self.lock.acquire()
        except OSError as error:
            raise UsageError(f"{self.folder}: {error.strerror}") from None
        if not taken:
            raise RefusedByWorld(
                f"{self.folder}: a runner, or a command that one has started, is still at work "
                "there; wait for it or end it"
            )
        kind = self._receipt_of()
        if kind not in ("", self.kind):
            self.lock.release()
            raise UsageError(
                f"{self.receipt}: is that of another command ({one_line(kind, 40)}); a step needs "
                "a folder of its own"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.lock.release()

    def _receipt_of(self) -> str:
        """The kind that a whole receipt names; empty where there is none."""
        if not self.receipt.exists():
            return ""
        try:
            body, _ = read_sealed(self.receipt, "receipt", RECEIPT, dict[str, Any])
        except Dsv41Error:
            return ""
        return str(body.get("step"))

    def trusted(
        self, inputs: Iterable[Path], progress: Callable[[int], None] | None = None
    ) -> dict[str, Any]:
        """Return the receipt, if it proves that the step is done.

        Raises:
            Untrusted: there is none, it is damaged or another step's, or an input is not what it
                was.
        """
        if not self.receipt.exists():
            raise Untrusted("there is no receipt")
        try:
            body, _ = read_sealed(self.receipt, "receipt", RECEIPT, dict[str, Any])
        except Dsv41Error as error:
            raise Untrusted(one_line(str(error))) from None
        if body.get("step") != self.kind or body.get("complete") is not True:
            raise Untrusted(f"{self.receipt}: not the receipt of a complete {self.kind}")
        if not all(_files(body.get(key)) for key in ("inputs", "outputs")):
            raise Untrusted(f"{self.receipt}: does not list its inputs and outputs")
        held = {str(row["path"]): row for row in body["inputs"]}
        wanted = {str(path): path for path in inputs}
        if held.keys() != wanted.keys():
            other = ", ".join(sorted(held.keys() ^ wanted.keys()))
            raise Untrusted(f"{self.receipt}: it has other inputs: {one_line(other)}")
        for name, path in wanted.items():
            try:
                size = identity(path)[0]
                same = size == held[name]["bytes"] and (
                    hash_file(path, progress) == held[name]["sha256"]
                )
            except WindowStopped:
                raise
            except (Dsv41Error, OSError) as error:
                raise Untrusted(f"{name}: {one_line(str(error))}") from None
            if not same:
                raise Untrusted(f"{name}: its bytes are others than those of the receipt")
        return body

    def begin(self, entry: Mapping[str, Any], *, keep_journal: bool = False) -> None:
        """Take the old receipt away, and the old journal too; write the first line of a new one."""
        remove(self.receipt)
        if not keep_journal:
            remove(self.journal)
        self._started = _utc()
        self._clock = time.monotonic()
        self.note("begin", **entry)

    def note(self, event: str, **facts: Any) -> None:
        """Append to the journal, synced."""
        append_json_line(self.journal, {"event": event, "utc": _utc(), **facts})

    def noted(self) -> list[dict[str, Any]]:
        """The journal's whole lines."""
        return read_json_lines(self.journal)

    def finish(
        self,
        inputs: Iterable[Mapping[str, Any]],
        outputs: Iterable[Mapping[str, Any]],
        **facts: Any,
    ) -> dict[str, Any]:
        """Write the receipt: the step's last act.

        Args:
            inputs: `path`, `bytes` and `sha256` of each.
            outputs: the same, of what the step has made.
            facts: what it found, JSON.
        """
        body = {
            "schema": RECEIPT,
            "step": self.kind,
            "complete": True,
            "started_utc": self._started,
            "ended_utc": _utc(),
            "seconds": round(time.monotonic() - self._clock, 3),
            "version": __version__,
            "code_sha256": self._code,
            "inputs": [dict(row) for row in inputs],
            "outputs": [dict(row) for row in outputs],
            **facts,
        }
        write_sealed(self.receipt, body)
        return body


def _files(rows: Any) -> bool:
    """Whether they are what a receipt says of files."""
    keys = {"path", "bytes", "sha256"}
    return isinstance(rows, list) and all(isinstance(r, dict) and keys <= r.keys() for r in rows)


def _utc() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
