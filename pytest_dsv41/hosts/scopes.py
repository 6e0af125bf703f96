"""Scopes: everything that a command starts on a host, under one name, ended whole.

A scope is a transient unit of the host's `systemd --user`, named `dsv41w-<tag>-<epoch>-<what>`. It
holds children that detach, double-fork or ignore signals; ending it is one write to its
`cgroup.kill`, and it is over when the kernel says `populated 0`. With RuntimeMaxSec the host ends
it by itself, also while nobody can reach it. Inside a scope a plain `tmux` reaches a socket of that
scope alone: a pane on a server that ran before would live outside of it.

Needs cgroup v2 with `cgroup.kill` (Linux 5.14) and a `systemd --user` of the login's user.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ..errors import CommandFailed, TransportError, UsageError
from ..text import one_line
from .base import CommandResult, Fence, Host

__all__ = ["KILL", "LIST", "RUN", "ScopeName", "end_scopes", "live_scopes", "run_scoped"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PREFIX: Final = "dsv41w"

RUN: Final = """\
unit=$1 longest=$2 socket=$3; shift 3
: "${XDG_RUNTIME_DIR:=/run/user/$(id -u)}"
export XDG_RUNTIME_DIR
DSV41_TMUX=$socket
export DSV41_TMUX
shim=$XDG_RUNTIME_DIR/dsv41
mkdir -p -- "$shim" && cat > "$shim/tmux.$$" <<'SHIM' && chmod 700 "$shim/tmux.$$" \\
  && mv -f "$shim/tmux.$$" "$shim/tmux" || exit 74
#!/bin/sh
exec /usr/bin/tmux -L "$DSV41_TMUX" "$@"
SHIM
PATH=$shim:$PATH
export PATH
set -- --unit="$unit" -- "$@"
if [ "$longest" != 0 ]; then set -- -p RuntimeMaxSec="$longest" -p TimeoutStopSec=5 "$@"; fi
# From 254 on systemd-run would expand variables in the command; before, there is no such option.
case $(systemd-run --help) in *--expand-environment*) set -- --expand-environment=no "$@";; esac
exec systemd-run --user --scope --quiet --collect "$@"
"""
"""Arguments: unit, seconds it may live (0: for ever), tmux socket, command."""

_FIND: Final = "find /sys/fs/cgroup -type d -name 'dsv41*.scope' 2>/dev/null"

LIST: Final = f"""\
{_FIND} | while IFS= read -r group; do
  if grep -q '^populated 1' "$group/cgroup.events" 2>/dev/null; then echo "$group"; fi
done
"""
"""Prints the cgroup of every scope of ours that holds a process."""

KILL: Final = f"""\
tries=$1; shift
ours() {{
  {_FIND} | while IFS= read -r group; do
    for unit; do
      if [ "$unit" = "$(basename -- "$group")" ]; then echo "$group"; fi
    done
  done
}}
alive() {{
  ours "$@" | while IFS= read -r group; do
    if grep -q '^populated 1' "$group/cgroup.events" 2>/dev/null; then basename -- "$group"; fi
  done
}}
ours "$@" | while IFS= read -r group; do
  if [ -e "$group/cgroup.kill" ]; then echo 1 > "$group/cgroup.kill"; fi
done
while left=$(alive "$@") && [ -n "$left" ]; do
  tries=$((tries - 1))
  if [ "$tries" -le 0 ]; then echo "$left" >&2; exit 75; fi
  sleep 0.02
done
# Empty is over; that systemd has seen it too only lets the unit's name be used again at once.
tries=100
while [ "$tries" -gt 0 ] && [ -n "$(ours "$@")" ]; do tries=$((tries - 1)); sleep 0.02; done
for unit; do
  socket=dsv41-$(printf %s "$unit" | sha256sum | cut -c 1-16)
  rm -f -- "/tmp/tmux-$(id -u)/$socket"
done
"""
"""Arguments: how often to look, 0.02 s apart, and the units. Exit 75: these still live."""


@dataclasses.dataclass(frozen=True)
class ScopeName:
    """The name of one scope: whose (`tag`, a window's id), from which epoch, and for what.

    Hyphens of `what` are escaped as systemd escapes them, so a name tells its parts: the scopes of
    `a` are never taken for those of `a-2`.
    """

    tag: str
    epoch: int
    what: str

    def __post_init__(self) -> None:
        for part in (self.tag, self.what):
            if not _NAME.fullmatch(part):
                raise UsageError(
                    f"scope: {one_line(part)!r}; valid: letters, digits, '.', '_', '-', "
                    "at most 128, beginning with a letter or digit"
                )

    @property
    def unit(self) -> str:
        """The unit's full name."""
        what = self.what.replace("-", "\\x2d")
        return f"{_PREFIX}-{self.tag}-{self.epoch}-{what}.scope"

    @classmethod
    def parse(cls, unit: str) -> ScopeName | None:
        """The parts of a unit's name, or None when it is not one of a window's."""
        head, _, tail = unit.removesuffix(".scope").partition("-")
        parts = tail.rsplit("-", 2)
        if head != _PREFIX or not unit.endswith(".scope") or len(parts) != 3:
            return None
        tag, epoch, what = parts
        try:
            return cls(tag, int(epoch), what.replace("\\x2d", "-"))
        except (ValueError, UsageError):
            return None


def private_socket(unit: str) -> str:
    """The tmux socket of a scope; short, since the path of a socket has a length limit."""
    return f"dsv41-{hashlib.sha256(unit.encode()).hexdigest()[:16]}"


def run_scoped(
    host: Host,
    unit: str,
    argv: Sequence[str],
    *,
    name: str,
    deadline_s: float,
    longest_s: float = 0.0,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    check: bool = True,
    fence: Fence | None = None,
) -> CommandResult:
    """Run `argv` in a new scope `unit` and return what it answered; what it started lives on.

    The scope is ended by its host after `longest_s` seconds (0: never). A command that outlives
    `deadline_s` in the foreground raises as `Host.run` does.

    Raises:
        CommandFailed: the command did, or the unit is there already.
    """
    script = ["sh", "-c", RUN, "sh", unit, f"{longest_s:.0f}", private_socket(unit), *argv]
    return host.run(
        script, name=name, deadline_s=deadline_s, stdin=stdin, env=env, check=check, fence=fence
    )


def live_scopes(host: Host) -> list[str]:
    """The units of ours, of any window, that hold a process; sorted.

    Raises:
        TransportError, CommandFailed: they cannot be seen; that is not none.
    """
    found = host.run(["sh", "-c", LIST], name="scopes", deadline_s=15.0)
    return sorted({line.rpartition("/")[2] for line in found.stdout.splitlines() if line})


def end_scopes(
    host: Host,
    units: Sequence[str],
    *,
    name: str,
    patience_s: float = 10.0,
    fence: Fence | None = None,
) -> None:
    """Kill everything in these scopes and wait until the kernel says they are empty; idempotent.

    Raises:
        TransportError: something is still there (uninterruptible), or the host does not answer.
    """
    if not units:
        return
    tries = str(max(1, round(patience_s / 0.02)))
    argv = ["sh", "-c", KILL, "sh", tries, *units]
    try:
        host.run(argv, name=name, deadline_s=patience_s + 15.0, fence=fence)
    except CommandFailed as error:
        if error.returncode != 75:
            raise
        raise TransportError(f"{name}: still alive on {host.name}: {error}") from error
