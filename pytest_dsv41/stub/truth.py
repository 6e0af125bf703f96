"""The ground truth: when every write left, on CLOCK_MONOTONIC, in nanoseconds.

A line: `request` (the server's number of it, 0 before there is one), `connection`, `kind` (head,
role, token, finish, usage, done, error, comment, whole, rest …), `tokens` (delivered by this
write), `offset` and `bytes` in the connection's stream, `before_ns` and `after_ns` around the
system call. `rest` is the remainder of a write that the kernel did not take at once. `arrived` is
no write but the request: `before_ns` is when its last packet came (by the kernel's stamp where
there is one), `after_ns` when it was read, `id` its x-request-id.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from pytest_dsv41.errors import UsageError

__all__ = ["Mark", "Truth"]

_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_MOST = 2_000_000
_BATCH = 16


class Mark(NamedTuple):
    """What a write is: the request's number, the kind, and the tokens it delivers."""

    request: int
    kind: str
    tokens: int = 0
    id: str = ""


class Truth:
    """Collects the lines; appends them to `path`, when there is one, while nothing is due.

    UsageError when the file cannot be opened.
    """

    def __init__(self, path: str = "", *, keep: bool = True) -> None:
        self._fd = -1
        if path:
            try:
                self._fd = os.open(path, _APPEND, 0o600)
            except OSError as error:
                raise UsageError(f"truth {path}: {error.strerror}") from None
        self._keep = keep
        self._written = 0
        self._rows: list[tuple[int, object, int, int, int, int]] = []

    def sent(
        self, connection: Any, mark: object, before: int, after: int, offset: int, count: int
    ) -> None:
        """Note one write (the callback of a Connection)."""
        if len(self._rows) < _MOST:
            self._rows.append((connection.number, mark, before, after, offset, count))

    def lines(self) -> list[dict[str, Any]]:
        """Return everything noted (and kept) so far, in order."""
        return [_line(row) for row in self._rows]

    def flush(self) -> None:
        """Append all that is new to the file."""
        if self._fd >= 0:
            self._write(len(self._rows))

    def _write(self, most: int) -> None:
        rows = self._rows[self._written : self._written + most]
        if rows:
            text = "".join(json.dumps(_line(row)) + "\n" for row in rows)
            os.write(self._fd, text.encode())
        self._written += len(rows)
        if not self._keep and self._written == len(self._rows):
            self._rows.clear()
            self._written = 0

    def close(self) -> None:
        """Write what is left and close the file."""
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def flush_some(self) -> bool:
        """Append a few lines to the file; say whether more are left. Takes about 0.1 ms."""
        if self._fd < 0:
            return False
        self._write(_BATCH)
        return self._written < len(self._rows)


def _line(row: tuple[int, object, int, int, int, int]) -> dict[str, Any]:
    connection, mark, before, after, offset, count = row
    if isinstance(mark, Mark):
        request, kind, tokens, name = mark
    else:
        request, kind, tokens, name = 0, str(mark or "rest"), 0, ""
    return {
        "request": request,
        "connection": connection,
        "kind": kind,
        "tokens": tokens,
        "offset": offset,
        "bytes": count,
        "before_ns": before,
        "after_ns": after,
        **({"id": name} if name else {}),
    }
