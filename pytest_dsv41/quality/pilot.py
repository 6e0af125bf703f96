"""One start of the A/A pilot: seeded cells, the distributional probe, and in start A the bridge.

It only reads: it sends requests to a server that runs and returns one record, without any text.
Start A is the window's last control start, start B restored production under the HOLD (WIN2
"Seeded A/A pilot recipe"); `aa_compare` sets the two beside each other.
"""

from __future__ import annotations

import datetime
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..engines import get_engine
from ..errors import MeasurementFailed, MeasurementRefused, UsageError
from ..identity import prompt_identity
from ..measure.cell import Sampling
from ..measure.corpus import text_sha256
from ..measure.group import Endpoint, Progress, Reader
from ..measure.seeded import SEEDED_CELLS, SeededCell, SeededResult, check_seeds, run_seeded_cell
from ..text import one_line
from .aa_compare import START_SCHEMA
from .bridge import BRIDGE_CELLS, pin_fault
from .probe import Probe, ProbeProgress, run_probe
from .prompts import ProbePrompt, parse_subset, probe_prompts

__all__ = [
    "PILOT_SUBSET",
    "PilotPlan",
    "cell_definition",
    "cell_record",
    "plan_pilot",
    "probe_estimate_s",
    "probe_path",
    "refused_parts",
    "run_start",
]

STARTS: Final = ("A", "B")
PILOT_SUBSET: Final = "short,32k"
"""The probe's prompts that WIN2's pilot registers."""

_PROBE_S: Final = {"short": 3.75, "32k": 11.25, "150k": 67.5}
"""Estimated seconds of one prompt by subset: WIN2's 2, 6.5 and 15.5 minutes for the first one,
two and three subsets."""


@dataclass(frozen=True)
class PilotPlan:
    """What both starts of a pilot run, and what start A runs beside it."""

    cells: tuple[SeededCell, ...]
    prompts: tuple[ProbePrompt, ...] = ()
    bridge: tuple[SeededCell, ...] = ()

    def estimate_s(self, start: str) -> float:
        """Expected seconds of one start, by the cells' own estimates and WIN2's of the probe."""
        cells = (*self.cells, *(self.bridge if start == "A" else ()))
        seeded = sum(cell.estimated_s * cell.pairs for cell in cells)
        return seeded + probe_estimate_s(self.prompts)


def probe_estimate_s(prompts: Sequence[ProbePrompt]) -> float:
    """Expected seconds of a probe over these prompts."""
    return sum(_PROBE_S[prompt.subset] for prompt in prompts)


def plan_pilot(
    names: tuple[str, ...] = tuple(SEEDED_CELLS),
    *,
    known: Mapping[str, SeededCell] = SEEDED_CELLS,
    subset: str | None = PILOT_SUBSET,
    each: int | None = None,
    bridge: bool = True,
    bridge_sampling: Sampling | None = None,
) -> PilotPlan:
    """Return the plan of a pilot.

    Args:
        names: the seeded cells.
        known: every seeded cell by name.
        subset: the probe's prompts, as `short,32k`; None: no probe.
        each: of each subset only the first so many prompts.
        bridge: the whole bridge, or none of it.
        bridge_sampling: stands for BRIDGE_SAMPLING where production is asked with other settings.

    Raises:
        UsageError: a cell or subset is unknown, a cell is given twice, none has one request at a
            time, seeds overlap, or no corpus has a prompt of the probe.
        MeasurementRefused: a prompt of the probe is not the pinned one.
    """
    for name in names:
        if name not in known:
            shown = one_line(name, 60)
            raise UsageError(f"seeded cell {shown} is not known; valid: {', '.join(known)}")
    if len(set(names)) < len(names):
        raise UsageError("a seeded cell is named twice")
    cells = tuple(known[name] for name in names)
    if not any(cell.batch == 1 for cell in cells):
        raise UsageError("the pilot needs a seeded cell with one request at a time")
    extra = tuple(BRIDGE_CELLS.values()) if bridge else ()
    if bridge_sampling is not None:
        extra = tuple(replace(cell, sampling=bridge_sampling) for cell in extra)
    check_seeds((*cells, *extra))
    prompts = () if subset is None else probe_prompts(parse_subset(subset), each=each)
    return PilotPlan(cells, prompts, extra)


def run_start(
    endpoint: Endpoint,
    plan: PilotPlan,
    *,
    start: str,
    deadline_s: float,
    salt: str | None = None,
    commit: str | None = None,
    clock_cap_mhz: int | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> tuple[dict[str, Any], Probe | None]:
    """Run one start; return its record and its probe. What is refused stands there refused.

    Args:
        endpoint: production's configuration, idle, and used by nobody else.
        plan: what is run; the bridge in start A only.
        start: "A" or "B".
        deadline_s: everything is over by then.
        salt: new for every start; None makes one.
        commit: the 40 hex digits of production, where they are known.
        clock_cap_mhz: the cap that the start's own log proves, where it is known.
        stop: ends the run once it is set.
        progress: gets a line to show, several times a second.

    Raises:
        UsageError: no corpus has a prompt of a seeded cell; nothing was sent.
        MeasurementRefused: a prompt is not the pinned one; nothing was sent.
        MeasurementFailed: stopped, or not finished at the deadline.
    """
    if start not in STARTS:
        raise UsageError(f"start {one_line(start, 20)!r}; valid: A, B")
    with Reader() as reader:
        return _run_start(
            endpoint, plan, reader, start, deadline_s, salt, commit, clock_cap_mhz, stop, progress
        )


def _run_start(
    endpoint: Endpoint,
    plan: PilotPlan,
    reader: Reader,
    start: str,
    deadline_s: float,
    salt: str | None,
    commit: str | None,
    clock_cap_mhz: int | None,
    stop: threading.Event | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, Any], Probe | None]:
    until = time.monotonic() + deadline_s
    salt = salt or f"aa-pilot-{secrets.token_hex(8)}"
    definitions = {cell.name: cell_definition(cell) for cell in plan.cells}
    engine = get_engine(endpoint.engine)
    model = endpoint.model or engine.models(endpoint.url)[0]
    version = engine.version(endpoint.url) or None
    began = _server_began(endpoint)

    def run(cell: SeededCell, number: int, count: int) -> dict[str, Any]:
        def told(pair: int, now: Progress) -> None:
            rate = f"{now.tokens} tokens, {now.tok_s:.1f} tokens/s" if now.tokens else "prefill"
            progress(
                f"start {start}, cell {number} of {count}: {cell.name}, pair {pair + 1} of "
                f"{cell.pairs}: {rate}"
            )

        progress(f"start {start}, cell {number} of {count}: {cell.name}: cold prefill")
        try:
            result = run_seeded_cell(
                endpoint,
                cell,
                salt=f"{salt}-{start}-{cell.name}",
                deadline_s=max(0.0, until - time.monotonic()),
                stop=stop,
                progress=told,
                reader=reader,
            )
        except (MeasurementRefused, MeasurementFailed) as error:
            if error.kind in ("stopped", "deadline"):
                raise
            return {"profile": cell.profile, "refused": f"{error.kind}: {one_line(str(error))}"}
        return cell_record(cell, result)

    bridge = plan.bridge if start == "A" else ()
    count = len(plan.cells) + len(bridge)
    probe: Probe | None = None
    probed: dict[str, Any] | None = None
    cells = {cell.name: run(cell, n, count) for n, cell in enumerate(plan.cells, start=1)}
    if plan.prompts:
        try:
            probe = run_probe(
                endpoint,
                plan.prompts,
                deadline_s=max(0.0, until - time.monotonic()),
                salt=f"{salt}-{start}-probe",
                progress=lambda now: progress(_probing(start, now)),
                stop=stop,
            )
            probed = {"sha256": probe.sha256, "subset": probe.subset}
        except (MeasurementRefused, MeasurementFailed) as error:
            if error.kind in ("stopped", "deadline"):
                raise
            probed = {"refused": f"{error.kind}: {one_line(str(error))}"}
    bridged: dict[str, Any] = {}
    for number, cell in enumerate(bridge, start=len(cells) + 1):
        try:
            fault = pin_fault(cell.name, cell_definition(cell)["prompt_sha256"])
        except (UsageError, MeasurementRefused) as error:
            # What to do about a missing prompt belongs to a prompt that is needed.
            fault = one_line(str(error).partition(" (")[0])
        if fault is not None:
            bridged[cell.name] = {"refused": f"not run: {fault}"}
            continue
        bridged[cell.name] = run(cell, number, count)
    record = {
        "schema": START_SCHEMA,
        "start": start,
        "utc": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "salt": salt,
        "server_began": began,
        "definition": {
            "engine": endpoint.engine,
            "version": version,
            "model": model,
            "commit": commit,
            "clock_cap_mhz": clock_cap_mhz,
            "cells": definitions,
        },
        "cells": cells,
        "probe": probed,
        "bridge": bridged or None,
    }
    return record, probe


def _server_began(endpoint: Endpoint) -> float | None:
    """When the server's counters began, seconds since 1970; None where it does not tell."""
    try:
        created = get_engine(endpoint.engine).scrape(endpoint.url).created
    except MeasurementRefused:
        return None
    return min(created.values(), default=None)


def refused_parts(record: Mapping[str, Any]) -> list[str]:
    """What of a start was refused among the parts that are compared, one line each."""
    parts = {**record["cells"], **({"probe": record["probe"]} if record["probe"] else {})}
    return [f"{name}: {part['refused']}" for name, part in parts.items() if "refused" in part]


def probe_path(record: Path) -> Path:
    """Return where the probe of a start's record lies: beside it."""
    return record.with_name(f"{record.stem}.probe.json")


def _probing(start: str, now: ProbeProgress) -> str:
    done, total = now.done, now.total
    return f"start {start}, probe: position {done} of {total}, {now.prompt}"


def cell_record(cell: SeededCell, result: SeededResult) -> dict[str, Any]:
    """What one start measured of a seeded cell: values, rounds and hashes by pair, no text."""
    seeds = [
        [cell.seed_base + 10 * pair + member for member in range(cell.batch)]
        for pair in range(cell.pairs)
    ]
    return {
        "profile": cell.profile,
        "prompt_sha256": result.prompt_sha256,
        "prompt_members": list(result.prompt_members),
        "speculates": any(pair.server.speculates for pair in result.pairs),
        "pairs": [
            {
                "seeds": seeds[index],
                "prompt_sha256": pair.prompt_sha256,
                "outputs": result.outputs[index],
                "rounds": pair.server.rounds,
                "accepted": pair.server.accepted,
                "tokens": pair.server.tokens,
                "values": {
                    name: {
                        "value": value.value,
                        "unit": value.unit,
                        "lower_is_better": value.lower_is_better,
                    }
                    for name, value in pair.values.items()
                },
                "missing": dict(pair.missing),
                "notes": list(pair.notes),
            }
            for index, pair in enumerate(result.pairs)
        ],
    }


def cell_definition(cell: SeededCell) -> dict[str, Any]:
    """What a cell is, down to the texts it will send."""
    members = [text_sha256(cell.text(prompt)) for prompt in cell.prompts]
    return {
        "cell": cell.definition(),
        "pairs": cell.pairs,
        "prompt_sha256": prompt_identity(members),
    }
