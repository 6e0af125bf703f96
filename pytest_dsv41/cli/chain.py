"""`dsv41 chain`: the gate before a chain's next window, its recovery, and its end."""

from __future__ import annotations

import argparse
import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import UsageError
from ..hosts import Placeholder
from ..hosts.local import boottime
from ..lifecycle.abort import (
    ABORTED,
    ALERT_ONLY,
    NOT_RESTORED,
    Aborted,
    abort,
    new_abort_folder,
)
from ..lifecycle.campaign import not_the_coordinator
from ..lifecycle.closing import CloseResult
from ..lifecycle.gate import ADMIT, Gate, end_by_hand, gate, look_target
from ..lifecycle.lease import Lease
from ..lifecycle.marker import marker_path, read_leftovers, read_marker
from ..lifecycle.recover import look
from ..signals import Signals
from ..text import one_line
from ..window.summary import RESTORE_FAILED, RESTORE_RESTORED

HELP = (
    "Windows back to back. gate: may the chain's next window begin? 0 yes, 2 refused, 3 CHAIN "
    "STOPPED: PRODUCTION DOWN. abort: bring production back, 0 done, 3 failed, 4 alert only. "
    "placeholders, end, status."
)
_NOT_THE_COORDINATOR = 2
_ABORT_S = 7200.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    commands = parser.add_subparsers(dest="act", metavar="ACTION", required=True)
    admit = commands.add_parser("gate", help="wait for the previous summary, then admit or refuse")
    admit.add_argument(
        "--prev",
        type=Path,
        required=True,
        metavar="SUMMARY",
        help="the previous window's folder, or its summary.json",
    )
    admit.add_argument(
        "--wait",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="for the summary (default: 900)",
    )
    stop = commands.add_parser("abort", help="bring production back and end a stopped chain")
    stop.add_argument(
        "--out", type=Path, help="folder of the recovery (default: CHAIN-ABORT-<UTC>)"
    )
    stop.add_argument(
        "--again", action="store_true", help="forget an attempt that failed and try once more"
    )
    probe = commands.add_parser("placeholders", help="look for the chain's placeholders")
    probe.add_argument("--owner", help="of this owner (default: the marker's)")
    end = commands.add_parser("end", help="verify and watch production, then end the chain")
    end.add_argument("--owner", help="the chain's owner (default: the marker's)")
    status = commands.add_parser("status", help="the chain's facts; changes nothing")
    for command in (admit, stop, probe, end, status):
        command.add_argument(
            "--campaign",
            type=Path,
            default=Path("dsv41-windows"),
            help="the campaign folder (default: dsv41-windows)",
        )


def run(arguments: argparse.Namespace) -> int:
    """Run one act; the exit code is WIN2's."""
    campaign: Path = arguments.campaign
    if not campaign.is_dir():
        raise UsageError(f"--campaign {campaign}: no such folder; no window has run there")
    campaign = campaign.resolve()
    if arguments.act in ("gate", "abort", "end"):
        why = not_the_coordinator(campaign)
        if why is not None:
            print(f"dsv41 chain {arguments.act}: {why}", file=sys.stderr)
            return _NOT_THE_COORDINATOR
    act: Callable[[argparse.Namespace, Path], int] = _ACTS[arguments.act]
    return act(arguments, campaign)


def _say(what: str, left: float) -> None:
    """One line when what is done changes; a person reads along."""
    if _said != [what]:
        _said[:] = [what]
        print(what + (f" (up to {left:.0f} s)" if left else ""), flush=True)


_said: list[str] = []


def _gate(arguments: argparse.Namespace, campaign: Path) -> int:
    if not 0 <= arguments.wait < math.inf:
        raise UsageError(f"--wait {arguments.wait}: seconds, 0 or more")
    signals = Signals(lambda _why: None)

    def progress(what: str, left: float) -> None:
        # A recovery that has begun is finished, whoever presses Ctrl-C.
        if what == "abort":
            signals.install()
            print("CHAIN STOPPED: PRODUCTION DOWN; the one automatic recovery begins", flush=True)
            return
        _say(what, left)

    # A test's own, refused over real machines (WIN2, "Test-only overrides").
    program = os.environ.get("DSV41_CHAIN_ABORT")
    recovery = functools.partial(_by_program, program) if program else abort
    found: Gate = gate(
        campaign, arguments.prev, wait_s=arguments.wait, progress=progress, recovery=recovery
    )
    signals.remove()
    if found.code == ADMIT:
        print(f"ADMIT: {found.mode.value if found.mode else ''}")
        return ADMIT
    for refusal in found.refusals:
        print(f"REFUSED: {refusal}")
    if found.aborted is not None:
        _tell(found.aborted)
    elif found.code != ADMIT + 2:
        print("CHAIN STOPPED: PRODUCTION DOWN")
    return found.code


def _by_program(
    program: str, campaign: Path, out: Path, *, lease: Lease, progress: Callable[[str, float], None]
) -> Aborted:
    """Let `program OUT --campaign DIR` recover; its exit code says how, as `chain_abort.sh`'s."""
    progress(f"abort by {program}", 0.0)
    # It takes the lease itself.
    lease.release()
    code = subprocess.run([program, str(out), "--campaign", str(campaign)], check=False).returncode
    code = code if code in (ABORTED, ALERT_ONLY) else NOT_RESTORED
    status = RESTORE_RESTORED if code == ABORTED else RESTORE_FAILED
    closed = CloseResult(
        restore={"status": status, "reason": f"by {program}"}, production_down=code != ABORTED
    )
    return Aborted(code, closed, out)


def _tell(aborted: Aborted) -> None:
    print(f"chain abort: {aborted.line}")
    for alert in aborted.closed.alerts:
        print(f"ALERT: {alert}")
    if aborted.folder is not None:
        print(f"summary: {aborted.folder / 'summary.json'}")


def _abort(arguments: argparse.Namespace, campaign: Path) -> int:
    out = arguments.out.resolve() if arguments.out else new_abort_folder(campaign)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"--out {arguments.out}: something lies there; name a new folder")
    lease = Lease(campaign)
    lease.acquire("chain abort", _ABORT_S)
    signals = Signals(lambda _why: None)
    signals.install()
    try:
        aborted = abort(campaign, out, lease=lease, again=arguments.again, progress=_say)
    finally:
        signals.remove()
        lease.release()
    _tell(aborted)
    return aborted.code


def _placeholders(arguments: argparse.Namespace, campaign: Path) -> int:
    owner = arguments.owner
    if owner is None:
        marker = read_marker(campaign)
        if marker is None:
            raise UsageError(f"{campaign}: no chain marker lies here; say whose: --owner OWNER")
        owner = marker.placeholder_owner
    seen = look_target(campaign).placeholders(owner)
    for host, state in seen.items():
        print(f"{host}: {state.value} ({owner})")
    if not seen:
        print(f"this target needs no placeholders ({owner})")
    return 0 if all(state is Placeholder.UP for state in seen.values()) else 1


def _end(arguments: argparse.Namespace, campaign: Path) -> int:
    signals = Signals(lambda _why: None)
    signals.install()
    try:
        ended, alerts = end_by_hand(campaign, owner=arguments.owner, progress=_say)
    finally:
        signals.remove()
    print(f"chain: {ended or 'not ended'}")
    for alert in alerts:
        print(f"ALERT: {alert}")
    return 21 if alerts or ended is None else 0


def _status(_arguments: argparse.Namespace, campaign: Path) -> int:
    status = look(campaign)
    marker = status.marker
    print(f"{status.observation.answer.value}: {status.observation.why}")
    print(f"  marker       {marker_path(campaign)}: {status.facts.marker.value}")
    print(f"  production   {status.production}")
    print(f"  asked at     {status.production_url or 'not known'}")
    if marker is not None:
        print(f"  owner        {marker.placeholder_owner}")
        print(f"  left down by {marker.window}")
        print(f"  snapshot     {marker.snapshot}")
        minutes = max(0.0, marker.deadline - boottime()) / 60
        in_time = f"in time: the next window may begin within {minutes:.0f} min"
        print(f"  chain        {status.stopped or ('overdue' if marker.overdue else in_time)}")
        for line in _placeholder_lines(campaign, marker.placeholder_owner):
            print(f"  placeholder  {line}")
    for left in read_leftovers(campaign):
        print(f"  left over    {left.host}: {left.why} ({left.owner})")
    if status.command:
        print(f"  next         {status.command}")
    return status.exit_code


def _placeholder_lines(campaign: Path, owner: str) -> list[str]:
    """Each host's placeholder, or why none can be looked at: the other facts are still told."""
    try:
        seen = look_target(campaign).placeholders(owner)
    except Exception as error:  # noqa: BLE001 - a target of the user's own
        return [one_line(f"cannot tell: {error}")]
    return [f"{host}: {state.value}" for host, state in seen.items()]


_ACTS: dict[str, Callable[[argparse.Namespace, Path], int]] = {
    "gate": _gate,
    "abort": _abort,
    "placeholders": _placeholders,
    "end": _end,
    "status": _status,
}
