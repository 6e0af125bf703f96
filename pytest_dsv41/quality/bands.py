"""The band: how far production is from itself, registered before any candidate is looked at.

A band is made of comparisons of production with production, each of two runs that no other
comparison uses, under the conditions of its later use. Registering seals it; its seal is its name.
A candidate's probe names the seal of the band that will judge it, and so cannot have come first:
a band registered after a candidate was seen is named by no probe of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np

from pytest_dsv41.decision_v2 import mean_ceiling
from pytest_dsv41.decision_v2.kernel import Floats
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.compare import compare_probes, refuse_other_positions
from pytest_dsv41.quality.kl import COMMON_MASS
from pytest_dsv41.quality.probe import Conditions, Probe, ProbedPrompt
from pytest_dsv41.quality.sealed import read_sealed, write_sealed

__all__ = [
    "EXACT_CEILING",
    "SCHEMA",
    "SEED",
    "AAComparison",
    "Band",
    "load_band",
    "production_of",
    "refuse_unfit",
    "register_band",
    "save_band",
]

SCHEMA: Final = "dsv41-band-1"
SEED: Final = 41
"""Seed of the bootstrap behind the ceiling; written into the band."""
EXACT_CEILING: Final = 1e-6
"""The ceiling, in nats, where every KL of the A/A is 0: it lets rounding pass."""
CV_MOST: Final = 3.0
"""The mean-KL test keeps its rate of false losses while the A/A's KL has a cv up to here."""
_STRICT: Final = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class AAComparison:
    """Production against itself: two runs, and what lies between them at each position."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    a: str
    b: str
    """Seals of the two probes."""
    a_run: str
    b_run: str
    kl: tuple[float, ...]
    common_mass: tuple[float, ...]
    top1_same: tuple[bool, ...]

    @property
    def disagreements(self) -> int:
        """Positions with different likeliest tokens."""
        return self.top1_same.count(False)

    @property
    def untrusted(self) -> int:
        """Positions with a common mass below 0.99."""
        return sum(mass < COMMON_MASS for mass in self.common_mass)


@dataclass(frozen=True)
class Band:
    """Registered comparisons of production with itself, and the ceiling that follows from them."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    schema: Literal["dsv41-band-1"]
    registered_utc: str
    engine: str
    version: str
    model: str
    top_n: int
    conditions: Conditions
    prompts: tuple[ProbedPrompt, ...]
    prompt_of: tuple[str, ...]
    """The prompt's name, by position."""
    prefixes: tuple[str, ...]
    """The hash of the prefix's token ids, by position."""
    comparisons: tuple[AAComparison, ...]
    seed: int
    kl_ceiling: float
    """Nats: a candidate's mean KL above it is a LOSS."""
    prompt_ceiling: float
    """The same, with prompts resampled in place of positions; reported, never deciding."""

    @property
    def k(self) -> int:
        """How many comparisons there are."""
        return len(self.comparisons)

    @property
    def subset(self) -> str:
        """The subsets it covers, as `short,32k`."""
        return ",".join(dict.fromkeys(prompt.subset for prompt in self.prompts))

    @property
    def kls(self) -> Floats:
        """All k·n positions' KL, in nats."""
        return np.asarray([kl for one in self.comparisons for kl in one.kl], dtype=np.float64)

    @property
    def exact(self) -> bool:
        """Whether production never differed from itself."""
        return not self.kls.any() and not any(one.disagreements for one in self.comparisons)

    @property
    def cv(self) -> float | None:
        """The coefficient of variation of the positions' KL; None where there is none."""
        kls = self.kls
        if kls.size < 2 or not kls.any():
            return None
        return float(kls.std(ddof=1) / kls.mean())

    @property
    def trusted_share(self) -> float:
        """The share of positions with a common mass of at least 0.99, 0 to 1."""
        total = self.k * len(self.prefixes)
        return 1.0 - sum(one.untrusted for one in self.comparisons) / total

    @property
    def saturated(self) -> bool:
        """Whether production itself mostly lacks common mass, so that counting it tells nothing."""
        return self.trusted_share < 0.5

    def remarks(self) -> tuple[str, ...]:
        """What a reader must know before relying on this band."""
        said = []
        if self.exact:
            said.append(
                "the A/A is exact: production never differed from itself; "
                f"the ceiling is {EXACT_CEILING:g}"
            )
        if self.k == 1:
            said.append(
                "one A/A run is nearly blind to a change of 4 times the flip rate (found 4.3 % of "
                "the time at 1 expected flip, 20.5 % with three runs): register more"
            )
        cv = self.cv
        if cv is not None and cv > CV_MOST:
            said.append(
                f"the A/A's KL has a cv of {cv:.1f} over its positions, more than {CV_MOST:g}: "
                "the ceiling's false losses may exceed 0.2 % (2.1 % where it was 7)"
            )
        if self.saturated:
            said.append(
                f"only {100 * self.trusted_share:.0f} % of the A/A's positions have a common mass "
                f"of {COMMON_MASS}: the mass test is saturated and does not decide"
            )
        return tuple(said)


def register_band(pairs: Sequence[tuple[Probe, Probe]], *, seed: int = SEED) -> Band:
    """Make a band of pairs of production's probes.

    Raises:
        UsageError: no pair.
        MeasurementRefused: kinds `band-candidate` (a candidate's probe), `band-overlap` (one run
            in two places), `band-production` (probes of different servers or versions), and
            those of `compare_probes`.
    """
    if not pairs:
        raise UsageError("a band needs at least one pair of production's probes")
    probes = [probe for pair in pairs for probe in pair]
    first = probes[0]
    seen: set[str] = set()
    for probe in probes:
        if probe.role != "control":
            raise MeasurementRefused(
                "band-candidate", f"run {probe.run} is a candidate's: a band is production alone"
            )
        if probe.run in seen:
            raise MeasurementRefused(
                "band-overlap", f"run {probe.run} stands in two places: pairs must be disjoint"
            )
        seen.add(probe.run)
        if production_of(probe) != production_of(first):
            raise MeasurementRefused(
                "band-production",
                f"run {probe.run} is of {production_of(probe)}, run {first.run} of "
                f"{production_of(first)}: another production",
            )
    found = []
    for control, other in pairs:
        # Pairs must agree with each other too, not only within.
        if control is not first:
            compare_probes(first, control)
        compared = compare_probes(control, other)
        found.append(
            AAComparison(
                compared.control,
                compared.candidate,
                control.run,
                other.run,
                tuple(position.kl for position in compared.positions),
                tuple(position.common_mass for position in compared.positions),
                tuple(position.top1_same for position in compared.positions),
            )
        )
    prompt_of = tuple(position.prompt for position in first.positions)
    kls = np.asarray([one.kl for one in found])
    names = np.asarray(prompt_of)
    by_prompt = np.concatenate(
        [kls[:, names == prompt.name].mean(axis=1) for prompt in first.prompts]
    )
    return Band(
        schema="dsv41-band-1",
        registered_utc=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        engine=first.engine,
        version=first.version,
        model=first.model,
        top_n=first.top_n,
        conditions=first.conditions,
        prompts=first.prompts,
        prompt_of=prompt_of,
        prefixes=first.prefixes,
        comparisons=tuple(found),
        seed=seed,
        kl_ceiling=_ceiling(kls.ravel(), seed),
        prompt_ceiling=_ceiling(by_prompt, seed),
    )


def _ceiling(kls: Floats, seed: int) -> float:
    return mean_ceiling(kls, seed=seed) if kls.any() else EXACT_CEILING


def save_band(path: Path, band: Band) -> str:
    """Register `band`: write it to a new file and return its seal.

    Raises:
        UsageError: the file exists.
    """
    return write_sealed(path, asdict(band))


def load_band(path: Path) -> tuple[Band, str]:
    """Read a registered band and its seal.

    Raises:
        UsageError: it is none.
        MeasurementRefused: kind `band-edited`; `band-overlap` where one run stands in two places.
    """
    band, seal = read_sealed(path, "band", SCHEMA, Band)
    positions = len(band.prefixes)
    lengths = {len(band.prompt_of), positions}
    for one in band.comparisons:
        lengths |= {len(one.kl), len(one.common_mass), len(one.top1_same)}
    if not band.comparisons or not positions or len(lengths) != 1:
        raise UsageError(f"{path}: no band: its lists do not have one entry a position")
    wrong = _contradiction(band)
    if wrong is not None:
        raise UsageError(f"{path}: no band: {wrong}")
    runs = [run for one in band.comparisons for run in (one.a_run, one.b_run)]
    if len(set(runs)) != len(runs):
        raise MeasurementRefused(
            "band-overlap", f"{path}: one run stands in two places: pairs must be disjoint"
        )
    return band, seal


def _contradiction(band: Band) -> str | None:
    """What of a band cannot be, whoever wrote it: a band that judges wrongly is worse than none."""
    known = [prompt.name for prompt in band.prompts]
    if len(set(known)) != len(known) or set(known) != set(band.prompt_of):
        return "its positions are not those of its prompts"
    if len({band.prompt_of.count(name) for name in known}) > 1:
        return "its prompts have not as many positions each"
    if len(set(band.prefixes)) != len(band.prefixes):
        return "one position stands there twice"
    if band.top_n < 1:
        return f"top_n: {band.top_n}; at least 1 is needed"
    if min(band.kl_ceiling, band.prompt_ceiling) <= 0:
        return "a ceiling is not above 0"
    if min(kl for one in band.comparisons for kl in one.kl) < 0:
        return "a KL is below 0"
    if any(not 0 <= mass <= 1 for one in band.comparisons for mass in one.common_mass):
        return "a common mass is not between 0 and 1"
    return None


def refuse_unfit(band: Band, probe: Probe) -> None:
    """Refuse to hold `probe` against a band gathered under other conditions or over other prompts.

    Raises:
        MeasurementRefused: kinds `top-n`, `conditions`, `other-prompts`, `band-overlap` (the
            probe is part of the band).
    """
    if probe.top_n != band.top_n:
        raise MeasurementRefused(
            "top-n", f"the band has {band.top_n} entries a position, the probe {probe.top_n}"
        )
    if probe.conditions != band.conditions:
        raise MeasurementRefused(
            "conditions",
            f"the band was gathered {band.conditions}; the probe {probe.conditions}",
        )
    refuse_other_positions(probe, band.prefixes, "the band")
    if probe.run in {run for one in band.comparisons for run in (one.a_run, one.b_run)}:
        raise MeasurementRefused(
            "band-overlap", f"run {probe.run} is part of the band: probe production again"
        )


def production_of(source: Probe | Band) -> str:
    """Return which server a probe or a band is of: engine, version, model."""
    return f"{source.engine} {source.version or '(no version)'} {source.model}"
