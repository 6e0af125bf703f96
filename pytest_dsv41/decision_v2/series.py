"""What a rule judges: one metric of one cell in two arms, with the proof that both saw one prompt.

Everything that cannot be judged is `Refused`, with the cell, the metric, the arm and the position
(counted from 0) of the fault. A refusal is never an INCONCLUSIVE: the second says that the data did
not settle the question, the first that there was no question.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["ORIENTATION", "Refused", "Series", "metric_label"]

ORIENTATION: dict[str, bool] = {
    "ms_per_round": True,
    "accepted_per_round": False,
    "ttft_ms": True,
    "decode_tok_s": False,
    "client_tok_s": False,
    "prefill_tok_s": False,
}
"""Metric name -> whether lower is better (RULES section 0)."""

_LABELS = {
    "ms_per_round": "ms per round",
    "accepted_per_round": "accepted per round",
    "ttft_ms": "TTFT",
    "decode_tok_s": "decode tok/s",
    "client_tok_s": "client tok/s",
    "prefill_tok_s": "prefill tok/s",
}

_SHA256 = re.compile(r"[0-9a-f]{64}")

MIN_REPEATS = 3


class Refused(ValueError):
    """A rule cannot judge this input. The message says what is wrong and where.

    Attributes `cell`, `metric`, `arm` ("control", "candidate", or a start's name) and `position`
    (counted from 0) are None where they do not apply.
    """

    def __init__(
        self,
        what: str,
        *,
        cell: str | None = None,
        metric: str | None = None,
        arm: str | None = None,
        position: int | None = None,
    ) -> None:
        self.what = what
        self.cell = cell
        self.metric = metric
        self.arm = arm
        self.position = position
        spot = arm if position is None else f"{arm or 'value'}[{position}]"
        where = " / ".join(str(part) for part in (cell, metric, spot) if part is not None)
        super().__init__(f"{where}: {what}" if where else what)


def metric_label(metric: str) -> str:
    """A metric's name in plain words."""
    return _LABELS.get(metric, metric.replace("_", " "))


def check_identity(
    identity: object,
    *,
    cell: str | None = None,
    metric: str | None = None,
    arm: str | None = None,
    position: int | None = None,
) -> str:
    """`identity` if it is a sha256 in 64 lower-case hex digits; else `Refused`."""
    if isinstance(identity, str) and _SHA256.fullmatch(identity):
        return identity
    what = (
        "has no prompt identity"
        if identity is None
        else f"prompt identity {identity!r} is not a sha256 in 64 lower-case hex digits"
    )
    raise Refused(what, cell=cell, metric=metric, arm=arm, position=position)


def check_values(
    values: Sequence[object],
    *,
    lower_is_better: bool,
    is_control: bool,
    cell: str,
    metric: str,
    arm: str,
) -> list[float]:
    """`values` as floats, or `Refused` at the first one no rule can judge.

    Refused are: a bool or a non-number, NaN, infinity, a negative value, a control value of 0, and
    a 0 where lower is better (nothing takes no time).
    """
    out: list[float] = []
    for position, value in enumerate(values):

        def refuse(what: str, at: int = position) -> Refused:
            return Refused(what, cell=cell, metric=metric, arm=arm, position=at)

        # numpy's bool is no numbers.Real, Python's is.
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise refuse(f"{value!r} is not a number")
        try:
            number = float(value)
        except OverflowError:
            raise refuse("the number is too large") from None
        if not math.isfinite(number):
            raise refuse(f"{number!r} is not a finite number")
        if number < 0:
            raise refuse(f"{number!r} is negative")
        if number == 0 and is_control:
            raise refuse("a control value must be above 0, got 0")
        if number == 0 and lower_is_better:
            raise refuse("0 where lower is better is not a measurement")
        out.append(number)
    return out


def as_tuple(values: object, *, cell: str, metric: str, arm: str) -> tuple[object, ...]:
    """`values` as a tuple, or `Refused` if it is no sequence of values."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise Refused(f"{values!r} is not a list of values", cell=cell, metric=metric, arm=arm)
    return tuple(values)


@dataclass(frozen=True)
class Series:
    """One metric of one cell: the control arm's repeats and the candidate's.

    The first series of a cell is its primary, every further one a guard, which can only cause a
    LOSS. Values are in the metric's unit, one per repeat, in run order; `paired` says that
    candidate i was measured beside control i (adjacent starts, or the mean of two bracketing ones).
    The prompt lists hold one identity per value (see `identity`); a decision cell needs
    them. The values themselves are judged, or `Refused`, when a rule reads them.
    """

    cell: str
    metric: str
    control: Sequence[float]
    candidate: Sequence[float]
    lower_is_better: bool = field(kw_only=True)
    paired: bool = field(default=True, kw_only=True)
    control_prompts: Sequence[str] | None = field(default=None, kw_only=True)
    candidate_prompts: Sequence[str] | None = field(default=None, kw_only=True)
    unit: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, value in (("cell", self.cell), ("metric", self.metric)):
            if not isinstance(value, str) or not value:
                raise Refused(f"a series needs a {name} name, got {value!r}")
        for name in ("lower_is_better", "paired"):
            value = getattr(self, name)
            if not isinstance(value, (bool, np.bool_)):
                what = f"{name} must be True or False, got {value!r}"
                raise Refused(what, cell=self.cell, metric=self.metric)
            object.__setattr__(self, name, bool(value))
        for arm in ("control", "candidate"):
            values = as_tuple(getattr(self, arm), cell=self.cell, metric=self.metric, arm=arm)
            object.__setattr__(self, arm, values)
            prompts = getattr(self, f"{arm}_prompts")
            if prompts is not None:
                kept = as_tuple(prompts, cell=self.cell, metric=self.metric, arm=f"{arm}_prompts")
                object.__setattr__(self, f"{arm}_prompts", kept)
