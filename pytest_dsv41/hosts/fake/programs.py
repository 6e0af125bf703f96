"""The programs of a simulated machine: what each command line answers or becomes.

A program is a function of a `Call`. It answers at once (`Reply`) or stays (`Service`: a server, a
placeholder). Shell scripts are known by their text, since no shell is simulated: a script of one's
own is registered with the world together with the function that does what it does.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Final

from ...errors import UsageError
from ..scopes import KILL, LIST, RUN
from ..tmux import LOGGED, START, TITLED
from .machine import FakeProcess, Machine, Service

__all__ = ["BUILT_IN", "Call", "Program", "Reply", "Service", "execute", "load_program"]

_DEFAULT_SOCKET: Final = "default"


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a program that ends answers: exit code and output."""

    code: int = 0
    out: str = ""
    err: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
    """One start of a program on a machine: its argv, input, environment, and where it runs."""

    machine: Machine
    argv: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scope: str = ""
    """The systemd scope it runs in; empty in a plain login."""
    socket: str = _DEFAULT_SOCKET
    """The tmux socket that a plain `tmux` reaches from here."""
    session: str = ""
    """The tmux session whose pane it is."""
    programs: Mapping[str, Program] = dataclasses.field(default_factory=dict)
    servers: str = "simulated"
    """Whether servers are "simulated" (a port that listens) or "real" (a stub on loopback)."""

    @property
    def args(self) -> tuple[str, ...]:
        """The command line without the program's name."""
        return self.argv[1:]

    def option(self, name: str, default: str = "") -> str:
        """The value of `--name VALUE` or `--name=VALUE`."""
        for index, word in enumerate(self.argv):
            if word == name and index + 1 < len(self.argv):
                return self.argv[index + 1]
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return default

    def nested(self, argv: tuple[str, ...], **changes: object) -> Call:
        """The call of a program that this one runs."""
        return dataclasses.replace(self, argv=argv, **changes)  # type: ignore[arg-type]


Program = Callable[[Call], "Reply | Service"]


def load_program(name: str) -> Program:
    """Import a program by `module:function`, so that every process of a world finds it.

    Raises:
        UsageError: there is no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"program {name}: {error}; valid: MODULE:FUNCTION") from error
    program: Program = found
    return program


def execute(call: Call) -> Reply | None:
    """Run a command to its end; None when it stays in the foreground and never answers."""
    answer = resolve(call)
    if isinstance(answer, Reply):
        return answer
    start(call, answer)
    return None


def resolve(call: Call) -> Reply | Service:
    """What the command answers or becomes."""
    if not call.argv or not call.argv[0]:
        return Reply(127, err="no command\n")
    program = call.programs.get(PurePosixPath(call.argv[0]).name)
    if program is None:
        return Reply(127, err=f"{call.argv[0]}: No such file or directory\n")
    return program(call)


def start(call: Call, service: Service) -> None:
    """Make the command a process of the machine."""
    call.machine.start(
        list(call.argv),
        service,
        scope=call.scope,
        socket=call.socket if call.session else "",
        session=call.session,
        env=dict(call.env),
    )


# -- plain programs ----------------------------------------------------------------------------


def _true(_call: Call) -> Reply:
    return Reply()


def _false(_call: Call) -> Reply:
    return Reply(1)


def _echo(call: Call) -> Reply:
    return Reply(out=" ".join(call.args) + "\n")


def _printf(call: Call) -> Reply:
    """`printf '%s\\n' WORD…`: what arrived, one a line."""
    if call.args[:1] != ("%s\\n",):
        return Reply(2, err="printf: only the format '%s\\n' is simulated\n")
    return Reply(out="".join(f"{word}\n" for word in call.args[1:]))


def _cat(call: Call) -> Reply | Service:
    names = [word for word in call.args if word != "--"]
    if not names:
        return Reply(out=call.stdin) if call.stdin or not call.session else Service()
    out = ""
    for name in names:
        if name == "/proc/self/cgroup":
            out += f"0::/user.slice/{call.scope or 'session-1.scope'}\n"
            continue
        data = call.machine.load(name)
        if data is None:
            return Reply(1, out, f"cat: {name}: No such file or directory\n")
        out += data.decode("utf-8", "replace")
    return Reply(out=out)


def _sleep(call: Call) -> Service:
    word = call.args[0] if call.args else "infinity"
    return Service(lives_s=None if word == "infinity" else float(word))


def _date(call: Call) -> Reply:
    return Reply(out=f"{call.machine.wall:.0f}\n")


def _hostname(call: Call) -> Reply:
    return Reply(out=f"{call.machine.name}\n")


def _env(call: Call) -> Reply | Service:
    words = list(call.args)
    env = dict(call.env)
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if not words:
        return Reply(out="".join(f"{name}={value}\n" for name, value in sorted(env.items())))
    return resolve(call.nested(tuple(words), env=env))


def _timeout(call: Call) -> Reply | Service:
    words = list(call.args)
    while words and words[0].startswith("-"):
        words.pop(0)
    return resolve(call.nested(tuple(words[1:])))


def _bash(call: Call) -> Reply | Service:
    """A shell: scripts are known by their text, `exit N` alone is understood."""
    words = list(call.args)
    if words[:1] == ["-c"] and len(words) > 1:
        text, rest = words[1], tuple(words[2:])
    elif words[:1] == ["-s"]:
        text, rest = call.stdin, ("sh", *(word for word in words[1:] if word != "--"))
    else:
        return Reply(2, err=f"{call.argv[0]}: only -c SCRIPT and -s are simulated\n")
    head, _, code = text.strip().partition(" ")
    if head == "exit" and code.isdigit():
        return Reply(int(code))
    script = call.programs.get(text)
    if script is None:
        first = text.strip().splitlines()[0] if text.strip() else "(empty)"
        return Reply(127, err=f"{call.argv[0]}: no simulation of this script: {first}\n")
    return script(call.nested(rest))


def _exec_titled(call: Call) -> Reply | Service:
    """`exec -a "$1" cat`: a process that stays under a title of its own."""
    return Service(title=(call.argv[1],))


# -- servers -----------------------------------------------------------------------------------


def _server(call: Call) -> Service:
    """A model server: it listens on `--port` (a headless one does not) and uses the GPU."""
    if "--headless" in call.argv:
        return Service(gpu=True)
    port = call.option("--port", "8000")
    model = call.option("--served-model-name", "stub")
    return _serving(call, port, ("--model", model, "--port", port))


def _python(call: Call) -> Reply | Service:
    """`python -m pytest_dsv41 stub …`: the embedded server, really started where asked for."""
    if call.args[:3] != ("-m", "pytest_dsv41", "stub"):
        return Reply(1, err="python: only -m pytest_dsv41 stub is simulated\n")
    return _stub(call.nested(("dsv41", *call.args[2:])))


def _stub(call: Call) -> Reply | Service:
    if call.args[:1] != ("stub",):
        return Reply(2, err="dsv41: only stub is simulated\n")
    rest = list(call.args[1:])
    _pop(rest, "--host")
    return _serving(call, call.option("--port", "0"), tuple(rest))


def _serving(call: Call, port: str, options: tuple[str, ...]) -> Service:
    """A server on `port`; a real one is the embedded stub on the machine's loopback address."""
    real: tuple[str, ...] = ()
    if call.servers == "real":
        where = ("--host", call.machine.address)
        real = (sys.executable, "-m", "pytest_dsv41", "stub", *where, *options)
    return Service(ports=(int(port),), gpu=True, real=real)


def _curl(call: Call) -> Reply:
    """The exit code says whether something listens: 0, or 7 for a refused connection."""
    url = next((word for word in call.args if word.startswith("http")), "")
    port = url.partition("://")[2].partition("/")[0].rpartition(":")[2]
    if port.isdigit() and call.machine.listening(int(port)):
        return Reply()
    return Reply(7, err=f"curl: (7) Failed to connect to {url}\n")


# -- tmux --------------------------------------------------------------------------------------


def _tmux(call: Call) -> Reply:
    words = list(call.args)
    # By its full name the program is tmux itself and never the shim of a scope.
    socket = _DEFAULT_SOCKET if call.argv[0].startswith("/") else call.socket
    while words and words[0] in ("-L", "-f"):
        option, value = words.pop(0), words.pop(0)
        if option == "-L":
            socket = value
    command = words.pop(0) if words else ""
    handler = _TMUX.get(command)
    if handler is None:
        return Reply(1, err=f"unknown command: {command}\n")
    return handler(call, socket, words)


def _pop(words: list[str], name: str, default: str = "") -> str:
    if name not in words:
        return default
    at = words.index(name)
    value = words[at + 1]
    del words[at : at + 2]
    return value


def _tmux_new(call: Call, socket: str, words: list[str]) -> Reply:
    head = words[: words.index("--")] if "--" in words else words
    tail = words[len(head) + 1 :] if "--" in words else []
    name = _pop(head, "-s")
    _pop(head, "-x")
    _pop(head, "-y")
    command = tuple(tail or [word for word in head if word != "-d"])
    machine = call.machine
    if any(pane.session == name for pane in machine.panes(socket)):
        return Reply(1, err=f"duplicate session: {name}\n")
    server = machine.tmux_server(socket)
    if server is None:
        server = machine.start(["tmux", "-L", socket], scope=call.scope, socket=socket)
    # A pane lives where its server does, whoever asked for it.
    inner = call.nested(command, scope=server.scope, socket=socket, session=name)
    answer = resolve(inner)
    if isinstance(answer, Reply):
        if not machine.panes(socket):
            machine.kill(server.pid)
        return Reply()
    start(inner, answer)
    return Reply()


def _tmux_window(call: Call, socket: str, words: list[str]) -> Reply:
    found = _tmux_target(call, socket, words)
    if isinstance(found, Reply):
        return found
    server = call.machine.tmux_server(socket)
    assert server is not None
    command = tuple(words[words.index("--") + 1 :])
    inner = call.nested(command, scope=server.scope, socket=socket, session=found)
    answer = resolve(inner)
    if isinstance(answer, Service):
        start(inner, answer)
    return Reply()


def _session_id(call: Call, pane: FakeProcess) -> str:
    """A session's id: it is never another session's again."""
    panes = call.machine.panes(pane.socket)
    return f"${min(p.pid for p in panes if p.session == pane.session)}"


def _tmux_panes(call: Call, socket: str, words: list[str]) -> Reply:
    if call.machine.tmux_server(socket) is None:
        return Reply(1, err=f"no server running on /tmp/tmux-0/{socket}\n")
    form = _pop(words, "-F", "#{session_name}")
    return Reply(
        out="".join(
            form.replace("#{session_name}", pane.session)
            .replace("#{session_id}", _session_id(call, pane))
            .replace("#{pane_pid}", str(pane.pid))
            + "\n"
            for pane in call.machine.panes(socket)
        )
    )


def _tmux_sessions(call: Call, socket: str, words: list[str]) -> Reply:
    listed = _tmux_panes(call, socket, words)
    return dataclasses.replace(listed, out="".join(dict.fromkeys(listed.out.splitlines(True))))


def _tmux_target(call: Call, socket: str, words: list[str]) -> str | Reply:
    """The session that `-t` names, by its exact name or its id."""
    wanted = _pop(words, "-t").removesuffix(":")
    if call.machine.tmux_server(socket) is None:
        return Reply(1, err=f"no server running on /tmp/tmux-0/{socket}\n")
    for pane in call.machine.panes(socket):
        if wanted in (f"={pane.session}", pane.session, _session_id(call, pane)):
            return pane.session
    return Reply(1, err=f"can't find session: {wanted}\n")


def _tmux_has(call: Call, socket: str, words: list[str]) -> Reply:
    found = _tmux_target(call, socket, words)
    return found if isinstance(found, Reply) else Reply()


def _tmux_kill(call: Call, socket: str, words: list[str]) -> Reply:
    found = _tmux_target(call, socket, words)
    if isinstance(found, Reply):
        return found
    for pane in call.machine.panes(socket):
        if pane.session == found:
            call.machine.kill(pane.pid)
    return Reply()


def _tmux_kill_server(call: Call, socket: str, _words: list[str]) -> Reply:
    server = call.machine.tmux_server(socket)
    if server is None:
        return Reply(1, err=f"no server running on /tmp/tmux-0/{socket}\n")
    call.machine.kill(server.pid)
    return Reply()


_TMUX: Final[Mapping[str, Callable[[Call, str, list[str]], Reply]]] = {
    "new-session": _tmux_new,
    "new-window": _tmux_window,
    "list-panes": _tmux_panes,
    "list-sessions": _tmux_sessions,
    "has-session": _tmux_has,
    "kill-session": _tmux_kill,
    "kill-server": _tmux_kill_server,
}


# -- systemd, GPU, containers ------------------------------------------------------------------


def _systemd_run(call: Call) -> Reply | Service:
    """`systemd-run --user --scope --unit=U [-p RuntimeMaxSec=N] [--] COMMAND…`."""
    words = list(call.args)
    unit, expires = "", None
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        value = words.pop(0) if word == "-p" else word.partition("=")[2]
        if word.startswith("--unit"):
            unit = value
        elif "RuntimeMaxSec=" in value:
            expires = float(value.partition("=")[2])
    unit = unit if unit.endswith(".scope") else f"{unit}.scope"
    if unit in call.machine.scopes():
        return Reply(1, err=f"Failed to start transient scope unit: Unit {unit} already exists.\n")
    inner = call.nested(tuple(words), scope=unit)
    answer = resolve(inner)
    if expires is not None and (isinstance(answer, Service) or unit in call.machine.scopes()):
        call.machine.expiry[unit] = call.machine.now + expires
    if isinstance(answer, Service):
        start(inner, answer)
        # The command stays in the foreground, so whoever called it waits.
        return Service(lives_s=0.0)
    return answer


def _start_in_tmux(call: Call) -> Reply | Service:
    """The script `tmux.START`: the clock cap, its line, and the server in tmux."""
    host, clock, session, log, *command = call.args
    said = ""
    if clock != "0":
        capped = resolve(call.nested(("nvidia-smi", "-lgc", f"0,{clock}")))
        if not isinstance(capped, Reply) or capped.code != 0:
            return capped
        said = f"{host} clock cap {clock} MHz\n"
    words = ("tmux", "new-session", "-d", "-s", session, "--", "sh", "-c", LOGGED, log, *command)
    started = resolve(call.nested(words))
    if isinstance(started, Reply):
        return dataclasses.replace(started, out=said + started.out)
    return started


def _logged(call: Call) -> Reply | Service:
    """`exec "$@" >> "$0"`: the command itself, what it says in its log."""
    log, *command = call.argv
    answer = resolve(call.nested(tuple(command)))
    if isinstance(answer, Reply):
        text = (call.machine.load(log) or b"").decode("latin-1") + answer.out + answer.err
        call.machine.store(log, text.encode("latin-1", "replace"), synced=False)
        return answer
    return dataclasses.replace(answer, title=answer.title or tuple(command))


def _tail(call: Call) -> Reply:
    """`tail -n N FILE`."""
    data = call.machine.load(call.argv[-1])
    if data is None:
        return Reply(1, err=f"tail: cannot open '{call.argv[-1]}'\n")
    lines = data.decode("utf-8", "replace").splitlines(keepends=True)
    return Reply(out="".join(lines[-int(call.option("-n", "10")) :]))


def _run_scoped(call: Call) -> Reply | Service:
    """The script `scopes.RUN`: a scope in which a plain `tmux` reaches the scope's own socket."""
    unit, longest, socket, *command = call.args
    words = ["systemd-run", "--user", "--scope", f"--unit={unit}"]
    if longest != "0":
        words += ["-p", f"RuntimeMaxSec={longest}"]
    return _systemd_run(call.nested((*words, "--", *command), socket=socket))


def _list_scopes(call: Call) -> Reply:
    return Reply(out="".join(f"/user.slice/{unit}\n" for unit in call.machine.scopes()))


def _kill_scopes(call: Call) -> Reply:
    for unit in call.args[1:]:
        call.machine.kill_scope(unit)
    return Reply()


def _nvidia_smi(call: Call) -> Reply:
    if not call.machine.gpu:
        return Reply(127, err="nvidia-smi: No such file or directory\n")
    if "-lgc" in call.args:
        low_high = call.args[call.args.index("-lgc") + 1]
        call.machine.store("/sys/fake/clock-cap", low_high.encode(), synced=False)
        return Reply(out="All done.\n")
    if any(word.startswith("--query-compute-apps") for word in call.args):
        rows = [f"{p.pid}, {p.argv[0]}\n" for p in call.machine.processes.values() if p.gpu]
        rows += [f"{900 + i}, {c.name}\n" for i, c in enumerate(call.machine.containers) if c.gpu]
        return Reply(out="".join(rows))
    return Reply(out="NVIDIA-SMI (simulated)\n")


def _docker(call: Call) -> Reply:
    """`docker ps …` with `--filter label=K[=V]`, one name a line, and `docker rm -f NAME`."""
    machine = call.machine
    if call.args[:1] == ("rm",):
        gone = set(call.args[1:])
        machine.containers = [c for c in machine.containers if c.name not in gone]
        return Reply()
    if call.args[:1] != ("ps",):
        return Reply(1, err="docker: only ps and rm are simulated\n")
    label = call.option("--filter").partition("label=")[2]
    key, has_value, value = label.partition("=")
    names = [
        c.name
        for c in machine.containers
        if not key or (key in c.labels and (not has_value or c.labels[key] == value))
    ]
    if "json" in call.option("--format"):
        return Reply(out="".join(json.dumps({"Names": name}) + "\n" for name in names))
    return Reply(out="".join(f"{name}\n" for name in names))


BUILT_IN: Final[dict[str, Program]] = {
    "true": _true,
    "false": _false,
    "echo": _echo,
    "printf": _printf,
    "cat": _cat,
    "tail": _tail,
    "sleep": _sleep,
    "date": _date,
    "hostname": _hostname,
    "env": _env,
    "timeout": _timeout,
    "sh": _bash,
    "bash": _bash,
    TITLED: _exec_titled,
    START: _start_in_tmux,
    LOGGED: _logged,
    RUN: _run_scoped,
    LIST: _list_scopes,
    KILL: _kill_scopes,
    "vllm": _server,
    "llama-server": _server,
    "python": _python,
    "python3": _python,
    PurePosixPath(sys.executable).name: _python,
    "dsv41": _stub,
    "curl": _curl,
    "tmux": _tmux,
    "systemd-run": _systemd_run,
    "nvidia-smi": _nvidia_smi,
    "docker": _docker,
}
"""Programs by their name, and shell scripts by their text."""
