"""Counters, gauges and histograms as prometheus_client 0.26 prints them.

Labels come in alphabetical order, `_created` is a gauge family of its own after each counter and
histogram, numbers switch to an exponent at seven digits before the point.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["CONTENT_TYPE", "Counter", "Gauge", "Histogram", "Registry", "number"]

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

Labels = Mapping[str, str]


def number(value: float) -> str:
    """Return `value` as the exposition format has it: `7.0`, `1.79e+09`, `+Inf`, `NaN`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+0{dot - 1}"
    return text


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escape(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{inside}}} {number(value)}\n" if inside else f"{name} {number(value)}\n"


class _Series:
    """One set of label values of a family."""

    __slots__ = ("buckets", "created", "labels", "sum", "value")

    def __init__(self, labels: Labels, created: float, buckets: int = 0) -> None:
        self.labels = dict(labels)
        self.value = 0.0
        self.created = created
        self.sum = 0.0
        self.buckets = [0] * buckets


class Family:
    """A metric's name, help and series; the base of the three kinds."""

    kind = ""

    def __init__(self, name: str, help_text: str) -> None:
        self.name = name
        self.help = help_text
        self.series: dict[tuple[tuple[str, str], ...], _Series] = {}

    def at(self, labels: Labels) -> _Series:
        """Return the series of `labels`, made now if it is new."""
        key = tuple(sorted(labels.items()))
        found = self.series.get(key)
        if found is None:
            found = self.series[key] = self._new(labels)
        return found

    def _new(self, labels: Labels) -> _Series:
        return _Series(labels, time.time())

    def _header(self, name: str, kind: str) -> str:
        return f"# HELP {name} {self.help}\n# TYPE {name} {kind}\n"

    def created_lines(self) -> Iterable[str]:
        """Yield the gauge family with the second in which each series began."""
        if not self.series:
            return
        name = f"{self.name}_created"
        yield self._header(name, "gauge")
        for series in self.series.values():
            yield _sample(name, series.labels, series.created)

    def lines(self) -> Iterable[str]:
        """Yield the family's text."""
        raise NotImplementedError


class Counter(Family):
    """A sum that only grows. `name` is without `_total`."""

    def inc(self, amount: float, labels: Labels) -> None:
        """Add `amount`."""
        self.at(labels).value += amount

    def lines(self) -> Iterable[str]:
        name = f"{self.name}_total"
        yield self._header(name, "counter")
        for series in self.series.values():
            yield _sample(name, series.labels, series.value)


class Gauge(Family):
    """A value that comes and goes; `read` is asked when the text is printed."""

    def __init__(self, name: str, help_text: str) -> None:
        super().__init__(name, help_text)
        self._reads: list[tuple[_Series, Callable[[], float]]] = []

    def bind(self, labels: Labels, read: Callable[[], float]) -> None:
        """Print `read()` for `labels`."""
        self._reads.append((self.at(labels), read))

    def lines(self) -> Iterable[str]:
        yield self._header(self.name, "gauge")
        for series, read in self._reads:
            yield _sample(self.name, series.labels, read())


class Histogram(Family):
    """Counts by bucket edge, cumulated when printed."""

    def __init__(self, name: str, help_text: str, edges: Sequence[float]) -> None:
        super().__init__(name, help_text)
        self.edges = (*edges, math.inf)

    def _new(self, labels: Labels) -> _Series:
        return _Series(labels, time.time(), len(self.edges))

    def observe(self, value: float, labels: Labels, times: int = 1) -> None:
        """Add one observation (or several of the same value)."""
        series = self.at(labels)
        series.buckets[bisect.bisect_left(self.edges, value)] += times
        series.sum += value * times
        series.value += times

    def lines(self) -> Iterable[str]:
        yield self._header(self.name, "histogram")
        for series in self.series.values():
            total = 0
            for edge, count in zip(self.edges, series.buckets, strict=True):
                total += count
                yield _sample(f"{self.name}_bucket", {**series.labels, "le": number(edge)}, total)
            yield _sample(f"{self.name}_count", series.labels, series.value)
            yield _sample(f"{self.name}_sum", series.labels, series.sum)


class Registry:
    """The families in the order they were added."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}

    def add(self, family: Family) -> None:
        """Print `family` after those that are here."""
        self.families[family.name] = family

    def text(self, *, created: bool = True, without: Iterable[str] = ()) -> str:
        """Return the whole exposition, without the families named in `without`."""
        hidden = {name.removesuffix("_total") for name in without} | set(without)
        parts: list[str] = []
        for name, family in self.families.items():
            if name in hidden:
                continue
            parts.extend(family.lines())
            if created and not isinstance(family, Gauge):
                parts.extend(family.created_lines())
        return "".join(parts)
