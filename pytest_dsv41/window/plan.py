"""The plan: what will run, in which order, how long it takes, and what it can show.

A plan is made from the window and the definitions of its cells alone, is written as `plan.json`
before anything is touched, and is enough, with the values, to decide again later.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ..durable import dump_json
from ..errors import UsageError
from ..text import counted, one_line
from .advice import MODERATED, WIDENED, check_advice
from .deciding import check_deciding, in_pairs, is_seeded, profile_of
from .gates import told_gates
from .schedule import Start, layout
from .source import choices, shown
from .spec import PILOT_CELL, WindowSpec
from .summary import claimed

__all__ = [
    "Estimate",
    "KnownSpread",
    "Plan",
    "PlannedItem",
    "Spreads",
    "describe_plan",
    "designs",
    "make_plan",
    "planned_items",
    "render_plan",
    "spread_of",
]

SCHEMA = "dsv41-plan-v1"
WIDTH = 100


@dataclasses.dataclass(frozen=True)
class KnownSpread:
    """The CV of one repeat (a fraction) that the archive knows of one definition, or why none."""

    cv: float | None = None
    why: str = ""
    several: bool = False
    """Whether it is not known because rows of several definitions would fit."""


Spreads = Callable[[str, str], KnownSpread]
"""What the archive knows of a cell and metric."""

_ADVISED_CONTROLS = 4
"""Control repeats advised when unpaired (WIN2, "When to pair")."""

_POWER_4V3 = {"gain": (26.4, 62.1), "loss": (22.2, 53.3)}
_POWER_3V3 = {"gain": (17.3, 45.1), "loss": (16.8, 41.6)}
"""WIN2's power table at cv 2 %: percent found of a true 3 % and 5 % gain or loss."""


@dataclasses.dataclass(frozen=True)
class PlannedItem:
    """One measurement: `index` is its place in the window's order, from 0."""

    id: str
    start: str
    arm: str
    cell: str
    repeat: int
    index: int
    decision: bool


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Expected seconds. `starts_s` is None when nothing says how long a start takes.

    `seam_s` is the A/A pilot's start B, on production that is back and still held. `down_s` is how
    long production is not there for others (0 when the target holds nothing); `total_s` adds the
    watch; both leave out starts that are not estimated. `window_s` is the window's deadline.
    """

    items_s: float
    starts_s: float | None
    seam_s: float
    watch_s: float
    down_s: float
    total_s: float
    window_s: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The ordered starts and items of one window, with everything that defines them.

    `spec` is the resolved window as JSON (`window` gives it typed; read from a file, the arms'
    environment values are hashes), `cells` the definition of each
    cell by name, `estimates` the expected seconds of one item of each cell. `digest` is the
    sha256 of everything that matters to the result: not of the window's id, texts and folders.
    """

    window_id: str
    seed: int
    spec: dict[str, Any]
    starts: tuple[Start, ...]
    items: tuple[PlannedItem, ...]
    cells: dict[str, dict[str, Any]]
    estimates: dict[str, float]
    digest: str

    @functools.cached_property
    def window(self) -> WindowSpec:
        """The window as it was checked."""
        return WindowSpec.model_validate(self.spec)

    @property
    def estimate(self) -> Estimate:
        """How long the window takes, in seconds."""
        seam_s = float(self.cells[PILOT_CELL]["seam_s"]) if self.window.pilot else 0.0
        return _estimate(self.window, self.items, self.estimates, seam_s)

    def profile(self, cell: str) -> str:
        """The profile of a cell, "single" or "multi": the window's word, else the cell's own."""
        return profile_of(self.window.cell(cell), self.cells[cell])

    def primary(self, cell: str) -> str:
        """The primary metric of a cell; a report-only cell that names none has its kind's own."""
        named = self.window.cell(cell).primary
        if named:
            return named
        if self.cells[cell].get("kind") == "prefill":
            return "ttft_ms"
        # The luck of a seed cancels in the pair, so a seeded request has its speed as it is.
        alone = is_seeded(self.cells[cell]) and self.profile(cell) == "single"
        return "decode_tok_s" if alone else "ms_per_round"

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values, the arms' environment values hashed; `from_json` reads it."""
        return {
            "schema": SCHEMA,
            "window_id": self.window_id,
            "seed": self.seed,
            "digest": self.digest,
            "spec": _masked(self.spec),
            "starts": [start.model_dump() for start in self.starts],
            "items": [dataclasses.asdict(item) for item in self.items],
            "cells": self.cells,
            "estimates": self.estimates,
        }

    @classmethod
    def from_json(cls, data: Any) -> Plan:
        """Read a plan back.

        Raises:
            UsageError: it is damaged, or of another schema; one line.
        """
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, Mapping) else data
            raise UsageError(f"no plan of schema {SCHEMA}, but {shown(found)}")
        try:
            plan = cls(
                window_id=_typed(data, "window_id", str),
                seed=_typed(data, "seed", int),
                spec=_typed(data, "spec", dict),
                starts=tuple(Start.model_validate(start) for start in data["starts"]),
                items=tuple(PlannedItem(**item) for item in data["items"]),
                cells=_typed(data, "cells", dict),
                estimates=_typed(data, "estimates", dict),
                digest=_typed(data, "digest", str),
            )
            window = plan.window
            # Plans of the first version hold the values themselves.
            intact = plan.digest in (_digest(plan), _digest(plan, mask=dict))
        except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"the plan is damaged: {one_line(first)}") from None
        if not intact or [*_order(window)] != [*plan.items]:
            raise UsageError("the plan is damaged: its digest does not fit its content")
        return plan


def make_plan(
    spec: WindowSpec,
    cells: Mapping[str, Mapping[str, Any]],
    *,
    window_id: str,
    seed: int | None = None,
    estimates: Mapping[str, float] | None = None,
) -> Plan:
    """Make the plan of a window.

    Args:
        spec: the checked window.
        cells: the definition (JSON) of every known cell by name; `estimated_s`, `profile` and
            `kind` are read from it. Quality cells and the pilot stand in it too; `seam_s` of the
            pilot's is how long start B takes.
        window_id: the window's unique id.
        seed: the window's seed; None takes the file's, else one made from the id.
        estimates: seconds of one item by cell, known from earlier windows; they win over the
            cell's own `estimated_s`, the file's `estimated_s` over both.

    Raises:
        SpecError: the window names a cell that does not exist, decision cells that no one rule
            can judge, or advice that cannot apply.
    """
    used: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    for position, use in enumerate(spec.cells):
        if use.name not in cells:
            raise spec.error(
                ("cells", position, "name"),
                f"unknown cell {shown(use.name)}{choices(use.name, sorted(cells))}",
            )
        used[use.name] = dict(cells[use.name])
        known = (estimates or {}).get(use.name, used[use.name].get("estimated_s", 10.0))
        seconds[use.name] = float(known if use.estimated_s is None else use.estimated_s)
    for name in _beside(spec):
        used[name] = dict(cells[name])
        seconds[name] = float(used[name]["estimated_s"])
    check_deciding(spec, {use.name: used[use.name] for use in spec.cells})
    check_advice(spec, used)
    if seed is None:
        seed = _seed_of(window_id) if spec.seed is None else spec.seed
    plan = Plan(
        window_id=window_id,
        seed=seed,
        spec=spec.to_json(),
        starts=spec.starts,
        items=planned_items(spec),
        cells=used,
        estimates=seconds,
        digest="",
    )
    return dataclasses.replace(plan, digest=_digest(plan))


def planned_items(spec: WindowSpec) -> tuple[PlannedItem, ...]:
    """The items of a window in their order."""
    return tuple(_order(spec))


def _beside(spec: WindowSpec) -> tuple[str, ...]:
    """The names of what runs beside the measured cells: quality cells, and the pilot."""
    return (*(use.name for use in spec.quality), *([PILOT_CELL] if spec.pilot else []))


def _order(spec: WindowSpec) -> Iterator[PlannedItem]:
    """Start by start and cell by cell; interleaved: cell by cell, the starts in turn.

    After a start's measured cells come its quality cells, and at the end of the last control start
    the A/A pilot's start A.
    """
    if spec.interleave:
        most = max(spec.repeats.values())
        order = [
            (start, cell.name, repeat, cell.decision)
            for cell in spec.cells
            for repeat in range(most)
            for start in spec.starts
            if repeat < spec.repeats_of(start.name)
        ]
        order += [row for start in spec.starts for row in _after(spec, start)]
    else:
        order = [
            row
            for start in spec.starts
            for row in (
                *(
                    (start, cell.name, repeat, cell.decision)
                    for cell in spec.cells
                    for repeat in range(spec.repeats_of(start.name))
                ),
                *_after(spec, start),
            )
        ]
    for index, (start, cell, repeat, decision) in enumerate(order):
        yield PlannedItem(
            id=f"{start.name}-{cell}-r{repeat}",
            start=start.name,
            arm=start.arm,
            cell=cell,
            repeat=repeat,
            index=index,
            decision=decision,
        )


def _after(spec: WindowSpec, start: Start) -> Iterator[tuple[Start, str, int, bool]]:
    """What a start runs after its measured cells.

    A quality cell probes the first start of every arm, which is judged, and once more the last
    control start, which shows how far the window's own control is from itself.
    """
    first = next(other for other in spec.starts if other.arm == start.arm)
    last_control = [other for other in spec.starts if other.arm == spec.control.name][-1]
    for use in spec.quality:
        if start in (first, last_control):
            yield start, use.name, 0, spec.kind == "candidate" and start == first
    if spec.pilot is not None and start == last_control:
        yield start, PILOT_CELL, 0, False


_NOT_THE_RESULT = (
    "hypothesis",
    "out",
    "campaign",
    "path",
    "cell_modules",
    "variables",
    "seed",
    "start_estimate_s",
    "diff_cv",
    "clock_cap_mhz",
    "override",
)


_MASK = re.compile(r"sha256:[0-9a-f]{64}")


def _masked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec without the values of the arms' environments, which may be secrets."""
    return {
        **spec,
        "arms": [
            {**arm, "env": {name: _hashed(value) for name, value in arm["env"].items()}}
            for arm in spec["arms"]
        ],
    }


def _hashed(value: str) -> str:
    if _MASK.fullmatch(value):
        return value
    return f"sha256:{hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _digest(plan: Plan, mask: Callable[[Mapping[str, Any]], Mapping[str, Any]] = _masked) -> str:
    of = mask(plan.spec)
    spec = {key: value for key, value in of.items() if key not in _NOT_THE_RESULT}
    spec["target"] = {key: spec["target"][key] for key in ("kind", "table")}
    spec["cells"] = [_without_estimate(use) for use in spec["cells"]]
    for use in spec["cells"]:
        if use.get("expect_identical"):
            # As a band: its seal says which pilot it is, not where the file lies.
            told = use["expect_identical"]
            use["expect_identical"] = {k: v for k, v in told.items() if k != "record"}
    claims = spec.pop("claims", None)
    if claims:
        # In whatever words: what is claimed is how a metric changes from one arm to another.
        spec["claims"] = [{k: v for k, v in claim.items() if k != "text"} for claim in claims]
    if "quality" in spec:
        # The band's seal says which one it is; where its file lies does not matter.
        spec["quality"] = [
            {key: value for key, value in _without_estimate(use).items() if key != "band"}
            for use in spec["quality"]
        ]
    matters = {
        "seed": plan.seed,
        "spec": spec,
        "starts": [start.model_dump() for start in plan.starts],
        "items": [dataclasses.asdict(item) for item in plan.items],
        "cells": {name: _without_estimate(cell) for name, cell in plan.cells.items()},
    }
    return hashlib.sha256(dump_json(matters).encode()).hexdigest()


def _without_estimate(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in cell.items() if key not in ("estimated_s", "seam_s")}


def _seed_of(window_id: str) -> int:
    """A seed from 0 to 2^31 - 1 that the id alone gives."""
    return int.from_bytes(hashlib.sha256(window_id.encode()).digest()[:4], "big") >> 1


def _typed(data: Mapping[str, Any], key: str, kind: type) -> Any:
    value = data[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{key} is {shown(value)}")
    return value


def _estimate(
    spec: WindowSpec,
    items: Sequence[PlannedItem],
    seconds: Mapping[str, float],
    seam_s: float,
) -> Estimate:
    limits = spec.limits
    items_s = sum(seconds[item.cell] for item in items)
    holds = spec.target.kind != "endpoints"
    starts_s: float | None = 0.0
    if holds:
        one = spec.start_estimate_s
        starts_s = None if one is None else one * len(spec.starts)
    down_s = items_s + (starts_s or 0.0) + seam_s if holds else 0.0
    watch_s = limits.watch_s if holds else 0.0
    window_s = limits.window_s
    if window_s is None:
        # Three times the estimate, one item at its limit, and every start at its limits.
        a_start = limits.start_s + limits.stop_s + limits.quiet_s if holds else 0.0
        window_s = 3 * items_s + limits.item_s + a_start * len(spec.starts)
    return Estimate(
        items_s=items_s,
        starts_s=starts_s,
        seam_s=seam_s,
        watch_s=watch_s,
        down_s=down_s,
        total_s=items_s + (starts_s or 0.0) + seam_s + watch_s,
        window_s=window_s,
    )


# -- what the plan can show -----------------------------------------------------------------------


def designs(plan: Plan, spreads: Spreads | None = None) -> list[dict[str, Any]]:
    """Each cell and candidate arm: its design, least p, half-width and what to know about it.

    `archive_cv` is the CV of one repeat that the half-width is estimated from; `diff_cv` the
    registered CV of paired differences, which goes before it.
    """
    window = plan.window
    return [
        _design(plan, use.name, arm.name, spreads)
        for use in window.cells
        for arm in window.candidates
    ]


def _design(plan: Plan, cell: str, arm: str, spreads: Spreads | None) -> dict[str, Any]:
    # numpy and scipy are loaded only when a plan needs them.
    from ..decision_v2 import half_width, spread_metric

    window = plan.window
    seeded = in_pairs(window, plan.cells[cell])
    row = _of_pairs(plan, cell) if seeded else _of_repeats(plan, cell, arm)
    primary = plan.primary(cell)
    estimated_from = spread_metric(row["design"], primary)
    known = spreads(cell, estimated_from) if spreads else KnownSpread()
    diff_cv = window.diff_cv.get(f"{cell}/{primary}") if row["paired"] else None
    if known.several and diff_cv is None:
        row["notes"].append(f"no spread is taken from the archive: {known.why}")
    least = min(row["control_repeats"], row["candidate_repeats"])
    sees = (known.cv is not None or diff_cv is not None) and least >= 2
    return {
        "cell": cell,
        "arm": arm,
        "decision": window.cell(cell).decision,
        "profile": plan.profile(cell),
        "primary": primary,
        "guards": list(window.cell(cell).guards),
        "archive_cv": known.cv,
        "archive_metric": estimated_from,
        "archive_unknown": known.why or None,
        "diff_cv": diff_cv,
        "expected_gain": window.cell(cell).expected_gain,
        **row,
        "half_width": half_width(row["design"], **spread_of(row, known.cv, diff_cv))
        if sees
        else None,
    }


def spread_of(row: Mapping[str, Any], cv: float | None, diff_cv: float | None) -> dict[str, Any]:
    """The spread arguments of `decision_v2`'s filter for a row of `designs`."""
    if row["bracket"] and diff_cv is None and cv is not None:
        # The mean of two control values has half their variance: 1 + 1/2 instead of 1 + 1.
        diff_cv = 1.5**0.5 * cv
    return {"cv": cv, "diff_cv": diff_cv, "drift": row["drift"]}


def _of_repeats(plan: Plan, cell: str, arm: str) -> dict[str, Any]:
    window = plan.window
    places = layout(plan, cell, arm)
    controls, candidates = len(places.control), len(places.candidate)
    notes: list[str] = []
    if not places.paired and controls < _ADVISED_CONTROLS and window.cell(cell).decision:
        notes.append(_few_controls(controls, candidates))
    if places.paired:
        ids = [item for group in places.control for item in group]
        if len(set(ids)) < len(ids):
            notes.append(
                "a control start stands in two brackets: their pairs share its values, so the "
                "interval comes out a little too narrow"
            )
    return {
        "design": f"pairs:{candidates}" if places.paired else f"unpaired:{controls}v{candidates}",
        "paired": places.paired,
        "bracket": window.pairing == "bracket",
        "drift": 0.0,
        "control_repeats": controls,
        "candidate_repeats": candidates,
        "least_p": 2.0 ** (1 - candidates) if places.paired else None,
        "notes": notes,
    }


def _of_pairs(plan: Plan, cell: str) -> dict[str, Any]:
    window = plan.window
    use = window.cell(cell)
    pairs = window.repeats_of(plan.starts[0].name)
    controls = len(plan.starts) - 1
    primary = plan.primary(cell)
    start_sd = window.start_sd.get(f"{cell}/{primary}")
    notes: list[str] = []
    if use.decision and controls == 1:
        notes.append(_NO_AA)
    if use.decision and (
        unregistered := [
            metric for metric in (primary, *use.guards) if f"{cell}/{metric}" not in window.start_sd
        ]
    ):
        notes.append(_unregistered(unregistered, built_in_aa=controls == 2))
    # Between-start spread does not shrink with more pairs of the same starts.
    drift = 0.0 if start_sd is None else start_sd * (1 + 1 / controls) ** 0.5
    if drift and pairs >= 2:
        from ..decision_v2 import half_width

        floor = half_width(f"seeded:{pairs}", diff_cv=0.0, drift=drift)
        notes.append(
            f"the registered start_sd of {100 * (start_sd or 0):g} % alone holds the interval at "
            f"±{100 * floor:.2f} %, whatever the number of pairs adds"
        )
    return {
        "design": f"seeded:{pairs}",
        "paired": True,
        "bracket": False,
        "drift": drift,
        "control_repeats": pairs * controls,
        "candidate_repeats": pairs,
        "built_in_aa": controls == 2,
        "start_sd": start_sd,
        "least_p": 2.0 ** (1 - pairs),
        "notes": notes,
    }


_NO_AA = (
    "one control start: there is no built-in A/A, so a start that happens to be fast or slow looks "
    "like an effect; where starts differ by 1 % and nobody registered it, a candidate without "
    "effect is called WIN up to 8 % and LOSS up to 13 % of the time; C/X/C has the check"
)


def _unregistered(metrics: Sequence[str], *, built_in_aa: bool) -> str:
    said = (
        f"start_sd is unregistered for {', '.join(metrics)} and counts as 0: what starts differ "
        "by is taken for an effect"
    )
    if built_in_aa:
        said += "; at 1 % about 5 % false WIN and 10 % false LOSS"
    return said


def _few_controls(controls: int, candidates: int) -> str:
    advice = f"{controls} control repeats, unpaired; {_ADVISED_CONTROLS} are advised"
    if (controls, candidates) != (3, 3):
        return f"{advice} for power"
    here, there = _POWER_3V3, _POWER_4V3
    return (
        f"{advice}: at a spread of 2 % a true 5 % gain is found {here['gain'][1]:g} % of the time "
        f"({there['gain'][1]:g} % at 4 v 3), a true 3 % gain {here['gain'][0]:g} % "
        f"({there['gain'][0]:g} %), a true 5 % loss {here['loss'][1]:g} % ({there['loss'][1]:g} %)"
    )


def describe_plan(plan: Plan, *, spreads: Spreads | None = None) -> dict[str, Any]:
    """The plan for `--json`: `to_json` with times, designs and notes. Seconds and fractions."""
    estimate = plan.estimate
    return {
        **plan.to_json(),
        "minutes": {
            "total": round(estimate.total_s / 60, 2),
            "items": round(estimate.items_s / 60, 2),
            "starts": None if estimate.starts_s is None else round(estimate.starts_s / 60, 2),
            "seam": round(estimate.seam_s / 60, 2),
            "watch": round(estimate.watch_s / 60, 2),
            "production_down": round(estimate.down_s / 60, 2),
            "deadline": round(estimate.window_s / 60, 2),
        },
        "designs": designs(plan, spreads),
    }


def render_plan(plan: Plan, *, spreads: Spreads | None = None) -> str:
    """The plan as plain text of at most 100 columns, ending with a newline."""
    window, estimate = plan.window, plan.estimate
    limits = window.limits
    lines = [
        f"window {plan.window_id}",
        f"  {window.kind} window on target '{window.target.kind}', lane {window.lane}",
    ]
    lines += _wrapped(f"hypothesis: {one_line(window.hypothesis, 2000)}", "  ")
    if window.report_only and window.kind == "candidate":
        lines += ["  report only: it decides nothing"]
    lines += [
        f"  seed {plan.seed}, plan digest {plan.digest[:16]}",
        "",
        f"starts ({len(plan.starts)}): {one_line(window.schedule, 60)}"
        f"{', interleaved request by request' if window.interleave else ''}",
    ]
    lines += _start_lines(plan)
    lines += ["", f"cells ({len(window.cells)}), in this order in every start:"]
    for use in window.cells:
        role = "decides" if use.decision else "reported only"
        lines.append(
            f"  {use.name}  {role}, {plan.profile(use.name)}, about "
            f"{plan.estimates[use.name]:.1f} s a repeat"
        )
        guards = ", ".join(use.guards) or "none"
        lines += _wrapped(f"primary {plan.primary(use.name)}, guards {guards}", "    ")
    if beside := _beside_lines(plan):
        lines += [f"beside them ({len(window.quality) + (window.pilot is not None)}):", *beside]
    if window.candidates:
        lines += ["", "what the repeats can show:"]
        for row in designs(plan, spreads):
            lines += _design_lines(row, alone=len(window.candidates) == 1)
    if window.claims:
        lines += ["", "claims, judged when it ends:"]
        for claim in window.claims:
            lines += _wrapped(
                f"{one_line(claim.text, 2000)} "
                f"({claim.cell}/{claim.metric or plan.primary(claim.cell)}, "
                f"{claim.from_arm or window.control.name} to {claim.to_arm}: "
                f"{claimed(claim.direction, claim.threshold)})",
                "  ",
            )
    if window.gates:
        lines += ["", "gates, asked of the candidates alone:"]
        for line in told_gates(window):
            lines += _wrapped(line, "  ")
    if window.noise:
        noise = ", ".join(f"{metric} {100 * size:g} %" for metric, size in window.noise.items())
        lines += ["", *_wrapped(f"cost table, by the registered noise of: {noise}", "")]
    registered = {MODERATED: window.advice.moderated, WIDENED: window.advice.widened_aa}
    if advice := [name for name, given in registered.items() if given]:
        lines += ["", f"advice: {', '.join(advice)}; it decides nothing"]
    starts = (
        f"{estimate.starts_s:.0f} s for starts"
        if estimate.starts_s is not None
        else f"starts not estimated (up to {limits.start_s:.0f} s each)"
    )
    lines += [
        "",
        f"time: about {_minutes(estimate.total_s)}: {estimate.items_s:.0f} s for "
        f"{counted(len(plan.items), 'item')}, {starts}, "
        + (f"{estimate.seam_s:.0f} s for start B, " if window.pilot else "")
        + f"{estimate.watch_s:.0f} s watch",
        f"production down: about {_minutes(estimate.down_s)}"
        + (" and the starts" if estimate.down_s and estimate.starts_s is None else "")
        + (" (this target holds nothing)" if window.target.kind == "endpoints" else ""),
        f"deadline of the window: {_minutes(estimate.window_s)}",
    ]
    return "\n".join(lines) + "\n"


def _beside_lines(plan: Plan) -> list[str]:
    """The quality cells and the A/A pilot, with where they run and what they cost."""
    lines: list[str] = []
    for use in plan.window.quality:
        starts = [item.start for item in plan.items if item.cell == use.name]
        role = (
            "decides" if any(i.decision for i in plan.items if i.cell == use.name) else "reported"
        )
        lines += _wrapped(
            f"{use.name}  quality, {role}: subset {use.subset} in {', '.join(starts)}, about "
            f"{_minutes(plan.estimates[use.name])} each, by band {use.band_sha256[:12]}",
            "  ",
        )
    if plan.window.pilot is not None:
        start = next(item.start for item in plan.items if item.cell == PILOT_CELL)
        lines += _wrapped(
            f"{PILOT_CELL}  reported only: start A in {start}, about "
            f"{_minutes(plan.estimates[PILOT_CELL])}; start B on restored production before the "
            f"HOLD goes, about {_minutes(plan.estimate.seam_s)}",
            "  ",
        )
    return lines


_STARTS_SHOWN = 40


def _start_lines(plan: Plan) -> list[str]:
    window = plan.window
    lines = []
    for start in plan.starts[:_STARTS_SHOWN]:
        repeats = window.repeats_of(start.name)
        items = sum(item.start == start.name for item in plan.items)
        role = window.arm(start.arm).role
        lines.append(
            f"  {start.index + 1}. {start.name}  {role} '{start.arm}', "
            f"{counted(repeats, 'repeat')} a cell, "
            f"{counted(items, 'item')}"
        )
    if len(plan.starts) > _STARTS_SHOWN:
        lines.append(f"  … and {len(plan.starts) - _STARTS_SHOWN} more")
    return lines


def _design_lines(row: Mapping[str, Any], *, alone: bool) -> list[str]:
    what = row["cell"] if alone else f"{row['cell']}, arm {row['arm']}"
    if row["paired"]:
        seeded = "seeded " if row["design"].startswith("seeded") else ""
        text = (
            f"{what}: {row['candidate_repeats']} {seeded}pairs; the least p a sign flip of them "
            f"can reach is {row['least_p']:.2g}"
        )
    else:
        text = (
            f"{what}: {row['control_repeats']} control against {row['candidate_repeats']} "
            "candidate repeats, unpaired"
        )
    if row["half_width"] is not None:
        text += f"; resolves {row['primary']} to ±{100 * row['half_width']:.2f} % "
        if row["diff_cv"] is not None:
            text += f"(registered spread of pairs {100 * row['diff_cv']:.2f} %)"
        else:
            other = row["archive_metric"]
            of = f" of {other}" if other != row["primary"] else ""
            text += f"(archive spread{of} {100 * row['archive_cv']:.2f} %)"
        gain = row["expected_gain"]
        if gain is not None and gain < 2 * row["half_width"]:
            text += f"; the expected gain of {100 * gain:g} % is less than twice that"
    lines = _wrapped(text, "  ")
    for note in row["notes"]:
        lines += _wrapped(f"note: {note}", "    ")
    return lines


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min"


def _wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most WIDTH columns; what follows the first is indented further."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )
