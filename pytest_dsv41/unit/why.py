"""Why a unit does not run: a preflight's refusal, a crash, a boot loop, or a wrong configuration.

From outside the journal all four look alike: the unit sits in `auto-restart` and no port opens
(FRANK-ARCHON "The outage: a refusal, not a crash": 6,919 refusals in 20 hours). They are told apart
by which command ended, how, and after how long, and by what the manager says of the unit itself.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dsv41.errors import CommandFailed
from pytest_dsv41.hosts import Host
from pytest_dsv41.text import counted, one_line
from pytest_dsv41.unit.masking import masked_argv
from pytest_dsv41.unit.systemd import ExecCommand, Loaded, read_unit

__all__ = ["CAUSES", "JournalLine", "Why", "explain", "read_journal", "why"]

CAUSES: Final = {
    "RUNNING": "it runs",
    "STARTING": "it is being started",
    "STOPPED": "nothing is wrong, it was stopped or never started",
    "PREFLIGHT REFUSAL": "a check before the server said no; correct what the line names",
    "WRONG CONFIGURATION": "systemd could not run it as it is written; correct the unit",
    "CRASH": "the server itself ended",
    "BOOT LOOP": "the server ends again and again; stop it (systemctl stop) before you look",
    "UNKNOWN": "neither systemd nor the journal says why",
}
"""Each cause, in a sentence."""

_RECORDS: Final = 1000
_QUOTED: Final = 3
_AT_ONCE_S: Final = 1.0  # what ends by itself sooner has refused, if it says the same each time
_SETTLED_S: Final = 60.0  # a unit that was restarted and runs so long has come up
_EXIT: Final = "98e322203f7a4ed290d09fe03c09fe15"
_FIELDS: Final = (
    "MESSAGE,MESSAGE_ID,PRIORITY,UNIT,USER_UNIT,_SYSTEMD_INVOCATION_ID,INVOCATION_ID,"
    "USER_INVOCATION_ID,COMMAND,EXIT_CODE,EXIT_STATUS,CONFIG_FILE,CONFIG_LINE"
)
# Codes with which systemd's own child ends before the program runs (systemd.exec(5)).
_BEFORE_THE_PROGRAM: Final = {
    200: "CHDIR", 201: "NICE", 202: "FDS", 203: "EXEC", 204: "MEMORY", 205: "LIMITS",
    206: "OOM_ADJUST", 207: "SIGNAL_MASK", 208: "STDIN", 209: "STDOUT", 210: "CHROOT",
    211: "IOPRIO", 212: "TIMERSLACK", 213: "SECUREBITS", 214: "SETSCHEDULER", 215: "CPUAFFINITY",
    216: "GROUP", 217: "USER", 218: "CAPABILITIES", 219: "CGROUP", 220: "SETSID", 221: "CONFIRM",
    222: "STDERR", 224: "PAM", 225: "NETWORK", 226: "NAMESPACE", 227: "NO_NEW_PRIVILEGES",
    228: "SECCOMP", 229: "SELINUX_CONTEXT", 230: "PERSONALITY", 231: "APPARMOR",
    232: "ADDRESS_FAMILIES", 233: "RUNTIME_DIRECTORY", 235: "CHOWN", 236: "SMACK_PROCESS_LABEL",
    237: "KEYRING", 238: "STATE_DIRECTORY", 239: "CACHE_DIRECTORY", 240: "LOGS_DIRECTORY",
    241: "CONFIGURATION_DIRECTORY", 242: "NUMA_POLICY", 243: "CREDENTIALS", 244: "BPF",
}  # fmt: skip
_EXITED: Final = 1
_CODES: Final = {"exited": 1, "killed": 2, "dumped": 3}
_RESULT: Final = re.compile(r"Failed with result|Start request repeated|Failed to start ")
_LIMIT: Final = re.compile(r"Start request repeated too quickly")
_SKIPPED: Final = re.compile(r"\b[Ss]kipped\b")
_COMMAND: Final = re.compile(r"Exec[A-Za-z]{1,20}")
_CHECKS: Final = ("ExecCondition", "ExecStartPre")


@dataclass(frozen=True)
class JournalLine:
    """One record of the journal. `manager`: systemd says it of the unit, not the unit itself.

    `command`, `code` (1 exited, 2 killed, 3 dumped) and `status` are of a record that a process
    ended; `config` names file and line of a record about a setting. `at_us`: since 1970.
    """

    at_us: int
    message: str
    manager: bool
    priority: int
    invocation: str
    command: str = ""
    code: int = 0
    status: int = 0
    config: str = ""


@dataclass(frozen=True)
class Why:
    """The answer: `cause` is a key of `CAUSES`, `said` what it rests on, `lines` the quotes.

    `restarts` counts systemd's automatic restarts since the unit was last started or reset;
    `looping` says that it is restarted again and again, or was until the start limit.
    """

    cause: str
    looping: bool
    restarts: int
    said: str
    lines: tuple[str, ...]

    @property
    def fault(self) -> bool:
        """Whether something is wrong."""
        return self.cause not in ("RUNNING", "STARTING", "STOPPED")


def why(
    host: Host,
    unit: str,
    *,
    user: bool = False,
    become: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> Why:
    """Read a unit's state and journal and say why it does not run; nothing is changed.

    `progress` is called with what is read next.

    Raises:
        UsageError: no name of a service.
        CommandFailed, TransportError: the unit cannot be read.
    """
    facts = read_unit(host, unit, user=user, become=become, process=False, progress=progress)
    if progress is not None:
        progress(f"{host.name}: the journal of {facts.unit}")
    journal = read_journal(host, facts.unit, user=user, become=become)
    return explain(facts.loaded, journal, now_us=facts.manager.now_us)


def read_journal(
    host: Host, unit: str, *, user: bool = False, become: Sequence[str] = ()
) -> list[JournalLine]:
    """Read what this boot's journal has of a unit, the newest 1,000 records, in order.

    A journal that this login may not read gives none.

    Raises:
        TransportError: the host does not answer.
    """
    # What --unit= leaves out: the last words of a child that could not be executed, whose unit
    # the journal no longer saw, but which root has signed with it.
    system = [f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}", "_UID=0"]
    which = [f"--user-unit={unit}"] if user else system
    done = host.run(
        [
            *(*become, "journalctl", "--boot", "--no-pager", "--quiet", "--output=json"),
            *(f"--output-fields={_FIELDS}", f"--lines={_RECORDS}", *which),
        ],
        name="unit-journal",
        deadline_s=30.0,
        check=False,
        private=True,
    )
    if done.returncode == 127:
        raise CommandFailed(f"{host.name}: journalctl: {one_line(done.stderr)}", 127)
    return [line for raw in done.stdout.splitlines() if (line := parse_record(raw)) is not None]


def parse_record(raw: str) -> JournalLine | None:
    """Read one record of `journalctl --output=json`; None for what is none."""
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    message = record.get("MESSAGE")
    if isinstance(message, list):
        # What is not clean text comes as its bytes.
        message = bytes(b for b in message if isinstance(b, int) and 0 <= b < 256).decode(
            "utf-8", "replace"
        )
    config = _word(record, "CONFIG_FILE")
    ended = _word(record, "MESSAGE_ID") == _EXIT
    # Any process of the unit can write such a record: only what systemd would say is repeated.
    command = _COMMAND.fullmatch(_word(record, "COMMAND"))
    return JournalLine(
        _number(record, "__REALTIME_TIMESTAMP"),
        message if isinstance(message, str) else "",
        bool({"UNIT", "USER_UNIT"} & record.keys()),
        _number(record, "PRIORITY", 6),
        _word(record, "INVOCATION_ID")
        or _word(record, "USER_INVOCATION_ID")
        or _word(record, "_SYSTEMD_INVOCATION_ID"),
        command[0] if ended and command is not None else "",
        _CODES.get(_word(record, "EXIT_CODE"), 0) if ended else 0,
        _number(record, "EXIT_STATUS") if ended else 0,
        f"{config}:{_number(record, 'CONFIG_LINE')}" if config else "",
    )


def _word(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    return value if isinstance(value, str) else ""


def _number(record: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = _word(record, key)
    return int(value) if value.isdecimal() and len(value) < 20 else default


@dataclass(frozen=True)
class _Ending:
    """How the last process that failed ended: of which command, and how."""

    command: str
    code: int
    status: int
    seconds: float | None

    def __str__(self) -> str:
        name = _signal(self.status) if self.code != _EXITED else f"exit code {self.status}"
        core = ", core dumped" if self.code == 3 else ""
        lived = "" if self.seconds is None else f" after {self.seconds:.3f} s"
        return f"{self.command} ended by {name}{core}{lived}"


def explain(loaded: Loaded, journal: Sequence[JournalLine], *, now_us: int) -> Why:
    """Say why, from what systemd has of the unit and its journal; `now_us`: the host's clock."""
    restarts = loaded.restarts
    if loaded.load_state not in ("loaded", "merged"):
        said = f"systemd has it as {loaded.load_state}"
        if loaded.load_error:
            said += f": {one_line(loaded.load_error)}"
        return Why("WRONG CONFIGURATION", False, restarts, said, _of_manager(journal))
    ending = _ending(loaded, journal)
    state = f"{loaded.active_state} ({loaded.sub_state})"
    if loaded.active_state in ("active", "reloading"):
        lived = (now_us - loaded.main_started_us) / 1e6
        if restarts < 2 or lived >= _SETTLED_S:
            more = f"; {counted(restarts, 'automatic restart')} before" if restarts else ""
            return Why("RUNNING", False, restarts, state + more, ())
        said = f"{state} for {lived:.0f} s, {counted(restarts, 'automatic restart')} before"
        return _fault(loaded, journal, ending, True, said)
    limit = loaded.active_state == "failed" and _over_the_limit(loaded, journal)
    looping = limit or loaded.sub_state.startswith("auto-restart") or restarts >= 2
    if limit:
        state += ", given up by the start limit"
    if loaded.active_state == "inactive" or not looping:
        unmet = _unmet(loaded, journal)
        if unmet:
            return Why("PREFLIGHT REFUSAL", False, restarts, f"{state}: {unmet}", _of_unit(journal))
    if loaded.active_state == "inactive":
        # What failed is `failed`, not `inactive`: this was stopped, ended well, or never started.
        before = f"; before that, {ending}" if ending is not None else ""
        return Why("STOPPED", False, restarts, state + before, ())
    if loaded.active_state in ("activating", "deactivating") and not looping:
        return Why("STARTING", False, restarts, state, ())
    return _fault(loaded, journal, ending, looping, state)


def _fault(
    loaded: Loaded,
    journal: Sequence[JournalLine],
    ending: _Ending | None,
    looping: bool,
    state: str,
) -> Why:
    def answer(cause: str, said: str, lines: tuple[str, ...]) -> Why:
        return Why(cause, looping, loaded.restarts, f"{state}: {said}", lines)

    if loaded.result == "resources":
        return answer(
            "WRONG CONFIGURATION",
            "systemd could not set up what it needs to start",
            _of_manager(journal),
        )
    if ending is None:
        if looping:
            return answer("BOOT LOOP", "it ends by itself, without a failure", _of_unit(journal))
        return answer("UNKNOWN", f"its result is {loaded.result}", _of_manager(journal))
    spoken = _of_unit(journal) or _of_manager(journal)
    before = _BEFORE_THE_PROGRAM.get(ending.status) if ending.code == _EXITED else None
    if before is not None:
        command = _shown(loaded, ending.command)
        return answer(
            "WRONG CONFIGURATION",
            f"{ending} ({before}): systemd could not run {command}",
            _of_manager(journal),
        )
    if ending.command in _CHECKS:
        return answer("PREFLIGHT REFUSAL", f"{ending}: {_shown(loaded, ending.command)}", spoken)
    if _refuses_itself(ending, journal):
        same = f"{ending}, with the same words each time, before it served anything"
        return answer("PREFLIGHT REFUSAL", same, spoken)
    return answer("BOOT LOOP" if looping else "CRASH", _crash(loaded, ending), spoken)


def _crash(loaded: Loaded, ending: _Ending) -> str:
    special = {
        "watchdog": "; its watchdog was not served",
        "timeout": "; it did not start, or stop, in time",
        "oom-kill": "; the kernel ran out of memory",
        "protocol": "; it did not say that it is ready",
    }
    return f"{ending}{special.get(loaded.result, '')}"


def _ending(loaded: Loaded, journal: Sequence[JournalLine]) -> _Ending | None:
    """The newest failure that the journal or systemd knows; None where nothing failed."""
    for line in reversed(journal):
        # What a stop ends by SIGTERM, such as a check that was under way, has not failed.
        stopped = line.code == 2 and line.status == signal.SIGTERM
        if line.code and not stopped and (line.code != _EXITED or line.status != 0):
            seconds = _seconds(loaded, journal, line)
            return _Ending(line.command or "its process", line.code, line.status, seconds)
    if loaded.result == "success":
        # What was stopped ended by a signal too.
        return None
    for key in (*_CHECKS, "ExecStart", "ExecStartPost"):
        for command in loaded.commands.get(key, ()):
            if command.code and (command.code != _EXITED or command.status != 0):
                return _Ending(key, command.code, command.status, _between(command))
    if loaded.main_code and (loaded.main_code != _EXITED or loaded.main_status != 0):
        return _Ending("ExecStart", loaded.main_code, loaded.main_status, None)
    return None


def _seconds(loaded: Loaded, journal: Sequence[JournalLine], end: JournalLine) -> float | None:
    """How long the process lived: as systemd timed it, else since it last spoke of the unit."""
    for command in loaded.commands.get(end.command, ()):
        known = _between(command)
        if known is not None and abs(command.ended_us - end.at_us) < 1_000_000:
            return known
    before = [line.at_us for line in journal if line.manager and line.at_us < end.at_us]
    return (end.at_us - max(before)) / 1e6 if before else None


def _between(command: ExecCommand) -> float | None:
    if command.started_us and command.ended_us >= command.started_us:
        return (command.ended_us - command.started_us) / 1e6
    return None


def _refuses_itself(ending: _Ending, journal: Sequence[JournalLine]) -> bool:
    """Whether the server's own command says no: it exits at once, with the same words each time."""
    if ending.code != _EXITED or ending.seconds is None or ending.seconds > _AT_ONCE_S:
        return False
    # By order and not by invocation: the journal may learn a dead process's run too late.
    ends = [at for at, line in enumerate(journal) if line.code]
    since = journal[ends[-6] + 1 :] if len(ends) > 5 else journal
    said = Counter(re.sub(r"\d+", "0", line.message) for line in since if _spoken(line))
    return len(ends) >= 2 and 0 < len(said) <= _QUOTED and min(said.values()) >= 2


def _spoken(line: JournalLine) -> bool:
    return not line.manager and bool(line.message.strip())


def _over_the_limit(loaded: Loaded, journal: Sequence[JournalLine]) -> bool:
    """Whether systemd gave up: its result keeps the first failure, so its words count too."""
    for line in reversed(journal):
        if line.code:
            break
        if line.manager and _LIMIT.search(line.message):
            return True
    return loaded.result == "start-limit-hit"


def _unmet(loaded: Loaded, journal: Sequence[JournalLine]) -> str:
    """Which condition or assertion of the unit is not met; empty where none is."""
    if loaded.result == "exec-condition":
        return "its ExecCondition= is not met"
    # A unit that nothing refers to is forgotten at once, and its state with it: the journal stays.
    told = [line for line in journal if line.manager][-1:]
    if told and loaded.active_state == "inactive" and _SKIPPED.search(told[0].message):
        return one_line(told[0].message)
    for kind in ("Condition", "Assert"):
        if loaded.properties.get(f"{kind}Result", True) or not loaded.properties.get(
            f"{kind}Timestamp"
        ):
            continue
        for name, _, negated, parameter, state in loaded.properties.get(f"{kind}s", ()):
            if state < 0:
                return one_line(f"{name}={'!' if negated else ''}{parameter} is not met")
        return f"a {kind.lower()} of it is not met"
    return ""


def _of_unit(journal: Sequence[JournalLine]) -> tuple[str, ...]:
    """The last words of the last run that said something."""
    spoken = [line for line in journal if _spoken(line)]
    if not spoken:
        return ()
    last = spoken[-1].invocation
    lines = dict.fromkeys(one_line(line.message) for line in spoken if line.invocation == last)
    return tuple(lines)[-_QUOTED:]


def _of_manager(journal: Sequence[JournalLine]) -> tuple[str, ...]:
    """What systemd last complained of, with the file and line of a setting."""
    told = [line for line in journal if line.manager and line.priority <= 4 and not line.code]
    settings = [line for line in told if not _RESULT.search(line.message)] or told
    return tuple(
        one_line(f"{line.config + ': ' if line.config else ''}{line.message}")
        for line in settings[-_QUOTED:]
    )


def _shown(loaded: Loaded, key: str) -> str:
    commands = loaded.commands.get(key, ())
    failed = [c for c in commands if c.code and (c.code != _EXITED or c.status != 0)]
    which = failed or commands[:1]
    return masked_argv(which[0].argv) if which else key


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
