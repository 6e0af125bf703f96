"""The shape a server says it has: slots, window, KV dtype, each with where it was read.

A probe takes its sizes from here and never from a file that says what the server should be: such a
file and the server drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.text import counted

__all__ = ["Served", "agreed", "whole_above"]

_FIELDS: Final = ("slots", "window", "kv_dtype")


@dataclass(frozen=True)
class Served:
    """What one source says. None, or an empty text: it does not say.

    `slots` are requests at a time, `window` tokens of prompt and answer together, `told` maps each
    known field to its source.
    """

    slots: int | None = None
    window: int | None = None
    kv_dtype: str = ""
    told: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str, **known: Any) -> Served:
        """Make one of what a single source says; what is None or empty is not known."""
        found = {name: value for name, value in known.items() if value}
        return cls(**found, told=dict.fromkeys(found, source))

    def to_json(self) -> dict[str, Any]:
        """Return it for a record."""
        return {
            "slots": self.slots,
            "window": self.window,
            "kv_dtype": self.kv_dtype,
            "told": dict(self.told),
        }

    @property
    def line(self) -> str:
        """The shape in one line, as a person says it."""
        parts = [
            counted(self.slots, "slot") if self.slots else "slots not told",
            f"a window of {self.window:,} tokens" if self.window else "window not told",
            f"KV {self.kv_dtype}" if self.kv_dtype else "KV dtype not told",
        ]
        return ", ".join(parts)


def agreed(*stated: Served) -> Served:
    """Put together what several sources say.

    Raises:
        MeasurementRefused: kind `shape`: two of them contradict each other.
    """
    known: dict[str, Any] = {}
    told: dict[str, str] = {}
    for one in stated:
        for name in _FIELDS:
            value = getattr(one, name)
            if not value:
                continue
            if known.get(name, value) != value:
                raise MeasurementRefused(
                    "shape",
                    f"{name}: {told[name]} says {known[name]}, {one.told[name]} says {value}",
                )
            if name not in known:
                known[name], told[name] = value, one.told[name]
    return Served(**known, told=told)


def whole_above(value: object, low: int = 1) -> int | None:
    """Return a whole number of at least `low`, None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= low:
        return value
    return None
