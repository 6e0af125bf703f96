"""Build a window's folder from nothing but numbers, as the reports read it.

The values follow a fixed pattern, so what a report must show can be said beforehand: the control
arm lies around 20 ms a round, a candidate at `20 · (1 − gain)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_dsv41.decision_v2 import Series, decide_window, prompt_identity
from pytest_dsv41.window.summary import Summary, write_summary

PROMPT = prompt_identity(["ab" * 32])
PATTERN = (0.000, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003, -0.002)
UNITS = {
    "ms_per_round": ("ms", True),
    "accepted_per_round": ("tokens", False),
    "client_tok_s": ("tok/s", False),
    "ttft_ms": ("ms", True),
}


def measured(arm_gain: float, step: int) -> dict[str, dict[str, Any]]:
    """The values of one item: a pattern of a few tenths of a percent around the arm's level."""
    wobble = 1 + PATTERN[step % len(PATTERN)]
    ms = 20.0 * (1 - arm_gain) * wobble
    accepted = 1.30 * (1 + 4 * PATTERN[(3 * step + 1) % len(PATTERN)])
    numbers = {
        "ms_per_round": ms,
        "accepted_per_round": accepted,
        "client_tok_s": 1000 * (1 + accepted) / ms,
        "ttft_ms": 180 * wobble,
    }
    return {
        metric: {
            "value": value,
            "unit": UNITS[metric][0],
            "lower_is_better": UNITS[metric][1],
            "source": "server" if metric.endswith("round") else "client",
            "parts": {},
        }
        for metric, value in numbers.items()
    }


def make_plan(
    arms: Sequence[str] = ("control", "fast"),
    starts: Sequence[tuple[str, str]] = (
        ("K1", "control"),
        ("I1", "fast"),
        ("K2", "control"),
        ("I2", "fast"),
    ),
    cells: Mapping[str, bool] | None = None,
    repeats: int = 3,
) -> dict[str, Any]:
    """A plan.json: every cell `repeats` times in each start."""
    cells = {"short-b1": True, "32k-b1": False} if cells is None else cells
    items: list[dict[str, Any]] = []
    for start, arm in starts:
        for cell, decides in cells.items():
            for repeat in range(repeats):
                items.append(
                    {
                        "id": f"{start}-{cell}-r{repeat}",
                        "start": start,
                        "arm": arm,
                        "cell": cell,
                        "repeat": repeat,
                        "index": len(items),
                        "decision": decides,
                    }
                )
    return {
        "window_id": "DEMO-demo-W-20261129T203311Z",
        "seed": 7,
        "spec": {"lane": "DEMO", "name": "demo", "arms": list(arms)},
        "starts": [{"name": start, "arm": arm} for start, arm in starts],
        "items": items,
        "cells": {cell: {"name": cell, "max_tokens": 256, "batch": 1} for cell in cells},
        "digest": "d1" * 32,
    }


def make_values(plan: dict[str, Any], gains: Mapping[str, float]) -> list[dict[str, Any]]:
    """A values.jsonl in which every item was measured."""
    count: dict[tuple[str, str], int] = {}
    lines = []
    for index, item in enumerate(plan["items"]):
        key = (item["arm"], item["cell"])
        step = count[key] = count.get(key, -1) + 1
        lines.append(
            {
                **{name: item[name] for name in ("start", "arm", "cell", "repeat")},
                "item": item["id"],
                "outcome": "measured",
                "kind": None,
                "reason": None,
                "values": measured(
                    gains.get(item["arm"], 0.0), step + 3 * (item["arm"] != "control")
                ),
                "prompt_sha256": PROMPT,
                "prompt_members": [PROMPT],
                "max_tokens": 256,
                "started_utc": f"2026-11-29T20:{34 + index // 30:02d}:{2 * (index % 30):02d}Z",
                "duration_s": 1.25,
            }
        )
    return lines


def broken(line: dict[str, Any], outcome: str, kind: str, reason: str) -> dict[str, Any]:
    """The same item, but without values."""
    return {**line, "outcome": outcome, "kind": kind, "reason": reason, "values": {}}


def decide(
    plan: dict[str, Any], values: Sequence[Mapping[str, Any]], arm: str, *, paired: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The decision of `arm` over the decision cells, and its sentences."""
    series = []
    for cell in plan["cells"]:
        for metric in ("ms_per_round", "accepted_per_round", "client_tok_s"):
            of = {
                one: [
                    line["values"][metric]["value"]
                    for line in values
                    if line["cell"] == cell and line["arm"] == one and metric in line["values"]
                ]
                for one in ("control", arm)
            }
            series.append(
                Series(
                    cell,
                    metric,
                    of["control"],
                    of[arm],
                    lower_is_better=UNITS[metric][1],
                    paired=paired,
                    control_prompts=[PROMPT] * len(of["control"]),
                    candidate_prompts=[PROMPT] * len(of[arm]),
                    unit=UNITS[metric][0],
                )
            )
    deciding = list(dict.fromkeys(item["cell"] for item in plan["items"] if item["decision"]))
    decision = decide_window(series, deciding)
    return decision.to_dict(), decision.explain()


def make_summary(
    plan: dict[str, Any],
    decided: Mapping[str, tuple[dict[str, Any], list[str]]],
    /,
    **changes: Any,
) -> Summary:
    """A summary of a window that went well; `changes` replaces top-level fields."""
    codes = {"CANDIDATE": 0, "NOT A CANDIDATE": 11, "INCONCLUSIVE": 10}
    verdict = next((one["verdict"] for one, _ in decided.values()), "COMPLETE")
    arms = plan["spec"]["arms"]
    deciding = list(dict.fromkeys(item["cell"] for item in plan["items"] if item["decision"]))
    fields: dict[str, Any] = {
        "window": {
            "id": plan["window_id"],
            "lane": "DEMO",
            "name": "demo",
            "hypothesis": "The fast arm needs 8 % less time a round.",
            "kind": "candidate",
            "seed": 7,
            "plan_digest": plan["digest"],
            "folder": plan["window_id"],
        },
        "status": verdict,
        "exit_code": codes.get(verdict, 0),
        "started_utc": "2026-11-29T20:33:11Z",
        "ended_utc": "2026-11-29T20:35:02Z",
        "target": {"kind": "local", "engine": "vllm", "model": "stub"},
        "arms": [
            {"name": arm, "role": "control" if arm == "control" else "candidate"} for arm in arms
        ],
        "starts": [
            {
                "name": start["name"],
                "arm": start["arm"],
                "started_utc": "2026-11-29T20:34:00Z",
                "ready_s": 0.41,
            }
            for start in plan["starts"]
        ],
        "decision_cells": deciding,
        "decisions": {arm: decision for arm, (decision, _) in decided.items()},
        "explanations": {arm: sentences for arm, (_, sentences) in decided.items()},
        "promotion": {"arm": "fast", "profile": "single", "cells": deciding}
        if verdict == "CANDIDATE"
        else None,
        "restore": {"status": "RESTORED", "answers_identical": 6, "seconds": 3.2},
        "watch": {"status": "PASS", "seconds": 5.0, "samples": 12},
        "production_commit": "596ba1c" + "0" * 33,
        "archive": {
            "path": "control-archive.jsonl",
            "before": {"rows": 120, "sha256": "aa" * 32},
            "after": {"rows": 168, "sha256": "bb" * 32},
            "appended": 48,
        },
        "spreads": {
            "short-b1/ms_per_round": {"in_window_cv": 0.0031, "archive_cv": 0.0255},
            "short-b1/accepted_per_round": {"in_window_cv": 0.012, "archive_cv": None},
            "32k-b1/ms_per_round": {"in_window_cv": 0.0031, "archive_cv": 0.0107},
        },
        "software": {"pytest-dsv41": "0.1.0", "python": "3.12.4", "engine": "stub 1"},
    }
    return Summary.model_validate({**fields, **changes})


def write_folder(
    folder: Path,
    plan: Mapping[str, Any] | None,
    values: Sequence[Mapping[str, Any]],
    summary: Summary | None,
    journal: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the files that the reports read."""
    folder.mkdir(parents=True, exist_ok=True)
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
    for name, lines in (("values.jsonl", values), ("journal.jsonl", journal)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        write_summary(folder, summary)
    return folder


def demo_folder(folder: Path, gain: float = 0.08, **changes: Any) -> Path:
    """A whole window of one candidate that gains `gain` in ms a round."""
    plan = make_plan()
    values = make_values(plan, {"fast": gain})
    decisions = {"fast": decide(plan, values, "fast")}
    return write_folder(folder, plan, values, make_summary(plan, decisions, **changes))
