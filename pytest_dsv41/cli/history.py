"""`dsv41 history`: put old windows into the archive, and score them again.

Exit codes of reanalyze are the window's: 0 CANDIDATE, 10 INCONCLUSIVE, 11 NOT A CANDIDATE, and
12 where an arm cannot be judged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..text import one_line
from .archive import checkpoint_argument, clock_arguments, known_heads, patience, print_backfill

if TYPE_CHECKING:
    from ..decision_v2 import Decision

__all__ = ["HELP", "configure", "run"]

HELP = "backfill the archive from old windows, score them again"

_MOST_CELLS = 2
_CODES = {"CANDIDATE": 0, "INCONCLUSIVE": 10, "NOT A CANDIDATE": 11}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    fill = actions.add_parser(
        "backfill", help="append the control rows of old windows, idempotently"
    )
    fill.set_defaults(work=_backfill)
    fill.add_argument("--archive", metavar="FILE", required=True, help="the archive's file")
    fill.add_argument("folders", metavar="WINDOW", nargs="+", help="window folders")
    checkpoint_argument(fill)
    clock_arguments(fill)
    again = actions.add_parser("reanalyze", help="decide an old window again, one decision per arm")
    again.set_defaults(work=_reanalyze)
    again.add_argument("folder", metavar="WINDOW", help="the window's folder")
    again.add_argument(
        "--decision",
        metavar="CELL",
        action="append",
        required=True,
        help="a decision cell; at most two",
    )
    again.add_argument(
        "--primary",
        metavar="METRIC",
        default="ms_per_round",
        help="primary metric (default: %(default)s; a cell without it: ttft_ms)",
    )
    again.add_argument(
        "--guard",
        metavar="METRIC",
        action="append",
        help="guards (default: accepted_per_round and client_tok_s, where measured)",
    )
    again.add_argument(
        "--revision",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="of the rule for repeats (default: 3)",
    )
    again.add_argument("--json", action="store_true", help="print a JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action and return its exit code."""
    with patience(f"history {args.action}"):
        code: int = args.work(args)
    return code


def _backfill(args: argparse.Namespace) -> int:
    from ..archive.history import backfill

    done = backfill(
        args.archive,
        args.folders,
        clock_log=args.clock_log,
        hosts=args.hosts,
        checkpoints=known_heads(args, Path(args.archive)),
    )
    print_backfill(done)
    return 0


def _reanalyze(args: argparse.Namespace) -> int:
    from ..archive.history import read_values, role_of
    from ..decision_v2 import Refused, decide_window

    cells = list(dict.fromkeys(args.decision))
    if len(cells) > _MOST_CELLS:
        raise UsageError(f"--decision: {len(cells)} decision cells; at most {_MOST_CELLS}")
    folder = Path(args.folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such window folder")
    values = read_values(folder)
    named = {str(line.get("arm")) for line in values}
    arms = sorted(arm for arm in named if role_of(folder, arm) != "control")
    control = [line for line in values if str(line.get("arm")) not in arms]
    if not control or not arms:
        raise UsageError(f"{folder}: values.jsonl has no measured control and other arm")
    results: dict[str, Any] = {}
    worst: list[int] = []
    for arm in arms:
        own = [line for line in values if line.get("arm") == arm]
        try:
            series = [one for cell in cells for one in _series(args, cell, control, own)]
            decision: Decision = decide_window(series, cells, revision=args.revision)
        except Refused as error:
            results[arm] = {"refused": str(error)}
            worst.append(12)
            continue
        results[arm] = decision.to_dict()
        worst.append(_CODES[decision.verdict])
        if not args.json:
            print(one_line(f"{arm}: {decision.verdict}", 300))
            for line in decision.explain():
                print(f"  {one_line(line, 600)}")
    if args.json:
        print(
            json.dumps({"window": folder.name, "decision_cells": cells, "arms": results}, indent=2)
        )
    else:
        for arm, result in results.items():
            if "refused" in result:
                print(one_line(f"{arm}: cannot be judged: {result['refused']}", 600))
    # As a window with several arms ends: any candidate, else any loss, else not decided.
    return next(code for code in (0, 11, 10, 12) if code in worst)


def _series(
    args: argparse.Namespace, cell: str, control: list[Any], candidate: list[Any]
) -> list[Any]:
    """Return the cell's series, primary first; control repeats are pooled, so it is unpaired."""
    from ..decision_v2 import ORIENTATION, Refused, Series

    of_control = _ordered(control, cell)
    of_candidate = _ordered(candidate, cell)
    measured = {metric for line in of_control for metric in line["values"]}
    primary = args.primary if args.primary in measured else "ttft_ms"
    if primary not in measured:
        raise Refused(f"{cell}: neither {args.primary} nor ttft_ms was measured in the control")
    guards = args.guard or [
        metric for metric in ("accepted_per_round", "client_tok_s") if metric in measured
    ]
    return [
        Series(
            cell,
            metric,
            _numbers(of_control, metric),
            _numbers(of_candidate, metric),
            lower_is_better=_lower(metric, of_control, ORIENTATION),
            paired=False,
            control_prompts=[line.get("prompt_sha256") for line in of_control],
            candidate_prompts=[line.get("prompt_sha256") for line in of_candidate],
        )
        for metric in dict.fromkeys((primary, *guards))
    ]


def _ordered(lines: list[Any], cell: str) -> list[Any]:
    return [line for line in lines if line.get("cell") == cell]


def _numbers(lines: list[Any], metric: str) -> list[Any]:
    return [_value(line["values"].get(metric)) for line in lines]


def _value(measured: Any) -> Any:
    return measured.get("value") if isinstance(measured, dict) else measured


def _lower(metric: str, lines: list[Any], orientation: Any) -> bool:
    for line in lines:
        measured = line["values"].get(metric)
        if isinstance(measured, dict) and isinstance(measured.get("lower_is_better"), bool):
            return bool(measured["lower_is_better"])
    if metric not in orientation:
        raise UsageError(f"{metric}: values.jsonl does not say whether lower is better")
    return bool(orientation[metric])
