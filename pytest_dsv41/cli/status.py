"""`dsv41 status`: the facts, the observer's answer, and the exact next command."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..errors import UsageError
from ..lifecycle.marker import marker_path
from ..lifecycle.recover import look

HELP = (
    "Reads every durable fact of a campaign and says what they mean. Changes nothing. Exit code: "
    "0 CLEAN, 1 at work or waiting, 20 production down and nobody at work on it, 21 every other "
    "ALERT."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--campaign",
        type=Path,
        default=Path("dsv41-windows"),
        help="the campaign folder (default: dsv41-windows)",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the status; the exit code is the observer's."""
    campaign: Path = arguments.campaign
    if not campaign.is_dir():
        raise UsageError(f"--campaign {campaign}: no such folder; no window has run there")
    status = look(campaign.resolve())
    if arguments.json:
        print(json.dumps(status.to_json(), indent=2))
        return status.exit_code
    print(f"{status.observation.answer.value}: {status.observation.why}")
    asked = f" (asked at {status.production_url})" if status.production_url else ""
    print(f"  production  {status.production}{asked}")
    print(f"  HOLD        {status.hold_state.value} {status.hold_owner}".rstrip())
    print(f"  intent      {status.intent.window if status.intent else 'none'}")
    print(f"  lease       {status.lease}")
    print(f"  window      {status.window or 'none yet'}")
    print(f"  marker      {marker_path(status.campaign)}: {status.facts.marker.value}")
    if status.facts.marker.value != "none":
        owner = status.marker.placeholder_owner if status.marker else "unreadable"
        print(f"  chain       {owner}" + (f": stopped: {status.stopped}" if status.stopped else ""))
    for left in status.leftovers:
        print(f"  left over   placeholder on {left.host}: {left.why} ({left.owner})")
    for line in status.stray:
        print(f"  left over   {line}")
    for name in status.unfinished:
        print(f"  unfinished  {name} has no summary")
    if status.command:
        print(f"  next        {status.command}")
    return status.exit_code
