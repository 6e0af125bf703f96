"""Drift: where a unit's files, its checkout, what is loaded and what runs are not one and the same.

A green deploy proves none of it (FRANK-ARCHON "the bench drop-in trap"): a drop-in that a campaign
left behind overrides the unit file at every restart, drop-ins of all folders sort by file name, so
a foreign one can beat one's own, and a manager that has not been reloaded starts what the files no
longer say. Everything is named by file, line and key, and nothing is touched. What cannot be told
apart counts as drift.

A finding that is known and accepted is registered by its id, which changes with what it is about:
another content of the same file is another finding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_dsv41.errors import UsageError
from pytest_dsv41.hosts import Host
from pytest_dsv41.text import one_line
from pytest_dsv41.unit.masking import masked_argv, masked_value
from pytest_dsv41.unit.systemd import ExecCommand, UnitFacts, read_host_file, read_unit
from pytest_dsv41.unit.unitfile import (
    Assignment,
    Change,
    UnitFile,
    changes,
    environment_of,
    expand,
    fits,
    live,
    parse_environment_file,
    parse_unit_file,
    split_commands,
    split_words,
)
from pytest_dsv41.window.source import read_input

__all__ = ["KINDS", "Checkout", "Finding", "drift", "find_drift", "load_checkout", "unregistered"]

KINDS: Final = {
    "load-state": "the unit is not loaded as it should be: masked, or its settings are bad",
    "unit-file": "the unit file is not the checkout's",
    "env-file": "an environment file is not the checkout's",
    "drop-in": "a drop-in applies that the checkout does not have",
    "drop-in-over-ours": "the same, and it beats a drop-in of ours",
    "hides": "a drop-in hides another of the same name",
    "missing-drop-in": "a drop-in of the checkout does not apply",
    "not-loaded": "on disk, and not loaded: a reload would bring it",
    "gone": "loaded, or needed by a start, and no longer on disk",
    "loaded-differs": "loaded otherwise than it stands on disk",
    "changed-since-load": "a file changed after the manager last read its files",
    "daemon-reload": "systemd itself says that it has not read the newest files",
    "changed-since-start": "a file with further settings changed after the process started",
    "argv": "the running command line is not what is loaded",
    "environment": "the running environment is not what is loaded",
}
"""Each kind of finding, in a sentence."""

# Keys that are looked at in the process itself, or that say nothing of it.
_SEEN: Final = re.compile(r"Exec[A-Z]|Environment|UnsetEnvironment|Restart|Timeout|Type$")
_FILE_MAX: Final = 1 << 20
# Keys whose loaded property is the word that the file has.
_SAME_WORD: Final = (
    "Type",
    "Restart",
    "User",
    "Group",
    "WorkingDirectory",
    "RootDirectory",
    "KillMode",
    "NotifyAccess",
    "Slice",
    "SyslogIdentifier",
)
# What systemd sets itself (systemd.exec(5)), beside the variables of its own environment.
_SYSTEMDS_OWN_TEXT: Final = """
    PATH LANG USER LOGNAME HOME SHELL INVOCATION_ID XDG_RUNTIME_DIR XDG_SESSION_ID XDG_SEAT
    XDG_VTNR RUNTIME_DIRECTORY STATE_DIRECTORY CACHE_DIRECTORY LOGS_DIRECTORY
    CONFIGURATION_DIRECTORY CREDENTIALS_DIRECTORY MAINPID MANAGERPID MANAGERPIDFDID LISTEN_FDS
    LISTEN_PID LISTEN_FDNAMES LISTEN_PIDFDID NOTIFY_SOCKET WATCHDOG_PID WATCHDOG_USEC
    SYSTEMD_EXEC_PID TERM COLORTERM NO_COLOR LOG_NAMESPACE JOURNAL_STREAM PIDFILE REMOTE_ADDR
    REMOTE_PORT TRIGGER_UNIT TRIGGER_PATH TRIGGER_TIMER_REALTIME_USEC
    TRIGGER_TIMER_MONOTONIC_USEC MEMORY_PRESSURE_WATCH MEMORY_PRESSURE_WRITE FDSTORE
    DEBUG_INVOCATION
"""
_SYSTEMDS_OWN: Final = frozenset(_SYSTEMDS_OWN_TEXT.split())


@dataclass(frozen=True)
class Finding:
    """One difference: its kind (a key of `KINDS`), where it stands, and what it is about.

    `line` is 0 where it is about a whole file or none. `beats` are the places (`file:line`) of what
    no longer counts because of it. `id` names it for a registration. No secret stands in `what`.
    """

    kind: str
    path: str
    line: int
    key: str
    what: str
    beats: tuple[str, ...]
    id: str

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.key}: {self.what}" if self.key else f"{where}: {self.what}"


@dataclass(frozen=True)
class Checkout:
    """What a unit should be: its file, and the drop-ins `NAME.d/*.conf` beside it, by file name."""

    name: str
    data: bytes
    drop_ins: Mapping[str, bytes]


def load_checkout(path: Path) -> Checkout:
    """Read a unit file of a checkout, with the drop-ins that lie in the folder `PATH.d` beside it.

    Raises:
        UsageError: a file is missing or cannot be read.
    """
    folder = path.with_name(f"{path.name}.d")
    drop_ins = sorted(folder.glob("*.conf")) if folder.is_dir() else []
    return Checkout(str(path), read_file(path), {each.name: read_file(each) for each in drop_ins})


def read_file(path: Path) -> bytes:
    """Read a small file of a checkout.

    Raises:
        UsageError: it is missing, no file, over 1 MiB, or cannot be read.
    """
    return read_input(path, _FILE_MAX)


def drift(
    host: Host,
    unit: str,
    *,
    checkout: Checkout | None = None,
    env_files: Mapping[str, bytes] | None = None,
    ours: Collection[str] = (),
    user: bool = False,
    become: Sequence[str] = (),
) -> list[Finding]:
    """Read a unit and return every difference, in the order of its files; nothing is changed.

    Args:
        host: where it runs.
        unit: its name; `.service` may be left out.
        checkout: what its files should be.
        env_files: files on the host (absolute paths) to what they should hold.
        ours: drop-ins (paths on the host) that are the caller's own; only what beats them is told.
        user: the login's own manager instead of the system's.
        become: put before every command, such as `("sudo", "-n")`.

    Raises:
        UsageError: no name of a service, or the host has no such unit.
        CommandFailed, TransportError: something cannot be read; that is not clean.
    """
    facts = read_unit(host, unit, user=user, become=become)
    wanted = env_files or {}
    there = {path: read_host_file(host, path, become=become) for path in wanted}
    return find_drift(
        facts,
        checkout=checkout,
        env_files={path: (wanted[path], there[path]) for path in wanted},
        ours=ours,
    )


def find_drift(
    facts: UnitFacts,
    *,
    checkout: Checkout | None = None,
    env_files: Mapping[str, tuple[bytes, bytes | None]] | None = None,
    ours: Collection[str] = (),
) -> list[Finding]:
    """Return every difference in facts already read (see `drift`).

    Args:
        facts: the unit.
        checkout: what its files should be.
        env_files: path on the host to (what it should hold, what it holds; None: there is none).
        ours: drop-ins of the caller's own.

    Raises:
        UsageError: the host has no such unit.
    """
    if facts.loaded.load_state == "not-found" and facts.fragment is None:
        raise UsageError(f"{facts.host}: no unit {facts.unit}")
    found: list[Finding] = []
    if facts.loaded.load_state not in ("loaded", "merged"):
        found.append(_load_state(facts))
    if checkout is not None:
        found += _against_checkout(facts, checkout)
    for path, (wanted, there) in (env_files or {}).items():
        found += _environment_file(path, wanted, there)
    found += _drop_ins(facts, checkout, ours)
    if facts.loaded.load_state in ("loaded", "merged"):
        found += _loaded(facts)
        found += _running(facts)
    return found


def unregistered(findings: Sequence[Finding], registered: Collection[str]) -> list[Finding]:
    """Return the findings whose id is not registered."""
    return [finding for finding in findings if finding.id not in registered]


def _finding(
    kind: str,
    path: str,
    what: str,
    *,
    line: int = 0,
    key: str = "",
    beats: Sequence[Assignment] = (),
    basis: Sequence[str] = (),
) -> Finding:
    """`basis`: what the id is made of beside kind, file and key; it may hold secrets."""
    digest = hashlib.sha256()
    for part in (kind, path, key, *basis):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    where = tuple(str(assignment) for assignment in beats)
    return Finding(kind, path, line, key, what, where, digest.hexdigest()[:16])


def _load_state(facts: UnitFacts) -> Finding:
    loaded = facts.loaded
    path = facts.fragment.path if facts.fragment is not None else loaded.fragment or facts.unit
    why = f": {one_line(loaded.load_error)}" if loaded.load_error else ""
    return _finding(
        "load-state", path, f"systemd has it as {loaded.load_state}{why}", basis=[loaded.load_state]
    )


# -- files ----------------------------------------------------------------------------------------


def _against_checkout(facts: UnitFacts, checkout: Checkout) -> Iterator[Finding]:
    if facts.fragment is None:
        yield _finding("unit-file", facts.unit, f"no unit file on disk; {checkout.name} is one")
    else:
        yield from _compare(facts.fragment, checkout.data, checkout.name)
    there = {file.path.rpartition("/")[2] for file in facts.drop_ins}
    for name in checkout.drop_ins:
        if name not in there:
            yield _finding(
                "missing-drop-in",
                f"{facts.unit}.d/{name}",
                f"not on the host; the checkout has it beside {checkout.name}",
            )


def _compare(file: UnitFile, wanted: bytes, name: str) -> Iterator[Finding]:
    """Every key whose assignments differ; where none does, that the bytes do."""
    if file.data == wanted:
        return
    here, there = _by_key(file.assignments), _by_key(parse_unit_file(name, wanted).assignments)
    keys = [
        key for key in dict.fromkeys([*here, *there]) if _values(here, key) != _values(there, key)
    ]
    for key in keys:
        ours, theirs = here.get(key, []), there.get(key, [])
        has = _shown_all(ours) or "nothing"
        wants = f"{theirs[0]} has {_shown_all(theirs)}" if theirs else f"{name} has nothing"
        yield _finding(
            "unit-file",
            file.path,
            f"{has}; {wants}",
            line=ours[0].line if ours else 0,
            key=key,
            basis=[*_values(here, key), "against", *_values(there, key)],
        )
    if not keys:
        yield _finding(
            "unit-file",
            file.path,
            f"other bytes than {name}, the same settings (comments or spaces): sha256 "
            f"{file.sha256[:12]}, not {hashlib.sha256(wanted).hexdigest()[:12]}",
            basis=[file.sha256],
        )


def _by_key(assignments: Sequence[Assignment]) -> dict[str, list[Assignment]]:
    found: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        found.setdefault(assignment.name, []).append(assignment)
    return found


def _values(by_key: Mapping[str, list[Assignment]], key: str) -> list[str]:
    return [assignment.value for assignment in by_key.get(key, ())]


def _environment_file(path: str, wanted: bytes, there: bytes | None) -> Iterator[Finding]:
    if there is None:
        yield _finding("env-file", path, "not on the host")
        return
    if there == wanted:
        return
    has, wants = parse_environment_file(there), parse_environment_file(wanted)
    differ = [name for name in dict.fromkeys([*has, *wants]) if has.get(name) != wants.get(name)]
    for name in differ:
        here = masked_value(name, has[name]) if name in has else "not set"
        should = masked_value(name, wants[name]) if name in wants else "not set"
        yield _finding(
            "env-file",
            path,
            f"{here}; the checkout has it {should}",
            line=_line_of(there, name),
            key=name,
            basis=[has.get(name, "\0"), wants.get(name, "\0")],
        )
    if not differ:
        digest = hashlib.sha256(there).hexdigest()
        yield _finding(
            "env-file",
            path,
            f"other bytes than the checkout's, the same variables: sha256 {digest[:12]}",
            basis=[digest],
        )


def _line_of(data: bytes, name: str) -> int:
    """The last line that begins with the variable's name; 0 where none does."""
    lines = data.decode("utf-8", "replace").splitlines()
    at = [n for n, line in enumerate(lines, 1) if line.lstrip().startswith(f"{name}=")]
    return at[-1] if at else 0


def _drop_ins(
    facts: UnitFacts, checkout: Checkout | None, ours: Collection[str]
) -> Iterator[Finding]:
    every = changes(_with_base(facts))
    held = live(_with_base(facts))
    declared = checkout.drop_ins if checkout is not None else {}
    order = [file.path for file in facts.drop_ins]
    for file in facts.drop_ins:
        if file.path in ours:
            continue
        own = [change for change in every if change.path == file.path]
        same = declared.get(file.path.rpartition("/")[2]) == file.data
        for change in (_with_what_that_beat(change, every) for change in own):
            anywhere = _beaten_anywhere(facts, change, held)
            mine = [a for a in (*change.beats, *anywhere) if a.path in ours]
            if same and not mine:
                continue
            yield _drop_in(file, change, anywhere, mine, _beaten_by(change, every, order))
        if not own and not same and (file.data.strip() or file.ignored):
            yield _finding("drop-in", file.path, "applies, and sets nothing", basis=[file.sha256])
    names = {file.path.rpartition("/")[2]: file for file in facts.drop_ins}
    for lost in facts.hidden:
        winner = names[lost.path.rpartition("/")[2]]
        if winner.path in ours or winner.data == lost.data:
            continue
        keys = ", ".join(dict.fromkeys(a.name for a in lost.assignments)) or "nothing"
        how = "masks" if winner.target == "/dev/null" else "is read instead of"
        yield _finding(
            "hides",
            winner.path,
            f"{how} {lost.path}, which sets {keys}",
            beats=lost.assignments,
            basis=[winner.sha256, lost.sha256],
        )


def _with_base(facts: UnitFacts) -> list[UnitFile]:
    """The files in order; an empty one in place of a unit file that is not there."""
    base = facts.fragment or parse_unit_file(facts.unit, b"")
    return [base, *facts.drop_ins]


def _with_what_that_beat(change: Change, every: Sequence[Change]) -> Change:
    """The change with all that no longer counts: what it beats, what that had beaten, and so on."""
    beats = list(change.beats)
    for assignment in beats:
        for earlier in every:
            if earlier.subject == change.subject and assignment in earlier.by:
                beats += [a for a in earlier.beats if a not in beats and a.path != change.path]
    return dataclasses.replace(change, beats=tuple(beats))


def _beaten_anywhere(
    facts: UnitFacts, change: Change, held: Mapping[str, Sequence[Assignment]]
) -> list[Assignment]:
    """What a change beats wherever it stands: variables of environment files go over those of
    Environment=, and UnsetEnvironment= goes over both (systemd.exec(5)).
    """
    key, _, name = change.subject.partition(" ")
    names: list[str] = [name] if key == "Service.UnsetEnvironment" and name else []
    if key == "Service.EnvironmentFile":
        read = {file.path: file.data or b"" for file in facts.environment_files}
        for assignment in change.by:
            data = read.get(assignment.value.removeprefix("-"), b"")
            names += parse_environment_file(data, version=facts.manager.version)
    beaten = [a for each in names for a in held.get(f"Service.Environment {each}", ())]
    return [a for a in dict.fromkeys(beaten) if a.path != change.path]


def _drop_in(
    file: UnitFile,
    change: Change,
    anywhere: Sequence[Assignment],
    mine: Sequence[Assignment],
    beaten: Sequence[Assignment],
) -> Finding:
    sets = [a for a in change.by if a.value]
    told = f"sets {_shown_all(sets, change.subject)}" if sets else "empties it"
    if change.beats:
        told += "; beats " + ", ".join(f"{a} ({_shown(a, change.subject)})" for a in change.beats)
    if anywhere:
        told += "; goes over " + ", ".join(f"{a} ({_shown(a)})" for a in anywhere)
        told += ", wherever that stands"
    elif mine:
        told += f"; ours, {mine[0].path}, is read before it: drop-ins sort by file name"
    if beaten:
        told += "; itself beaten by " + ", ".join(map(str, beaten))
    return _finding(
        "drop-in-over-ours" if mine else "drop-in",
        file.path,
        told,
        line=change.by[0].line,
        key=change.subject,
        beats=[*change.beats, *anywhere],
        basis=[file.sha256],
    )


def _beaten_by(change: Change, every: Sequence[Change], order: Sequence[str]) -> list[Assignment]:
    """The first assignment of each later file that takes this change's say away."""
    by = set(change.by)
    after = order[order.index(change.path) + 1 :]
    return [
        later.by[0]
        for later in every
        if later.path in after and later.subject == change.subject and by & set(later.beats)
    ]


# -- loaded against the files ---------------------------------------------------------------------


def _loaded(facts: UnitFacts) -> Iterator[Finding]:
    loaded = facts.loaded
    fragment = facts.fragment
    if fragment is not None and loaded.fragment not in (fragment.path, fragment.target):
        yield _finding(
            "not-loaded",
            fragment.path,
            f"a reload would load it in place of {loaded.fragment or 'no file'}",
            basis=[loaded.fragment],
        )
    elif fragment is None and loaded.fragment:
        yield _finding("gone", loaded.fragment, "loaded as the unit file, and no longer on disk")
    on_disk = [file.path for file in facts.drop_ins]
    for file in facts.drop_ins:
        if file.path not in loaded.drop_ins:
            keys = ", ".join(dict.fromkeys(a.name for a in file.assignments)) or "nothing"
            yield _finding(
                "not-loaded",
                file.path,
                f"a drop-in that is not loaded; a reload would let it set {keys}",
                line=file.assignments[0].line if file.assignments else 0,
                basis=[file.sha256],
            )
    for path in loaded.drop_ins:
        if path not in on_disk:
            yield _finding("gone", path, "a drop-in that still counts, and is no longer on disk")
    for env_file in facts.environment_files:
        if env_file.data is None and not env_file.optional:
            yield _finding("gone", env_file.path, "a start needs this environment file")
    held = live(_with_base(facts))
    found = [
        *_commands_loaded(facts, held),
        *_environment_loaded(facts, held),
        *_environment_files_loaded(facts, held),
        *_words_loaded(facts, held),
    ]
    yield from found
    if facts.manager.loaded_us:
        for file in facts.files:
            if file.changed * 1e6 > facts.manager.loaded_us and file.path in (
                loaded.fragment,
                *loaded.drop_ins,
            ):
                yield _finding(
                    "changed-since-load",
                    file.path,
                    "changed on disk after systemd last read its files; systemctl daemon-reload, "
                    "then look again",
                    basis=[file.sha256],
                )
    if loaded.need_daemon_reload:
        path = fragment.path if fragment is not None else facts.unit
        yield _finding("daemon-reload", path, "systemd has not read the newest files of it")


def _place(facts: UnitFacts, assignments: Sequence[Assignment]) -> tuple[str, int]:
    if assignments:
        return assignments[-1].path, assignments[-1].line
    return (facts.fragment.path if facts.fragment is not None else facts.unit), 0


def _commands_loaded(
    facts: UnitFacts, held: Mapping[str, Sequence[Assignment]]
) -> Iterator[Finding]:
    for key, commands in facts.loaded.commands.items():
        name = f"Service.{key}"
        written = [c for a in held.get(name, ()) for c in split_commands(a.value)]
        same = len(written) == len(commands) and all(
            fits(one.path, other.path, facts.unit)
            and len(one.argv) == len(other.argv)
            and all(fits(a, b, facts.unit) for a, b in zip(one.argv, other.argv, strict=True))
            for one, other in zip(written, commands, strict=True)
        )
        if not same:
            path, line = _place(facts, held.get(name, ()))
            disk = "; ".join(masked_argv(command.argv) for command in written) or "nothing"
            has = "; ".join(masked_argv(command.argv) for command in commands) or "nothing"
            yield _finding(
                "loaded-differs",
                path,
                f"loaded is {has}; on disk stands {disk}",
                line=line,
                key=name,
                basis=[word for command in commands for word in command.argv],
            )


def _environment_loaded(
    facts: UnitFacts, held: Mapping[str, Sequence[Assignment]]
) -> Iterator[Finding]:
    written = environment_of(held)
    loaded = facts.loaded.environment
    for name in dict.fromkeys([*written, *loaded]):
        value, assignment = written.get(name, ("", None))
        if assignment is None:
            told = f"loaded is {masked_value(name, loaded[name])}; no file sets it"
        elif name not in loaded:
            told = f"not loaded; on disk it is {masked_value(name, value)}"
        elif not fits(value, loaded[name], facts.unit):
            told = (
                f"loaded is {masked_value(name, loaded[name])}; on disk it is "
                f"{masked_value(name, value)}"
            )
        else:
            continue
        path, line = _place(facts, [assignment] if assignment is not None else [])
        yield _finding(
            "loaded-differs",
            path,
            told,
            line=line,
            key=f"Service.Environment {name}",
            basis=[loaded.get(name, "\0"), value],
        )


def _environment_files_loaded(
    facts: UnitFacts, held: Mapping[str, Sequence[Assignment]]
) -> Iterator[Finding]:
    assignments = held.get("Service.EnvironmentFile", ())
    written = [(a.value.removeprefix("-"), a.value.startswith("-")) for a in assignments]
    loaded = facts.loaded.environment_files
    same = len(written) == len(loaded) and all(
        fits(path, has, facts.unit) and optional == may
        for (path, optional), (has, may) in zip(written, loaded, strict=True)
    )
    if not same:
        path, line = _place(facts, assignments)
        has = ", ".join(("-" if may else "") + where for where, may in loaded) or "nothing"
        disk = ", ".join(a.value for a in assignments) or "nothing"
        yield _finding(
            "loaded-differs",
            path,
            one_line(f"loaded is {has}; on disk stands {disk}", 600),
            line=line,
            key="Service.EnvironmentFile",
            basis=[has],
        )


def _words_loaded(facts: UnitFacts, held: Mapping[str, Sequence[Assignment]]) -> Iterator[Finding]:
    for key in _SAME_WORD:
        assignments = held.get(f"Service.{key}", ())
        value = assignments[-1].value if assignments else ""
        has = str(facts.loaded.properties.get(key, ""))
        if key == "WorkingDirectory":
            # "!" is how the property says that the folder may be missing.
            value, has = value.removeprefix("-"), has.removeprefix("!")
            if value == "~" or has == "~":
                continue
        if value and value.rstrip("/") != has and not fits(value.rstrip("/"), has, facts.unit):
            path, line = _place(facts, assignments)
            yield _finding(
                "loaded-differs",
                path,
                one_line(f"loaded is {has or 'nothing'}; on disk stands {value}"),
                line=line,
                key=f"Service.{key}",
                basis=[has, value],
            )


# -- running against loaded -----------------------------------------------------------------------


def _running(facts: UnitFacts) -> Iterator[Finding]:
    process, commands = facts.process, facts.loaded.commands.get("ExecStart", ())
    if process is None or not commands:
        return
    held = live(_with_base(facts))
    expected, origin = _expected_environment(facts, held)
    # A variable that is declared nowhere, such as HOME, is what the process got.
    filled = {**process.environment, **expected}
    command = next((c for c in commands if c.pid == process.pid), commands[0])
    words = list(command.argv)
    if "no-env-expand" not in command.flags:
        words = expand(words, filled)
    same = _same_words(process.argv, words, command)
    # systemd itself says that the command, as it is loaded now, was started as this process: what
    # is then another command line, or variable, is the doing of the process (a script's `exec`).
    # Of a daemon that forks, it is the command that ended before.
    forks = facts.loaded.properties.get("Type") == "forking" and command.pid != 0
    by_it = forks or command.pid == process.pid
    path, line = _place(facts, held.get("Service.ExecStart", ()))
    if not same and not by_it:
        yield _finding(
            "argv",
            path,
            f"pid {process.pid} runs {masked_argv(process.argv)}; loaded is {masked_argv(words)}, "
            "which was not started since it was loaded; a restart starts it",
            line=line,
            key="Service.ExecStart",
            basis=[*process.argv, "against", *words],
        )
    for name, value in expected.items():
        has = process.environment.get(name)
        where, at, changed = origin[name]
        if has == value or (by_it and not same and changed * 1e6 <= process.started_us):
            continue
        yield _finding(
            "environment",
            where,
            f"pid {process.pid} has "
            + (f"{masked_value(name, has)}" if has is not None else "not set")
            + f"; a restart would set {masked_value(name, value)}",
            line=at,
            key=name,
            basis=[has if has is not None else "\0", value],
        )
    for file in facts.files:
        other = [a for a in file.assignments if a.section == "Service" and not _SEEN.match(a.key)]
        if other and file.changed * 1e6 > process.started_us:
            keys = ", ".join(dict.fromkeys(a.key for a in other))
            yield _finding(
                "changed-since-start",
                file.path,
                f"pid {process.pid} is older; whether it has {keys} as written cannot be told",
                line=other[0].line,
                basis=[file.sha256],
            )
    if not same or facts.loaded.properties.get("PAMName"):
        return
    passed = facts.loaded.properties.get("PassEnvironment", ())
    for name, value in process.environment.items():
        if not (
            name in expected
            or name in _SYSTEMDS_OWN
            or name in passed
            or name.startswith(("LC_", "SYSTEMD_"))
            or name in facts.manager.environment
        ):
            yield _finding(
                "environment",
                path,
                f"pid {process.pid} has {masked_value(name, value)}; nothing sets it any more",
                key=name,
                basis=[value],
            )


def _same_words(running: Sequence[str], words: Sequence[str], command: ExecCommand) -> bool:
    if list(running) == list(words):
        return True
    # A script runs as its interpreter, which is given the script's path in place of its name.
    script = [command.path, *words[1:]]
    more = len(running) - len(script)
    return more in (1, 2) and list(running[more:]) == script


def _expected_environment(
    facts: UnitFacts, held: Mapping[str, Sequence[Assignment]]
) -> tuple[dict[str, str], dict[str, tuple[str, int, float]]]:
    """What a start would set: Environment=, then EnvironmentFile=, which goes over it.

    Each variable with where it comes from: file, line, and when an environment file last changed.
    """
    expected = dict(facts.loaded.environment)
    written = environment_of(held)
    origin: dict[str, tuple[str, int, float]] = {}
    for name in expected:
        path, line = _place(facts, [written[name][1]] if name in written else [])
        origin[name] = (path, line, 0.0)
    for file in facts.environment_files:
        for name, value in parse_environment_file(
            file.data or b"", version=facts.manager.version
        ).items():
            expected[name] = value
            origin[name] = (file.path, _line_of(file.data or b"", name), file.changed)
    for word in facts.loaded.properties.get("UnsetEnvironment", ()):
        name, equals, value = str(word).partition("=")
        if not equals or expected.get(name) == value:
            expected.pop(name, None)
    return expected, origin


# -- how values are shown -------------------------------------------------------------------------


def _shown_all(assignments: Sequence[Assignment], subject: str = "") -> str:
    return " | ".join(_shown(assignment, subject) for assignment in assignments)


def _shown(assignment: Assignment, subject: str = "") -> str:
    """An assignment's value without secrets; of one that sets several variables, the subject's."""
    key, value = assignment.key, assignment.value
    if not value:
        return f"{key}= (empty)"
    if key == "Environment":
        wanted = subject.partition(" ")[2]
        pairs = [word.partition("=") for word in split_words(value)]
        return " ".join(
            f"{name}={masked_value(name, text)}"
            for name, _, text in pairs
            if not wanted or name == wanted
        )
    if key.startswith("Exec"):
        return masked_argv(split_words(value))
    if key.startswith(("SetCredential", "LoadCredential")):
        return f"{key}=***"
    return one_line(value, 200)
