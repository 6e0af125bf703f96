"""Seeded cells as series: what each start of one cell measured, brought together pair by pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .series import ORIENTATION, Refused, as_tuple, check_identity

__all__ = ["PROFILES", "SeededSeries", "seeded_series", "start_name"]

PROFILES = ("single", "multi")


@dataclass(frozen=True)
class SeededSeries:
    """One metric of one seeded cell: k control starts (1 or 2) and the candidate start.

    `controls` holds one list of values a control start, `candidate` the candidate's; entry i of
    each is pair i. `profile` is single (B = 1) or multi (B >= 2; a group is the pair's unit). The
    prompt identities, where given, have the shape of the values. A `report_only` series may have
    3 to 5 pairs and never decides.
    """

    cell: str
    metric: str
    controls: Sequence[Sequence[float]]
    candidate: Sequence[float]
    lower_is_better: bool = field(kw_only=True)
    profile: str = field(kw_only=True)
    unit: str | None = field(default=None, kw_only=True)
    control_prompts: Sequence[Sequence[str]] | None = field(default=None, kw_only=True)
    candidate_prompts: Sequence[str] | None = field(default=None, kw_only=True)
    report_only: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        refuse = partial(Refused, cell=self.cell, metric=self.metric)
        if self.profile not in PROFILES:
            raise refuse(f"profile {self.profile!r} is unknown; valid: {', '.join(PROFILES)}")
        for name in ("lower_is_better", "report_only"):
            if not isinstance(getattr(self, name), bool):
                raise refuse(f"{name} must be True or False, got {getattr(self, name)!r}")
        at = {"cell": self.cell, "metric": self.metric}
        starts = as_tuple(self.controls, arm="controls", **at)
        if len(starts) not in (1, 2):
            raise refuse(f"{len(starts)} control starts; C/X and C/X/C have 1 and 2")
        names = [start_name(j) for j in range(len(starts))]
        kept = tuple(as_tuple(s, arm=a, **at) for s, a in zip(starts, names, strict=True))
        object.__setattr__(self, "controls", kept)
        object.__setattr__(self, "candidate", as_tuple(self.candidate, arm="candidate", **at))
        if self.control_prompts is not None:
            prompts = as_tuple(self.control_prompts, arm="control_prompts", **at)
            lists = tuple(as_tuple(p, arm="control_prompts", **at) for p in prompts)
            object.__setattr__(self, "control_prompts", lists)
        if self.candidate_prompts is not None:
            prompts = as_tuple(self.candidate_prompts, arm="candidate_prompts", **at)
            object.__setattr__(self, "candidate_prompts", prompts)


def start_name(index: int) -> str:
    """The name of control start `index` in messages."""
    return f"control C{index + 1}"


def seeded_series(
    c1: Mapping[str, Any],
    x: Mapping[str, Any],
    c2: Mapping[str, Any] | None = None,
    *,
    metrics: Sequence[str] | Mapping[str, bool],
    profile: str,
) -> list[SeededSeries]:
    """The series of one seeded cell from the records of its starts, primary first.

    A record is what one start measured:

        {"cell": name, "report_only": bool (optional),
         "pairs": [{"pair": index, "seeds": [...] (none for prefill cells),
                    "prompt_sha256": identity,
                    "values": {metric: number, or {"value", "unit", "lower_is_better"}}}, ...]}

    `metrics` names the primary and then the guards; as a mapping it also says whether lower is
    better, which is otherwise taken from the values or from the metrics RULES defines.

    Raises `Refused` when the starts are of different cells, a pair is missing in one of them, the
    seeds of a pair differ, a metric is missing, or the prompts are not one and the same everywhere.
    """
    starts = {"control C1": c1, "candidate": x} | ({} if c2 is None else {"control C2": c2})
    cell = c1.get("cell")
    if not isinstance(cell, str) or not cell:
        raise Refused(f"a record without the name of its cell: {cell!r}")
    pairs: dict[str, list[Mapping[str, Any]]] = {}
    for arm, record in starts.items():
        if record.get("cell") != cell:
            raise Refused(f"is a record of cell {record.get('cell')!r}", cell=cell, arm=arm)
        pairs[arm] = _pairs_of(record, cell, arm)
    labels = [pair["pair"] for pair in pairs["control C1"]]
    prompt: str | None = None
    prompts: dict[str, list[str]] = {}
    for arm, entries in pairs.items():
        own = [pair["pair"] for pair in entries]
        if own != labels:
            missing = sorted(set(labels) ^ set(own))
            raise Refused(f"pairs {missing} are not in every start", cell=cell, arm=arm)
        prompts[arm] = []
        for position, pair in enumerate(entries):
            if pair.get("seeds") != pairs["control C1"][position].get("seeds"):
                raise Refused(
                    "the starts used different seeds", cell=cell, arm=arm, position=position
                )
            identity = check_identity(
                pair.get("prompt_sha256"), cell=cell, arm=arm, position=position
            )
            if prompt is not None and identity != prompt:
                raise Refused("pairs on different prompts", cell=cell, arm=arm, position=position)
            prompt = identity
            prompts[arm].append(identity)
    report_only = any(bool(record.get("report_only")) for record in starts.values())
    controls = [arm for arm in ("control C1", "control C2") if arm in pairs]
    if not metrics:
        raise Refused("no metric named", cell=cell)
    out = []
    for metric in metrics:
        values = {arm: [_value(p, metric, cell, arm) for p in pairs[arm]] for arm in pairs}
        entries = [entry for arm in values for entry in values[arm]]
        out.append(
            SeededSeries(
                cell,
                metric,
                [[entry["value"] for entry in values[arm]] for arm in controls],
                [entry["value"] for entry in values["candidate"]],
                lower_is_better=_orientation(metric, metrics, entries, cell),
                profile=profile,
                unit=next((e["unit"] for e in entries if e.get("unit") is not None), None),
                control_prompts=[prompts[arm] for arm in controls],
                candidate_prompts=prompts["candidate"],
                report_only=report_only,
            )
        )
    return out


def _pairs_of(record: Mapping[str, Any], cell: str, arm: str) -> list[Mapping[str, Any]]:
    entries = record.get("pairs")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise Refused("a record without pairs", cell=cell, arm=arm)
    for position, entry in enumerate(entries):
        number = entry.get("pair") if isinstance(entry, Mapping) else None
        if isinstance(number, bool) or not isinstance(number, int):
            raise Refused("a pair without its number", cell=cell, arm=arm, position=position)
    ordered = sorted(entries, key=lambda entry: int(entry["pair"]))
    if len({entry["pair"] for entry in ordered}) != len(ordered):
        raise Refused("a pair is there twice", cell=cell, arm=arm)
    return ordered


def _value(pair: Mapping[str, Any], metric: str, cell: str, arm: str) -> Mapping[str, Any]:
    values = pair.get("values")
    entry = values.get(metric) if isinstance(values, Mapping) else None
    if entry is None or (isinstance(entry, Mapping) and entry.get("value") is None):
        raise Refused(f"pair {pair['pair']} has no value", cell=cell, metric=metric, arm=arm)
    return entry if isinstance(entry, Mapping) else {"value": entry}


def _orientation(
    metric: str,
    metrics: Sequence[str] | Mapping[str, bool],
    entries: Iterable[Mapping[str, Any]],
    cell: str,
) -> bool:
    if isinstance(metrics, Mapping):
        return bool(metrics[metric])
    told = {e["lower_is_better"] for e in entries if e.get("lower_is_better") is not None}
    if len(told) > 1:
        raise Refused("the values disagree on whether lower is better", cell=cell, metric=metric)
    if told:
        return bool(told.pop())
    if metric not in ORIENTATION:
        raise Refused("nothing says whether lower is better", cell=cell, metric=metric)
    return ORIENTATION[metric]
