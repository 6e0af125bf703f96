"""Another machine over ssh: one connection, opened again when it is lost, nothing waited for ever.

What travels is one line, quoted once: a fixed script or the caller's command, and data only as its
arguments or its input. The far side ends a command at its deadline too, so that nothing acts long
after its caller has given up. Host keys must be known; an unknown or changed one is refused.

A command that was sent is never sent again: when its answer is lost, nobody knows whether it was
done. Only what was not sent yet is tried over a new connection.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import select
import shlex
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import paramiko
from paramiko.hostkeys import InvalidHostKey

from ..errors import CommandFailed, StaleEpoch, TransportError
from ..text import error_line, one_line
from .base import (
    FENCED_OFF,
    CommandLog,
    CommandResult,
    Fence,
    Probe,
    Process,
    identity_of,
    raise_for_code,
    stale,
    usable,
)

__all__ = ["SshHost"]

_MAX_OUTPUT: Final = 32 * 1024 * 1024
_LINGER_S: Final = 0.5
"""How long output may still come once the exit code is there: a child may keep the pipe open."""
_EXISTS: Final = 73
_ABSENT: Final = 66
_REFUSED: Final = 7
# How a link fails, in whatever layer.
_LINK: Final = (paramiko.SSHException, OSError, EOFError)
_ENVIRONMENT_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# A shell between sshd and the command answers with a code where a signal would give none.
_ANSWER: Final = '"$@"; exit $?'

_FENCED: Final = """\
umask 077
fence=$1 epoch=$2; shift 2
folder=$(dirname -- "$fence")
mkdir -p -- "$folder" && exec 9>>"$fence.lock" && flock 9 || exit 74
seen=0
if [ -e "$fence" ]; then read -r seen < "$fence"; fi
case $seen in ''|*[!0-9]*) echo "$fence: no epoch stands there" >&2; exit 74;; esac
if [ "$seen" -gt "$epoch" ]; then echo "dsv41-fence $seen" >&2; exit 83; fi
if [ "$seen" -lt "$epoch" ]; then
  new=$fence.$$.tmp
  printf '%s\\n' "$epoch" > "$new" && sync -- "$new" && mv -fT -- "$new" "$fence" \\
    && sync -- "$folder" || { rm -f -- "$new"; exit 74; }
fi
# The lock is this shell's: a server that the command leaves behind must not keep it.
"$@" 9>&-
exit $?
"""

_STORE: Final = """\
umask 077
how=$1 path=$2 size=$3
folder=$(dirname -- "$path")
mkdir -p -- "$folder" || exit 74
new=$folder/.$(basename -- "$path").$$.tmp
trap 'rm -f -- "$new"' EXIT
set -C
cat > "$new" || exit 74
set +C
# A link that broke while the data came must not leave half of them under the name.
[ "$(wc -c < "$new")" -eq "$size" ] && sync -- "$new" || exit 74
if [ "$how" = create ]; then
  if ! ln -T -- "$new" "$path"; then
    if [ -e "$path" ] || [ -L "$path" ]; then exit 73; fi
    exit 74
  fi
else
  mv -fT -- "$new" "$path" || exit 74
fi
sync -- "$folder" || exit 74
"""

_READ: Final = """\
if [ -e "$1" ] && [ ! -f "$1" ]; then echo "not a file" >&2; exit 74; fi
cat -- "$1" && exit 0
if [ -e "$1" ] || [ -L "$1" ]; then exit 74; fi
exit 66
"""

_REMOVE: Final = """\
rm -f -- "$1" || exit 74
folder=$(dirname -- "$1")
if [ -d "$folder" ]; then sync -- "$folder" || exit 74; fi
"""

_PORT: Final = """\
LC_ALL=C
export LC_ALL
said=$(timeout 2 bash -c ': <>"/dev/tcp/$1/$2"' port "$1" "$2" 2>&1) && exit 0
case $said in *"Connection refused"*) exit 7;; esac
exit 1
"""

# Every record names its file and ends in a null character, so any argument comes over whole.
_PROCESSES: Final = """\
cd /proc || exit 74
LC_ALL=C grep -aHz '' [0-9]*/cmdline [0-9]*/stat 2>/dev/null
exit 0
"""

# Nobody has asked for paramiko's own lines; what went wrong is in the error that is raised.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class SshHost:
    """A machine over ssh. `connect_s` bounds each step of connecting; keys come from `key`, an
    agent, or the user's own; `known_hosts` is the file that must name the host (by default the
    user's and the system's).
    """

    def __init__(
        self,
        name: str,
        address: str,
        log: CommandLog,
        *,
        port: int = 22,
        user: str | None = None,
        key: Path | None = None,
        known_hosts: Path | None = None,
        connect_s: float = 5.0,
    ) -> None:
        self.name = name
        self.address = address
        self.log = log
        self._port = port
        self._user = user
        self._key = key
        self._known_hosts = known_hosts
        self._connect_s = connect_s
        self._client: paramiko.SSHClient | None = None
        self._lock = threading.RLock()
        self._reused = False

    # -- the interface ---------------------------------------------------------------------------

    def identity(self) -> str:
        """See `Host.identity`."""
        argv = ["cat", "/proc/sys/kernel/random/boot_id", "/proc/1/stat"]
        boot, _, first = self._ask(argv, "identity").decode("utf-8", "replace").partition("\n")
        return identity_of(boot, first)

    def run(
        self,
        argv: Sequence[str],
        *,
        name: str,
        deadline_s: float,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        check: bool = True,
        fence: Fence | None = None,
        private: bool = False,
    ) -> CommandResult:
        """See `Host.run`. A command that a signal ended answers 128 and the signal's number."""
        usable(argv, name)
        words = list(argv)
        if env:
            for variable in env:
                if not _ENVIRONMENT_NAME.fullmatch(variable):
                    raise CommandFailed(f"{name}: no environment name: {variable!r}", 127)
            words = ["env", *(f"{key}={value}" for key, value in env.items()), *words]
        begun = time.monotonic()
        try:
            code, out, err = self._exchange(words, name, deadline_s, stdin.encode(), fence)
        except (TransportError, CommandFailed) as error:
            self.log.write(name, [f"host: {self.name}", f"argv: {list(argv)!r}", str(error)])
            raise
        result = CommandResult(
            tuple(argv),
            code,
            out.decode("utf-8", "replace"),
            err.decode("utf-8", "replace"),
            time.monotonic() - begun,
        )
        self.log.record(self.name, name, result, private=private)
        if check:
            raise_for_code(name, result)
        return result

    def read(self, path: str) -> bytes | None:
        """See `Host.read`."""
        code, out, err = self._script(_READ, [path], f"read {path}")
        if code == _ABSENT:
            return None
        _refuse(f"read {path}", code, err)
        return out

    def create(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.create`."""
        self._put("create", path, data, fence)

    def write(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.write`."""
        self._put("write", path, data, fence)

    def remove(self, path: str, *, fence: Fence | None = None) -> None:
        """See `Host.remove`."""
        code, _, err = self._script(_REMOVE, [path], f"remove {path}", fence=fence)
        _refuse(f"remove {path}", code, err)

    def port(self, port: int, host: str = "127.0.0.1") -> Probe:
        """See `Host.port`."""
        code, _, _ = self._script(_PORT, [host, str(port)], f"port {port}")
        return {0: Probe.UP, _REFUSED: Probe.DOWN}.get(code, Probe.UNKNOWN)

    def processes(self) -> list[Process]:
        """See `Host.processes`."""
        _, out, _ = self._script(_PROCESSES, [], "processes")
        argv: dict[int, list[str]] = {}
        started: dict[int, float] = {}
        for record in out.decode("utf-8", "replace").split("\0"):
            where, _, text = record.partition(":")
            pid, _, kind = where.partition("/")
            if kind == "cmdline":
                argv.setdefault(int(pid), []).append(text)
            elif kind == "stat":
                fields = text.rpartition(")")[2].split()
                if fields[0] != "Z":
                    started[int(pid)] = float(fields[19])
        return [
            Process(pid, ticks, tuple(argv.get(pid, ()))) for pid, ticks in sorted(started.items())
        ]

    def close(self) -> None:
        """See `Host.close`."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- scripts -----------------------------------------------------------------------------------

    def _put(self, how: str, path: str, data: bytes | str, fence: Fence | None) -> None:
        raw = data.encode() if isinstance(data, str) else data
        code, _, err = self._script(
            _STORE, [how, path, str(len(raw))], f"{how} {path}", stdin=raw, fence=fence
        )
        if code == _EXISTS:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        _refuse(f"{how} {path}", code, err)

    def _script(
        self,
        script: str,
        arguments: list[str],
        what: str,
        *,
        stdin: bytes = b"",
        fence: Fence | None = None,
    ) -> tuple[int, bytes, bytes]:
        argv = ["sh", "-c", script, "sh", *arguments]
        usable(argv, what)
        return self._exchange(argv, what, 3 * self._connect_s, stdin, fence)

    def _ask(self, argv: list[str], what: str) -> bytes:
        code, out, err = self._exchange(argv, what, 3 * self._connect_s, b"", None)
        _refuse(what, code, err)
        return out

    # -- the connection ---------------------------------------------------------------------------

    def _exchange(
        self, argv: list[str], what: str, deadline_s: float, stdin: bytes, fence: Fence | None
    ) -> tuple[int, bytes, bytes]:
        """Run `argv` on the host within the deadline and return its code and output.

        Raises:
            TransportError: the link or the deadline; whether the command ran is not known.
            StaleEpoch: the host has seen a newer epoch.
        """
        deadline = time.monotonic() + deadline_s
        words = list(argv)
        if fence is not None:
            words = ["sh", "-c", _FENCED, "sh", fence.path, str(fence.epoch), *words]
        limited = ["timeout", "-k", "5", f"{deadline_s:.3f}", *words]
        line = shlex.join(["sh", "-c", _ANSWER, "sh", *limited])
        channel = self._open(what, deadline)
        # Some of paramiko's waits have no end of their own; a closed transport ends them all.
        guard = threading.Timer(max(0.0, deadline - time.monotonic()), self.close)
        guard.daemon = True
        guard.start()
        try:
            code, out, err = _converse(channel, line, stdin, deadline)
        except _LINK as error:
            self.close()
            if time.monotonic() >= deadline:
                raise self._silent(what, deadline_s) from error
            raise TransportError(f"{what}: the link to {self.name} was lost: {error}") from error
        finally:
            guard.cancel()
            channel.close()
        if code is None:
            if time.monotonic() >= deadline:
                raise self._silent(what, deadline_s)
            self.close()
            raise TransportError(f"{what}: the link to {self.name} was lost before the answer")
        if code == FENCED_OFF and fence is not None and err.startswith(b"dsv41-fence "):
            raise StaleEpoch(stale(what, self.name, int(err.split()[1]), fence), FENCED_OFF)
        return code, out, err

    def _silent(self, what: str, deadline_s: float) -> TransportError:
        return TransportError(f"{what}: {self.name} gave no answer within {deadline_s:g} s")

    def _open(self, what: str, deadline: float) -> paramiko.Channel:
        """Open a channel; over a new connection when the old one does not carry any more."""
        left = deadline - time.monotonic()
        failure: Exception | None = None
        try:
            try:
                return self._channel(left)
            except _LINK:
                # What was open before may have died unseen; what was opened now is not tried twice.
                if not self._reused:
                    raise
                self.close()
                return self._channel(deadline - time.monotonic())
        except (*_LINK, InvalidHostKey, ValueError) as error:
            self.close()
            failure = error
        reason = _reason(failure, self.address, self._port, self._known_hosts)
        raise TransportError(f"{what}: {self.name} cannot be reached: {reason}") from failure

    def _channel(self, left: float) -> paramiko.Channel:
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        return self._connected(left).open_session(timeout=min(self._connect_s, left))

    def _connected(self, left: float) -> paramiko.Transport:
        with self._lock:
            transport = self._client.get_transport() if self._client is not None else None
            self._reused = transport is not None and transport.is_active()
            if transport is not None and self._reused:
                return transport
            self.close()
            patience = min(self._connect_s, left)
            link = socket.create_connection((self.address, self._port), timeout=patience)
            client = paramiko.SSHClient()
            try:
                # Without it every command waits for the far side's delayed acknowledgement.
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._known_hosts is None:
                    client.load_system_host_keys()
                    with contextlib.suppress(OSError):
                        client.load_system_host_keys("/etc/ssh/ssh_known_hosts")
                else:
                    client.load_host_keys(str(self._known_hosts))
                client.set_missing_host_key_policy(paramiko.RejectPolicy())
                client.connect(
                    self.address,
                    port=self._port,
                    username=self._user,
                    key_filename=str(self._key) if self._key is not None else None,
                    look_for_keys=self._key is None,
                    allow_agent=self._key is None,
                    sock=link,
                    timeout=patience,
                    banner_timeout=patience,
                    auth_timeout=patience,
                    channel_timeout=patience,
                )
                found = client.get_transport()
                if found is None:
                    raise paramiko.SSHException("no transport")
            except BaseException:
                client.close()
                link.close()
                raise
            found.set_keepalive(15)
            self._client = client
            return found


def _converse(
    channel: paramiko.Channel, line: str, stdin: bytes, deadline: float
) -> tuple[int | None, bytes, bytes]:
    """Send the command and its input, and gather code and output; None: no code came."""
    channel.settimeout(max(0.01, deadline - time.monotonic()))
    channel.exec_command(line)
    if stdin:
        channel.sendall(stdin)
    channel.shutdown_write()
    out, err = bytearray(), bytearray()
    ready = select.poll()
    ready.register(channel.fileno(), select.POLLIN)
    quiet_since = time.monotonic()
    while True:
        moved = False
        while channel.recv_ready():
            out += channel.recv(65536)
            moved = True
        while channel.recv_stderr_ready():
            err += channel.recv_stderr(65536)
            moved = True
        now = time.monotonic()
        if len(out) + len(err) > _MAX_OUTPUT:
            raise paramiko.SSHException(f"more than {_MAX_OUTPUT} bytes of output")
        if moved:
            quiet_since = now
            continue
        ended = channel.closed or channel.eof_received
        if ended and (channel.exit_status_ready() or channel.closed):
            break
        if channel.exit_status_ready() and now - quiet_since > _LINGER_S:
            break
        if now >= deadline:
            return None, bytes(out), bytes(err)
        # After the end of the stream the descriptor stays ready: only the code is waited for.
        if ended:
            channel.status_event.wait(min(0.05, deadline - now))
        else:
            ready.poll(min(100.0, 1000.0 * (deadline - now)))
    # What came between the last look at the streams and the look at their end.
    while channel.recv_ready():
        out += channel.recv(65536)
    while channel.recv_stderr_ready():
        err += channel.recv_stderr(65536)
    code = channel.exit_status if channel.exit_status_ready() else -1
    return (None if code < 0 else code), bytes(out), bytes(err)


def _refuse(what: str, code: int, err: bytes) -> None:
    if code != 0:
        said = err.decode("utf-8", "replace").strip().splitlines()
        raise CommandFailed(f"{what}: {one_line(said[-1]) if said else f'exit {code}'}", code)


def _reason(error: Exception | None, address: str, port: int, known: Path | None) -> str:
    """Why there is no connection, and what to do where it will not heal by itself."""
    where = f"{address}:{port}"
    if isinstance(error, paramiko.BadHostKeyException):
        return f"{where} shows another host key than the known one; nothing was sent"
    if isinstance(error, paramiko.AuthenticationException):
        return f"{where} refuses the user or the key"
    if error is not None and "not found in known_hosts" in str(error):
        file = known or "~/.ssh/known_hosts"
        return f"{where} is not in {file}; check its key and add it (ssh-keyscan prints it)"
    if isinstance(error, InvalidHostKey):
        file = known or "a known_hosts file"
        return f"{file} has a line that is no host key: {one_line(str(error))}"
    if isinstance(error, TimeoutError):
        return f"{where} did not answer in time"
    return f"{where}: {'no address' if error is None else error_line(error)}"
