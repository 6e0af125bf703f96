"""Reading metrics text: exact sample names, summed over labels, nothing guessed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.text import one_line

__all__ = ["read_samples", "refuse_part", "refuse_resets"]


def read_samples(
    text: str, names: Iterable[str], *, label: Mapping[str, str] | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (sums by exact sample name, creation times by sample) of the named samples.

    A name with `label[name]` is also kept apart by that label's value, as `name{value}`. Only
    the lines that begin with a wanted name are parsed.

    Raises:
        MeasurementRefused: kind `bad-counter` for a value that is no finite number, or text
            that cannot be parsed.
    """
    # Its package brings a whole web server: who only asks for a server's health needs neither.
    from prometheus_client.parser import text_string_to_metric_families

    wanted = frozenset(names)
    created_of = {name.removesuffix("_total") + "_created" for name in wanted}
    keep = [
        line
        for line in text.split("\n")
        if line and line[0] != "#" and _name_of(line) in wanted | created_of
    ]
    sums: dict[str, float] = {}
    created: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families("\n".join(keep) + "\n"):
            for sample in family.samples:
                value = float(sample.value)
                if not math.isfinite(value):
                    raise MeasurementRefused(
                        "bad-counter", f"{one_line(sample.name)} is {value}: not a count"
                    )
                if sample.name in created_of:
                    marks = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                    created[f"{sample.name}{{{marks}}}"] = value
                    continue
                sums[sample.name] = sums.get(sample.name, 0.0) + value
                split = (label or {}).get(sample.name)
                if split is not None and split in sample.labels:
                    key = f"{sample.name}{{{sample.labels[split]}}}"
                    sums[key] = sums.get(key, 0.0) + value
    except (ValueError, OverflowError) as error:
        raise MeasurementRefused(
            "bad-counter", f"the metrics text cannot be read: {one_line(str(error), 120)}"
        ) from None
    return sums, created


def refuse_part(name: str, value: float) -> None:
    """Refuse a counter that counts no whole things; seconds may have parts.

    Raises:
        MeasurementRefused: kind `bad-counter`.
    """
    seconds = name.endswith("_seconds_sum")
    # Beyond 2^53 a float no longer holds each whole number.
    if value < 0 or not (seconds or (value.is_integer() and value <= 2**53)):
        raise MeasurementRefused("bad-counter", f"{name} is {value:g}: no count")


def _name_of(line: str) -> str:
    for at, char in enumerate(line):
        if char in "{ \t":
            return line[:at]
    return line


def refuse_resets(
    before: Mapping[str, float],
    after: Mapping[str, float],
    created_before: Mapping[str, float],
    created_after: Mapping[str, float],
    *,
    counters: Iterable[str],
) -> None:
    """Refuse when a counter fell, appeared, vanished or was created anew between two snapshots.

    Raises:
        MeasurementRefused: kind `reset`, or `missing-family` for one that vanished.
    """
    for key in created_before.keys() & created_after.keys():
        if created_before[key] != created_after[key]:
            raise MeasurementRefused(
                "reset", f"{one_line(key, 100)} changed: the server was restarted in between"
            )
    if created_before.keys() != created_after.keys() and created_before and created_after:
        raise MeasurementRefused(
            "reset", "the set of engines behind the counters changed: restarted in between"
        )
    for name in counters:
        old, new = before.get(name), after.get(name)
        if old is not None and new is None:
            raise MeasurementRefused("missing-family", f"{name} vanished between two looks")
        if old is not None and new is not None and new < old:
            raise MeasurementRefused(
                "reset",
                f"{name} fell from {old:g} to {new:g}: restarted, or several servers answer",
            )
