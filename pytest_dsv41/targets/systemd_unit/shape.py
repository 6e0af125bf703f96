"""The unit's own shape: what it is and runs, what a window captures of it, and what goes back."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...durable import write_atomic
from ...errors import CommandFailed, RefusedByWorld, StartFailed
from ...hosts import Host
from ...text import one_line
from ...unit.live import LiveUnit, UnitState
from ...unit.masking import masked_words
from ...unit.memory import Ledger
from ..base import TargetContext
from .starts import MARK, StartFiles, sha256_of, told_by
from .table import UnitTable

__all__ = ["UnitShape", "argv_sha256", "files_apart", "hashed"]

_OF_A_START: Final = frozenset(
    {
        *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MAINPID", "WATCHDOG_PID"),
        *("NOTIFY_SOCKET", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "WATCHDOG_USEC"),
        *("CREDENTIALS_DIRECTORY", "LISTEN_PID", "LISTEN_PIDFDID", "MANAGERPIDFDID"),
        *("TRIGGER_UNIT", "TRIGGER_PATH", "TRIGGER_TIMER_REALTIME_USEC"),
        *("TRIGGER_TIMER_MONOTONIC_USEC", "MONITOR_SERVICE_RESULT", "MONITOR_EXIT_CODE"),
        *("MONITOR_EXIT_STATUS", "MONITOR_INVOCATION_ID", "MONITOR_UNIT", "DEBUG_INVOCATION"),
        MARK,
    }
)
"""What systemd gives each start anew or by what has started it, and our own mark: no part of a
shape (systemd.exec(5))."""
# What a card or an allocator decides anew at every boot; all other facts follow from the shape.
_OF_A_BOOT: Final = frozenset(
    {"settled free", "unclaimed", "not accounted", "weights pool free", "mover took"}
)


class UnitShape:
    """The shape of a unit as it stands, held against that of the window's capture."""

    def __init__(
        self,
        root: Host,
        unit: LiveUnit,
        table: UnitTable,
        context: TargetContext,
        starts: StartFiles,
    ) -> None:
        self._root = root
        self._unit = unit
        self._table = table
        self._context = context
        self._starts = starts

    def of(self, unit: UnitState, *, keep_bytes: bool = False) -> dict[str, Any]:
        """What the unit is and runs, as JSON; values of the environment are kept as hashes."""
        argv = self._unit.argv(unit)
        ledger = None
        if unit.pid:
            ledger = self._unit.ledger(self._unit.boot_log(unit))
        return {
            "unit": self._table.unit,
            **self.files(unit),
            "environment_files": [list(each) for each in unit.environment_files],
            "enabled": unit.enabled,
            "argv": masked_words(argv),
            "argv_sha256": argv_sha256(argv),
            "environment": hashed(self._unit.environ(unit)),
            "env_file": self.env_file(keep_bytes),
            "ledger": None if ledger is None or ledger.missing else _kept_facts(ledger),
        }

    def files(self, unit: UnitState, *, own: bool = True) -> dict[str, Any]:
        """The loaded unit file and drop-ins by sha256; without `own` the start's is left out."""
        own = own or self._starts.is_somebodys(self._starts.lying())
        drop_ins = [path for path in unit.drop_ins if own or path != self._starts.drop_in]
        return {
            "fragment": {unit.fragment: self._digest(unit.fragment)} if unit.fragment else {},
            "drop_ins": {path: self._digest(path) for path in drop_ins},
        }

    def env_file(self, keep_bytes: bool) -> dict[str, str] | None:
        """The environment file by sha256, mode, owner and where it leads; None: not there."""
        path = self._table.env_file
        data = self._root.read(path)
        if data is None:
            return None
        said = told_by(self._root, ["stat", "-L", "-c", "%a %u:%g", "--", path], "env-file")
        mode, owner = said.split()
        # A link stays a link: what is written is what it leads to.
        kept = {"path": path, "sha256": sha256_of(data), "mode": mode, "owner": owner}
        kept["real"] = self.real(path)
        if keep_bytes:
            kept["base64"] = base64.b64encode(data).decode("ascii")
        return kept

    def apart(self, captured: Mapping[str, Any]) -> list[str]:
        """What of the unit's shape is not as captured, one line each."""
        now = self.of(self._unit.look())
        found = files_apart(captured, now)
        was, is_now = captured["env_file"], now["env_file"]
        if is_now is None or any(was[key] != is_now[key] for key in ("sha256", "mode", "owner")):
            leads = self.real(was["path"])
            to = "" if leads == was["real"] else f": it leads to {one_line(leads, 200)}"
            found.append(f"{was['path']} is not as it was{to}")
        if not now["argv"]:
            # What nothing runs has no environment and no ledger that could differ.
            return [*found, "it runs nothing"]
        if now["argv_sha256"] != captured["argv_sha256"]:
            found.append(f"it runs {one_line(shlex.join(now['argv']), 600)}")
        before, after = captured["environment"], now["environment"]
        changed = [n for n in sorted({*before, *after}) if before.get(n) != after.get(n)]
        if changed:
            found.append(f"its environment differs in {one_line(', '.join(changed))}")
        if captured["ledger"] is not None:
            was_said = {(s, n): v for s, n, v in captured["ledger"]}
            is_said = {(s, n): v for s, n, v in now["ledger"] or ()}
            found += [
                f"its boot ledger says {s} {n} {is_said.get((s, n))}, not {was_said.get((s, n))}"
                for s, n in dict.fromkeys([*was_said, *is_said])
                if was_said.get((s, n)) != is_said.get((s, n))
            ]
        return found

    def captured(self) -> dict[str, Any]:
        """The window's capture, whose payload must be whole.

        Raises:
            RefusedByWorld: it cannot be read, or its bytes are not those of its sha256.
        """
        path = self._context.folder / "rollback.json"
        try:
            configuration: dict[str, Any] = json.loads(path.read_text("utf-8"))["configuration"]
            kept = configuration["env_file"]
            data = base64.b64decode(kept["base64"], validate=True)
            whole = sha256_of(data) == kept["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RefusedByWorld(
                f"{path}: no capture to go back to: {one_line(str(error))}"
            ) from error
        if not whole:
            raise RefusedByWorld(f"{path}: the environment file's sha256 does not fit its bytes")
        return configuration

    def put_env_file_back(self, name: str, captured: Mapping[str, Any]) -> bool:
        """Write the captured bytes where others lie now; those are kept in the window's folder.

        Whether anything had to be written. What somebody did to the file meanwhile is told.
        """
        kept = captured["env_file"]
        path, real = kept["path"], kept["real"]
        leads = self.real(path)
        if path != real != leads:
            # A link that somebody has turned: what it led to is as it was, and the link is theirs.
            return False
        what = "was gone"
        try:
            now = self.env_file(keep_bytes=False)
        except CommandFailed:
            now, what = None, "was no file any more"
        if now is not None and all(now[key] == kept[key] for key in ("sha256", "mode", "owner")):
            return False
        data = None if now is None else self._root.read(path)
        changed = data is not None and sha256_of(data) != kept["sha256"]
        if data is not None and changed:
            found = f"env-found-{sha256_of(data)[:12]}"
            write_atomic(self._context.folder / found, data)
            what = f"was changed (what lay there is kept as {found})"
        if leads != real:
            what = f"was made a link to {one_line(leads, 200)} (which is not touched)"
        elif now is not None and not changed:
            what = f"had mode {now['mode']} and owner {now['owner']}"
        # Whoever else was killed between the bytes and their owner has told of the bytes.
        if not what.startswith("had") or not self._starts.records("told"):
            self._starts.tell(
                f"{path} {what}, by somebody during the window; the captured one goes back"
            )
        data = base64.b64decode(kept["base64"])
        try:
            self._starts.install(real, data, kept["mode"], kept["owner"])
        except CommandFailed as error:
            raise StartFailed(f"{name}: {error}") from error
        return True

    def tell_what_stays(self, captured: Mapping[str, Any]) -> None:
        """Tell what somebody did to the unit that is no part of its shape, and stays as it is."""
        now, real = self._unit.look().enabled, self.real(captured["env_file"]["path"])
        if now != captured["enabled"]:
            self._starts.tell(
                f"{self._table.unit} is {now or 'nothing'} now and was {captured['enabled']}, by "
                "somebody during the window; it is left so"
            )
        if real != captured["env_file"]["real"]:
            self._starts.tell(
                f"{captured['env_file']['path']} leads to {one_line(real, 200)} now, by somebody "
                "during the window, with the same bytes; it is left so"
            )

    def real(self, path: str) -> str:
        """Where a path leads, links followed; whether anything is there or not."""
        return told_by(self._root, ["readlink", "-m", "--", path], "real-path").strip()

    def _digest(self, path: str) -> str | None:
        data = self._root.read(path)
        return None if data is None else sha256_of(data)


def files_apart(captured: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Which of the unit file and the drop-ins changed, one line each."""
    found: list[str] = []
    for key in ("fragment", "drop_ins"):
        was, is_now = captured[key], now[key]
        for path in dict.fromkeys([*was, *is_now]):
            if was.get(path) != is_now.get(path):
                new = "is new" if path not in was else "is gone"
                found.append(f"{path} {'changed' if path in was and path in is_now else new}")
    return found


def argv_sha256(argv: Sequence[str]) -> str:
    """What tells two command lines apart; a secret in one is in no artefact."""
    return sha256_of("\0".join(argv).encode("utf-8", "surrogateescape"))


def hashed(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment as an artefact may hold it: names, and hashes of the values."""
    return {
        name: sha256_of(f"{name}={value}".encode("utf-8", "surrogateescape"))[:16]
        for name, value in sorted(environ.items())
        if name not in _OF_A_START
    }


def _kept_facts(ledger: Ledger) -> list[list[Any]]:
    """The facts that follow from the shape, as JSON: subject, name, value."""
    return [[f.subject, f.name, f.value] for f in ledger.facts if f.name not in _OF_A_BOOT]
