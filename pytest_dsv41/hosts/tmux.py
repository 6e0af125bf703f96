"""Placeholders: a quiet process in tmux whose title says that a host is taken, and by whom.

The chain's placeholder lives on the host's default socket, outside of every scope, so it outlives
the window that started it; its title ends in `owner=chain-…`. A window's own lives in a scope, on
that scope's socket, names no owner, and dies with the scope. Whose a placeholder is says its title
alone, compared whole: another's, or one without an owner, is never touched (SAFETY I2).
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Final

from ..errors import CommandFailed, Dsv41Error, RefusedByWorld, TransportError, UsageError
from ..text import one_line
from .base import Fence, Host, Placeholder
from .scopes import run_scoped

__all__ = [
    "HOLD_HEAD",
    "HOLD_SESSION",
    "PLACEHOLDER_TMUX",
    "START",
    "check_owner",
    "placeholder_down",
    "placeholder_state",
    "placeholder_up",
    "window_placeholder_up",
]

PLACEHOLDER_TMUX: Final = ("/usr/bin/tmux", "-L", "default")
"""By its full name, so that it reaches the default socket from inside a scope too."""
HOLD_SESSION: Final = "dsv41-hold"
HOLD_HEAD: Final = "vllm serve [DSV41-OFFLOAD hold]"
TITLED: Final = 'exec -a "$1" cat'
"""Becomes a process that waits on its terminal for ever under the title `$1`, and nothing else."""

START: Final = """\
# usage: sh -s -- HOST CLOCK SESSION LOG COMMAND...
# Sets the GPU clock cap (MHz; 0: none), says so, and starts COMMAND in tmux with its output in LOG.
set -eu
host=$1 clock=$2 session=$3 log=$4
shift 4
if [ "$clock" != 0 ]; then
  nvidia-smi -lgc "0,$clock" >&2
  echo "$host clock cap $clock MHz"
fi
mkdir -p -- "$(dirname -- "$log")"
exec tmux new-session -d -s "$session" -- sh -c 'exec "$@" >> "$0" 2>&1' "$log" "$@"
"""
"""The start script that target `spark-pair` uses unless it is given another."""
LOGGED: Final = 'exec "$@" >> "$0" 2>&1'

_OWNER: Final = re.compile(r"chain-\d{8}T\d{6}Z-[0-9a-f]{8}")
_NOBODY: Final = re.compile(
    r"no server running on |"
    r"error connecting to .*\((No such file or directory|Connection refused)\)"
)
_DEADLINE_S: Final = 15.0


@dataclasses.dataclass(frozen=True)
class _Seen:
    state: Placeholder
    session: str = ""
    detail: str = ""


def check_owner(owner: str) -> None:
    """Refuse what is no chain's owner name.

    Raises:
        UsageError: it is not.
    """
    if not _OWNER.fullmatch(owner):
        raise UsageError(
            f"owner: {one_line(owner)!r}; valid: chain-<YYYYMMDD>T<HHMMSS>Z-<8 hex digits>"
        )


def placeholder_state(host: Host, owner: str, *, head: str = HOLD_HEAD) -> Placeholder:
    """What lies on the host's default socket, for this owner. Reads only, never raises."""
    return _look(host, owner, head).state


def placeholder_up(
    host: Host, owner: str, *, head: str = HOLD_HEAD, fence: Fence | None = None
) -> None:
    """Start the chain's placeholder unless this owner's is there.

    Raises:
        RefusedByWorld: another's is there, or the command runs inside a window's scope, where a
            new tmux server would die with it.
        TransportError: it is not known to be up.
    """
    check_owner(owner)
    where = host.run(["cat", "/proc/self/cgroup"], name="placeholder-where", deadline_s=_DEADLINE_S)
    if "/dsv41w-" in where.stdout:
        raise RefusedByWorld(
            f"{host.name}: a chain's placeholder is not started inside a window's scope"
        )
    seen = _look(host, owner, head)
    if seen.state is Placeholder.DOWN:
        argv = [*PLACEHOLDER_TMUX, "new-session", "-d", "-s", HOLD_SESSION, "--"]
        argv += ["bash", "-c", TITLED, "hold", _title(owner, head)]
        # Two that start it at once: one gets "duplicate session", and the look decides.
        host.run(argv, name="placeholder-up", deadline_s=_DEADLINE_S, check=False, fence=fence)
        limit = time.monotonic() + _DEADLINE_S
        seen = _look(host, owner, head)
        while seen.state is Placeholder.FOREIGN and time.monotonic() < limit:
            if not seen.detail.startswith("bash "):
                break
            time.sleep(0.02)
            seen = _look(host, owner, head)
    if seen.state is Placeholder.FOREIGN:
        raise RefusedByWorld(f"{host.name}: {_foreign(seen)}")
    if seen.state is not Placeholder.UP:
        raise TransportError(f"{host.name}: the placeholder is {seen.state.value}: {seen.detail}")


def placeholder_down(
    host: Host, owner: str, *, head: str = HOLD_HEAD, fence: Fence | None = None
) -> str | None:
    """End this owner's placeholder; idempotent. Returns why something is left, or None."""
    seen = _look(host, owner, head)
    if seen.state is Placeholder.UP:
        try:
            # By the session's id: a name could be another's by now.
            host.run(
                [*PLACEHOLDER_TMUX, "kill-session", "-t", seen.session],
                name="placeholder-down",
                deadline_s=_DEADLINE_S,
                check=False,
                fence=fence,
            )
        except (Dsv41Error, OSError) as error:
            return f"{host.name}: {one_line(str(error))}"
        seen = _look(host, owner, head)
    if seen.state is Placeholder.DOWN:
        return None
    if seen.state is Placeholder.FOREIGN:
        return f"{host.name}: {_foreign(seen)}"
    return f"{host.name}: the placeholder is {seen.state.value}: {seen.detail}"


def window_placeholder_up(
    host: Host,
    unit: str,
    *,
    longest_s: float,
    head: str = HOLD_HEAD,
    fence: Fence | None = None,
) -> None:
    """Start a window's own placeholder in its scope `unit`; it dies with the scope."""
    argv = ["tmux", "new-session", "-d", "-s", HOLD_SESSION, "--"]
    argv += ["bash", "-c", TITLED, "hold", head]
    run_scoped(
        host,
        unit,
        argv,
        name="window-placeholder",
        deadline_s=_DEADLINE_S,
        longest_s=longest_s,
        fence=fence,
    )


def _title(owner: str, head: str) -> str:
    return f"{head} owner={owner}"


def _foreign(seen: _Seen) -> str:
    return f"a placeholder that is not this owner's is there ({seen.detail}); it is not touched"


def _look(host: Host, owner: str, head: str) -> _Seen:
    form = "#{session_id} #{pane_pid} #{session_name}"
    try:
        listed = host.run(
            [*PLACEHOLDER_TMUX, "list-panes", "-a", "-F", form],
            name="placeholder-look",
            deadline_s=_DEADLINE_S,
            check=False,
        )
        if listed.returncode != 0:
            if listed.returncode == 1 and _NOBODY.match(listed.stderr):
                return _Seen(Placeholder.DOWN)
            raise CommandFailed(one_line(listed.stderr or "no answer"), listed.returncode)
        panes = [line.split(" ", 2) for line in listed.stdout.splitlines()]
        ours = [(session, pid) for session, pid, name in panes if name == HOLD_SESSION]
        titles = [host.read(f"/proc/{pid}/cmdline") or b"" for _, pid in ours]
    except (Dsv41Error, OSError, ValueError) as error:
        return _Seen(Placeholder.UNKNOWN, detail=one_line(str(error)))
    if not ours:
        return _Seen(Placeholder.DOWN)
    wanted = f"{_title(owner, head)}\0".encode()
    strange = [title for title in titles if title != wanted]
    if strange:
        words = strange[0].rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
        return _Seen(Placeholder.FOREIGN, detail=one_line(words) or "no title")
    return _Seen(Placeholder.UP, session=ours[0][0])
