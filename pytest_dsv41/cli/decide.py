"""`dsv41 decide`: the decision of a window again, from the files in its folder alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..text import one_line

if TYPE_CHECKING:
    from ..window.summary import ClaimInfo, Cost, Summary
    from ..window.verdict import Outcome

__all__ = ["HELP", "configure", "run"]

HELP = "decide a finished window again from the files in its folder"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "folder", metavar="FOLDER", help="the window's folder, wherever it lies now"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the decision; the window's exit code.

    Raises:
        UsageError: a file is missing or damaged.
    """
    # numpy and scipy are loaded by the verdict only.
    from ..window.advice import read_prior
    from ..window.claims import judge_claims
    from ..window.cost import cost_tables
    from ..window.quality import judge_quality
    from ..window.served import read_served
    from ..window.summary import FILE_NAME, read_summary
    from ..window.verdict import conclude, read_folder

    folder = Path(args.folder)
    plan, values = read_folder(folder)
    summary = read_summary(folder) if (folder / FILE_NAME).exists() else None
    stopped = summary.stopped if summary else None
    served = read_served(folder)
    outcome = conclude(
        plan,
        values,
        stopped=stopped,
        prior=read_prior(folder, plan),
        quality=judge_quality(folder, plan, values),
        served=served,
    )
    if summary and summary.status == "REFUSED":
        # It never opened: there is nothing to be missed, and nothing to decide.
        outcome = dataclasses.replace(
            outcome, status="REFUSED", exit_code=13, incomplete=[], notes=[]
        )
    claims, costs = judge_claims(plan, values), cost_tables(plan, values, served)
    if args.json:
        told = {
            "window_id": plan.window_id,
            **outcome.to_json(),
            "claims": [claim.model_dump(mode="json") for claim in claims],
            "costs": {arm: cost.model_dump(mode="json") for arm, cost in costs.items()},
        }
        print(json.dumps(told, indent=2))
    else:
        print(_text(plan.window_id, outcome, summary, claims, costs), end="")
    return outcome.exit_code


def _text(
    window_id: str,
    outcome: Outcome,
    summary: Summary | None,
    claims: Sequence[ClaimInfo],
    costs: Mapping[str, Cost],
) -> str:
    from ..report.terminal import render_costs, render_decision

    parts = [f"window {one_line(window_id)}\n"]
    for arm, decision in outcome.decisions.items():
        text = render_decision(arm, decision, outcome.explanations[arm])
        parts.append(f"\n{text.rstrip()}\n")
    parts.append(render_costs(costs))
    if outcome.decisions:
        parts.append("\n")
    if outcome.status == "REFUSED" and summary:
        parts.append(f"refused: {one_line(summary.stopped or 'no reason was recorded', 2000)}\n")
    parts += [f"claim: {one_line(claim.line, 2000)}\n" for claim in claims]
    parts += [f"missing: {one_line(line)}\n" for line in outcome.incomplete]
    parts += [f"note: {one_line(line)}\n" for line in outcome.notes]
    for name, lines in outcome.advisory.items():
        parts += [f"{name} (advisory): {one_line(line)}\n" for line in lines]
    if outcome.promotion:
        cells = ", ".join(outcome.promotion["cells"])
        parts.append(
            f"promotion: arm {outcome.promotion['arm']}, profile "
            f"{outcome.promotion['profile']}, on {cells}\n"
        )
    parts.append(f"{outcome.status} (exit {outcome.exit_code})\n")
    if summary and (summary.status, summary.exit_code) != (outcome.status, outcome.exit_code):
        parts.append(
            f"the window itself ended as {summary.status} (exit {summary.exit_code}), "
            "see its summary.json\n"
        )
    return "".join(parts)
