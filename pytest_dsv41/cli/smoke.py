"""`dsv41 smoke`: does a candidate arm come up, before a window is spent on it?"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..durable import dump_json, write_atomic
from ..errors import UsageError
from ..lifecycle.campaign import not_the_coordinator, read_campaign
from ..lifecycle.dropped import drop, taken_back
from ..lifecycle.lease import Lease
from ..lifecycle.smoke_start import BOUND_S, SmokeResult, load_backend, plan_text, smoke
from ..signals import Signals
from ..text import one_line
from ..window.spec import load_spec

HELP = (
    "Starts an arm, asks it, and stops it: five steps, 15 minutes at most, counted nowhere. Prints "
    "the plan; with --execute runs it: 0 PASS, 1 an arm is dropped, 20 an arm did not stop."
)
_DID_NOT_STOP = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("experiment", metavar="EXPERIMENT", help="a window file, or its name")
    parser.add_argument("arm", metavar="ARM", nargs="*", help="(default: every candidate)")
    parser.add_argument(
        "--mode",
        choices=("chain-head", "x-first"),
        default="x-first",
        help="chain-head: before a chain, an arm that fails is dropped from it; x-first: before "
        "a window's first control start (default)",
    )
    parser.add_argument("--execute", action="store_true", help="run it (coordinator only)")
    parser.add_argument(
        "--backend",
        metavar="MODULE:FACTORY",
        help="what starts the arms (default: campaign.toml's smoke_backend)",
    )
    parser.add_argument("--out", type=Path, help="folder of the results; needed with --execute")
    parser.add_argument(
        "--campaign", type=Path, help="the campaign folder (default: the window file's)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, or smoke the arms one after the other."""
    spec = load_spec(arguments.experiment)
    arms = tuple(arguments.arm) or tuple(arm.name for arm in spec.candidates)
    for name in arms:
        if name not in {arm.name for arm in spec.arms}:
            known = ", ".join(arm.name for arm in spec.arms)
            raise UsageError(f"{spec.path.name}: no arm {one_line(name)!r}; valid: {known}")
    if not arguments.execute:
        print(plan_text(arguments.experiment, arms, arguments.mode))
        return 0
    campaign = (arguments.campaign or spec.campaign).resolve()
    if not campaign.is_dir():
        raise UsageError(f"--campaign {campaign}: no such folder")
    why = not_the_coordinator(campaign)
    if why is not None:
        print(f"dsv41 smoke: {why}", file=sys.stderr)
        return 2
    name = arguments.backend or read_campaign(campaign).smoke_backend
    if not name:
        raise UsageError(
            "--backend MODULE:FACTORY is missing, and campaign.toml names no smoke_backend"
        )
    if arguments.out is None:
        raise UsageError("--out DIR is missing: the results are kept there")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    lease = Lease(campaign)
    lease.acquire("smoke", BOUND_S * len(arms) + 60.0)
    # An arm that was started is stopped, whoever presses Ctrl-C.
    signals = Signals(lambda _why: None)
    signals.install()
    try:
        backend = load_backend(name, spec.path, out)
        results = []
        for arm in arms:
            try:
                result = smoke(backend, arm, progress=_say)
            except Exception as error:  # noqa: BLE001 - a backend of the user's own
                why = one_line(str(error) or type(error).__name__)
                print(f"smoke {arm}: NOT STOPPED: {why}", file=sys.stderr)
                print("the HOLD stays; bring production back: dsv41 recover", file=sys.stderr)
                return _DID_NOT_STOP
            results.append(result)
            write_atomic(out / f"smoke-{arm}.json", dump_json(result.to_json()) + "\n")
            print(result.line)
            _record(campaign, f"{spec.lane}-{spec.name}", result, arguments.mode)
    finally:
        signals.remove()
        lease.release()
    print(json.dumps({result.arm: "PASS" if result.passed else "FAIL" for result in results}))
    return 0 if all(result.passed for result in results) else 1


def _record(campaign: Path, window: str, result: SmokeResult, mode: str) -> None:
    """At a chain's head the chain's record says which arms' windows are not started."""
    if mode != "chain-head":
        return
    if result.passed:
        taken_back(campaign, window, result.arm)
    else:
        drop(campaign, window, result.arm, f"{result.failed}: {result.reason}")


def _say(what: str, left: float) -> None:
    print(what + (f" (up to {left:.0f} s)" if left else ""), flush=True)
