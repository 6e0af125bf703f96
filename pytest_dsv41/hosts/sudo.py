"""A host whose commands and files are root's, through `sudo -n`; it looks and listens as itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Final

from ..errors import CommandFailed
from ..text import one_line
from .base import CommandResult, Fence, Host, Probe, Process

__all__ = ["SudoHost"]

_DEADLINE_S: Final = 15.0
_ABSENT: Final = 66
_EXISTS: Final = 73

READ: Final = """\
if [ -e "$1" ] || [ -L "$1" ]; then base64 -w 0 -- "$1"; exit $?; fi
exit 66
"""
STORE: Final = """\
umask 077
how=$1 path=$2
folder=$(dirname -- "$path")
mkdir -p -- "$folder" || exit 74
new=$(mktemp -- "$folder/.dsv41.XXXXXXXX") || exit 74
trap 'rm -f -- "$new"' EXIT
base64 -d > "$new" && sync -- "$new" || exit 74
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
REMOVE: Final = """\
rm -f -- "$1" || exit 74
folder=$(dirname -- "$1")
if [ -d "$folder" ]; then sync -- "$folder" || exit 74; fi
"""


class SudoHost:
    """`Host` over another one, whose login may run commands as root without a password.

    Nothing is asked of sudo but `sudo -n -- PROGRAM ...`; a password prompt is a refusal.
    """

    def __init__(self, host: Host) -> None:
        self._host = host

    @property
    def name(self) -> str:
        """See `Host.name`."""
        return self._host.name

    def identity(self) -> str:
        """See `Host.identity`."""
        return self._host.identity()

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
        """See `Host.run`; the fence is the login's, the command root's."""
        words = [*(["env", *(f"{k}={v}" for k, v in env.items())] if env else []), *argv]
        return self._host.run(
            ["sudo", "-n", "--", *words],
            name=name,
            deadline_s=deadline_s,
            stdin=stdin,
            check=check,
            fence=fence,
            private=private,
        )

    def read(self, path: str) -> bytes | None:
        """See `Host.read`."""
        done = self._script(READ, [path], f"read {path}")
        if done.returncode == _ABSENT:
            return None
        _answered(f"read {path}", done)
        return base64.b64decode(done.stdout)

    def create(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.create`."""
        self._store("create", path, data, fence)

    def write(self, path: str, data: bytes | str, *, fence: Fence | None = None) -> None:
        """See `Host.write`."""
        self._store("write", path, data, fence)

    def remove(self, path: str, *, fence: Fence | None = None) -> None:
        """See `Host.remove`."""
        _answered(f"remove {path}", self._script(REMOVE, [path], f"remove {path}", fence=fence))

    def port(self, port: int, host: str = "127.0.0.1") -> Probe:
        """See `Host.port`."""
        return self._host.port(port, host)

    def processes(self) -> list[Process]:
        """See `Host.processes`."""
        return self._host.processes()

    def close(self) -> None:
        """See `Host.close`."""
        self._host.close()

    def _store(self, how: str, path: str, data: bytes | str, fence: Fence | None) -> None:
        raw = data.encode() if isinstance(data, str) else data
        stdin = base64.b64encode(raw).decode("ascii")
        done = self._script(STORE, [how, path], f"{how} {path}", stdin=stdin, fence=fence)
        if how == "create" and done.returncode == _EXISTS:
            raise FileExistsError(path)
        _answered(f"{how} {path}", done)

    def _script(
        self,
        script: str,
        arguments: Sequence[str],
        name: str,
        *,
        stdin: str = "",
        fence: Fence | None = None,
    ) -> CommandResult:
        return self.run(
            ["sh", "-c", script, "sh", *arguments],
            name=name,
            deadline_s=_DEADLINE_S,
            stdin=stdin,
            check=False,
            fence=fence,
            private=True,
        )


def _answered(what: str, done: CommandResult) -> None:
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        reason = one_line(said[-1]) if said else f"exit {done.returncode}"
        raise CommandFailed(f"{what}: {reason}", done.returncode)
