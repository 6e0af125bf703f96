"""`dsv41 resolution`: can this design resolve the expected gain? 0 QUEUE, 2 REFUSE."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..text import counted, one_line

if TYPE_CHECKING:
    from ..archive import Spread

__all__ = ["HELP", "configure", "run"]

HELP = "can this design resolve the expected gain? 0 QUEUE, 2 REFUSE"

_ARCHIVE = "dsv41-windows/control-archive.jsonl"
_KINDS = ("pairs", "seeded", "unpaired")


def _gain(text: str) -> float:
    """A gain or CV: 0.03 or 3%."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 10:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive fraction; valid: 0.03 or 3%")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--cell", required=True, help="the cell, such as short-b1")
    parser.add_argument("--metric", default="ms_per_round", help="(default: %(default)s)")
    parser.add_argument(
        "--design",
        required=True,
        metavar="DESIGN",
        help="unpaired:AvB (A control, B candidate repeats), pairs:N or seeded:N",
    )
    parser.add_argument(
        "--expected-gain", required=True, type=_gain, metavar="G", help="0.03 or 3%%"
    )
    parser.add_argument(
        "--archive", metavar="FILE", default=_ARCHIVE, help="(default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="of the definition")
    parser.add_argument("--clock", type=int, metavar="MHZ", help="clock cap of the definition")
    parser.add_argument("--commit", metavar="SHA", help="production commit, or its beginning")
    parser.add_argument("--prompt", metavar="SHA", help="prompt identity, or its beginning")
    parser.add_argument(
        "--diff-cv",
        metavar="CV",
        help="measured CV of paired differences, a fraction, or a summary.json or pilot result "
        "that holds it",
    )
    parser.add_argument(
        "--estimated-s",
        type=_seconds,
        metavar="S",
        help="estimated seconds of one repeat (a cell's estimated_s), for the minutes "
        "(default: a seeded cell's of this package)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the half-width, the answer, and the least designs that would queue."""
    from ..decision_v2 import Refused, parse_design, queue, spread_metric
    from ..measure.seeded import SEEDED_CELLS

    try:
        parse_design(args.design)
        estimated_from = spread_metric(args.design, args.metric)
        spread = _spread(args, estimated_from)
        diff_cv, source = _diff_cv(args)
        cv = spread.cv_within if spread is not None else None
        answer = queue(args.design, args.expected_gain, cv=cv, diff_cv=diff_cv)
        least = {
            kind: design
            for kind, design in _least(args.expected_gain, cv, diff_cv).items()
            # Another kind of design would be judged by another metric's spread.
            if (diff_cv is not None and kind != "unpaired")
            or spread_metric(kind, args.metric) == estimated_from
        }
    except Refused as error:
        raise UsageError(str(error)) from None
    seconds = args.estimated_s
    if seconds is None and args.cell in SEEDED_CELLS:
        seconds = SEEDED_CELLS[args.cell].estimated_s
    result = {
        **answer.to_dict(),
        "cell": args.cell,
        "metric": args.metric,
        "definition": spread.definition if spread is not None and spread.n else None,
        "cv": cv,
        "diff_cv": diff_cv,
        "diff_cv_source": source,
        "archive_rows": spread.n if spread is not None else 0,
        "archive_windows": len(spread.windows) if spread is not None else 0,
        "least": {
            kind: {"design": design, "minutes": _minutes(design, seconds)}
            for kind, design in least.items()
        },
        "minutes": _minutes(args.design, seconds),
    }
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    return 2 if answer.verdict == "REFUSE" else 0


def _spread(args: argparse.Namespace, metric: str) -> Spread | None:
    """Return the spread of the one definition that the arguments pick."""
    from ..archive import archive_spread, archive_spreads

    path = Path(args.archive)
    if not path.exists():
        if args.archive != _ARCHIVE:
            raise UsageError(f"{path}: there is no such archive")
        return None
    where: dict[str, Any] = {}
    if args.max_tokens is not None:
        where["max_tokens"] = args.max_tokens
    if args.clock is not None:
        where["clock_cap_mhz"] = args.clock
    known = archive_spreads(path, args.cell, metric)
    for field, given in (("commit", args.commit), ("prompt_sha256", args.prompt)):
        if given is None:
            continue
        full = {str(getattr(one, field)) for one in known}
        matching = sorted(value for value in full if value.startswith(given.lower()))
        if len(matching) > 1:
            shown = ", ".join(value[:12] for value in matching)
            raise UsageError(f"--{field.partition('_')[0]} {given}: is ambiguous: {shown}")
        where[field] = matching[0] if matching else given.lower()
    return archive_spread(path, args.cell, metric, where)


def _diff_cv(args: argparse.Namespace) -> tuple[float | None, str | None]:
    """Return the measured CV of paired differences, from the argument or the file it names."""
    if args.diff_cv is None:
        return None, None
    try:
        return _gain(args.diff_cv), "given"
    except argparse.ArgumentTypeError:
        path = Path(args.diff_cv)
    try:
        value = json.loads(path.read_bytes())
        in_pilot, in_decisions = _measured(value, args.cell, args.metric)
    except FileNotFoundError:
        raise UsageError(
            f"--diff-cv {args.diff_cv}: is neither a positive fraction nor a file"
        ) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: is not JSON, or nested too deeply") from None
    # A summary can hold both: the pilot measured production against itself, a decision an arm.
    found = sorted(set(in_pilot or in_decisions))
    if len(found) != 1:
        raise UsageError(
            f"{path}: holds {len(found)} values of diff_cv for {args.cell}/{args.metric}, one is "
            "needed"
        )
    return found[0], str(path)


def _measured(value: Any, cell: str, metric: str) -> tuple[list[float], list[float]]:
    """Collect `diff_cv` of a cell's metric from pilots' results and from a summary's decisions.

    Read are {"diff_cv": {"cell/metric": cv}}, which pilots have, and
    {"cells": {cell: {"series": [{"metric", "diff_cv"}]}}}, which decisions have, at any depth.
    """
    in_pilot: list[Any] = []
    in_decisions: list[Any] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        if not isinstance(one, dict):
            continue
        waiting += one.values()
        table = one.get("diff_cv")
        if isinstance(table, dict):
            in_pilot.append(table.get(f"{cell}/{metric}"))
        cells = one.get("cells")
        own = cells.get(cell) if isinstance(cells, dict) else None
        series = own.get("series") if isinstance(own, dict) else None
        for row in series if isinstance(series, list) else ():
            if isinstance(row, dict) and row.get("metric") == metric:
                in_decisions.append(row.get("diff_cv"))
    return _fractions(in_pilot), _fractions(in_decisions)


def _fractions(found: list[Any]) -> list[float]:
    return [
        float(cv)
        for cv in found
        if isinstance(cv, int | float) and not isinstance(cv, bool) and 0 <= cv < 10
    ]


def _least(gain: float, cv: float | None, diff_cv: float | None) -> dict[str, str | None]:
    """Return the smallest design of each kind that would queue, of the kinds that can be judged."""
    from ..decision_v2.resolution import least_design

    return {
        kind: least_design(kind, gain, cv=cv, diff_cv=diff_cv)
        for kind in _KINDS
        if cv is not None or (diff_cv is not None and kind != "unpaired")
    }


def _minutes(design: str | None, seconds: float | None) -> float | None:
    """Return the measuring minutes of a design, without starts; seeded is C/X/C."""
    from ..decision_v2.resolution import parse_design

    if design is None or seconds is None:
        return None
    kind, control, candidate = parse_design(design)
    repeats = control * 2 + candidate if kind == "seeded" else control + candidate
    return repeats * seconds / 60


def _took(minutes: float | None) -> str:
    return "" if minutes is None else f", {minutes:.1f} min of measuring without the starts"


def _print(result: dict[str, Any]) -> None:
    name = f"{result['cell']}/{result['metric']}"
    print(one_line(f"{result['verdict']}: {name}: {result['reason']}", 600))
    half = result["half_width"]
    if half is not None:
        print(
            f"  {result['design']}: half-width ±{100 * half:.3f} %, needs an expected gain of "
            f"{100 * result['needed_gain']:.2f} %{_took(result['minutes'])}"
        )
    if result["diff_cv"] is not None:
        print(
            f"  CV of paired differences {100 * result['diff_cv']:.2f} % "
            f"({one_line(result['diff_cv_source'], 200)})"
        )
    if result["cv"] is not None:
        definition = result["definition"]
        print(
            f"  CV of one repeat of {definition['metric']} {100 * result['cv']:.2f} %, from "
            f"{counted(result['archive_rows'], 'row')} of "
            f"{counted(result['archive_windows'], 'window')}: "
            f"{definition['max_tokens']} tokens, {definition['clock_cap_mhz']} MHz, "
            f"commit {definition['commit'][:12]}, prompt {definition['prompt_sha256'][:12]}"
        )
    for kind, least in result["least"].items():
        if least["design"] is None:
            print(f"  {kind}: no design up to 1,000 repeats would queue")
        else:
            print(f"  least {kind}: {least['design']}{_took(least['minutes'])}")
