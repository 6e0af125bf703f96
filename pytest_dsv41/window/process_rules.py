"""May this window open? The two-window cap and the resolution filter, asked before it does.

WIN2 "Process rules as code", items 2 and 3; RULES section 3. Neither judges a measurement. The
cap asks for a new hypothesis from a lane's third counted window on; the filter asks whether each
decision cell's design can resolve half of the gain that is expected of it. Only an answer REFUSE
refuses: what is not known is not judged, and said so. A person may open a refused window all the
same, with a reason that plan, summary and JUnit keep.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..archive import MixedDefinitions, archive_spread
from ..archive.window_cap import window_cap
from ..errors import Dsv41Error
from ..text import one_line
from .plan import KnownSpread, Plan, Spreads, designs, spread_of
from .summary import CellResolution, ProcessRules, RuleAnswer

__all__ = ["archived", "ask", "refusal"]

_EXPERIMENTS, _LANES = "experiments", "LANES.md"
"""Where a repository keeps hypotheses and register, seen from the current folder."""


def archived(
    plan: Plan,
    archive: Path,
    *,
    commit: str | None = None,
    prompts: Mapping[str, str] | None = None,
) -> Spreads:
    """Return how the CV of one repeat of a planned cell's metric is looked up in the archive.

    Args:
        plan: gives each cell's max_tokens, and the clock cap where the window file names it.
        archive: the campaign's control archive; it may be missing.
        commit: production's commit, where it is known.
        prompts: cell to the prompt identity that it will send, where that is known.
    """

    def look(cell: str, metric: str) -> KnownSpread:
        where: dict[str, Any] = {
            "max_tokens": plan.cells[cell].get("max_tokens"),
            "commit": commit,
            "prompt_sha256": (prompts or {}).get(cell),
            "clock_cap_mhz": plan.window.clock_cap_mhz,
        }
        where = {field: value for field, value in where.items() if value is not None}
        try:
            spread = archive_spread(archive, cell, metric, where)
        except MixedDefinitions as mixed:
            return KnownSpread(why=one_line(str(mixed), 600), several=True)
        except (Dsv41Error, ValueError, OSError) as error:
            return KnownSpread(why=f"the archive cannot be read: {one_line(str(error))}")
        if not spread.n:
            return KnownSpread(why=f"the archive has no rows of {cell}/{metric} as it is planned")
        if spread.cv_within is None:
            return KnownSpread(why=f"no window in the archive has two repeats of {cell}/{metric}")
        return KnownSpread(spread.cv_within)

    return look


def ask(plan: Plan, spreads: Spreads, *, campaign: Path) -> ProcessRules:
    """Ask both rules; reads only.

    Args:
        plan: the window's plan; its lane, kind, designs, expected gains and override are used.
        spreads: see `archived`.
        campaign: the folder of the lane's windows, with WINDOW-CAP.json, experiments/ and LANES.md.
    """
    cap = _cap(plan, campaign)
    resolution = _resolution(plan, spreads)
    refused = cap.refuses or any(cell.refuses for cell in resolution)
    override = plan.window.override if refused else ""
    return ProcessRules(window_cap=cap, resolution=resolution, override=override or None)


def refusal(rules: ProcessRules, plan: Plan, *, campaign: Path) -> str | None:
    """Return why the window must not open and what a person can do, one line; None if it may."""
    if not rules.refusals or rules.override is not None:
        return None
    ways = ["--window-override=REASON"]
    if rules.window_cap.refuses:
        ways.insert(
            0, f"dsv41 window-cap {plan.window.lane} --campaign {shlex.quote(str(campaign))}"
        )
    return f"{'; '.join(rules.refusals)}; next: {', or '.join(ways)}"


def _cap(plan: Plan, campaign: Path) -> RuleAnswer:
    window = plan.window
    if window.kind == "admission":
        return RuleAnswer(answer="ALLOW", reason="an admission window never counts")
    if not campaign.is_dir():
        return RuleAnswer(
            answer="ALLOW", reason=f"the cap is not in force: {campaign} has no windows yet"
        )
    try:
        found = window_cap(window.lane, campaign, experiments=[_EXPERIMENTS], lanes=[_LANES])
    except (Dsv41Error, ValueError, OSError) as error:
        # A cap that may be in force and cannot be read is never taken for none.
        return RuleAnswer(answer="REFUSE", reason=f"cannot tell: {one_line(str(error), 600)}")
    reason = one_line(found.reason, 600)
    return RuleAnswer(answer="ALLOW" if found.allow else "REFUSE", reason=reason)


def _resolution(plan: Plan, spreads: Spreads) -> tuple[CellResolution, ...]:
    if plan.window.report_only or not plan.window.decision_cells:
        return ()
    from ..decision_v2 import queue

    found = []
    for row in designs(plan, spreads):
        if not row["decision"]:
            continue
        about = {
            "cell": row["cell"],
            "arm": row["arm"],
            "metric": row["primary"],
            "design": row["design"],
            "expected_gain": row["expected_gain"],
        }
        if row["expected_gain"] is None:
            why = "the window file gives no expected_gain"
            found.append(CellResolution(answer="NOT JUDGED", reason=why, **about))
        elif row["half_width"] is None:
            why = row["archive_unknown"] or "no spread is known"
            found.append(CellResolution(answer="NOT JUDGED", reason=why, **about))
        else:
            spread = spread_of(row, row["archive_cv"], row["diff_cv"])
            answer = queue(row["design"], row["expected_gain"], **spread)
            found.append(
                CellResolution(
                    answer=answer.verdict,
                    reason=answer.reason,
                    half_width=answer.half_width,
                    least_design=answer.least_design,
                    **about,
                )
            )
    return tuple(found)
