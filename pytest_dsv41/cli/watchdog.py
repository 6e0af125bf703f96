"""`dsv41 watchdog`: one pass over a campaign for a timer, and the timer's unit files."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from ..durable import write_atomic
from ..errors import UsageError
from ..lifecycle.campaign import keep_in_units
from ..lifecycle.watchdog import pass_once, unit_files
from ..signals import Signals

HELP = (
    "One look at a campaign: alerts what a person must do (a file, the system's journal, the "
    "campaign's alert_command), and starts a stopped chain's one recovery. Exit code as dsv41 "
    "status. install: write the timer's unit files for this user."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("act", nargs="?", choices=("install",), help="write the unit files")
    parser.add_argument(
        "--campaign",
        type=Path,
        default=Path("dsv41-windows"),
        help="the campaign folder (default: dsv41-windows)",
    )
    parser.add_argument(
        "--every", type=int, default=60, metavar="SECONDS", help="the timer's period (default: 60)"
    )
    parser.add_argument(
        "--dir", type=Path, help="folder of the units (default: the user's own systemd)"
    )
    parser.add_argument(
        "--keepers",
        action="store_true",
        help="with install: run the campaign's keepers as transient units of their own too",
    )


def run(arguments: argparse.Namespace) -> int:
    """Look once, or write the units."""
    campaign: Path = arguments.campaign
    if not campaign.is_dir():
        raise UsageError(f"--campaign {campaign}: no such folder; no window has run there")
    campaign = campaign.resolve()
    if arguments.act == "install":
        return _install(arguments, campaign)
    if arguments.keepers:
        raise UsageError("--keepers: goes with install")
    # A recovery that has begun is finished, whatever asks the pass to end.
    signals = Signals(lambda _why: None)
    signals.install()
    try:
        seen = pass_once(campaign)
    finally:
        signals.remove()
    if seen.recovered is not None:
        print(f"recovery of the stopped chain: {seen.recovered.line}")
    if seen.alert is None:
        print(seen.answer)
        return seen.exit_code
    print(f"{seen.answer}: {seen.alert['why']}" + ("" if seen.told else " (told before)"))
    print(f"  next  {seen.alert['command']}")
    for problem in seen.alert.get("problems", ()):
        print(f"  not told: {problem}")
    return seen.exit_code


def _install(arguments: argparse.Namespace, campaign: Path) -> int:
    if arguments.every < 1:
        raise UsageError(f"--every {arguments.every}: at least 1 second")
    if arguments.keepers:
        if shutil.which("systemd-run") is None:
            raise UsageError("--keepers: systemd-run is not installed here")
        print(f"{keep_in_units(campaign)}: keeper_units = true")
    configured = Path(os.environ.get("XDG_CONFIG_HOME", "") or Path.home() / ".config")
    folder: Path = arguments.dir or configured / "systemd" / "user"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in unit_files(campaign, arguments.every).items():
        write_atomic(folder / name, text)
        (folder / name).chmod(0o644)
        print(folder / name)
        if name.endswith(".timer"):
            timer = name
    print(f"switch it on: systemctl --user daemon-reload && systemctl --user enable --now {timer}")
    print("and let it run while nobody is logged in: loginctl enable-linger")
    return 0
