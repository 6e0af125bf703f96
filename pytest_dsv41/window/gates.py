"""Gates of a window: a rate with a floor whose source is told, and a KL score with its limits.

A gate asks of the candidate alone what a comparison does not: is it fast enough, and was its
payload scored well enough, in the shape that it is served in? A candidate that fails one is
NOT A CANDIDATE whatever it won. FRANK-ARCHON "Gates".
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from ..text import one_line
from .arm_keys import arm_keys, flag_keys, left_keys

if TYPE_CHECKING:
    from .plan import Plan
    from .spec import WindowSpec

__all__ = ["GATE_REPEATS", "GateVerdict", "KlGate", "ThroughputGate", "judge_gates", "told_gates"]

GATE_REPEATS: Final = 3
"""Least repeats of the candidate that a floor is held against."""
_CONFIDENCE: Final = 0.975
_NO_SHAPE: Final = (
    "no shape is given: nobody can see whether production leaves the one that was scored"
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ThroughputGate(_Frozen):
    """A floor under one metric of one cell, in the metric's unit, and where the floor comes from.

    `rate_tolerance` is how far the client's and the engine's rate of a lone request may lie apart,
    a fraction; None: it is not looked at.
    """

    kind: Literal["throughput"] = "throughput"
    name: str
    cell: str
    metric: str
    floor: float
    source: str
    rate_tolerance: float | None = None


class KlGate(_Frozen):
    """A `dsv41 kl` report of an arm's payload, judged by the window's limits when it was read.

    `shape` says how the scored run was started; `checks` and `verdict` are the gate's own.
    """

    kind: Literal["kl"] = "kl"
    name: str
    arm: str
    report: str
    report_sha256: str
    verdict: str
    checks: tuple[dict[str, Any], ...]
    scored: dict[str, Any]
    shape: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GateVerdict:
    """One gate's word on one arm: PASS, LOSS, or None where it could not be judged.

    `reason` is one line, `facts` what it rests on, `notes` what else a reader must know.
    """

    gate: str
    verdict: str | None
    reason: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def judge_gates(
    plan: Plan,
    records: Mapping[str, Mapping[str, Any]],
    arm: str,
    served: Mapping[str, Sequence[str]] | None = None,
) -> list[GateVerdict]:
    """Judge one candidate arm by every gate that is about it.

    `records` are measured items by their id, `served` is what `read_served` gives.
    """
    window = plan.window
    found = []
    for gate in window.gates:
        if isinstance(gate, ThroughputGate):
            found.append(_throughput(gate, plan, records, arm))
        elif gate.arm == arm:
            found.append(_kl(gate, window, served or {}))
    return found


def told_gates(window: WindowSpec) -> list[str]:
    """Say before a window begins what each gate asks, and what a KL gate answers already."""
    lines = []
    for gate in window.gates:
        if isinstance(gate, ThroughputGate):
            lines.append(
                f"{gate.name}: {gate.metric} of {gate.cell}, at least {gate.floor:g} "
                f"({one_line(gate.source, 200)})"
            )
            continue
        found = _kl(gate, window, {})
        lines.append(f"{gate.name}: arm {gate.arm}: {found.verdict}, known already: {found.reason}")
        lines += [f"note: {note}" for note in found.notes]
    return lines


def _throughput(
    gate: ThroughputGate, plan: Plan, records: Mapping[str, Mapping[str, Any]], arm: str
) -> GateVerdict:
    items = [item.id for item in plan.items if item.cell == gate.cell and item.arm == arm]
    tables = {item: _table(records.get(item), gate.metric) for item in items}
    values = {item: table["value"] for item, table in tables.items() if _is_value(table)}
    if len(values) < len(items) or len(values) < GATE_REPEATS:
        return GateVerdict(
            gate.name,
            None,
            f"{gate.metric} of {gate.cell} has {len(values)} of {len(items)} values, "
            f"{GATE_REPEATS} or more and all of them are needed",
        )
    mean, low = lower_bound(list(values.values()))
    apart = _apart(gate, plan, tables)
    facts = {
        "kind": gate.kind,
        "cell": gate.cell,
        "metric": gate.metric,
        "repeats": len(values),
        "mean": mean,
        "low": low,
        "floor": gate.floor,
        "source": gate.source,
        "rate_tolerance": gate.rate_tolerance,
        "rates": apart,
    }
    reason = (
        f"{gate.metric} of {gate.cell} is {mean:.4g}, at least {low:.4g} by {len(values)} repeats; "
        f"the floor is {gate.floor:g} ({one_line(gate.source, 200)})"
    )
    notes = tuple(
        f"{gate.name}: {row['item']}: the client reads {row['client']:.4g} tokens/s and the engine "
        f"{row['engine']:.4g}, {100 * row['apart']:.0f} % apart; registered are "
        f"{100 * (gate.rate_tolerance or 0.0):g} %"
        for row in apart
        if row["beyond"]
    )
    return GateVerdict(gate.name, "PASS" if low >= gate.floor else "LOSS", reason, facts, notes)


def lower_bound(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and lower end of its 95 % interval, mean − t(0.975, n − 1) · sd / √n."""
    from scipy.stats import t

    count = len(values)
    mean = math.fsum(values) / count
    if len(set(values)) == 1:
        return mean, mean
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, mean - float(t.ppf(_CONFIDENCE, count - 1)) * math.sqrt(variance / count)


def _table(record: Mapping[str, Any] | None, metric: str) -> Mapping[str, Any]:
    values = record.get("values") if record is not None else None
    table = values.get(metric) if isinstance(values, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def _is_value(table: Mapping[str, Any]) -> bool:
    value = table.get("value")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    # JSON has whole numbers that no float holds.
    return abs(value) <= sys.float_info.max


def _apart(
    gate: ThroughputGate, plan: Plan, tables: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Client and engine rate of each item, where the gate registers how far apart they may lie."""
    alone = len(plan.cells[gate.cell].get("prompts", ())) == 1
    if gate.rate_tolerance is None or gate.metric != "decode_tok_s" or not alone:
        return []
    rows = []
    for item, table in tables.items():
        parts = table.get("parts")
        parts = parts if isinstance(parts, Mapping) else {}
        decode, tokens = parts.get("server_decode_ms"), parts.get("tokens")
        if not decode or not tokens or tokens < 2:
            continue
        engine = (tokens - 1) * 1000.0 / decode
        apart = abs(table["value"] / engine - 1.0)
        rows.append(
            {
                "item": item,
                "client": table["value"],
                "engine": engine,
                "apart": apart,
                "beyond": apart > gate.rate_tolerance,
            }
        )
    return rows


def _of_every_arm(table: Mapping[str, Any]) -> dict[str, str]:
    """The flags of the command that a target starts every arm with, of whichever host."""
    experiment = table.get("experiment")
    command = table.get("command") or (
        experiment.get("command") if isinstance(experiment, Mapping) else None
    )
    lists = command.values() if isinstance(command, Mapping) else [command or ()]
    return {key: value for words in lists for key, value in flag_keys(words).items()}


def _kl(gate: KlGate, window: WindowSpec, served: Mapping[str, Sequence[str]]) -> GateVerdict:
    told = []
    for check in gate.checks:
        value, limit = check.get("value"), check.get("limit")
        seen = "not seen" if value is None else f"{value:.4g}"
        asked = "no limit" if limit is None else f"{check.get('relation')} {limit:g}"
        told.append(f"{check.get('name')} {seen} ({asked})")
    facts = {
        "kind": gate.kind,
        "report": gate.report,
        "report_sha256": gate.report_sha256,
        "checks": [dict(check) for check in gate.checks],
        "scored": dict(gate.scored),
        "shape": dict(gate.shape),
    }
    every = _of_every_arm(window.target.table)
    lines = [
        line
        for arm in (window.control, window.arm(gate.arm))
        for line in _left(
            gate.shape, arm.name, {**every, **arm_keys(arm, served.get(arm.name, ()))}
        )
    ]
    lines = lines if gate.shape else [_NO_SHAPE]
    notes = tuple(f"{gate.name}: {line}" for line in lines)
    verdict = "PASS" if gate.verdict == "PASS" else "LOSS"
    return GateVerdict(gate.name, verdict, "; ".join(told), facts, notes)


def _left(shape: Mapping[str, Any], arm: str, keys: Mapping[str, str]) -> list[str]:
    """How an arm leaves the scored shape, and what of that shape is not known of it."""
    left, untold = left_keys(shape, keys)
    lines = [
        f"{one_line(key, 60)} was {one_line(was, 60)} where it was scored, arm {arm} has "
        f"{one_line(now, 60)}: the score does not stand for that shape"
        for key, was, now in left
    ]
    if untold:
        lines.append(
            f"whether arm {arm} has the scored {one_line(', '.join(untold), 200)} is not told by it"
        )
    return lines
