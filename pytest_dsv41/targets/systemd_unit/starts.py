"""The files of a window's starts on a unit's host: on record before they are written, told from
everybody else's, and taken away.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from ...durable import append_json_line, read_json_lines
from ...errors import StartFailed, WindowStopped
from ...hosts import Fence, Host
from ...text import one_line
from ...unit.envfile import variant
from ...unit.live import LiveUnit
from ...window.served import STARTS
from ..base import Arm, TargetContext
from .table import UnitTable

__all__ = ["DROP_IN", "MARK", "StartFiles", "sha256_of", "told_by"]

MARK: Final = "DSV41_UNIT_START"
"""The variable by which a process says that it is a start's: the window, and the start."""
DROP_IN: Final = "zzzz-dsv41.conf"
"""The name of a start's drop-in, which sorts after every other."""
_HEADER: Final = "dsv41 start of window "
_DEADLINE_S: Final = 30.0


class StartFiles:
    """Where the files of this window's starts lie, and the journal of what became of each start."""

    def __init__(
        self,
        root: Host,
        unit: LiveUnit,
        table: UnitTable,
        context: TargetContext,
        fence: Fence | None,
    ) -> None:
        self._root = root
        self._unit = unit
        self._table = table
        self._context = context
        self._fence = fence
        self._runtime_folder = "/run" if table.manager == "system" else ""

    @property
    def drop_in(self) -> str:
        """The path of a start's drop-in."""
        return f"{self._run}/systemd/{self._table.manager}/{self._table.unit}.d/{DROP_IN}"

    def variant_path(self, start: str) -> str:
        """The path of a start's environment file."""
        return f"{self._run}/dsv41/{self._context.window_id}/{start}.env"

    @property
    def _run(self) -> str:
        """The folder of runtime state: /run, or that of the login's user."""
        if not self._runtime_folder:
            uid = told_by(self._root, ["id", "-u"], "whose").strip()
            self._runtime_folder = f"/run/user/{uid}"
        return self._runtime_folder

    def mark(self, start: str) -> str:
        """What `MARK` holds in the processes of a start."""
        return f"{self._context.window_id}/{start}"

    def write(self, name: str, start: str, arm: Arm, captured: Mapping[str, Any]) -> str:
        """Record what will be written, then write it: the variant, and the drop-in naming it.

        Returns the variant's sha256.
        """
        path = self.variant_path(start)
        data = variant(
            base64.b64decode(captured["env_file"]["base64"]),
            arm.env,
            header=f"{_HEADER}{self._context.window_id}, {start}",
            where=self._table.env_file,
            sourced=bool(self._table.env_var),
        )
        given = [f"Environment={self._table.env_var}={path}"]
        if not self._table.env_var:
            # In its own place among the unit's files: each goes over those before it.
            given = ["EnvironmentFile="]
            for file, optional in captured["environment_files"]:
                shown = path if file == self._table.env_file else file
                given.append(f"EnvironmentFile={'-' if optional else ''}{shown.replace('%', '%%')}")
        lines = [
            f"# {_HEADER}{self._context.window_id}, {start}",
            "# Taken away when the start ends; a reboot takes it away too.",
            "[Service]",
            f"Environment={MARK}={self.mark(start)}",
            *given,
        ]
        drop_in = ("\n".join(lines) + "\n").encode()
        there = self.lying()
        if there is not None and not self.is_ours(there):
            raise StartFailed(f"{name}: {self.drop_in}: {self.whose(there)}")
        self.note(
            {
                "event": "write",
                "start": start,
                "arm": arm.name,
                "files": {path: sha256_of(data), self.drop_in: sha256_of(drop_in)},
            }
        )
        unit = self._unit.look()
        if not unit.down:
            raise WindowStopped(f"{name}: {self._table.unit} is {unit.active}: somebody started it")
        # What reads the file: systemd itself, or the service as its user.
        reader = unit.user if self._table.env_var and self._table.manager == "system" else ""
        self.install(path, data, "600", reader)
        self.install(self.drop_in, drop_in, "644", "")
        return sha256_of(data)

    def install(self, path: str, data: bytes, mode: str, owner: str) -> None:
        """Write a file durably, of `mode` and `owner`; the folders above may be looked through."""
        folder = str(PurePosixPath(path).parent)
        if path.startswith(f"{self._run}/"):
            self._act(["install", "-d", "-m", "755", "--", folder], f"folder {folder}")
        self._root.write(path, data, fence=self._fence)
        if owner:
            self._act(["chown", "--", owner, path], f"owner {path}")
        self._act(["chmod", mode, "--", path], f"mode {path}")

    def lying(self) -> bytes | None:
        """What lies in the place of a start's drop-in, if anything does."""
        return self._root.read(self.drop_in)

    def is_ours(self, data: bytes) -> bool:
        """Whether a drop-in is one of this window's starts, by its header and its bytes."""
        header = f"# {_HEADER}{self._context.window_id}, ".encode()
        known = {sha256 for path, sha256 in self.written() if path == self.drop_in}
        return data.startswith(header) and sha256_of(data) in known

    def is_somebodys(self, data: bytes | None) -> bool:
        """Whether a drop-in lies in the place of a start's and is no window's."""
        return data is not None and not data.startswith(f"# {_HEADER}".encode())

    def whose(self, data: bytes | None) -> str:
        """Say whose a drop-in is, for a refusal."""
        first = (data or b"").partition(b"\n")[0].decode("utf-8", "replace")
        if first.startswith(f"# {_HEADER}{self._context.window_id}, "):
            return "this window's, and somebody has changed it; not touched: move it away first"
        if first.startswith(f"# {_HEADER}"):
            return f"it says it is of {one_line(first.removeprefix(f'# {_HEADER}'))}; not touched"
        return "it is not a window's; not touched"

    def note(self, record: Mapping[str, Any]) -> None:
        """Append a record to the window's `unit.jsonl`."""
        append_json_line(self._context.folder / STARTS, {"schema": "dsv41-unit-v1", **record})

    def records(self, event: str) -> list[dict[str, Any]]:
        """The records of one kind, oldest first."""
        lines = read_json_lines(self._context.folder / STARTS)
        return [line for line in lines if line.get("event") == event]

    def written(self) -> list[tuple[str, str]]:
        """Every path that a start has written, with the sha256 of what."""
        return [item for line in self.records("write") for item in line["files"].items()]

    def tell(self, line: str) -> None:
        """Keep a line for the window's alerts, once."""
        if line not in [record["line"] for record in self.records("told")]:
            self.note({"event": "told", "line": line})

    def _act(self, argv: Sequence[str], name: str) -> None:
        self._root.run(argv, name=name, deadline_s=_DEADLINE_S, fence=self._fence)


def told_by(host: Host, argv: Sequence[str], name: str) -> str:
    """Return what a command that only reads prints."""
    return host.run(argv, name=name, deadline_s=_DEADLINE_S).stdout


def sha256_of(data: bytes) -> str:
    """Return the sha256 of bytes, as hex digits."""
    return hashlib.sha256(data).hexdigest()
