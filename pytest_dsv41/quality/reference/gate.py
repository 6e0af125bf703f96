"""The KL gate: a report against the limits its user has written, and a receipt of the answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from pytest_dsv41.durable import read_regular
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.quality.reference.manifest import utc_now
from pytest_dsv41.quality.reference.report import read_report, rows_path

__all__ = ["RECEIPT", "Check", "Limits", "Receipt", "judge", "left_shape", "read_receipt"]

RECEIPT: Final = "dsv41-kl-gate-1"
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What a candidate must keep: nats, a share of positions, a ratio of perplexities.

    A limit of None is reported and does not decide. `trusted_share_min` is asked of reports on
    top-k recordings alone: their KL bounds the true one from below only, so it counts where at
    least this share of the positions has nearly all mass in both lists (RULES section 4).
    """

    mean_kl_max: float | None = 0.03
    top1_min: float | None = 0.95
    ppl_ratio_max: float | None = None
    trusted_share_min: float = 0.99


@dataclass(frozen=True)
class Check:
    """One limit and what was measured, None where that could not be seen.

    `passed` is None where there is no limit; what could not be seen keeps none.
    """

    name: str
    value: float | None
    relation: str
    limit: float | None
    passed: bool | None


@dataclass(frozen=True)
class Receipt:
    """The gate's answer, and all that it rests on."""

    verdict: str
    checks: tuple[Check, ...]
    shape: Mapping[str, Any]
    report: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the receipt's file."""
        return {
            "schema": RECEIPT,
            "created": utc_now(),
            "verdict": self.verdict,
            "checks": [asdict(check) for check in self.checks],
            "shape": dict(self.shape),
            "report": dict(self.report),
        }


def judge(path: Path, limits: Limits, shape: Mapping[str, Any]) -> Receipt:
    """Hold the report at `path` against `limits`: PASS if every limit is kept, else FAIL.

    `shape` says how the scored run was started; it goes into the receipt as it is.

    Raises:
        MeasurementRefused: the kinds of `read_report`.
    """
    report, _ = read_report(path)
    every = report["all"]
    topk = report.get("topk")
    checks = [
        _check("mean KL", every["kld"]["mean"], "<=", limits.mean_kl_max),
        _check("top-1 agreement", every["top1_agreement"], ">=", limits.top1_min),
        _check("perplexity ratio", every["ppl"]["ratio"], "<=", limits.ppl_ratio_max),
    ]
    if topk is not None:
        share = topk.get("trusted_share") if isinstance(topk, dict) else None
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise MeasurementRefused("report", f"{path}: topk.trusted_share: is no share, 0 to 1")
        checks.append(_check("trusted share", share, ">=", limits.trusted_share_min))
    failed = any(check.passed is False for check in checks)
    return Receipt(
        verdict="FAIL" if failed else "PASS",
        checks=tuple(checks),
        shape=shape,
        report={
            "path": str(path),
            "sha256": _sha256(path),
            "rows_sha256": _sha256(rows_path(path)),
            "positions": every["positions"],
            **{key: report[key] for key in ("model", "reference", "ref_dir", "corpus", "created")},
        },
    )


def _check(name: str, value: float | None, relation: str, limit: float | None) -> Check:
    passed = None
    if limit is not None:
        passed = value is not None and (value <= limit if relation == "<=" else value >= limit)
    return Check(name, value, relation, limit, passed)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt.

    Raises:
        MeasurementRefused: kind `receipt`: there is none.
    """
    try:
        receipt = json.loads(read_regular(path, _MOST_BYTES))
        if receipt["schema"] != RECEIPT or not isinstance(receipt["shape"], dict):
            raise KeyError
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise MeasurementRefused("receipt", f"{path}: is no {RECEIPT} receipt") from None
    return dict(receipt)


def left_shape(scored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how a shape differs from the scored one, one line a key; none: it is the same."""
    lines = []
    for key in sorted({*scored, *now}):
        if key not in now:
            lines.append(f"{key}: scored with {scored[key]!r}, now not set")
        elif key not in scored:
            lines.append(f"{key}: scored without, now {now[key]!r}")
        elif scored[key] != now[key] or type(scored[key]) is not type(now[key]):
            lines.append(f"{key}: scored with {scored[key]!r}, now {now[key]!r}")
    return lines
