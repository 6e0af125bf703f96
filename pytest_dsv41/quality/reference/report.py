"""The report of a scoring run: one JSON file, and beside it every row's four numbers (FORMATS)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.durable import create_exclusive, read_regular
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.quality.reference.manifest import Document, utc_now
from pytest_dsv41.quality.reference.score import Scores

__all__ = ["PERCENTILE", "build_report", "read_report", "rows_path", "summary", "write_report"]

PERCENTILE: Final = "linear interpolation between order statistics"
_QUANTILES: Final = {
    "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99_9": 0.999, "p99_99": 0.9999,
}  # fmt: skip
_MOST_BYTES: Final = 64 << 20
_NLL_MOST: Final = 700.0
"""Nats. Beyond it the perplexity is no float64, and what gave it no model."""
_MOST_NUMBER: Final = 1e300


def rows_path(report: Path) -> Path:
    """Return where a report's rows lie: `<report>.rows`."""
    return report.with_name(f"{report.name}.rows")


def summary(scores: Scores, rows: NDArray[np.intp] | slice = slice(None)) -> dict[str, Any]:
    """Return positions, KL statistics (nats), top-1 agreement (0 to 1) and perplexities of rows.

    Perplexities are over the rows whose next token both sides could see; None where there is none.

    Raises:
        MeasurementRefused: kind `nll`: the perplexity is no number.
    """
    kl = scores.kl[rows].astype(np.float64)
    candidate, reference = scores.candidate_nll[rows], scores.reference_nll[rows]
    known = np.isfinite(candidate) & np.isfinite(reference)
    ppl: dict[str, float | None] = {"candidate": None, "reference": None, "ratio": None}
    if known.any():
        ours, theirs = (_perplexity(nll[known]) for nll in (candidate, reference))
        ppl = {"candidate": ours, "reference": theirs, "ratio": ours / theirs}
    quantiles = np.quantile(kl, list(_QUANTILES.values()), method="linear")
    return {
        "positions": len(kl),
        "kld": {
            "mean": float(kl.mean()),
            **dict(zip(_QUANTILES, (float(value) for value in quantiles), strict=True)),
            "max": float(kl.max()),
        },
        "top1_agreement": float(scores.top1[rows].mean()),
        "ppl": ppl,
    }


def _perplexity(nll: NDArray[np.float32]) -> float:
    mean = float(np.mean(nll, dtype=np.float64))
    if not mean < _NLL_MOST:
        raise MeasurementRefused(
            "nll", f"the mean negative log-likelihood is {mean:g}: no perplexity of a model"
        )
    return math.exp(mean)


def build_report(
    scores: Scores,
    documents: tuple[Document, ...],
    *,
    model: str,
    reference: str,
    ref_dir: str,
    corpus: str,
    topk: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report of a scored run.

    Args:
        scores: every row's numbers, in the reference's order.
        documents: the reference's; their `source` groups `by_source`.
        model, reference: the candidate's model and the reference's.
        ref_dir, corpus: where the reference lies, and the name of its corpus.
        topk: of lists instead of whole distributions, what they cannot see (`TopkScores.to_json`).
    """
    by_source: dict[str, list[NDArray[np.intp]]] = {}
    for document in documents:
        rows = np.arange(document.row0, document.row0 + document.rows)
        by_source.setdefault(document.source, []).append(rows)
    return {
        "model": model,
        "reference": reference,
        "ref_dir": ref_dir,
        "corpus": corpus,
        "created": utc_now(),
        "docs": len(documents),
        "percentile": PERCENTILE,
        "all": summary(scores),
        "by_source": {
            source: summary(scores, np.concatenate(rows))
            for source, rows in sorted(by_source.items())
        },
        **({} if topk is None else {"topk": dict(topk)}),
    }


def write_report(path: Path, report: Mapping[str, Any], scores: Scores) -> None:
    """Write `<path>.rows`, then `path`; neither is ever overwritten.

    Raises:
        UsageError: one of them exists.
    """
    table = np.empty((len(scores.kl), 4), "<f4")
    table[:, 0], table[:, 1] = scores.kl, scores.candidate_nll
    table[:, 2], table[:, 3] = scores.reference_nll, scores.top1
    text = json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # A name that is no UTF-8 (a path may be any bytes) stands there as JSON's own escape.
    raw = text.encode(errors="backslashreplace")
    for target, data in ((rows_path(path), table.tobytes()), (path, raw)):
        try:
            create_exclusive(target, data)
        except FileExistsError:
            raise UsageError(f"{target}: exists; a report is never overwritten") from None


def read_report(path: Path) -> tuple[dict[str, Any], Scores]:
    """Read a report and its rows, and hold its totals against them.

    Raises:
        MeasurementRefused: kinds `missing`, `report` (not one, a key named), `size` (the rows are
            not as many as its positions), `rows` (they give another total).
    """
    try:
        raw = read_regular(path, _MOST_BYTES)
    except FileNotFoundError:
        raise MeasurementRefused("missing", f"{path}: is missing") from None
    except ValueError as error:
        raise MeasurementRefused("report", f"{path}: {error}") from None
    try:
        report = json.loads(raw)
        all_rows = report["all"]
        stated = {
            "all.kld.mean": all_rows["kld"]["mean"],
            "all.top1_agreement": all_rows["top1_agreement"],
            "all.ppl.candidate": all_rows["ppl"]["candidate"],
            "all.ppl.reference": all_rows["ppl"]["reference"],
            "all.ppl.ratio": all_rows["ppl"]["ratio"],
        }
        positions = all_rows["positions"]
        named = [report[key] for key in ("model", "reference", "ref_dir", "corpus", "created")]
    except (ValueError, RecursionError):
        raise MeasurementRefused("report", f"{path}: is not JSON") from None
    except (KeyError, TypeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else "is no KL report"
        raise MeasurementRefused("report", f"{path}: {what}") from None
    if not all(isinstance(value, str) for value in named):
        raise MeasurementRefused("report", f"{path}: a name in it is no text")
    partial = "topk" in report
    for key, value in stated.items():
        if value is None and partial and key.startswith("all.ppl."):
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # JSON has whole numbers that no float holds.
        if not number or not -_MOST_NUMBER < value < _MOST_NUMBER:
            raise MeasurementRefused("report", f"{path}: {key}: is no finite number")
    scores = _read_rows(rows_path(path), positions, partial)
    again = summary(scores)
    for key, value in stated.items():
        found: Any = again
        for part in key.split(".")[1:]:
            found = found[part]
        none = value is None or found is None
        if (
            value is not found
            if none
            else not math.isclose(value, found, rel_tol=1e-6, abs_tol=1e-9)
        ):
            raise MeasurementRefused("rows", f"{path}: {key}: {value}; its rows give {found}")
    return report, scores


def _read_rows(path: Path, positions: Any, partial: bool) -> Scores:
    if not path.is_file():
        raise MeasurementRefused("missing", f"{path}: is missing: the report cannot be checked")
    size = path.stat().st_size
    if not isinstance(positions, int) or positions < 1 or size != 16 * positions:
        raise MeasurementRefused(
            "size", f"{path}: {size} bytes; {positions} positions of 16 bytes are stated"
        )
    table = np.fromfile(path, "<f4").reshape(-1, 4)
    # Where a list cannot see the next token its likelihood is NaN.
    unseen = np.isnan(table[:, 1:3]) if partial else np.False_
    if not (np.isfinite(table[:, [0, 3]]).all() and (np.isfinite(table[:, 1:3]) | unseen).all()):
        raise MeasurementRefused("rows", f"{path}: holds a number that is not finite")
    if not np.isin(table[:, 3], (0.0, 1.0)).all():
        raise MeasurementRefused("rows", f"{path}: an agreement is neither 0 nor 1")
    return Scores(table[:, 0], table[:, 1], table[:, 2], table[:, 3] == 1.0)
