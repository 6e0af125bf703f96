"""The order of starts: tokens, start names, pairing, and which values belong together.

A schedule is a string of tokens, `K/I/K/I`: each token is one start of one arm. Pairs exist only
between values that lie next to each other in time (RULES section 1, "Pairing"):

- adjacent: a control start is followed at once by the candidate start it belongs to; control
  repeat r belongs to candidate repeat r;
- bracket: a candidate start lies between two control starts; candidate repeat r belongs to the
  mean of repeat r of both;
- none: every value of an arm is pooled.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from .plan import Plan

__all__ = [
    "MAX_STARTS",
    "Layout",
    "Pairing",
    "Start",
    "default_pairing",
    "layout",
    "name_starts",
    "pairing_fault",
    "split_schedule",
]

MAX_STARTS = 10_000

Pairing = Literal["adjacent", "bracket", "none"]


class Start(BaseModel):
    """One launch of an arm: its name in ids, the arm's name, and its position from 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arm: str
    index: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which items make up the values of one cell for one candidate arm: item ids, start by start.

    `control[i]` holds the ids whose mean is one control value: one id, or two for a bracket. When
    `paired`, `control[i]` belongs to `candidate[i]` and both have the same length.
    """

    paired: bool
    control: tuple[tuple[str, ...], ...]
    candidate: tuple[str, ...]


def split_schedule(schedule: str) -> list[str]:
    """Return the tokens of a schedule.

    Raises:
        ValueError: a token is empty, or there are more than 10,000.
    """
    tokens = [token.strip() for token in schedule.split("/")]
    if not all(tokens):
        raise ValueError("an empty token; write it like K/I/K/I")
    if len(tokens) > MAX_STARTS:
        raise ValueError(f"{len(tokens)} starts; at most {MAX_STARTS}")
    return tokens


def name_starts(tokens: Sequence[str], arms: Mapping[str, str]) -> tuple[Start, ...]:
    """Name each start by its token, numbered from 1 when the token occurs more than once.

    `arms` maps a token to the name of its arm.

    Raises:
        ValueError: two starts would get the same name.
    """
    total = Counter(tokens)
    seen: Counter[str] = Counter()
    starts: dict[str, Start] = {}
    for index, token in enumerate(tokens):
        seen[token] += 1
        name = f"{token}{seen[token]}" if total[token] > 1 else token
        if name in starts:
            raise ValueError(f"two starts would be called '{name}'; choose other symbols")
        starts[name] = Start(name=name, arm=arms[token], index=index)
    return tuple(starts.values())


def default_pairing(starts: Sequence[Start], control: str, *, interleave: bool) -> Pairing:
    """Return "adjacent" for K/I/K/I (control and one candidate in turn), else "none".

    A single K/I alternates only when the starts are interleaved request by request.
    """
    arms = [start.arm for start in starts]
    candidates = set(arms) - {control}
    turns = len(candidates) == 1 and arms == [control, *candidates] * (len(arms) // 2)
    return "adjacent" if turns and (len(arms) >= 4 or interleave) else "none"


def pairing_fault(
    starts: Sequence[Start], control: str, repeats: Mapping[str, int], pairing: Pairing
) -> str | None:
    """Return why these starts cannot be paired so, or None.

    `repeats` maps a start's name to its repeats. Every start must belong to a pair: a start that
    no pair uses would be measured and dropped.
    """
    if pairing == "none":
        return None
    if all(start.arm == control for start in starts):
        return f"pairing '{pairing}' needs a candidate in the schedule"
    used: set[str] = set()
    for position, start in enumerate(starts):
        if start.arm == control:
            continue
        partners = _partners(starts, position, control, pairing)
        if partners is None:
            needed = (
                "a control start right before it"
                if pairing == "adjacent"
                else "a control start right before and right after it"
            )
            return f"pairing '{pairing}' is impossible: start {start.name} needs {needed}"
        for partner in partners:
            if repeats[partner.name] != repeats[start.name]:
                return (
                    f"pairing '{pairing}' needs equal repeats: {partner.name} has "
                    f"{repeats[partner.name]}, {start.name} has {repeats[start.name]}"
                )
            used.add(partner.name)
    for start in starts:
        if start.arm == control and start.name not in used:
            return f"pairing '{pairing}' is impossible: no pair uses control start {start.name}"
    return None


def _partners(
    starts: Sequence[Start], position: int, control: str, pairing: Pairing
) -> list[Start] | None:
    """The control starts that the candidate start at `position` is compared with."""
    offsets = (-1,) if pairing == "adjacent" else (-1, 1)
    partners = [
        starts[position + offset] for offset in offsets if 0 <= position + offset < len(starts)
    ]
    if len(partners) < len(offsets) or any(partner.arm != control for partner in partners):
        return None
    return partners


def layout(plan: Plan, cell: str, candidate_arm: str) -> Layout:
    """Return which items of `cell` are compared to judge `candidate_arm`.

    Raises:
        KeyError: the plan has no such cell or no such candidate arm.
    """
    window = plan.window
    if cell not in plan.cells:
        raise KeyError(f"no cell '{cell}' in the plan; valid: {', '.join(plan.cells)}")
    if candidate_arm not in {arm.name for arm in window.candidates}:
        names = ", ".join(arm.name for arm in window.candidates)
        raise KeyError(f"no candidate arm '{candidate_arm}' in the plan; valid: {names}")
    ids = {(item.start, item.repeat): item.id for item in plan.items if item.cell == cell}
    control = window.control.name

    def repeats_of(start: Start) -> list[str]:
        return [ids[start.name, repeat] for repeat in range(window.repeats_of(start.name))]

    candidates = [start for start in plan.starts if start.arm == candidate_arm]
    candidate = tuple(item for start in candidates for item in repeats_of(start))
    if window.pairing == "none":
        pooled = (start for start in plan.starts if start.arm == control)
        singles = tuple((item,) for start in pooled for item in repeats_of(start))
        return Layout(paired=False, control=singles, candidate=candidate)
    groups: list[tuple[str, ...]] = []
    for start in candidates:
        partners = _partners(plan.starts, start.index, control, window.pairing) or []
        groups.extend(zip(*(repeats_of(partner) for partner in partners), strict=True))
    return Layout(paired=True, control=tuple(groups), candidate=candidate)
