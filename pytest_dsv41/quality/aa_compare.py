"""What two starts of production show of each other: the A/A pilot's verdict and its figures.

Pure: two start records in, one pilot record out; several pilot records in, one pooled record out.
PASSED means that every seeded cell with one request at a time gave the same tokens in the same
rounds in both starts. Everything else is measured and reported: the CV of paired differences (for
`dsv41 resolution --diff-cv`) and the between-start SD (for a window's `start_sd`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from ..decision_v2 import ORIENTATION
from ..errors import MeasurementRefused, UsageError
from ..text import one_line
from .bridge import bridge_report
from .compare import compare_probes
from .probe import Probe
from .sealed import seal_of

__all__ = [
    "ACCUMULATED_SCHEMA",
    "PILOT_SCHEMA",
    "START_SCHEMA",
    "accumulate",
    "compare_starts",
    "identical_fault",
    "registration_line",
]

START_SCHEMA: Final = "dsv41-aa-start-v1"
PILOT_SCHEMA: Final = "dsv41-aa-pilot-v1"
ACCUMULATED_SCHEMA: Final = "dsv41-aa-pilots-v1"

_LEAST_PAIRS: Final = 3
_SHARED: Final = ("engine", "version", "model", "commit", "clock_cap_mhz")
"""Parts of a definition that a start may not know (null); known ones must agree."""


# -- two starts -----------------------------------------------------------------------------------


def compare_starts(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    *,
    probes: tuple[Probe, Probe] | None = None,
) -> dict[str, Any]:
    """Return the pilot record of start A and start B (WIN2 "Seeded A/A pilot recipe" item 3).

    Per cell and metric, over the pairs that both starts have (three at least), with
    d_i = s (b_i - a_i) / a_i, positive meaning that B is better: `diff_cv` is the SD of d,
    `start_sd` is |mean d| / sqrt 2, one degree of freedom's estimate of the between-start SD, and
    `pair_noise` what of it the pairs' own spread explains, diff_cv / sqrt(2 n). All fractions.
    `probes` are the two starts' own; how far they lie apart stands in `distribution`.

    Raises:
        UsageError: the records are not an A and a B of one definition, or a probe is not theirs.
    """
    for record, name in ((a, "A"), (b, "B")):
        if record.get("start") != name:
            told = one_line(str(record.get("start")), 40)
            raise UsageError(f"the record given as start {name} is one of start {told}")
    definition = _agreed(a["definition"], b["definition"])
    if a.get("salt") == b.get("salt"):
        raise UsageError("start A and start B are one and the same run: their salts are equal")
    cells: dict[str, dict[str, Any]] = {}
    reasons: list[str] = []
    for name in definition["cells"]:
        one, two = a["cells"].get(name, {}), b["cells"].get(name, {})
        cells[name] = _cell(one, two)
        if cells[name]["decides"] and cells[name]["fault"]:
            reasons.append(f"{name}: {cells[name]['fault']}")
    if not any(cell["decides"] for cell in cells.values()):
        reasons.append("no seeded cell with one request at a time was run")
    passed = not reasons
    series = [(name, one) for name, cell in cells.items() for one in cell["series"]]
    return {
        "schema": PILOT_SCHEMA,
        "passed": passed,
        "reasons": reasons,
        "notes": _notes(a, b),
        "definition": definition,
        "starts": {
            name: {"sha256": seal_of(dict(record)), "utc": record.get("utc")}
            for name, record in (("A", a), ("B", b))
        },
        "cells": cells,
        "diff_cv": {f"{name}/{one['metric']}": one["diff_cv"] for name, one in series},
        "start_sd": {f"{name}/{one['metric']}": one["start_sd"] for name, one in series},
        "df": {f"{name}/{one['metric']}": 1 for name, one in series},
        "expect_identical": passed,
        "distribution": _distribution(a, b, probes),
        "bridge": bridge_report(a["bridge"]) if a.get("bridge") else None,
    }


def _notes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """What a reader must know before using the figures."""
    began = a.get("server_began")
    if began is None or began != b.get("server_began"):
        return []
    return [
        "both starts were measured on one and the same server process: nothing here says what a "
        "restart changes, and its start_sd is none"
    ]


def _distribution(
    a: Mapping[str, Any], b: Mapping[str, Any], probes: tuple[Probe, Probe] | None
) -> dict[str, Any] | None:
    """The A/A comparison of the two probes: what `dsv41 dist-gate band` registers them for."""
    refused = [
        f"start {start}: {record['probe']['refused']}"
        for start, record in (("A", a), ("B", b))
        if record.get("probe") and "refused" in record["probe"]
    ]
    if refused:
        return {"refused": "; ".join(refused)}
    if probes is None:
        probed = [record["start"] for record in (a, b) if record.get("probe")]
        if not probed:
            return None
        if len(probed) == 1:
            return {"refused": f"only start {probed[0]} was probed"}
        return {"refused": "the starts' probes do not lie beside their records"}
    for probe, record in zip(probes, (a, b), strict=True):
        if not record.get("probe") or record["probe"]["sha256"] != probe.sha256:
            raise UsageError(f"the probe of run {probe.run} is not start {record['start']}'s")
    try:
        compared = compare_probes(*probes)
    except MeasurementRefused as error:
        return {"refused": one_line(f"{error.kind}: {error}")}
    return {
        "a": compared.control,
        "b": compared.candidate,
        "subset": probes[0].subset,
        "positions": len(compared.positions),
        "mean_kl": compared.mean_kl,
        "disagreements": compared.disagreements,
        "untrusted": compared.untrusted,
    }


def identical_fault(
    pilot: Mapping[str, Any], cell: Mapping[str, Any], prompt_sha256: str | None = None
) -> str | None:
    """Why a pilot does not allow `expect_identical` for a cell of this definition; None: it does.

    `cell` is `SeededCell.definition()`; `prompt_sha256` the identity of the prompts as sent.
    """
    if pilot.get("passed") is not True:
        return f"the A/A pilot FAILED: {one_line('; '.join(pilot.get('reasons', ())), 200)}"
    name = str(cell.get("name"))
    measured = pilot["definition"]["cells"].get(name)
    if measured is None:
        known = ", ".join(pilot["definition"]["cells"])
        return f"the A/A pilot has no cell {name}; it has {known}"
    if pilot["cells"][name]["profile"] != "single":
        return f"cell {name} has several requests at a time, which the A/A pilot does not judge"
    if measured["cell"] != dict(cell):
        return f"the A/A pilot's cell {name} is another one: {_difference(measured['cell'], cell)}"
    if prompt_sha256 is not None and measured["prompt_sha256"] != prompt_sha256:
        return f"the A/A pilot's cell {name} ran on another prompt"
    return None


def _agreed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """The one definition of two starts. Raises UsageError where they differ."""
    shared: dict[str, Any] = {}
    for key in _SHARED:
        one, two = a.get(key), b.get(key)
        if one is not None and two is not None and one != two:
            raise UsageError(
                f"start A and start B are not of one definition: {key} is "
                f"{one_line(str(one), 60)} and {one_line(str(two), 60)}"
            )
        shared[key] = two if one is None else one
    cells: dict[str, Any] = {}
    for name in dict.fromkeys((*a["cells"], *b["cells"])):
        one, two = a["cells"].get(name), b["cells"].get(name)
        if one is None or two is None:
            raise UsageError(
                f"cell {one_line(name, 60)} was asked for in start {'A' if two is None else 'B'} "
                "only: both starts run the same cells"
            )
        if one != two:
            raise UsageError(
                f"start A and start B are not of one definition: cell {one_line(name, 60)}: "
                f"{_difference(one, two)}"
            )
        cells[name] = one
    return {**shared, "cells": cells}


def _difference(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    """The first key in which two definitions differ, with both values."""
    for key in dict.fromkeys((*one, *two)):
        left, right = one.get(key), two.get(key)
        if left == right:
            continue
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            return f"{key}.{_difference(left, right)}"
        return one_line(f"{key} is {left!r} and {right!r}", 160)
    return "no difference"


def _cell(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """One seeded cell in both starts: identity, and each metric's paired differences."""
    first = next((record for record in (a, b) if "pairs" in record), {})
    single = (first or a).get("profile", "single") == "single"
    report: dict[str, Any] = {
        "profile": "single" if single else "multi",
        "decides": single,
        "fault": None,
        "pairs": 0,
        "outputs_identical": None,
        "rounds_identical": None,
        "series": [],
        "missing": {},
    }
    refused = {
        start: str(record.get("refused") or "not run")
        for start, record in (("A", a), ("B", b))
        if "pairs" not in record
    }
    if refused:
        told = (f"start {start}: {one_line(why, 200)}" for start, why in refused.items())
        return {**report, "fault": "; ".join(told)}
    left, right = a["pairs"], b["pairs"]
    if [pair["seeds"] for pair in left] != [pair["seeds"] for pair in right]:
        return {**report, "fault": "the starts used different seeds"}
    outputs = sum(x["outputs"] == y["outputs"] for x, y in zip(left, right, strict=True))
    rounds = sum(
        x["rounds"] is not None and x["rounds"] == y["rounds"]
        for x, y in zip(left, right, strict=True)
    )
    series, missing = _series(left, right)
    return {
        **report,
        "fault": _identity_fault(left, right, outputs, rounds),
        "pairs": len(left),
        "outputs_identical": outputs,
        "rounds_identical": rounds,
        "series": series,
        "missing": missing,
    }


def _identity_fault(
    left: Sequence[Mapping[str, Any]],
    right: Sequence[Mapping[str, Any]],
    outputs: int,
    rounds: int,
) -> str | None:
    count = len(left)
    if outputs < count:
        return f"{count - outputs} of {count} pairs have different outputs"
    if any(pair["rounds"] is None for pair in (*left, *right)):
        return "the server does not tell its rounds"
    if rounds < count:
        return f"{count - rounds} of {count} pairs have different round counts"
    return None


def _series(
    left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every metric's differences over the pairs that both starts have, and what has none."""
    names = list(dict.fromkeys(name for pair in (*left, *right) for name in pair["values"]))
    series: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for metric in names:
        both = [
            (x["values"][metric], y["values"][metric])
            for x, y in zip(left, right, strict=True)
            if metric in x["values"] and metric in y["values"]
        ]
        if len(both) < _LEAST_PAIRS:
            missing[metric] = f"{len(both)} of {len(left)} pairs have it in both starts"
            continue
        lower = both[0][0].get("lower_is_better", ORIENTATION.get(metric))
        numbers = [(float(x["value"]), float(y["value"])) for x, y in both]
        if any(not math.isfinite(v) or v <= 0 for v, _ in numbers):
            missing[metric] = "start A has a value of 0, which no difference can be relative to"
            continue
        sign = -1.0 if lower else 1.0
        differences = [sign * (y - x) / x for x, y in numbers]
        mean, cv = math.fsum(differences) / len(differences), statistics.stdev(differences)
        series.append(
            {
                "metric": metric,
                "n": len(differences),
                "mean_difference": mean,
                "diff_cv": cv,
                "start_sd": abs(mean) / math.sqrt(2),
                "pair_noise": cv / math.sqrt(2 * len(differences)),
            }
        )
    return series, missing


# -- several pilots -------------------------------------------------------------------------------


def accumulate(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pool pilots of one definition: each figure weighted by its degrees of freedom.

    Takes pilot records and records of this function. `start_sd` is the root of the df-weighted
    mean of squares, `df` what stands behind it, `start_sd_upper` the largest SD that such a figure
    still leaves plausible (one-sided 95 %); `diff_cv` is pooled over the pairs' n - 1.

    Raises:
        UsageError: no record, two definitions, or a start that stands in two of them.
    """
    from scipy import stats

    if not records:
        raise UsageError("no pilot given")
    first = records[0]["definition"]
    for number, record in enumerate(records[1:], start=2):
        if record["definition"] != first:
            raise UsageError(
                f"pilot 1 and pilot {number} are not of one definition: "
                f"{_difference(first, record['definition'])}"
            )
    pilots = [one for record in records for one in _pilots(record)]
    starts = [start for pilot in pilots for start in pilot["starts"]]
    if len(set(starts)) < len(starts):
        raise UsageError("a start stands in two of the pilots: each start counts once")
    squares: dict[str, list[tuple[float, float]]] = {}
    spreads: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        pairs = record.get("diff_df") or _pairs_df(record)
        for key, sd in record["start_sd"].items():
            squares.setdefault(key, []).append((float(record["df"][key]), float(sd)))
            spreads.setdefault(key, []).append((float(pairs[key]), float(record["diff_cv"][key])))
    pooled = {key: _pool(parts) for key, parts in squares.items()}
    noise = {key: _pool(parts) for key, parts in spreads.items()}
    return {
        "schema": ACCUMULATED_SCHEMA,
        "passed": all(pilot["passed"] for pilot in pilots),
        "definition": first,
        "pilots": pilots,
        "start_sd": {key: sd for key, (_, sd) in pooled.items()},
        "df": {key: df for key, (df, _) in pooled.items()},
        "start_sd_upper": {
            key: sd * math.sqrt(df / float(stats.chi2.ppf(0.05, df)))
            for key, (df, sd) in pooled.items()
        },
        "diff_cv": {key: cv for key, (_, cv) in noise.items()},
        "diff_df": {key: df for key, (df, _) in noise.items()},
    }


def registration_line(
    record: Mapping[str, Any], field: Literal["start_sd", "diff_cv"], keys: Iterable[str]
) -> str:
    """Return the line of a window file's `[window]` that registers these figures.

    A figure outside of (0, 1) is left out, for a window file takes none; "" where none is left.
    """
    parts = [
        f'"{key}" = {record[field][key]:.4g}' for key in keys if 0 < record[field].get(key, 0.0) < 1
    ]
    return f"{field} = {{ {', '.join(parts)} }}" if parts else ""


def _pool(parts: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """(df, SD) of several (df, SD): the variances weighted by their df."""
    df = sum(part for part, _ in parts)
    return round(df), math.sqrt(math.fsum(part * sd**2 for part, sd in parts) / df)


def _pilots(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    if record["schema"] == ACCUMULATED_SCHEMA:
        return [dict(pilot) for pilot in record["pilots"]]
    starts = [str(start["sha256"]) for start in record["starts"].values()]
    return [{"sha256": seal_of(dict(record)), "passed": record["passed"], "starts": starts}]


def _pairs_df(record: Mapping[str, Any]) -> dict[str, int]:
    return {
        f"{name}/{one['metric']}": one["n"] - 1
        for name, cell in record["cells"].items()
        for one in cell["series"]
    }
