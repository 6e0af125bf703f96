"""The shape that a start would have, held against the memory law before anything is stopped.

A pool too small for its sequences starts, serves, and fails when all of them are full: nothing but
the law says so beforehand (FRANK-ARCHON "The dtype law", a seam against a silent resize).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pytest_dsv41.errors import UsageError
from pytest_dsv41.text import one_line

from .memory import Law, Ledger, Shape, make_plan
from .proof import flag_values

__all__ = ["law_refusals"]

_NEEDED = ("dtype", "seqs", "window")
_COUNTS = ("seqs", "window")


def law_refusals(
    law: Law, running: Sequence[str], stated: Mapping[str, str | bool], ledger: Ledger | None
) -> list[str]:
    """Return why a start must not be made, one line each; empty: the law has nothing against it.

    Args:
        law: of the server's dialect and model.
        running: production's command line: what an arm does not state stays as it is there.
        stated: the flags that the start is to have, by name; False: it has none.
        ledger: production's own boot ledger, the newest one; its budget was printed at the sizes
            of `running`.
    """

    def now(flag: str) -> str | bool | None:
        given = flag_values(running, flag)
        return given[-1] if given else None

    wanted = {key: stated.get(flag, now(flag)) for key, flag in law.flags.items()}
    untold = [law.flags.get(k, k) for k in _NEEDED if not isinstance(wanted.get(k), str)]
    if untold:
        return [
            f"the law needs {', '.join(untold)}; neither the flags of the arm nor production's "
            "command line tell"
        ]
    try:
        numbers = {key: _number(law, key, wanted[key]) for key in wanted if key != "dtype"}
        knobs = {
            knob.name: _size(f"--{knob.name}", value)
            for knob in law.knobs
            if isinstance(value := stated.get(f"--{knob.name}", now(f"--{knob.name}")), str)
        }
        sizes = [_number(law, key, now(law.flags.get(key, ""))) for key in ("weights", "pool")]
        weights, pool = sizes
        plan = make_plan(
            law,
            Shape(
                str(wanted["dtype"]),
                int(numbers["seqs"] or 0),
                int(numbers["window"] or 0),
                numbers.get("pool"),
                numbers.get("weights"),
            ),
            ledger=ledger,
            pair=None if weights is None or pool is None else (weights, pool),
            knobs=knobs,
        )
    except UsageError as error:
        return [str(error)]
    return list(plan.refused)


def _number(law: Law, key: str, value: str | bool | None) -> float | None:
    """The number of one of the law's flags; None where it is not given."""
    if not isinstance(value, str):
        return None
    number = _size(law.flags[key], value)
    if key in _COUNTS and number != int(number):
        raise UsageError(f"{law.flags[key]} {one_line(value, 40)}: no whole number")
    return number


def _size(flag: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{flag} {one_line(value, 40)}: no number")
    return number
