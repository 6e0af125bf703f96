"""What systemd knows of a service, what lies on disk for it, and what runs: read, never written.

Three states of one unit can differ: the files (what a reload would load), what the manager has
loaded (what a restart would start), and the running process. Each is read by itself: the files in
the order in which systemd reads them, the loaded state over D-Bus with its types (`busctl`, whose
answers keep a command's words apart where `systemctl show` joins them), the process from /proc.

Environments may hold secrets: what is read here stands in no command record.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_dsv41.errors import CommandFailed, UsageError
from pytest_dsv41.hosts import Host
from pytest_dsv41.hosts.base import raise_for_code
from pytest_dsv41.text import error_line, one_line
from pytest_dsv41.unit.unitfile import (
    UnitFile,
    drop_in_names,
    in_order,
    parse_unit_file,
    unit_name,
)

__all__ = [
    "EnvironmentFile",
    "ExecCommand",
    "Loaded",
    "Manager",
    "RunningProcess",
    "UnitFacts",
    "read_host_file",
    "read_unit",
]

_DEADLINE_S: Final = 20.0
_BUS: Final = "org.freedesktop.systemd1"
_ROOT: Final = "/org/freedesktop/systemd1"
_TRIES: Final = 3

# Per file, each followed by a null character: the folder or path that was asked for, the file,
# where its links lead, and when the link and what it leads to last changed, in seconds.
_LOOK: Final = """\
show() {
  printf '%s\\0%s\\0%s\\0%s\\0%s\\0' "$1" "$2" "$(readlink -m -- "$2")" \\
    "$(stat -c %.9Z -- "$2")" "$(stat -L -c %.9Z -- "$2" 2>/dev/null || echo 0)"
}
LC_ALL=C
export LC_ALL
for asked; do
  if [ -d "$asked" ]; then
    real=$(readlink -e -- "$asked") || exit 74
    if ! [ -r "$real" ] || ! [ -x "$real" ]; then echo "$real: cannot be read" >&2; exit 74; fi
    for file in "$real"/*.conf; do
      if [ -d "$file" ]; then continue; fi
      if [ -e "$file" ] || [ -L "$file" ]; then show "$asked" "$file"; fi
    done
  elif [ -e "$asked" ] || [ -L "$asked" ]; then
    show "$asked" "$asked"
  fi
done
"""


@dataclass(frozen=True)
class ExecCommand:
    """One command as the manager has loaded it, and how its last run went.

    `pid`, `code` and `status` are 0 where this command, as loaded now, was not run: a reload
    forgets. `code` and `status` are those of waitid(2): 1 exited with `status`, 2 killed by the
    signal `status`, 3 the same with a core. Times in microseconds since 1970, 0 for never.
    """

    path: str
    argv: tuple[str, ...]
    flags: tuple[str, ...]
    started_us: int
    ended_us: int
    pid: int
    code: int
    status: int


@dataclass(frozen=True)
class EnvironmentFile:
    """A file that EnvironmentFile= names: `data` is None where there is none.

    `changed` is its last change on disk (ctime, seconds since 1970).
    """

    path: str
    optional: bool
    data: bytes | None
    changed: float


@dataclass(frozen=True)
class Manager:
    """The manager: its version, where it looks for units, its environment, its last (re)load.

    `now_us` is the host's clock when it was asked. Both times in microseconds since 1970.
    """

    version: int
    unit_path: tuple[str, ...]
    environment: Mapping[str, str]
    loaded_us: int
    now_us: int


@dataclass(frozen=True)
class Loaded:
    """A unit as the manager has loaded it. Every D-Bus property stands in `properties`."""

    load_state: str
    load_error: str
    active_state: str
    sub_state: str
    result: str
    unit_file_state: str
    fragment: str
    drop_ins: tuple[str, ...]
    names: tuple[str, ...]
    need_daemon_reload: bool
    environment: Mapping[str, str]
    environment_files: tuple[tuple[str, bool], ...]
    """Path, and whether it may be missing."""
    commands: Mapping[str, tuple[ExecCommand, ...]]
    """`ExecStart` and its kin to their commands."""
    main_pid: int
    main_started_us: int
    main_code: int
    main_status: int
    restarts: int
    invocation: str
    properties: Mapping[str, Any]


@dataclass(frozen=True)
class RunningProcess:
    """The main process: its words, and the environment it was last executed with."""

    pid: int
    started_us: int
    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class UnitFacts:
    """One service on one host. `fragment` and `drop_ins` are what a reload would load now.

    `drop_ins` stand in the order in which they are read: by file name, whatever their folder.
    `hidden` are those that another of the same name in a folder of higher precedence hides.
    `process` is None where nothing runs, or where it was not asked for.
    """

    host: str
    unit: str
    user: bool
    manager: Manager
    loaded: Loaded
    fragment: UnitFile | None
    drop_ins: tuple[UnitFile, ...]
    hidden: tuple[UnitFile, ...]
    environment_files: tuple[EnvironmentFile, ...]
    process: RunningProcess | None

    @property
    def files(self) -> tuple[UnitFile, ...]:
        """The unit file and its drop-ins, in reading order."""
        return (*([self.fragment] if self.fragment is not None else []), *self.drop_ins)


def read_unit(
    host: Host,
    unit: str,
    *,
    user: bool = False,
    become: Sequence[str] = (),
    process: bool = True,
    progress: Callable[[str], None] | None = None,
) -> UnitFacts:
    """Read a service's files, its loaded state and its main process.

    Args:
        host: where it runs.
        unit: its name; `.service` may be left out.
        user: ask the login's own manager (`systemctl --user`) instead of the system's.
        become: put before every command, such as `("sudo", "-n")`; a process of another user can
            only be read by root.
        process: read the main process too.
        progress: called with what is read next.

    Raises:
        UsageError: no name of a service.
        CommandFailed: something cannot be read; what is not known is not clean.
        TransportError: the host does not answer.
    """
    try:
        unit = unit_name(unit)
    except ValueError as error:
        raise UsageError(f"unit {one_line(unit, 80)!r}: {error}") from error
    say = progress or (lambda _: None)
    reader = _Reader(host, user, tuple(become))
    say(f"{host.name}: systemd")
    manager = reader.manager()
    for _ in range(_TRIES):
        loaded = reader.loaded(unit)
        say(f"{host.name}: {unit}, its files and its process")
        running = reader.process(loaded) if process and loaded.main_pid else None
        # By its own name, where it was asked for by another.
        unit = loaded.names[0]
        fragment, drop_ins, hidden = reader.files(unit, manager, loaded)
        environment_files = reader.environment_files(loaded)
        say(f"{host.name}: {unit}, once more")
        again = reader.loaded(unit)
        same = (loaded.fragment, loaded.drop_ins) == (again.fragment, again.drop_ins)
        if process:
            # The process and what is loaded must be of one and the same start.
            same = same and loaded.main_pid == again.main_pid
            same = same and loaded.invocation == again.invocation
            same = same and bool(running) == bool(loaded.main_pid)
        if same:
            return UnitFacts(
                host.name,
                unit,
                user,
                manager,
                again,
                fragment,
                drop_ins,
                hidden,
                environment_files,
                running,
            )
    raise CommandFailed(
        f"{host.name}: {unit}: it changes while it is looked at ({_TRIES} times); "
        "is it restarting? dsv41 unit why says",
        1,
    )


def read_host_file(host: Host, path: str, *, become: Sequence[str] = ()) -> bytes | None:
    """Return the bytes of a file on the host, None where there is none; read by `become`.

    Raises:
        CommandFailed: it cannot be read.
        TransportError: the host does not answer.
    """
    if not become:
        return host.read(path)
    script = 'if ! [ -e "$1" ]; then exit 66; fi; exec base64 -w 0 -- "$1"'
    done = host.run(
        [*become, "sh", "-c", script, "sh", path],
        name="unit-read",
        deadline_s=_DEADLINE_S,
        check=False,
        private=True,
    )
    if done.returncode == 66:
        return None
    raise_for_code(f"read {path}", done)
    return base64.b64decode(done.stdout)


class _Reader:
    """Reads through one host; with `become`, as another user."""

    def __init__(self, host: Host, user: bool, become: tuple[str, ...]) -> None:
        self._host = host
        self._user = user
        self._become = become

    # -- the manager -------------------------------------------------------------------------------

    def manager(self) -> Manager:
        found = self._properties(_ROOT, f"{_BUS}.Manager")
        with _understood(self._host.name):
            version = _word(found["Version"]).split(".")[0]
            return Manager(
                int("".join(c for c in version if c.isdigit()) or 0),
                _words(found["UnitPath"]),
                _variables(_words(found["Environment"])),
                int(found.get("UnitsLoadTimestamp", 0)),
                self._now_us(),
            )

    def _now_us(self) -> int:
        done = self._host.run(["date", "+%s%6N"], name="unit-clock", deadline_s=_DEADLINE_S)
        return int(done.stdout)

    def loaded(self, unit: str) -> Loaded:
        (path,) = self._bus(_ROOT, f"{_BUS}.Manager", "LoadUnit", "s", unit)
        p = self._properties(str(path), "")
        with _understood(self._host.name):
            return _loaded(p)

    def _properties(self, path: str, interface: str) -> dict[str, Any]:
        answer = self._bus(path, "org.freedesktop.DBus.Properties", "GetAll", "s", interface)
        with _understood(self._host.name):
            (values,) = answer
            return {name: value["data"] for name, value in values.items()}

    def _bus(self, path: str, interface: str, method: str, *words: str) -> list[Any]:
        manager = ["--user"] if self._user else ["--system"]
        # Behind "--" a unit's name may begin with a hyphen.
        argv = [*self._become, "busctl", *manager, "--json=short", "--", "call", _BUS, path]
        done = self._host.run(
            [*argv, interface, method, *words],
            name=f"unit-{method.lower()}",
            deadline_s=_DEADLINE_S,
            check=False,
            private=True,
        )
        raise_for_code(f"{self._host.name}: systemd does not answer busctl", done)
        try:
            data = json.loads(done.stdout)["data"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CommandFailed(
                f"{self._host.name}: busctl {method}: no JSON: {one_line(done.stdout, 120)!r}", 1
            ) from error
        if not isinstance(data, list) or not data:
            raise CommandFailed(f"{self._host.name}: busctl {method}: answers nothing", 1)
        return data

    # -- files -------------------------------------------------------------------------------------

    def files(
        self, unit: str, manager: Manager, loaded: Loaded
    ) -> tuple[UnitFile | None, tuple[UnitFile, ...], tuple[UnitFile, ...]]:
        """The unit file, the drop-ins in reading order, and the hidden ones."""
        stem, at, _ = unit.partition("@")
        template = [f"{stem}@.service"] if at else []
        fragments = [f"{p}/{name}" for name in (unit, *template) for p in manager.unit_path]
        folders = [
            f"{p}/{each}.d"
            for name in loaded.names
            for p in manager.unit_path
            for each in drop_in_names(name)
        ]
        # What belongs to every service yields to all that is more specific.
        folders += [f"{p}/service.d" for p in manager.unit_path]
        seen: dict[str, list[tuple[str, str, float]]] = {}
        for asked, path, target, changed in self._look([*fragments, *folders]):
            seen.setdefault(asked, []).append((path, target, changed))
        at_path = {
            path: (target, changed) for each in seen.values() for path, target, changed in each
        }
        fragment = next((path for path in fragments if path in seen), None)
        if fragment is None and loaded.fragment in at_path:
            fragment = loaded.fragment
        order, hidden = in_order(
            [
                (path.rpartition("/")[0], path.rpartition("/")[2])
                for folder in dict.fromkeys(folders)
                for path, _, _ in seen.get(folder, ())
            ]
        )
        return (
            None if fragment is None else self._unit_file(fragment, *at_path[fragment]),
            tuple(self._unit_file(path, *at_path[path]) for path in order),
            tuple(self._unit_file(path, *at_path[path]) for path in hidden),
        )

    def _unit_file(self, path: str, target: str, changed: float) -> UnitFile:
        # A link to /dev/null masks: it holds nothing, and hides what lies below it.
        data = b"" if target == "/dev/null" else self._read(path) or b""
        return parse_unit_file(path, data, target=target, changed=changed)

    def environment_files(self, loaded: Loaded) -> tuple[EnvironmentFile, ...]:
        named = [
            (path, optional)
            for pattern, optional in loaded.environment_files
            for path in self._matching(pattern)
        ]
        changed = {asked: when for asked, _, _, when in self._look([path for path, _ in named])}
        return tuple(
            EnvironmentFile(
                path,
                optional,
                self._read(path) if path in changed else None,
                changed.get(path, 0.0),
            )
            for path, optional in named
        )

    def _matching(self, pattern: str) -> list[str]:
        """The files of a pattern in order; one that nothing matches is its own, missing file."""
        if not any(char in pattern for char in "*?["):
            return [pattern]
        script = "LC_ALL=C; IFS=; for file in $1; do printf '%s\\0' \"$file\"; done"
        done = self._host.run(
            [*self._become, "sh", "-c", script, "sh", pattern],
            name="unit-env-files",
            deadline_s=_DEADLINE_S,
        )
        return done.stdout.split("\0")[:-1]

    def _look(self, paths: Sequence[str]) -> list[tuple[str, str, str, float]]:
        if not paths:
            return []
        done = self._host.run(
            [*self._become, "sh", "-c", _LOOK, "sh", *paths],
            name="unit-files",
            deadline_s=_DEADLINE_S,
        )
        fields = done.stdout.split("\0")[:-1]
        return [
            (asked, path, target, max(float(link), float(there)))
            for asked, path, target, link, there in zip(*[iter(fields)] * 5, strict=True)
        ]

    def _read(self, path: str) -> bytes | None:
        return read_host_file(self._host, path, become=self._become)

    # -- the process -------------------------------------------------------------------------------

    def process(self, loaded: Loaded) -> RunningProcess | None:
        """The main process; None where it ended while it was looked at."""
        folder = f"/proc/{loaded.main_pid}"
        try:
            argv, environ = self._read(f"{folder}/cmdline"), self._read(f"{folder}/environ")
        except CommandFailed as error:
            if "Permission denied" in str(error):
                raise CommandFailed(
                    f"{self._host.name}: {folder} cannot be read: the process is another user's; "
                    "read it as root",
                    error.returncode,
                ) from error
            return None
        # Before its program is executed a new process is called as systemd calls it: (name).
        if not argv or environ is None or argv.startswith(b"("):
            return None
        return RunningProcess(
            loaded.main_pid,
            loaded.main_started_us,
            tuple(_text(word) for word in argv.removesuffix(b"\0").split(b"\0")),
            _variables([_text(word) for word in environ.split(b"\0") if word]),
        )


def _loaded(p: dict[str, Any]) -> Loaded:
    commands = {
        key: _commands(p, key)
        for key in (
            "ExecCondition",
            "ExecStartPre",
            "ExecStart",
            "ExecStartPost",
            "ExecReload",
            "ExecStop",
            "ExecStopPost",
        )
    }
    error = [text for text in _words(p.get("LoadError", ())) if text]
    return Loaded(
        load_state=_word(p["LoadState"]),
        load_error=": ".join(error),
        active_state=_word(p["ActiveState"]),
        sub_state=_word(p["SubState"]),
        result=_word(p.get("Result", "")),
        unit_file_state=_word(p.get("UnitFileState", "")),
        fragment=_word(p.get("FragmentPath", "")),
        drop_ins=_words(p.get("DropInPaths", ())),
        names=(_word(p["Id"]), *sorted(set(_words(p["Names"])) - {p["Id"]})),
        need_daemon_reload=bool(p.get("NeedDaemonReload", False)),
        environment=_variables(_words(p.get("Environment", ()))),
        environment_files=tuple((_word(w), bool(o)) for w, o in p.get("EnvironmentFiles", ())),
        commands=commands,
        main_pid=int(p.get("MainPID", 0)),
        main_started_us=int(p.get("ExecMainStartTimestamp", 0)),
        main_code=int(p.get("ExecMainCode", 0)),
        main_status=int(p.get("ExecMainStatus", 0)),
        restarts=int(p.get("NRestarts", 0)),
        invocation=bytes(p.get("InvocationID", ())).hex(),
        properties=p,
    )


@contextlib.contextmanager
def _understood(host: str) -> Iterator[None]:
    """What is not as systemd answers is named, whoever answers in its place.

    Raises:
        CommandFailed: the answer has another form.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CommandFailed(
            f"{host}: busctl: no answer of systemd: {error_line(error, 120)}", 1
        ) from error


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _words(values: Any) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{values!r} is no list")
    return tuple(map(_word, values))


def _commands(properties: Mapping[str, Any], key: str) -> tuple[ExecCommand, ...]:
    found = properties.get(f"{key}Ex", properties.get(key, ()))
    commands = []
    for path, argv, flags, started, _, ended, _, pid, code, status in found:
        named = tuple(flags) if isinstance(flags, list) else ("ignore-failure",) if flags else ()
        commands.append(
            ExecCommand(str(path), tuple(argv), named, started, ended, pid, code, status)
        )
    return tuple(commands)


def _variables(words: Sequence[str]) -> dict[str, str]:
    return {name: value for name, equals, value in (w.partition("=") for w in words) if equals}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
