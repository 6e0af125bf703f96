"""The A/A pilot of a window: where its starts are kept, start B in the seam, and its comparison.

Everything lies in the window's folder under `pilot/`: A.json and B.json, their probes beside them,
and pilot.json, which sets the two beside each other and can be made again from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..errors import Dsv41Error
from ..measure import Endpoint
from ..quality.aa_compare import PILOT_SCHEMA, START_SCHEMA, compare_starts
from ..quality.pilot import PilotPlan, probe_path, run_start
from ..quality.probe import Probe, load_probe, save_probe
from ..quality.sealed import read_sealed, write_sealed
from ..text import one_line
from .seam import Seam

__all__ = ["conclude_pilot", "keep_start", "pilot_seam"]

FOLDER: Final = "pilot"
RECORD: Final = f"{FOLDER}/pilot.json"


def keep_start(folder: Path, record: dict[str, Any], probe: Probe | None) -> tuple[Path, str]:
    """Write a start's record and its probe into the window's folder; return path and seal.

    Raises:
        UsageError: they are there already, or the folder lies in a git work tree.
    """
    path = folder / FOLDER / f"{record['start']}.json"
    path.parent.mkdir(exist_ok=True)
    if probe is not None:
        save_probe(probe_path(path), probe)
    return path, write_sealed(path, record)


def pilot_seam(
    folder: Path,
    plan: PilotPlan,
    *,
    production: Callable[[], Endpoint],
    salt: str,
    commit: str,
    deadline_s: float,
) -> Seam:
    """Return start B as work for the restore's seam; `production` says where production answers."""
    told = ["A/A pilot, start B"]

    def work(stop: threading.Event) -> tuple[dict[str, Any], Probe | None]:
        return run_start(
            production(),
            plan,
            start="B",
            deadline_s=deadline_s,
            salt=salt,
            commit=commit,
            stop=stop,
            progress=lambda line: told.__setitem__(0, line),
        )

    return Seam(
        "aa-pilot B",
        work,
        lambda found: _kept(folder, *found),
        deadline_s,
        doing=lambda: told[0],
    )


def _kept(folder: Path, record: dict[str, Any], probe: Probe | None) -> None:
    keep_start(folder, record, probe)


def conclude_pilot(folder: Path) -> dict[str, Any]:
    """Compare the two starts that a window's folder holds and return what its summary says.

    Written once: a window that is finished again reads the record that is there. Never raises for
    what the files hold: a pilot decides nothing and costs no window its summary.
    """
    base = folder / FOLDER
    try:
        if (folder / RECORD).exists():
            return _said(read_sealed(folder / RECORD, "pilot", PILOT_SCHEMA, dict)[0])
        starts: list[dict[str, Any]] = []
        probes: list[Probe] = []
        for name in ("A", "B"):
            path = base / f"{name}.json"
            if not path.exists():
                return _incomplete(f"start {name} was not run to its end")
            starts.append(read_sealed(path, "start", START_SCHEMA, dict)[0])
            if probe_path(path).exists():
                probes.append(load_probe(probe_path(path)))
        pair = (probes[0], probes[1]) if len(probes) == 2 else None
        pilot = compare_starts(starts[0], starts[1], probes=pair)
        write_sealed(folder / RECORD, pilot)
        return _said(pilot)
    except (Dsv41Error, OSError, KeyError, TypeError, ValueError) as error:
        return _incomplete(one_line(str(error) or type(error).__name__))


def _said(pilot: dict[str, Any]) -> dict[str, Any]:
    bridge = pilot["bridge"]
    return {
        "status": "PASSED" if pilot["passed"] else "FAILED",
        "reasons": pilot["reasons"],
        "record": RECORD,
        "expect_identical": pilot["expect_identical"],
        "diff_cv": pilot["diff_cv"],
        "start_sd": pilot["start_sd"],
        "distribution": pilot["distribution"],
        "h4": bridge["h4"] if bridge else None,
    }


def _incomplete(why: str) -> dict[str, Any]:
    return {"status": "INCOMPLETE", "reasons": [why], "record": None, "expect_identical": False}
