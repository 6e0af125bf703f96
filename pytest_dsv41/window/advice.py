"""Advice beside the verdict (RULES section 5): registered in the window file, it never decides.

`check_advice` refuses what cannot apply when the plan is made. Before the first start
`freeze_prior` fits what the archive knows of the spread and writes it as `prior.json`, whose sha256
goes into the journal. At the end `read_prior` gives that back, or says why it is not to be used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..archive import archive_head, archive_rows
from ..archive.rows import DEFINITION
from ..durable import dump_json, read_json_lines, read_regular, write_atomic
from ..errors import Dsv41Error
from ..text import one_line
from .deciding import judged
from .spec import WindowSpec

if TYPE_CHECKING:
    from ..decision_v2 import Advice, CellResult, SeriesResult
    from .plan import Plan

__all__ = [
    "FILE_NAME",
    "MODERATED",
    "WIDENED",
    "FrozenPrior",
    "advice_text",
    "check_advice",
    "freeze_prior",
    "moderated",
    "read_prior",
    "widened",
]

FILE_NAME: Final = "prior.json"
SCHEMA: Final = "dsv41-prior-v1"
MODERATED: Final = "win3-moderated"
WIDENED: Final = "widened-aa"
"""The two advisory rules, as `decision_v2` names them."""

_MAX_FILE = 1 << 26


# -- registered -----------------------------------------------------------------------------------


def check_advice(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse advice that the window's cells, pairing or schedule cannot have.

    Args:
        spec: the checked window.
        cells: the definition of each of its cells by name.

    Raises:
        SpecError: one line with file, line and key.
    """
    use = spec.advice
    for name in ("moderated", "widened_aa"):
        if getattr(use, name) and not spec.decision_cells:
            raise spec.error(
                ("advice", name), f"needs a decision cell; a window of kind '{spec.kind}' has none"
            )
    if use.moderated:
        _check_moderated(spec, cells)
    if use.widened_aa:
        _check_widened(spec, cells)


def _check_moderated(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    key = ("advice", "moderated")
    if not judged(spec, cells, seeded=False):
        raise spec.error(
            key, f"judges repeats, not seeded pairs; seeded: {', '.join(spec.decision_cells)}"
        )
    if spec.pairing == "bracket":
        # The mean of two starts spreads less than any difference that the archive can show.
        raise spec.error(key, "has no prior for pairing 'bracket'; valid: adjacent, none")


def _check_widened(spec: WindowSpec, cells: Mapping[str, Mapping[str, Any]]) -> None:
    key = ("advice", "widened_aa")
    names = judged(spec, cells, seeded=True)
    if not names:
        raise spec.error(
            key, f"needs a seeded decision cell; not seeded: {', '.join(spec.decision_cells)}"
        )
    if spec.starts[-1].arm != spec.control.name:
        raise spec.error(
            key,
            "needs a candidate start between two control starts (C/X/C), "
            f"not '{one_line(spec.schedule, 60)}'",
        )
    for name in names:
        wanted = f"{name}/{spec.cell(name).primary}"
        if wanted not in spec.start_sd:
            raise spec.error(
                key, f"needs the start spread of '{wanted}' in window.start_sd, a fraction"
            )


# -- frozen ---------------------------------------------------------------------------------------


def freeze_prior(folder: Path, plan: Plan, *, archive: Path, commit: str) -> dict[str, str]:
    """Write `prior.json` from the archive's rows of the window's own definitions.

    Cell, metric, max_tokens and commit are known before the first start; the clock cap and the
    prompt are not, so each definition that differs only there gets a prior of its own. An archive
    that is missing, damaged or too small costs the advice, never the window.

    Args:
        folder: the window's folder.
        plan: the window's plan.
        archive: the campaign's control archive.
        commit: production's commit, 40 hex digits.

    Returns:
        `{"prior_sha256": …}` for the journal; empty when the window registered no such advice.
    """
    if not plan.window.advice.moderated:
        return {}
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "window_id": plan.window_id,
        "archive": None,
        "reason": None,
        "priors": {},
    }
    try:
        head = archive_head(archive)
        content["archive"] = {"rows": head.rows, "sha256": head.sha256}
        content["priors"] = {
            f"{cell}/{metric}": list(_fitted(plan, cell, metric, archive, commit))
            for cell, metric in _series(plan)
        }
    except (Dsv41Error, ValueError, OSError) as error:
        content["reason"] = f"the archive cannot be read: {one_line(str(error))}"
    seal = _seal(content)
    write_atomic(folder / FILE_NAME, dump_json({**content, "sha256": seal}) + "\n")
    return {"prior_sha256": seal}


def _series(plan: Plan) -> Iterator[tuple[str, str]]:
    """(cell, metric) of everything that win3-moderated is asked about."""
    for cell in judged(plan.window, plan.cells, seeded=False):
        for metric in (plan.primary(cell), *plan.window.cell(cell).guards):
            yield cell, metric


def _fitted(
    plan: Plan, cell: str, metric: str, archive: Path, commit: str
) -> Iterator[dict[str, Any]]:
    """One entry a definition: its prior, or why there is none. A group is a start of a window."""
    from ..decision_v2 import Refused, fit_prior

    where = {
        "cell": cell,
        "metric": metric,
        "commit": commit,
        "max_tokens": plan.cells[cell]["max_tokens"],
    }
    found: dict[tuple[Any, ...], dict[tuple[str, str], list[tuple[int, float]]]] = {}
    for row in archive_rows(archive, where):
        groups = found.setdefault(tuple(row[name] for name in DEFINITION), {})
        groups.setdefault((row["window"], row["start"]), []).append((row["repeat"], row["value"]))
    paired = plan.window.pairing == "adjacent"
    for values, groups in found.items():
        definition = dict(zip(DEFINITION, values, strict=True))
        in_order = [[value for _, value in sorted(group)] for group in groups.values()]
        try:
            yield fit_prior(in_order, paired=paired, definition=definition).to_dict()
        except Refused as refusal:
            yield {"definition": definition, "reason": one_line(str(refusal))}


def _seal(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(dump_json(content).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class FrozenPrior:
    """What `prior.json` gives at the end of a window.

    `fault` says why the file is not used at all, `reason` why it holds no prior. `priors` maps
    `<cell>/<metric>` to its entries, `caps` each start to the clock cap (MHz) it ran at.
    """

    fault: str | None = None
    reason: str | None = None
    priors: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)
    caps: Mapping[str, int] = dataclasses.field(default_factory=dict)


def read_prior(folder: Path, plan: Plan) -> FrozenPrior | None:
    """Read the frozen prior of a window's folder; None when the window registered none.

    A file that is missing, or is not the one whose sha256 stands in the journal, is a `fault`.
    """
    if not plan.window.advice.moderated:
        return None
    try:
        content = json.loads(read_regular(folder / FILE_NAME, _MAX_FILE))
        written = content.pop("sha256")
        seal = _seal(content)
        lines = read_json_lines(folder / "journal.jsonl")
    except FileNotFoundError:
        return FrozenPrior(fault=f"{FILE_NAME} is missing")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return FrozenPrior(fault=f"{FILE_NAME} is damaged: it is not used")
    frozen = next((line["prior_sha256"] for line in lines if "prior_sha256" in line), None)
    if not seal == written == frozen:
        told = f"the journal has {one_line(str(frozen), 12)}" if frozen else "the journal has none"
        return FrozenPrior(
            fault=f"{FILE_NAME} was changed since the window was opened: its sha256 is "
            f"{seal[:12]}, {told}; it is not used"
        )
    return FrozenPrior(
        reason=content["reason"],
        priors=content["priors"],
        caps={
            str(line["step"]).partition(":")[2]: line["clock_cap_mhz"]
            for line in lines
            if line.get("event") == "end" and "clock_cap_mhz" in line
        },
    )


# -- given ----------------------------------------------------------------------------------------


def moderated(plan: Plan, cell: str, result: SeriesResult, frozen: FrozenPrior) -> Advice:
    """What win3-moderated says of one judged series of a decision cell, or why it says nothing."""
    from ..decision_v2 import Advice, Prior, Refused, moderated_advice

    control = {start.name for start in plan.starts if start.arm == plan.window.control.name}
    caps = {mhz for start, mhz in frozen.caps.items() if start in control}
    prompts = set(result.control_prompts or ())
    entries = [
        entry
        for entry in frozen.priors.get(f"{cell}/{result.metric}", ())
        if {entry["definition"]["clock_cap_mhz"]} == caps
        and {entry["definition"]["prompt_sha256"]} == prompts
    ]
    reason = frozen.reason or "the archive had no rows of this definition before the window"
    if len(caps) > 1:
        reason = f"the control starts ran at {len(caps)} clock caps"
    if entries:
        try:
            if "reason" in entries[0]:
                raise Refused(entries[0]["reason"])
            return _of(result, moderated_advice(result, Prior.from_dict(entries[0])))
        except Refused as refusal:
            reason = one_line(str(refusal))
    line = f"With the archive's spread: no advice ({reason})."
    return _of(result, Advice(MODERATED, line, {"call": None}))


def widened(result: CellResult) -> Advice:
    """What win2-paired-v1 says of a seeded cell when its A/A check knows the start spread."""
    from ..decision_v2 import widened_aa_advice

    return _of(result.series[0], widened_aa_advice(result))


def _of(result: SeriesResult, advice: Advice) -> Advice:
    return dataclasses.replace(advice, facts={"metric": result.metric, **advice.facts})


def _within(sentence: str) -> str:
    """A sentence as it goes on behind other words."""
    return sentence[:1].lower() + sentence[1:]


def advice_text(cell: str, advice: Advice, *, before: Iterable[str] = ()) -> str:
    """One line of advice for a person: what it is about, then what it says."""
    from ..decision_v2 import metric_label

    about = f"{cell} {metric_label(str(advice.facts['metric']))}"
    return ", ".join([*before, f"{about}: {_within(advice.line)}"])
