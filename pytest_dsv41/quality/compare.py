"""Two probes beside each other, position by position. What differs but the answers refuses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.kl import PositionKL, top20_kl
from pytest_dsv41.quality.probe import Probe

__all__ = ["Comparison", "compare_probes", "refuse_other_positions"]


@dataclass(frozen=True)
class Comparison:
    """KL(control || candidate) at every position, in nats, with the prompt it belongs to."""

    control: str
    candidate: str
    """The probes' seals."""
    prompts: tuple[str, ...]
    positions: tuple[PositionKL, ...]

    @cached_property
    def mean_kl(self) -> float:
        """The mean over all positions."""
        return sum(position.kl for position in self.positions) / len(self.positions)

    @cached_property
    def disagreements(self) -> int:
        """Positions at which the two have different likeliest tokens."""
        return sum(not position.top1_same for position in self.positions)

    @cached_property
    def untrusted(self) -> int:
        """Positions with a common mass below 0.99."""
        return sum(not position.trusted for position in self.positions)

    def by_prompt(self) -> dict[str, float]:
        """Return each prompt's mean KL, in the probe's order."""
        grouped: dict[str, list[float]] = {}
        for prompt, position in zip(self.prompts, self.positions, strict=True):
            grouped.setdefault(prompt, []).append(position.kl)
        return {prompt: sum(values) / len(values) for prompt, values in grouped.items()}


def compare_probes(control: Probe, candidate: Probe) -> Comparison:
    """Compare two probes over the same positions.

    Raises:
        MeasurementRefused: kinds `same-probe` (one run against itself), `top-n`, `conditions`,
            `other-prompts`, and those of `top20_kl`.
    """
    if control.run == candidate.run:
        raise MeasurementRefused("same-probe", f"both are the run {control.run}")
    if control.top_n != candidate.top_n:
        raise MeasurementRefused(
            "top-n", f"one has {control.top_n} entries a position, the other {candidate.top_n}"
        )
    if control.conditions != candidate.conditions:
        raise MeasurementRefused(
            "conditions",
            f"one was probed {control.conditions}; the other {candidate.conditions}",
        )
    refuse_other_positions(control, candidate.prefixes, "the other probe")
    return Comparison(
        control.sha256,
        candidate.sha256,
        tuple(position.prompt for position in control.positions),
        tuple(
            top20_kl(mine.top, theirs.top, top_n=control.top_n)
            for mine, theirs in zip(control.positions, candidate.positions, strict=True)
        ),
    )


def refuse_other_positions(probe: Probe, prefixes: Sequence[str], whose: str) -> None:
    """Refuse where `probe` does not cover exactly the positions `prefixes`, in their order.

    Raises:
        MeasurementRefused: kind `other-prompts`, with the first prompt that differs.
    """
    own = probe.prefixes
    if own == tuple(prefixes):
        return
    for position, theirs in zip(probe.positions, prefixes, strict=False):
        if position.prefix_sha256 != theirs:
            detail = f"they differ at {position.prompt}, {position.prefix_tokens} tokens"
            break
    else:
        detail = f"{len(own)} positions against {len(prefixes)}"
    raise MeasurementRefused("other-prompts", f"{whose} covers other positions: {detail}")
