"""The watchdog: one look at a campaign's facts, and an alert that reaches a person (SAFETY).

It is one pass for a timer. It starts the one recovery that a stopped chain is allowed, and nothing
else; what a person must do it says: to a file, to the system's journal, and to a command of the
user's choice. An alert that still stands is told again after some hours. What was told is written
down only once it was told, so a kill in between tells it twice rather than never.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import syslog
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from ..durable import append_json_line, dump_json, parse_json, remove, write_atomic
from ..errors import Dsv41Error, RefusedByWorld
from ..hosts.local import boottime
from ..text import one_line
from .abort import Aborted, abort, new_abort_folder
from .campaign import Campaign, read_campaign
from .journal import utc_now
from .lease import Lease
from .marker import here
from .observer import Answer
from .recover import Status, look

__all__ = ["Pass", "pass_once", "unit_files"]

_ALERT: Final = "alert.json"
_HISTORY: Final = "alerts.jsonl"
_COMMAND_S: Final = 30.0
_LISTEN_S: Final = 0.5
_SAID: Final = 2000
_RECOVERY_S: Final = 7200.0
_CANNOT_LOOK: Final = 21


@dataclasses.dataclass(frozen=True)
class Pass:
    """What one pass saw and did. `alert` is None when nothing needs a person."""

    answer: str
    exit_code: int
    alert: dict[str, Any] | None = None
    told: bool = False
    recovered: Aborted | None = None


def pass_once(
    campaign: Path,
    *,
    progress: Callable[[str, float], None] = lambda _what, _left: None,
) -> Pass:
    """Look, recover a stopped chain once, and tell what stands. Never raises for the facts."""
    recovered, settings, unset = None, Campaign(), ""
    try:
        settings = read_campaign(campaign)
    except Dsv41Error as error:
        # A slip in the settings must not keep a stopped chain from its recovery.
        unset = one_line(f"the settings count as not written: {error}")
    try:
        status = look(campaign)
        if status.observation.answer is Answer.RECOVER:
            recovered, status = _recover(campaign, progress)
    except (Dsv41Error, OSError, ValueError) as error:
        why = one_line(f"the facts of {campaign} cannot be read: {error}")
        alert = {"answer": "ALERT", "why": why, "row": 0, "command": "look at it by hand"}
        with contextlib.suppress(Dsv41Error):
            return _tell(campaign, settings, "ALERT", _CANNOT_LOOK, alert, "")
        return Pass("ALERT", _CANNOT_LOOK, alert)
    seen = status.observation
    if seen.answer is not Answer.ALERT and not unset:
        _clear(campaign)
        return Pass(seen.answer.value, status.exit_code, recovered=recovered)
    code, command = status.exit_code, status.command
    answer = Answer.ALERT.value
    if seen.answer is not Answer.ALERT:
        code, command = code or _CANNOT_LOOK, command or f"correct {campaign / 'campaign.toml'}"
    alert = {
        "answer": answer,
        "why": f"{seen.why}; {unset}" if unset else seen.why,
        "row": seen.row,
        "command": command,
        "production": one_line(status.production),
        "window": status.window,
        "down": seen.down,
    }
    stop = status.marker.stop_id if status.marker else ""
    told = _tell(campaign, settings, answer, code, alert, stop)
    return dataclasses.replace(told, recovered=recovered)


def _recover(
    campaign: Path, progress: Callable[[str, float], None]
) -> tuple[Aborted | None, Status]:
    """The one recovery that needs nobody. Whoever holds the lease is at work on it already."""
    lease = Lease(campaign)
    try:
        lease.acquire("watchdog", _RECOVERY_S)
    except RefusedByWorld:
        return None, look(campaign)
    try:
        # Between the look and the lease somebody else may have ended the chain.
        now = look(campaign, lease_is_mine=True)
        if now.observation.answer is not Answer.RECOVER:
            return None, now
        done = abort(campaign, new_abort_folder(campaign), lease=lease, progress=progress)
    finally:
        lease.release()
    return done, look(campaign)


def _tell(
    campaign: Path,
    settings: Campaign,
    answer: str,
    code: int,
    alert: dict[str, Any],
    stop: str,
) -> Pass:
    """Write the alert down, and tell it where it is new, or old enough to be told again."""
    words = [str(alert["row"]), alert["why"], str(alert.get("window", "")), stop]
    key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
    before = _current(campaign)
    now = boottime()
    if before.get("key") == key and before.get("told") and before.get("boot") == here():
        age = now - before["told_at"]
        if 0 <= age < settings.alert_repeat_hours * 3600.0:
            return Pass(answer, code, before)
    record = {
        "schema": "dsv41-alert-v1",
        "key": key,
        "campaign": str(campaign),
        "utc": utc_now(),
        "told": False,
        "told_at": now,
        "boot": here(),
        "times": before["times"] + 1 if before.get("key") == key else 1,
        **alert,
    }
    problems = []
    try:
        write_atomic(campaign / _ALERT, dump_json(record) + "\n")
    except OSError as error:
        problems.append(f"{campaign / _ALERT}: {error.strerror}")
    line = f"dsv41 ALERT: {alert['why']}; next: {alert['command']}; campaign {campaign}"
    syslog.syslog(syslog.LOG_ALERT | syslog.LOG_DAEMON, one_line(line, 800))
    problems += _run(settings.alert_command, record)
    record["told"] = not problems
    record["problems"] = problems
    with contextlib.suppress(OSError):
        append_json_line(campaign / _HISTORY, record)
        write_atomic(campaign / _ALERT, dump_json(record) + "\n")
    return Pass(answer, code, record, told=True)


def _run(command: tuple[str, ...], record: dict[str, Any]) -> list[str]:
    """Run the user's command with the alert on its input; why it failed, or nothing."""
    if not command:
        return []
    try:
        child = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return [one_line(f"alert_command: {error}")]
    assert child.stdin is not None
    assert child.stderr is not None
    said = bytearray()
    # Its end counts, not that of its output, which a child of its own may keep open.
    listener = threading.Thread(target=_listen, args=(child.stderr, said), daemon=True)
    listener.start()
    with contextlib.suppress(OSError):
        child.stdin.write(f"{dump_json(record)}\n".encode())
        child.stdin.flush()
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        code = child.wait(_COMMAND_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return [f"alert_command: no end within {_COMMAND_S:g} s"]
    listener.join(_LISTEN_S)
    text = bytes(said).decode("utf-8", "replace")
    return [one_line(f"alert_command: exit {code}: {text}")] if code != 0 else []


def _listen(stream: IO[bytes], said: bytearray) -> None:
    """Keep the first of what a command says, and let it say the rest."""
    with contextlib.suppress(OSError, ValueError), stream:
        while chunk := os.read(stream.fileno(), 65536):
            said += chunk[: _SAID - len(said)]


def _current(campaign: Path) -> dict[str, Any]:
    try:
        record = parse_json((campaign / _ALERT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    told_at, times = record.get("told_at"), record.get("times")
    usable = isinstance(told_at, float) and isinstance(times, int)
    return record if usable else {}


def _clear(campaign: Path) -> None:
    """Nothing stands any more: the next alert is a new one."""
    if not (campaign / _ALERT).exists():
        return
    with contextlib.suppress(OSError):
        cleared = {
            "schema": "dsv41-alert-v1",
            "key": _current(campaign).get("key"),
            "cleared": True,
        }
        append_json_line(campaign / _HISTORY, {**cleared, "utc": utc_now()})
        remove(campaign / _ALERT)


# -- units -----------------------------------------------------------------------------------------


def unit_files(campaign: Path, every_s: int = 60) -> dict[str, str]:
    """The user's systemd units that look at this campaign: file name to text."""
    name = f"dsv41-watchdog-{hashlib.sha256(os.fsencode(campaign)).hexdigest()[:8]}"
    words = [sys.executable, "-m", "pytest_dsv41", "watchdog", "--campaign", str(campaign)]
    command = " ".join(_quoted(word) for word in words)
    about = _plain(f"dsv41 watchdog over {campaign}")
    return {
        f"{name}.service": (
            f"[Unit]\nDescription={about}\n\n"
            # What a recovery starts on this machine must outlive the pass that started it.
            "[Service]\nType=oneshot\nKillMode=process\n"
            f"ExecStart={command}\n"
            "SuccessExitStatus=1 20 21\n"
        ),
        f"{name}.timer": (
            f"[Unit]\nDescription={about}, every {every_s} s\n\n"
            f"[Timer]\nOnActiveSec=1\nOnUnitInactiveSec={every_s}\nAccuracySec=1s\n\n"
            "[Install]\nWantedBy=timers.target\n"
        ),
    }


def _plain(text: str) -> str:
    return one_line(text).replace("%", "%%")


def _quoted(word: str) -> str:
    """One word of a command line as systemd reads it: no specifier, no variable, no escape."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"' + escaped.replace("\n", "\\n") + '"'
