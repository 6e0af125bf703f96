"""The observer: one pure, total function from the durable facts to one answer (SAFETY's table)."""

from __future__ import annotations

import dataclasses
import enum

from ..hosts import Probe
from .hold import HoldState

__all__ = ["Answer", "Facts", "Observation", "Presence", "observe"]


class Presence(enum.Enum):
    """A file that is there, is not, or is there and cannot be read (which counts as there)."""

    NONE = "none"
    PRESENT = "present"
    UNREADABLE = "unreadable"


class Answer(enum.Enum):
    """What the observer says."""

    CLEAN = "CLEAN"
    IN_PROGRESS = "IN PROGRESS"
    RECOVERING = "RECOVERING"
    CHAIN_WAITING = "CHAIN WAITING"
    NOT_OURS = "NOT OURS"
    UNKNOWN = "UNKNOWN"
    RECOVER = "RECOVER"
    ALERT = "ALERT"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything the observer looks at; nothing else is read."""

    lease_held: bool = False
    lease_overdue: bool = False
    hold: HoldState = HoldState.NONE
    production: Probe = Probe.UP
    intent: Presence = Presence.NONE
    keeper_alive: bool = False
    keeper_overdue: bool = False
    marker: Presence = Presence.NONE
    """UNREADABLE also stands for a marker that names no owner."""
    marker_overdue: bool = False
    gate_refused: bool = False
    abort_record: bool = False
    served_by_default: bool = True
    leftovers: bool = False
    """A placeholder that could not be taken down, or the record of another chain's recovery."""
    machines_known: bool = True
    """Whether a window has run here; before the first one nobody knows what to look at."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """The answer, why, and the number of the table's row that gave it.

    `down` says that production is down or not known to be up, with nobody at work on it.
    """

    answer: Answer
    why: str
    row: int
    command: str = ""
    down: bool = False


def observe(facts: Facts) -> Observation:
    """Return SAFETY's answer for `facts`: the first row that matches, and one always does."""
    ours = facts.intent is not Presence.NONE or facts.marker is not Presence.NONE
    not_up = facts.production is not Probe.UP

    def alert(
        row: int, why: str, command: str = "dsv41 status", *, down: bool = not_up
    ) -> Observation:
        return Observation(Answer.ALERT, why, row, command, down)

    if facts.lease_held:
        if facts.lease_overdue:
            return alert(1, "a command is past its deadline and still holds the lease")
        return Observation(Answer.IN_PROGRESS, "a command is at work", 1)
    if facts.hold in (HoldState.FOREIGN, HoldState.UNREADABLE):
        if ours:
            return alert(
                2,
                f"a {facts.hold.value} HOLD lies over a window of ours; nothing is touched",
                "dsv41 status (again, once the HOLD's owner is done)",
            )
        return Observation(
            Answer.NOT_OURS, f"a {facts.hold.value} HOLD; nothing is touched", 2, down=not_up
        )
    if facts.production is Probe.UNKNOWN:
        if ours or facts.hold is HoldState.OWN:
            return alert(3, "cannot see production, and a window of ours is open")
        if not facts.machines_known:
            nothing = "no window has run here: nothing of ours is open, and no machine is known"
            return Observation(Answer.CLEAN, nothing, 8)
        return Observation(
            Answer.UNKNOWN, "cannot see production; nothing is touched", 3, down=True
        )
    if facts.marker is Presence.UNREADABLE:
        return alert(4, "the chain marker is unreadable or names no owner", "look at it by hand")
    if facts.hold is HoldState.OWN:
        if facts.intent is not Presence.NONE:
            if facts.keeper_alive and not facts.keeper_overdue:
                return Observation(Answer.RECOVERING, "the keeper brings production back", 5)
            if facts.keeper_alive:
                return alert(5, "the keeper is past its deadline", "dsv41 recover")
            if facts.production is Probe.UP:
                return alert(
                    5, "production is up and not verified, under our HOLD", "dsv41 recover"
                )
            return alert(5, "a window left production down, and no keeper lives", "dsv41 recover")
        return alert(5, "a HOLD of ours is left without a down-intent", "dsv41 recover")
    if facts.marker is Presence.PRESENT:
        if not facts.marker_overdue and not facts.gate_refused:
            return Observation(Answer.CHAIN_WAITING, "between two windows of a chain", 6)
        if facts.production is Probe.UP:
            return alert(
                6,
                "production is up under a chain marker: verify it, watch it, then end the chain",
                "dsv41 chain end",
                down=False,
            )
        if facts.abort_record:
            return alert(
                6,
                "the chain stopped and its one automatic recovery has already run",
                "dsv41 chain abort --again",
            )
        return Observation(
            Answer.RECOVER,
            "the chain stopped: its one automatic recovery",
            6,
            "dsv41 chain abort",
            down=True,
        )
    if facts.intent is not Presence.NONE:
        if facts.production is Probe.UP:
            return alert(
                7, "restored, not closed: verify, watch, close", "dsv41 recover", down=False
            )
        return alert(7, "production is down by a window of ours", "dsv41 recover")
    if facts.production is Probe.UP or not facts.served_by_default:
        note = "; a leftover of ours is listed" if facts.leftovers else ""
        serves = (
            "production serves" if facts.production is Probe.UP else "nothing is served by default"
        )
        return Observation(Answer.CLEAN, serves + note, 8)
    return alert(8, "production is down, not by us", "start production by hand")
