"""A quality cell: one registered band, the probe that it asks for, and what it says of a candidate.

The band fixes everything about the probe: prompts, positions, entries a position, conditions.
A candidate's probe names the band's seal, so that the band is proved to have come first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..errors import MeasurementRefused
from ..measure.corpus import find_prompt
from ..measure.group import Endpoint
from .bands import Band, load_band
from .dist_gate import GateResult, judge
from .probe import Probe, ProbeProgress, run_probe
from .prompts import ProbePrompt

__all__ = ["QualityPlan", "judge_control", "plan_quality", "run_quality"]


@dataclass(frozen=True)
class QualityPlan:
    """A band's file, its content and seal, and the texts of its prompts."""

    path: Path
    band: Band
    seal: str
    prompts: tuple[ProbePrompt, ...]

    @property
    def positions(self) -> int:
        """Positions of one prompt."""
        return len(self.band.prefixes) // len(self.band.prompts)


def plan_quality(path: Path) -> QualityPlan:
    """Read a band's file and find its prompts.

    Raises:
        UsageError: the file is no band, or no corpus has a prompt.
        MeasurementRefused: kinds `band-edited`, `band-overlap`, and `prompt-pin` where a corpus
            has another text under a prompt's name.
    """
    band, seal = load_band(path)
    prompts = []
    for known in band.prompts:
        found = find_prompt(known.name)
        if found.sha256 != known.sha256:
            raise MeasurementRefused(
                "prompt-pin",
                f"prompt {known.name} hashes to {found.sha256[:12]}…; the band was gathered over "
                f"{known.sha256[:12]}…",
            )
        prompts.append(ProbePrompt(known.name, known.subset, found.text))
    return QualityPlan(path, band, seal, tuple(prompts))


def run_quality(
    endpoint: Endpoint,
    plan: QualityPlan,
    *,
    role: Literal["control", "candidate"],
    deadline_s: float,
    salt: str,
    stop: threading.Event | None = None,
    progress: Callable[[ProbeProgress], None] | None = None,
) -> Probe:
    """Probe a start as the band was probed.

    Raises:
        MeasurementFailed, MeasurementRefused: as `run_probe`.
    """
    return run_probe(
        endpoint,
        plan.prompts,
        role=role,
        band=plan.seal if role == "candidate" else None,
        prefixes=plan.band.prefixes,
        conditions=plan.band.conditions,
        top_n=plan.band.top_n,
        positions=plan.positions,
        deadline_s=deadline_s,
        salt=salt,
        stop=stop,
        progress=progress,
    )


def judge_control(band: Band, seal: str, first: Probe, last: Probe) -> GateResult:
    """Hold a window's last control start against its first, as if it were a candidate.

    Raises:
        MeasurementRefused: as `judge`.
    """
    return judge(band, seal, first, replace(last, role="candidate", band=seal))
