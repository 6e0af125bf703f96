"""Windows, plans and values for the tests of the window room; no server is involved."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_dsv41.window.plan import Plan, make_plan
from pytest_dsv41.window.spec import load_spec

PROMPT = "ab" * 32

CELLS: dict[str, dict[str, Any]] = {
    name: {
        "name": name,
        "kind": "prefill" if name.startswith("prefill") else "decode",
        "estimated_s": seconds,
        "profile": "single" if name.endswith("b1") else "multi",
        "max_tokens": 96,
    }
    for name, seconds in {
        "decode-b1": 0.5,
        "decode-b2": 0.75,
        "decode-b3": 1.0,
        "prefill-b1": 0.25,
        "short-b1": 2.0,
    }.items()
}


def window_text(
    *,
    schedule: str = "K/I/K/I",
    repeats: str = "3",
    more: str = "",
    candidates: int = 1,
    cells: str = "",
    target: str = 'kind = "local"\ncommand = ["{python}"]',
) -> str:
    arms = "".join(f'[arms.c{n}]\nrole = "candidate"\n' for n in range(1, candidates + 1))
    cells = cells or (
        '[[cells]]\nname = "decode-b1"\ndecision = true\nprimary = "ms_per_round"\n'
        'guards = ["accepted_per_round"]\n[[cells]]\nname = "prefill-b1"\n'
    )
    return (
        f'[window]\nlane = "L"\nname = "w"\nhypothesis = "h"\nschedule = "{schedule}"\n'
        f'repeats = {repeats}\n{more}\n[arms.control]\nrole = "control"\n{arms}{cells}'
        f"[target]\n{target}\n"
    )


def plan_of(folder: Path, text: str = "", **options: Any) -> Plan:
    file = folder / "w.toml"
    file.write_text(text or window_text())
    return make_plan(load_spec(file, **options), CELLS, window_id="L-w-W-20261101T000000Z")


TRUTH = {
    "ms_per_round": (8.0, True, "ms"),
    "accepted_per_round": (1.2, False, "tokens"),
    "client_tok_s": (250.0, False, "tok/s"),
    "ttft_ms": (20.0, True, "ms"),
}
"""metric -> (true value of the control, lower is better, unit)."""


def values_of(
    plan: Plan,
    factors: Mapping[tuple[str, str], float] | None = None,
    *,
    noise: float = 0.003,
    seed: int = 1,
) -> list[dict[str, Any]]:
    """Records of every planned item; `factors` scale a metric of an arm: {(arm, metric): 0.92}."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for item in plan.items:
        values = {}
        for metric, (true, lower, unit) in TRUTH.items():
            factor = (factors or {}).get((item.arm, metric), 1.0)
            value = true * factor * (1 + draw.gauss(0, noise))
            values[metric] = {
                "value": value,
                "unit": unit,
                "lower_is_better": lower,
                "source": "test",
                "parts": {},
            }
        rows.append(
            {
                "item": item.id,
                "start": item.start,
                "arm": item.arm,
                "cell": item.cell,
                "repeat": item.repeat,
                "outcome": "measured",
                "kind": None,
                "reason": None,
                "values": values,
                "prompt_sha256": PROMPT,
                "prompt_members": [PROMPT],
                "max_tokens": 96,
                "started_utc": "2026-11-01T00:00:00Z",
                "duration_s": 0.5,
            }
        )
    return rows
