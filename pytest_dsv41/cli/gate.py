"""`dsv41 gate run FILE…`: commands between named checks, each with a receipt."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..payload.gates import Found, Gate
    from ..payload.stopping import Stop

HELP = "commands between named checks, with receipts. 0 done, 1 the command failed, 2 a check did"

_MARK = {True: "PASS", False: "FAIL"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACTION", required=True)
    one = acts.add_parser(
        "run",
        help="run gate files in order, the first that fails ends it; 0 done, 1 the command failed, "
        "2 a check did, 13 done already",
    )
    one.add_argument("files", nargs="+", type=Path, metavar="FILE", help="gate files, in order")
    one.add_argument(
        "--run",
        dest="step",
        type=Path,
        metavar="DIR",
        help="of a single FILE; default: FILE.run beside it",
    )
    one.add_argument(
        "--resume", action="store_true", help="trust a whole receipt whose inputs still hash"
    )
    one.add_argument("--again", action="store_true", help="run although there is a receipt")


def run(args: argparse.Namespace) -> int:
    """Run the gate files in order."""
    from ..errors import UsageError, WindowStopped
    from ..payload.gates import load_gate
    from ..payload.runner import from_copy, swept
    from ..payload.stopping import stop_on_signals

    if args.step is not None and len(args.files) > 1:
        raise UsageError("--run: only with a single FILE")
    if args.resume and args.again:
        raise UsageError("--resume and --again exclude each other")
    # Each file is read before the first command runs.
    gates = [load_gate(path) for path in args.files]
    folders = [args.step or path.with_name(f"{path.name}.run") for path in args.files]
    code = from_copy(folders[0], args.words) if args.alone else ""
    with swept(folders[0]), stop_on_signals() as stop:
        for gate, folder in zip(gates, folders, strict=True):
            try:
                ending = _step(gate, folder, code, args, stop)
            except WindowStopped as error:
                print(f"{gate.path.name}: STOPPED: {error}; no receipt", file=sys.stderr)
                return stop.code or 1
            if ending:
                return ending
    return 0


def _step(gate: Gate, folder: Path, code: str, args: argparse.Namespace, stop: Stop) -> int:
    from ..payload.gates import KIND, run_gate
    from ..payload.shown import Shown
    from ..payload.step import Step
    from ..text import one_line

    with Step(folder, KIND, code=code) as step, Shown(sys.stderr) as show:
        done = run_gate(
            gate, step, resume=args.resume, again=args.again, stop=stop.event, progress=show
        )
    name = gate.path.name
    if done.note:
        print(f"{name}: {one_line(done.note)}")
    _tell("before", done.before)
    _tell("after", done.after)
    if done.status == "refused":
        print(f"{name}: REFUSED before the command; nothing was run", file=sys.stderr)
        return 2
    if done.status == "command":
        print(
            f"{name}: the command ended with {done.returncode}; its output: {step.output}",
            file=sys.stderr,
        )
        return 1
    if done.status == "failed":
        print(f"{name}: FAILED after the command; no receipt", file=sys.stderr)
        return 2
    print(f"{name}: {'DONE BEFORE' if done.status == 'trusted' else 'DONE'}, {step.receipt}")
    return 0


def _tell(side: str, checks: Sequence[Found]) -> None:
    from ..text import one_line

    for check in checks:
        name = one_line(check.name, 120)
        print(f"  {side:<6} {'PASS' if check.passed else 'FAIL'}  {name}: {check.found}")
