"""What a change costs: every metric of both arms beside its registered noise, and what differs.

The verdict rests on the decision cells alone; the cost table shows all that was measured, so that
a gain in one is not bought with a loss in another unseen. FRANK-ARCHON "Measured cost".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .arm_keys import arm_keys, differing
from .plan import Plan
from .summary import ArmKey, Cost, CostRow

__all__ = ["cost_tables"]


def cost_tables(
    plan: Plan,
    values: Sequence[Mapping[str, Any]],
    served: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Cost]:
    """Return the cost table of each candidate arm; none where the window registers no noise.

    Means are over all repeats of an arm; `delta` is the candidate's mean over the control's, less
    1, whichever way is better. `served` is what `read_served` gives.
    """
    window = plan.window
    if not window.noise:
        return {}
    rows = {row.get("item"): row for row in values if row.get("outcome") == "measured"}
    argv = served or {}
    control = arm_keys(window.control, argv.get(window.control.name, ()))
    tables = {}
    for arm in window.candidates:
        found = []
        for use in window.cells:
            mine = _by_metric(plan, rows, use.name, arm.name)
            theirs = _by_metric(plan, rows, use.name, window.control.name)
            found += [
                _row(use.name, metric, theirs[metric], mine[metric], window.noise.get(metric))
                for metric in mine
                if metric in theirs
            ]
        tables[arm.name] = Cost(
            rows=tuple(found),
            differing=tuple(
                ArmKey(key=key, control=one, candidate=two)
                for key, one, two in differing(control, arm_keys(arm, argv.get(arm.name, ())))
            ),
        )
    return tables


def _by_metric(
    plan: Plan, rows: Mapping[Any, Mapping[str, Any]], cell: str, arm: str
) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for item in plan.items:
        if (item.cell, item.arm) != (cell, arm) or item.id not in rows:
            continue
        values = rows[item.id].get("values")
        for metric, table in values.items() if isinstance(values, Mapping) else ():
            value = table.get("value") if isinstance(table, Mapping) else None
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found.setdefault(metric, []).append(table)
    return found


def _row(
    cell: str,
    metric: str,
    control: Sequence[Mapping[str, Any]],
    candidate: Sequence[Mapping[str, Any]],
    floor: float | None,
) -> CostRow:
    before, after = (_mean(tables) for tables in (control, candidate))
    delta = after / before - 1.0 if before else None
    lower = candidate[0].get("lower_is_better") is True
    outside = None if delta is None or floor is None else abs(delta) > floor
    better = None if not outside or delta is None else (delta < 0) == lower
    return CostRow(
        cell=cell,
        metric=metric,
        unit=str(candidate[0].get("unit", "")),
        control=before,
        candidate=after,
        n_control=len(control),
        n_candidate=len(candidate),
        delta=delta,
        floor=floor,
        outside=outside,
        better=better,
    )


def _mean(tables: Sequence[Mapping[str, Any]]) -> float:
    return math.fsum(float(table["value"]) for table in tables) / len(tables)
