"""`dsv41 recover`: finish a window whose process died and whose keeper could not."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError
from ..lifecycle.recover import recover_campaign
from ..report import write_views

HELP = (
    "Brings production back and closes the window that left it down. Exit code: 0 production is "
    "back and verified (or nothing had to be done), 20 production down, 21 alert, 13 refused."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--campaign",
        type=Path,
        default=Path("dsv41-windows"),
        help="the campaign folder (default: dsv41-windows)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Recover and say how it went."""
    campaign: Path = arguments.campaign
    if not campaign.is_dir():
        raise UsageError(f"--campaign {campaign}: no such folder; no window has run there")
    print("recover: reading the facts; then start, compare, close the HOLD, watch")
    recovered = recover_campaign(campaign.resolve())
    if recovered is None:
        print("nothing to recover")
        return 0
    folder, summary = recovered
    write_views(folder)
    print(f"{summary.window.id}: restore {summary.restore.status}, watch {summary.watch.status}")
    for alert in summary.alerts:
        print(f"ALERT: {alert}")
    return summary.exit_code if summary.exit_code in (20, 21) else 0
