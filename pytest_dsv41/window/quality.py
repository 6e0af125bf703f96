"""What a window's quality cells say of each candidate arm, from the window's folder alone.

A quality cell's items write one probe a start under `quality/`, beside the band that judges them.
Each candidate's first start is held against the first control start; the last control start, where
there is another one, is held against the first too: the window's own A/A, which is only reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..durable import create_exclusive
from ..errors import Dsv41Error, MeasurementRefused, UsageError
from ..text import one_line
from .plan import Plan, PlannedItem

if TYPE_CHECKING:
    from ..quality.bands import Band
    from ..quality.dist_gate import GateResult
    from ..quality.probe import Probe

__all__ = ["FOLDER", "QualityVerdict", "judge_quality", "keep_band", "probe_file"]

FOLDER = "quality"


@dataclasses.dataclass(frozen=True)
class QualityVerdict:
    """One quality cell's word on one arm: PASS, LOSS, or None where it could not be judged.

    `reason` is one line. `facts` is the gate's result as JSON, `notes` what else a reader must
    know.
    """

    cell: str
    verdict: str | None
    reason: str
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def probe_file(folder: Path, item: PlannedItem) -> Path:
    """Where an item of a quality cell writes its probe."""
    return folder / FOLDER / f"{item.id}.probe.json"


def keep_band(folder: Path, cell: str, band: Path) -> Path:
    """Copy a cell's band into the window's folder, once, byte for byte; return the copy's path.

    Raises:
        UsageError: another band of that cell lies there.
    """
    path = folder / FOLDER / f"{cell}.band.json"
    raw = band.read_bytes()
    path.parent.mkdir(exist_ok=True)
    try:
        create_exclusive(path, raw)
    except FileExistsError:
        if path.read_bytes() != raw:
            raise UsageError(f"{path}: another band lies there") from None
    return path


def judge_quality(
    folder: Path, plan: Plan, values: Sequence[Mapping[str, Any]]
) -> dict[str, list[QualityVerdict]]:
    """Judge every candidate arm by every quality cell: {arm: verdicts, in the file's order}.

    A probe that is missing, damaged or of other conditions is no verdict; its reason is told.
    """
    if not plan.window.quality:
        return {}
    rows = {row.get("item"): row for row in values}
    judged: dict[str, list[QualityVerdict]] = {arm.name: [] for arm in plan.window.candidates}
    for use in plan.window.quality:
        items = [item for item in plan.items if item.cell == use.name]
        control = [item for item in items if item.arm == plan.window.control.name]
        notes = _own_aa(folder, rows, use.name, use.band_sha256, control)
        for arm in plan.window.candidates:
            mine = next(item for item in items if item.arm == arm.name)
            try:
                found = _judge(folder, rows, use.name, use.band_sha256, control[0], mine)
            except (Dsv41Error, OSError) as error:
                judged[arm.name].append(QualityVerdict(use.name, None, _told(error), notes=notes))
                continue
            judged[arm.name].append(
                QualityVerdict(
                    use.name, found.verdict, _reason(found), found.to_json(),
                    (*notes, *found.remarks),
                )
            )  # fmt: skip
    return judged


def _judge(
    folder: Path,
    rows: Mapping[Any, Mapping[str, Any]],
    cell: str,
    seal: str,
    control: PlannedItem,
    candidate: PlannedItem,
) -> GateResult:
    from ..quality.dist_gate import judge

    first, mine = (_probe(folder, rows, item) for item in (control, candidate))
    return judge(_band(folder, cell, seal), seal, first, mine)


def _own_aa(
    folder: Path,
    rows: Mapping[Any, Mapping[str, Any]],
    cell: str,
    seal: str,
    control: Sequence[PlannedItem],
) -> tuple[str, ...]:
    """What the band says of the window's own control, last start against first."""
    from ..quality.cell import judge_control

    if len(control) < 2:
        return ()
    where = f"{control[0].start} against {control[1].start}"
    try:
        first, last = (_probe(folder, rows, item) for item in control)
        found = judge_control(_band(folder, cell, seal), seal, first, last)
    except (Dsv41Error, OSError) as error:
        return (f"{cell}: the window's own A/A ({where}) was not judged: {_told(error)}",)
    if found.verdict == "PASS":
        return ()
    return (
        f"{cell}: the window's own A/A ({where}) is outside the band too: {_reason(found)}; the "
        "band does not describe this production today",
    )


def _band(folder: Path, cell: str, seal: str) -> Band:
    from ..quality.bands import load_band

    path = folder / FOLDER / f"{cell}.band.json"
    band, found = load_band(path)
    if found != seal:
        raise MeasurementRefused("band-edited", f"{path.name} is not the band of the plan")
    return band


def _probe(folder: Path, rows: Mapping[Any, Mapping[str, Any]], item: PlannedItem) -> Probe:
    """The probe of an item, which must be the one that its row names."""
    from ..quality.probe import load_probe

    row = rows.get(item.id, {})
    if row.get("outcome") != "measured":
        why = row.get("reason") or row.get("outcome") or "not measured"
        raise MeasurementRefused("no-probe", f"{item.id}: {one_line(str(why))}")
    named = row.get("files", {}).get("probe", {}).get("sha256")
    probe = load_probe(probe_file(folder, item))
    if probe.sha256 != named:
        raise MeasurementRefused("probe-edited", f"{item.id}: its probe is not the recorded one")
    return probe


def _reason(found: GateResult) -> str:
    if found.reasons:
        return one_line("; ".join(found.reasons), 400)
    return (
        f"mean KL {found.mean_kl:.3g} of at most {found.kl_ceiling:.3g}, {found.top1.candidate} of "
        f"{found.positions} likeliest tokens differ"
    )


def _told(error: BaseException) -> str:
    return one_line(str(error) or type(error).__name__, 300)
