"""A coordinator that is paused in the middle: acts once, waits for a line, then tries everything.

usage: paused.py ADDRESS KEY KNOWN_HOSTS LOGS. Prints the name of what each late act raised.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_dsv41.hosts import CommandLog, Fence
from pytest_dsv41.hosts.scopes import ScopeName, end_scopes, run_scoped
from pytest_dsv41.hosts.ssh import SshHost
from pytest_dsv41.hosts.tmux import placeholder_down, placeholder_up

FOLDER = "/var/lib/dsv41-paused"
HOLD = f"{FOLDER}/HOLD"
OWNER = "chain-20260101T000000Z-0123abcd"
SERVER = ("tmux", "new-session", "-d", "-s", "server", "--", "sleep", "617")


def main() -> None:
    address, key, known_hosts, logs = sys.argv[1:]
    host = SshHost(
        "alpha",
        address,
        CommandLog(Path(logs)),
        user="root",
        key=Path(key),
        known_hosts=Path(known_hosts),
    )
    fence = Fence.beside(HOLD, 5)
    unit = ScopeName("paused", 5, "C1").unit
    host.create(HOLD, "mine", fence=fence)
    run_scoped(host, unit, SERVER, name="start", deadline_s=20.0, longest_s=600.0, fence=fence)
    placeholder_up(host, OWNER, fence=fence)
    print("ready", flush=True)
    sys.stdin.readline()
    other = ScopeName("paused", 5, "X").unit
    acts: dict[str, Callable[[], object]] = {
        "run": lambda: host.run(
            ["touch", f"{FOLDER}/late"], name="l", deadline_s=20.0, fence=fence
        ),
        "create": lambda: host.create(f"{FOLDER}/late", "late", fence=fence),
        "write": lambda: host.write(HOLD, "late", fence=fence),
        "remove": lambda: host.remove(HOLD, fence=fence),
        "start": lambda: run_scoped(
            host, other, SERVER, name="late", deadline_s=20.0, longest_s=600.0, fence=fence
        ),
        "stop": lambda: end_scopes(host, [unit], name="late", fence=fence),
        "placeholder": lambda: placeholder_up(host, OWNER[:-1] + "e", fence=fence),
        "placeholder-down": lambda: placeholder_down(host, OWNER, fence=fence),
    }
    found: dict[str, str] = {}
    for name, act in acts.items():
        try:
            found[name] = f"done: {act()}"
        except Exception as error:  # noqa: BLE001 - its name is the answer
            found[name] = type(error).__name__
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
