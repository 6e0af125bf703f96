"""The distributional gate: is the candidate further from production than production is from itself?

Three tests over the same positions (RULES section 4): mean KL against the band's ceiling, the count
of different likeliest tokens and the count of positions with little common mass, each count
against the A/A's by an exact conditional binomial test at one-sided p < 0.01.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from pytest_dsv41.decision_v2 import excess_p, least_losing_count
from pytest_dsv41.decision_v2.excess import EXCESS_LEVEL
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.bands import Band, production_of, refuse_unfit
from pytest_dsv41.quality.compare import compare_probes
from pytest_dsv41.quality.kl import COMMON_MASS, PositionKL
from pytest_dsv41.quality.probe import Probe
from pytest_dsv41.quality.prompts import DIST_PROMPTS

__all__ = ["DIST_PROMPTS", "CountTest", "GateResult", "SubsetKL", "count_test", "judge"]

CACHED_APART: Final = 0.1
"""Shares of cached prompt tokens that differ by more than this are remarked on."""
FMETHOD_MARGIN: Final = 2
"""The literal rule loses from so many positions above the A/A's most on."""


@dataclass(frozen=True)
class CountTest:
    """A count of the candidate's against the sum of the k A/A counts.

    `p` is P(X >= candidate), X ~ Bin(aa + candidate, 1/(k+1)); `least_losing` the smallest count
    that would lose. A test that does not decide is reported only.
    """

    candidate: int
    aa: tuple[int, ...]
    p: float
    least_losing: int
    decides: bool
    loss: bool


@dataclass(frozen=True)
class SubsetKL:
    """One subset of prompts: its positions, mean KL in nats, and different likeliest tokens."""

    positions: int
    mean_kl: float
    aa_mean_kl: float
    disagreements: int


@dataclass(frozen=True)
class GateResult:
    """The gate's answer with everything it rests on. KL in nats, shares 0 to 1."""

    verdict: Literal["PASS", "LOSS"]
    reasons: tuple[str, ...]
    """Why it is a LOSS, one line a test; empty for PASS."""
    positions: int
    k: int
    band: str
    control: str
    candidate: str
    """The seals of the three files."""
    mean_kl: float
    kl_ceiling: float
    kl_loss: bool
    aa_mean_kl: float
    prompt_ceiling: float
    top1: CountTest
    mass: CountTest
    fmethod_top1_rule: dict[str, Any]
    """F-METHOD's literal rule: `limit`, `candidate`, `loss`; reported, never deciding."""
    trusted_share: float
    aa_trusted_share: float
    by_subset: dict[str, SubsetKL]
    worst_prompt: str
    worst_prompt_kl: float
    remarks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)


def judge(band: Band, seal: str, control: Probe, candidate: Probe) -> GateResult:
    """Judge `candidate` against `control` (production, probed beside it) by the band `seal`.

    Raises:
        MeasurementRefused: kinds `band-late` (the candidate's probe does not name this band: it
            was probed before the band was registered), `role`, `band-production` (the control is
            not the band's production), and those of `refuse_unfit` and `compare_probes`.
    """
    for probe, role in ((control, "control"), (candidate, "candidate")):
        if probe.role != role:
            raise MeasurementRefused("role", f"run {probe.run} was probed as the {probe.role}")
    if candidate.band != seal:
        named = "no band" if candidate.band is None else f"the band {candidate.band[:12]}…"
        raise MeasurementRefused(
            "band-late",
            f"the candidate's probe names {named}, not {seal[:12]}…: a band judges only what was "
            "probed after its registration",
        )
    refuse_unfit(band, control)
    refuse_unfit(band, candidate)
    if production_of(control) != production_of(band):
        raise MeasurementRefused(
            "band-production",
            f"the control is {production_of(control)}, the band was gathered on "
            f"{production_of(band)}",
        )
    compared = compare_probes(control, candidate)
    k, n = band.k, len(compared.positions)
    top1 = count_test(
        compared.disagreements, tuple(one.disagreements for one in band.comparisons), decides=True
    )
    mass = count_test(
        compared.untrusted,
        tuple(one.untrusted for one in band.comparisons),
        decides=not band.saturated,
    )
    kl_loss = compared.mean_kl > band.kl_ceiling
    reasons = []
    if kl_loss:
        reasons.append(f"mean KL {compared.mean_kl:.3g} is above the ceiling {band.kl_ceiling:.3g}")
    if top1.loss:
        reasons.append(
            f"{top1.candidate} of {n} likeliest tokens differ, A/A {_listed(top1.aa)}: "
            f"p = {top1.p:.2g}"
        )
    if mass.loss:
        reasons.append(
            f"{mass.candidate} of {n} positions have a common mass below {COMMON_MASS}, "
            f"A/A {_listed(mass.aa)}: p = {mass.p:.2g}"
        )
    limit = max(top1.aa) + FMETHOD_MARGIN
    by_prompt = compared.by_prompt()
    worst = max(by_prompt, key=lambda name: by_prompt[name])
    remarks = list(band.remarks())
    if (compared.mean_kl > band.prompt_ceiling) != kl_loss:
        word = "above" if not kl_loss else "below"
        remarks.append(
            f"with prompts resampled in place of positions the ceiling is "
            f"{band.prompt_ceiling:.3g}: the mean KL is {word} it"
        )
    shares = (control.cached_share, candidate.cached_share)
    if None not in shares and abs((shares[0] or 0) - (shares[1] or 0)) > CACHED_APART:
        remarks.append(
            f"the control took {100 * (shares[0] or 0):.0f} % of its prompt tokens from a cache, "
            f"the candidate {100 * (shares[1] or 0):.0f} %: part of the KL may be that"
        )
    remarks += [
        f"the {probe.role}: {note}" for probe in (control, candidate) for note in probe.notes
    ]
    return GateResult(
        verdict="LOSS" if reasons else "PASS",
        reasons=tuple(reasons),
        positions=n,
        k=k,
        band=seal,
        control=compared.control,
        candidate=compared.candidate,
        mean_kl=compared.mean_kl,
        kl_ceiling=band.kl_ceiling,
        kl_loss=kl_loss,
        aa_mean_kl=float(band.kls.mean()),
        prompt_ceiling=band.prompt_ceiling,
        top1=top1,
        mass=mass,
        fmethod_top1_rule={
            "limit": limit,
            "candidate": top1.candidate,
            "loss": top1.candidate >= limit,
        },
        trusted_share=1.0 - compared.untrusted / n,
        aa_trusted_share=band.trusted_share,
        by_subset=_by_subset(band, control, compared.positions),
        worst_prompt=worst,
        worst_prompt_kl=by_prompt[worst],
        remarks=tuple(remarks),
    )


def count_test(candidate: int, aa: tuple[int, ...], *, decides: bool = True) -> CountTest:
    """Hold a candidate's count against the counts of k A/A comparisons (RULES section 4)."""
    total, k = sum(aa), len(aa)
    p = excess_p(candidate, total, k)
    return CountTest(
        candidate, aa, p, least_losing_count(total, k), decides, decides and p < EXCESS_LEVEL
    )


def _by_subset(band: Band, control: Probe, positions: Sequence[PositionKL]) -> dict[str, SubsetKL]:
    subset_of = {prompt.name: prompt.subset for prompt in control.prompts}
    subsets = np.asarray([subset_of[position.prompt] for position in control.positions])
    kls = np.asarray([position.kl for position in positions])
    differ = np.asarray([not position.top1_same for position in positions])
    aa = band.kls.reshape(band.k, -1)
    return {
        name: SubsetKL(
            int(mask.sum()),
            float(kls[mask].mean()),
            float(aa[:, mask].mean()),
            int(differ[mask].sum()),
        )
        for name in dict.fromkeys(subset_of.values())
        for mask in (subsets == name,)
    }


def _listed(counts: tuple[int, ...]) -> str:
    return " ".join(map(str, counts))
