"""`dsv41 fleet-probe URL`: what a server offers beside plain text, each with its evidence."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from .arguments import seconds

HELP = (
    "Vision, a tool call, reasoning efforts, the reasoning field, JSON answers, draft counters: "
    "PASS, FAIL or NOT OFFERED. Exit code: 0 none failed, 2 one did."
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from ..measure.probes.laws import VISION_TOKENS

    parser.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    parser.add_argument("--engine", default="", help="default: as the server says")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument(
        "--probe", action="append", default=[], metavar="NAME", help="repeatable; default: all"
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="NAME",
        help="a probe that must PASS: NOT OFFERED is a failure; repeatable",
    )
    parser.add_argument(
        "--deadline", type=seconds, default=600.0, metavar="S", help="of all (default: 600)"
    )
    parser.add_argument(
        "--vision-tokens",
        type=int,
        default=VISION_TOKENS,
        metavar="N",
        help=f"budget of a vision answer, at least {VISION_TOKENS} (default)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")


def run(args: argparse.Namespace) -> int:
    """Probe and say what was seen."""
    from ..engines import detect_engine
    from ..errors import UsageError
    from ..payload.shown import Shown
    from ..quality.fleet import FAIL, PASS, PROBES, fleet_probe

    for name in args.require:
        if name not in PROBES:
            raise UsageError(f"--require {name}: valid: {', '.join(PROBES)}")
        if args.probe and name not in args.probe:
            raise UsageError(f"--require {name}: it is not among --probe")
    with Shown(sys.stderr) as show:
        answers = fleet_probe(
            args.url,
            engine=args.engine or detect_engine(args.url),
            model=args.model,
            probes=args.probe,
            deadline_s=args.deadline,
            vision_tokens=args.vision_tokens,
            progress=lambda name: show(f"fleet-probe: {name}"),
        )
    wrong = [
        a for a in answers if a.status == FAIL or (a.name in args.require and a.status != PASS)
    ]
    if args.json:
        print(json.dumps([dataclasses.asdict(answer) for answer in answers], indent=1))
    else:
        for answer in answers:
            print(f"{answer.status:<11}  {answer.name:<11}  {answer.evidence}")
    if wrong:
        told = ", ".join(f"{a.name} {a.status}" for a in wrong)
        print(f"fleet-probe: {told}", file=sys.stderr)
    return 2 if wrong else 0
